"""KV that is loaded, late or not at all, and groups of recurrent state, on plans written by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from by_hand import ScriptedEngine
from conformance.operations import Abort, Add, Step
from conformance.protocol import (
    BlockMove,
    CommitResult,
    EngineConfig,
    Feature,
    Finished,
    KVCacheGroup,
    KVLoad,
    Sampled,
    SequenceKey,
    SequencePlan,
    StepPlan,
)
from conformance.records import RequestState
from conformance.session import Session

FEATURES: frozenset[Feature] = frozenset(
    {"abort", "chunked_prefill", "kv_connector", "kv_cache_groups", "state_groups"}
)


class Scripted(ScriptedEngine):
    """Reports ``ended`` as ended in error at the first commit."""

    def __init__(self, *plans: StepPlan, ended: str = "", **declared: Any) -> None:
        super().__init__(*plans, **({"features": FEATURES} | declared))
        self._ended = ended
        self.sampled: list[Sampled] = []

    def commit(self, step: int, sampled: Mapping[SequenceKey, Sampled]) -> CommitResult:
        self.sampled += sampled.values()
        ended, self._ended = self._ended, ""
        return CommitResult([Finished(request_id=ended, outputs=[[]], reason="error")] if ended else [])


def row(first: int, count: int, *tables: list[int], name: str = "r0", samples: bool = True) -> SequencePlan:
    return SequencePlan(request_id=name, first=first, num_tokens=count, block_tables=list(tables), samples=samples)


def load(first: int, count: int, table: list[int], **fields: Any) -> KVLoad:
    return KVLoad(request_id="r0", first=first, num_tokens=count, block_tables=[table], **fields)


def session_of(*plans: StepPlan, groups: tuple[KVCacheGroup, ...] = (), ended: str = "", **declared: Any) -> Session:
    """A session with one request of 6 + 3 tokens, blocks of 2, after one step for each plan."""
    config = EngineConfig(num_blocks=12, block_size=2, max_model_len=16, kv_cache_groups=groups)
    session = Session(Scripted(*plans, ended=ended, **declared), config)
    session.apply(Add(prompt_len=6, max_tokens=3))
    session.apply(Step(len(plans)))
    return session


def broken(session: Session) -> list[str]:
    return [violation.requirement for violation in session.violations]


# -- loads ---------------------------------------------------------------------------------------------------------


def test_what_is_loaded_in_time_need_not_be_computed() -> None:
    plan = StepPlan(step=0, loads=[load(0, 4, [1, 2, 3])], sequences=[row(4, 2, [1, 2, 3])])
    session = session_of(plan)
    assert not broken(session)
    assert session.ledger.behaviours["KV loaded in time"] == 1


def test_what_was_not_loaded_is_missed() -> None:
    plan = StepPlan(step=0, loads=[load(0, 2, [1, 2, 3])], sequences=[row(4, 2, [1, 2, 3])])
    assert "KV-3" in broken(session_of(plan))


def test_a_late_load_holds_its_blocks_and_is_there_when_it_has_arrived() -> None:
    late = load(0, 6, [1, 2, 3], late=True)
    session = session_of(StepPlan(step=0, loads=[late]))
    assert session.ledger.live["r0"].state is RequestState.LOADING
    assert session.ledger.free_blocks == 9
    arrives, runs = StepPlan(step=1, loaded=[late]), StepPlan(step=2, sequences=[row(5, 1, [1, 2, 3])])
    assert not broken(session_of(StepPlan(step=0, loads=[late]), arrives, runs))


def test_a_request_that_runs_before_its_load_has_arrived_reads_nothing() -> None:
    late = load(0, 6, [1, 2, 3], late=True)
    plans = StepPlan(step=0, loads=[late]), StepPlan(step=1, sequences=[row(5, 1, [1, 2, 3])])
    assert "KV-3" in broken(session_of(*plans))


def test_a_late_load_writes_to_its_blocks_whoever_holds_them_by_then() -> None:
    late = load(0, 4, [1, 2], late=True)
    engine = Scripted(
        StepPlan(step=0, loads=[late]),
        StepPlan(step=1, sequences=[row(0, 4, [1, 2], name="r1", samples=False)]),
        StepPlan(step=2, loaded=[late]),
        StepPlan(step=3, sequences=[row(4, 2, [1, 2, 3], name="r1")]),
    )
    session = Session(engine, EngineConfig(num_blocks=12, block_size=2, max_model_len=16))
    add = Add(prompt_len=6, max_tokens=3)
    for operation in (add, Step(), Abort(0), add, Step(3)):
        session.apply(operation)
    assert broken(session) == ["KV-1"]


def test_a_failed_load_is_computed_again_and_its_token_is_worth_nothing() -> None:
    failed = load(0, 4, [1, 2, 3], failed_from=2)
    plans = (
        StepPlan(step=0, loads=[failed], sequences=[row(4, 2, [1, 2, 3])]),
        StepPlan(step=1, sequences=[row(2, 4, [1, 2, 3])]),
    )
    session = session_of(*plans)
    assert not broken(session)
    assert len(session.ledger.live["r0"].sequences[0].tokens) == 7
    assert isinstance(session.engine, Scripted)
    wrong, right = (sample.tokens for sample in session.engine.sampled)
    assert wrong != right


def test_a_failed_load_that_is_taken_for_loaded_is_read() -> None:
    failed = load(0, 4, [1, 2, 3], failed_from=2)
    plans = (
        StepPlan(step=0, loads=[failed], sequences=[row(4, 2, [1, 2, 3])]),
        StepPlan(step=1, sequences=[row(4, 2, [1, 2, 3])]),
    )
    assert broken(session_of(*plans)) == ["KV-1"]


def test_a_late_load_that_brought_nothing_gives_its_blocks_back() -> None:
    late = load(0, 6, [1, 2, 3], late=True, failed_from=0)
    session = session_of(
        StepPlan(step=0, loads=[late]), StepPlan(step=1, loaded=[late]), StepPlan(step=2, unloaded=["r0"])
    )
    assert session.ledger.live["r0"].state is RequestState.WAITING
    assert session.ledger.free_blocks == 12


def test_a_failed_load_ends_its_request_where_that_is_declared() -> None:
    plan = StepPlan(step=0, loads=[load(0, 4, [1, 2, 3], failed_from=0)], sequences=[row(4, 2, [1, 2, 3])])
    session = session_of(plan, ended="r0", load_failures="fail")
    assert not broken(session)
    assert session.ledger.requests["r0"].state is RequestState.FAILED
    assert broken(session_of(plan, ended="r0")) == ["PRG-5"]


def test_a_request_without_a_failed_load_is_not_to_be_ended() -> None:
    plan = StepPlan(step=0, loads=[load(0, 4, [1, 2, 3])], sequences=[row(4, 2, [1, 2, 3])])
    assert broken(session_of(plan, ended="r0", load_failures="fail")) == ["PRG-5"]


# -- recurrent state -------------------------------------------------------------------------------------------------

GROUPS = KVCacheGroup("full", 2), KVCacheGroup("state", 2, state=True)


def test_a_state_is_read_where_the_last_step_left_it() -> None:
    plans = (
        StepPlan(step=0, sequences=[row(0, 4, [1, 2], [0, 5], samples=False)]),
        StepPlan(step=1, sequences=[row(4, 2, [1, 2, 3], [0, 5, 6])]),
        StepPlan(step=2, sequences=[row(6, 1, [1, 2, 3, 4], [0, 0, 6, 7])]),
    )
    assert not broken(session_of(*plans, groups=GROUPS, null_block=0, reserved_blocks=1))


def test_a_state_that_is_looked_for_elsewhere_is_not_there() -> None:
    plans = (
        StepPlan(step=0, sequences=[row(0, 4, [1, 2], [4, 5], samples=False)]),
        StepPlan(step=1, moves=[BlockMove("zero", 5, 5)], sequences=[row(4, 2, [1, 2, 3], [4, 5, 6])]),
    )
    assert broken(session_of(*plans, groups=GROUPS)) == ["KV-1"]


def test_a_state_is_not_there_in_the_step_that_computes_it() -> None:
    engine = Scripted(
        StepPlan(step=0, sequences=[row(0, 2, [1], [2], samples=False), row(2, 2, [1, 3], [2, 4], name="r1")]),
        features=FEATURES | {"prefix_caching"},
    )
    config = EngineConfig(num_blocks=12, block_size=2, enable_prefix_caching=True, kv_cache_groups=GROUPS)
    session = Session(engine, config)
    for _ in range(2):
        session.apply(Add(prompt_len=4, max_tokens=1, family=1, shared_len=4))
    session.apply(Step())
    assert broken(session)[0] == "KV-2"  # KV of the first group may be hit as soon as that


def test_a_null_block_may_lie_between_but_not_where_a_state_is_read_or_left() -> None:
    first = StepPlan(step=0, sequences=[row(0, 4, [1, 2], [0, 5], samples=False)])
    for table, what in (([0, 0, 6], "ACC-2"), ([0, 5, 0], "ACC-2")):
        second = StepPlan(step=1, sequences=[row(4, 2, [1, 2, 3], table)])
        assert what in broken(session_of(first, second, groups=GROUPS, null_block=0, reserved_blocks=1))
