"""A prompt that comes in parts: what the books say once an answer is there, and what an engine may do then."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

import msgspec
import pytest

from by_hand import ScriptedEngine
from conformance.operations import Abort, Add, Operation, Step, describe
from conformance.protocol import (
    Capabilities,
    CommitResult,
    EngineConfig,
    Feature,
    Finished,
    Sampled,
    SequenceKey,
    SequencePlan,
    StepPlan,
)
from conformance.records import RequestState
from conformance.session import Session
from conformance.token_model import request_from
from fuzz.plainer import plainer, weight
from fuzz.source import OperationSource
from fuzz.swarm import draw_config, draw_swarm

FEATURES: frozenset[Feature] = frozenset({"abort", "length_limit", "streaming_input"})
CONFIG = EngineConfig(num_blocks=8, block_size=4)
ADD = Add(3, 2, streamed=((2, 1),))


class Scripted(ScriptedEngine):
    """Runs r0 as told, (first, tokens, whether it samples); reports an end at the commits of the steps ``ends``."""

    def __init__(self, *plans: tuple[int, int, bool], ends: tuple[int, ...] = ()) -> None:
        super().__init__(*(_running_r0(step, *plan) for step, plan in enumerate(plans)), features=FEATURES)
        self._ends = ends
        self._outputs: list[int] = []

    def commit(self, step: int, sampled: Mapping[SequenceKey, Sampled]) -> CommitResult:
        for sample in sampled.values():
            self._outputs += sample.tokens
        if step not in self._ends:
            return CommitResult()
        outputs, self._outputs = self._outputs, []
        return CommitResult([Finished(request_id="r0", outputs=[outputs])])


def _running_r0(step: int, first: int, tokens: int, samples: bool) -> StepPlan:  # noqa: FBT001 - one plan of the script
    table = list(range(-(-(first + tokens) // 4)))
    row = SequencePlan(request_id="r0", first=first, num_tokens=tokens, block_tables=[table], samples=samples)
    return StepPlan(step=step, sequences=[row])


def broken(*plans: tuple[int, int, bool], ends: tuple[int, ...], more: tuple[Operation, ...] = ()) -> set[str]:
    session = Session(Scripted(*plans, ends=ends), CONFIG)
    return {violation.requirement for violation in session.run([ADD, Step(len(plans)), *more])}


ANSWERED = ((0, 3, True), (3, 1, True))
"""Two outputs to a prompt of three tokens: four positions are computed, and the second output is dropped."""


def test_the_next_input_follows_all_but_the_last_output() -> None:
    session = Session(Scripted(*ANSWERED, ends=(1,)), CONFIG)
    session.apply(ADD)
    session.apply(Step(2))
    (request,) = session.ledger.live.values()
    record = request.sequences[0]
    first = record.tokens[3]
    assert request.spec.prompt == [*request_from(ADD, 0).prompt, first, *request_from(ADD, 0).streamed[0].prompt]
    assert (request.state, record.computed, request.spec.max_tokens, request.spec.streamed) == (
        RequestState.BETWEEN,
        4,
        1,
        (),
    )
    assert session.ledger.distinct_held == 1
    assert not session.violations


def test_it_goes_on_from_where_it_is_computed() -> None:
    assert broken(*ANSWERED, (4, 2, True), ends=(1, 2)) == set()


@pytest.mark.parametrize(
    ("plans", "ends", "requirement"),
    [
        ((*ANSWERED, (5, 1, True)), (1, 2), "KV-3"),  # past its first new position
        ((*ANSWERED, (3, 3, True)), (1, 2), "KV-3"),  # what is computed is computed again
        ((*ANSWERED, (4, 2, True)), (2,), "PRG-5"),  # nobody hears of the first answer
        ((*ANSWERED, (4, 2, False)), (1,), "PRG-5"),  # nothing is sampled after the last input
    ],
)
def test_an_engine_that_goes_on_wrongly_is_seen(
    plans: tuple[tuple[int, int, bool], ...], ends: tuple[int, ...], requirement: str
) -> None:
    assert requirement in broken(*plans, ends=ends)


def test_who_is_aborted_between_inputs_holds_nothing() -> None:
    session = Session(Scripted(*ANSWERED, ends=(1,)), CONFIG)
    for operation in (ADD, Step(2), Abort()):
        session.apply(operation)
    assert session.ledger.distinct_held == 0
    assert session.ledger.behaviours["aborted while between inputs"] == 1


def test_an_engine_without_the_feature_gets_no_such_request() -> None:
    engine = Scripted()
    engine.capabilities = msgspec.structs.replace(engine.capabilities, features=FEATURES - {"streaming_input"})
    session = Session(engine, CONFIG)
    assert session.add(ADD) is None
    assert not session.ledger.requests


def test_inputs_are_said_and_become_fewer() -> None:
    assert describe(ADD) == "add prompt 3 + 2 tokens, then 2 + 1 tokens"
    simpler = [one.streamed for one in plainer(ADD) if isinstance(one, Add)]
    assert simpler[0] == ()
    assert ((1, 1),) in simpler
    assert all(weight(one) < weight(ADD) for one in plainer(ADD))


def drawn(features: frozenset[Feature]) -> list[Add]:
    capabilities = Capabilities(engine="drawn", version="1", features=features)
    adds = []
    for seed in range(40):
        rng = Random(seed)
        config = draw_config(rng, capabilities, {})
        source = OperationSource(rng, draw_swarm(rng, capabilities, config))
        adds += [source.draw_add() for _ in range(5)]
        assert all(
            not add.streamed
            or add.prompt_len + add.max_tokens + sum(sum(one) for one in add.streamed) <= config.max_model_len
            for add in adds[-5:]
        )
    return adds


def test_inputs_are_drawn_for_an_engine_that_takes_them_and_fit_the_model() -> None:
    assert any(add.streamed for add in drawn(FEATURES))
    assert not any(add.streamed for add in drawn(FEATURES - {"streaming_input"}))


@pytest.mark.parametrize("add", [ADD, Add(3, 2)], ids=["next input", "over"])
def test_nobody_is_next_in_the_queue_while_somebody_waits_out_of_turn(add: Add) -> None:
    session = Session(Scripted(*ANSWERED, ends=(1,)), CONFIG)
    for operation in (add, Step(2), Add(2, 2), Step()):
        session.apply(operation)
    passed_over = {violation.requirement for violation in session.violations}
    assert passed_over == (set() if add.streamed else {"PRG-7"})
