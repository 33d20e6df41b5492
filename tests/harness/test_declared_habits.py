"""Habits that an engine declares and the harness then allows for: each is wrong where it is not declared."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from by_hand import ScriptedEngine
from conformance.ledger import Ledger
from conformance.need import real_need
from conformance.operations import Add, Step
from conformance.protocol import (
    AdapterError,
    BlockMove,
    Capabilities,
    EngineConfig,
    Feature,
    Preemption,
    SequencePlan,
    StepPlan,
)
from conformance.session import Session
from conformance.token_model import request_from

FEATURES: frozenset[Feature] = frozenset({"fork", "recompute", "swap", "chunked_prefill", "pipeline"})
CONFIG = EngineConfig(num_blocks=12, block_size=2, max_num_batched_tokens=16, max_model_len=16)


class Scripted(ScriptedEngine):
    """Declares what these tests are about, and finishes nothing."""

    def __init__(self, *plans: StepPlan, **declared: Any) -> None:
        super().__init__(*plans, features=FEATURES, **declared)


def row(seq: int, first: int, count: int, table: list[int], *, samples: bool = True) -> SequencePlan:
    return SequencePlan(request_id="r0", seq=seq, first=first, num_tokens=count, block_tables=[table], samples=samples)


def plans(*steps: list[SequencePlan]) -> list[StepPlan]:
    return [StepPlan(step=number, sequences=sequences) for number, sequences in enumerate(steps)]


def broken(engine: Scripted, steps: int, add: Add, **config: Any) -> set[str]:
    session = Session(engine, msgspec.structs.replace(CONFIG, **config))
    session.apply(add)
    session.apply(Step(steps))
    return {violation.requirement for violation in session.violations}


FORK_BEFORE_THE_LAST_TOKEN = (
    [row(0, 0, 3, [0, 1], samples=False)],
    [row(0, 3, 1, [0, 1]), row(1, 0, 4, [2, 3])],
    [row(0, 4, 1, [0, 1, 4]), row(1, 4, 1, [2, 3, 5])],
)


def test_sequences_apart_may_be_forked_before_their_prompt_is_computed() -> None:
    add = Add(prompt_len=4, max_tokens=4, n=2)
    assert broken(Scripted(*plans(*FORK_BEFORE_THE_LAST_TOKEN), sequences_apart=True), 3, add) == set()
    assert "PRG-5" in broken(Scripted(*plans(*FORK_BEFORE_THE_LAST_TOKEN)), 3, add)


def test_a_child_that_skips_what_nobody_computed_for_it_is_seen() -> None:
    steps = [row(0, 0, 3, [0, 1], samples=False)], [row(0, 3, 1, [0, 1]), row(1, 3, 1, [2, 3])]
    assert "KV-1" in broken(Scripted(*plans(*steps), sequences_apart=True), 2, Add(prompt_len=4, max_tokens=4, n=2))


def test_one_of_several_sequences_may_be_preempted_alone_and_computed_again() -> None:
    steps = plans(
        *FORK_BEFORE_THE_LAST_TOKEN,
        [row(0, 5, 1, [0, 1, 4])],
        [row(0, 6, 1, [0, 1, 4, 6]), row(1, 0, 6, [2, 3, 5])],
    )
    steps[3].preempted = [Preemption(request_id="r0", mode="recompute", seq=1)]
    add = Add(prompt_len=4, max_tokens=8, n=2)
    assert broken(Scripted(*steps, sequences_apart=True), 5, add) == set()
    steps[3].preempted = []
    assert broken(Scripted(*steps, sequences_apart=True), 5, add)


def test_the_token_in_flight_of_a_swapped_sequence_may_be_sampled_again() -> None:
    steps = plans(
        *FORK_BEFORE_THE_LAST_TOKEN[:2],
        [row(0, 4, 1, [0, 1, 4])],
        [row(0, 5, 1, [0, 1, 4]), row(1, 3, 1, [2, 3])],
    )
    steps[2].preempted = [Preemption(request_id="r0", mode="swap", seq=1)]
    steps[2].moves = [BlockMove("swap_out", 2, 0), BlockMove("swap_out", 3, 1)]
    steps[3].moves = [BlockMove("swap_in", 0, 2), BlockMove("swap_in", 1, 3)]
    engine = Scripted(*steps, sequences_apart=True)
    swapping = {"preemption_mode": "swap", "num_swap_blocks": 4}
    assert broken(engine, 4, Add(prompt_len=4, max_tokens=8, n=2), pipeline_depth=2, **swapping) == set()


def test_a_row_of_no_token_belongs_to_sequences_apart_alone() -> None:
    steps = plans([row(0, 0, 3, [0, 1], samples=False)], [row(0, 3, 0, [0, 1], samples=False)])
    add = Add(prompt_len=4, max_tokens=4, n=2)
    assert broken(Scripted(*steps, sequences_apart=True), 2, add) == set()
    with pytest.raises(AdapterError, match="malformed"):
        broken(Scripted(*steps), 2, add)


def test_a_token_that_no_position_was_run_for_is_a_finding() -> None:
    steps = plans([row(0, 4, 0, [0, 1])])
    assert broken(Scripted(*steps), 1, Add(prompt_len=4, max_tokens=4)) == {"PRG-5"}


def test_who_keeps_its_blocks_may_be_back_in_the_step_that_preempts_it() -> None:
    steps = plans([row(0, 0, 4, [0, 1])], [row(0, 4, 1, [0, 1, 2])])
    steps[1].preempted = [Preemption(request_id="r0", mode="recompute")]
    keeping = frozenset({"preempted"})
    assert broken(Scripted(*steps, keeps_blocks=keeping), 2, Add(4, 3)) <= {"PRE-1", "PRE-2", "PRE-5"}
    assert "ACC-7" in broken(Scripted(*steps), 2, Add(4, 3))
    steps[1].sequences = [row(0, 0, 5, [3, 4, 5])]  # or they are taken from it, and it begins anew
    assert broken(Scripted(*steps, keeps_blocks=keeping), 2, Add(4, 3)) <= {"PRE-1", "PRE-2", "PRE-5"}


@pytest.mark.parametrize(("lookahead", "need"), [(0, 0), (1, 1), (2, 1), (3, 2)])
def test_tokens_set_aside_ahead_are_real_need(lookahead: int, need: int) -> None:
    ledger = Ledger(CONFIG, Capabilities(engine="none", version="0", features=FEATURES, lookahead_tokens=lookahead))
    request = ledger.add(request_from(Add(4, 8), 0), None, 0)
    ledger.resume(request)
    ledger.set_tables(request.sequences[0], [[0, 1]])
    request.sequences[0].computed = 3
    assert real_need(ledger, [request]) == need


@pytest.mark.parametrize(("own", "tokens_max"), [(None, 16), (8, 8), (99, 16)])
def test_an_engine_may_keep_sequences_shorter_than_the_model(own: int | None, tokens_max: int) -> None:
    ledger = Ledger(CONFIG, Capabilities(engine="none", version="0", features=FEATURES, sequence_tokens_max=own))
    assert ledger.tokens_max == tokens_max
