"""Who is preempted, and who comes back, beside requests whose KV is loaded: less is asked there."""

from __future__ import annotations

import pytest

from by_hand import ScriptedEngine
from conformance.operations import Add, Step
from conformance.protocol import EngineConfig, Feature, KVLoad, Preemption, SequencePlan, StepPlan
from conformance.session import Session

FEATURES: frozenset[Feature] = frozenset({"chunked_prefill", "kv_connector", "recompute"})
CONFIG = EngineConfig(num_blocks=12, block_size=2, max_model_len=16, max_num_seqs=4)
TABLES = {"r0": [1, 2], "r1": [3, 4], "r2": [5, 6]}


def row(name: str, first: int, count: int, table: list[int] | None = None) -> SequencePlan:
    blocks = TABLES[name] if table is None else table
    return SequencePlan(request_id=name, first=first, num_tokens=count, block_tables=[blocks], samples=True)


def load(name: str, count: int, *, late: bool = False) -> KVLoad:
    return KVLoad(request_id=name, first=0, num_tokens=count, block_tables=[TABLES[name]], late=late)


def preempted(name: str) -> list[Preemption]:
    return [Preemption(request_id=name, mode="recompute")]


def broken(*plans: StepPlan, requests: int = 2) -> set[str]:
    """What is broken when so many requests of 3 + 9 tokens are there from the beginning."""
    session = Session(ScriptedEngine(*plans, features=FEATURES), CONFIG)
    for _ in range(requests):
        session.apply(Add(prompt_len=3, max_tokens=9))
    session.apply(Step(len(plans)))
    return {violation.requirement for violation in session.violations}


@pytest.mark.parametrize("loaded", ["r0", "r1"])
def test_a_loaded_request_may_have_come_out_of_turn_and_so_may_its_preemption(loaded: str) -> None:
    both = [row("r0", 0, 3), row("r1", 0, 3)]
    second = StepPlan(step=1, preempted=preempted("r0"), sequences=[row("r1", 3, 1)])
    assert "PRE-3" in broken(StepPlan(step=0, sequences=both), second)
    some = [row(name, 2, 1) if name == loaded else row(name, 0, 3) for name in ("r0", "r1")]
    assert "PRE-3" not in broken(StepPlan(step=0, loads=[load(loaded, 2)], sequences=some), second)


def test_a_newcomer_that_is_loaded_may_have_had_its_blocks_before_the_preemption() -> None:
    first = StepPlan(step=0, sequences=[row("r0", 0, 3)])
    away, late = StepPlan(step=1, preempted=preempted("r0")), load("r1", 2, late=True)
    assert "PRE-4" in broken(first, away, StepPlan(step=2, sequences=[row("r1", 0, 3)]))
    loads = StepPlan(step=1, loads=[late], preempted=preempted("r0")), StepPlan(step=2, loaded=[late])
    assert "PRE-4" not in broken(first, *loads, StepPlan(step=3, sequences=[row("r1", 2, 1)]))


def test_nobody_waits_for_a_preempted_request_whose_kv_is_on_its_way() -> None:
    first = StepPlan(step=0, sequences=[row("r0", 0, 3)])
    loads = StepPlan(step=1, preempted=preempted("r0")), StepPlan(step=2, loads=[load("r0", 3, late=True)])
    assert "PRE-4" not in broken(first, *loads, StepPlan(step=3, sequences=[row("r1", 0, 3)]))


def test_a_preemption_may_free_nothing_while_somebody_who_cannot_be_made_to_let_go_loads() -> None:
    shared = [row("r0", 0, 3), row("r1", 0, 3, TABLES["r0"])]
    second = StepPlan(step=1, preempted=preempted("r1"), sequences=[row("r0", 3, 1)])
    assert "PRE-5" in broken_of_one_prompt(StepPlan(step=0, sequences=shared), second)
    loads = StepPlan(step=0, loads=[load("r2", 3, late=True)], sequences=shared)
    assert "PRE-5" not in broken_of_one_prompt(loads, second)


def broken_of_one_prompt(*plans: StepPlan) -> set[str]:
    """As `broken`, of three requests with the same prompt, so that they may share its blocks."""
    session = Session(ScriptedEngine(*plans, features=FEATURES), CONFIG)
    for _ in range(3):
        session.apply(Add(prompt_len=3, max_tokens=9, shared_len=3))
    session.apply(Step(len(plans)))
    return {violation.requirement for violation in session.violations}
