"""What a sequence has behind it may be given to others before any plan shows it; what it still reads may not."""

from __future__ import annotations

import pytest

from by_hand import ScriptedEngine
from conformance.operations import Add, Step
from conformance.protocol import (
    BlockMove,
    EngineConfig,
    Feature,
    KVCacheGroup,
    Preemption,
    SequencePlan,
    StepPlan,
)
from conformance.session import Session

FEATURES: frozenset[Feature] = frozenset(
    {"chunked_prefill", "kv_cache_groups", "pipeline", "sliding_window", "state_groups", "swap"}
)
ADD = Add(prompt_len=7, max_tokens=3)


def small_pool(**config: object) -> EngineConfig:
    fields = {"num_blocks": 12, "block_size": 2, "max_model_len": 16, "enable_chunked_prefill": True} | config
    return EngineConfig(**fields)  # type: ignore[arg-type]  # of fields of several types


def row(name: str, count: int, table: list[int]) -> SequencePlan:
    return SequencePlan(request_id=name, first=0, num_tokens=count, block_tables=[table], samples=False)


def broken(second: StepPlan, **config: object) -> list[str]:
    """r0 computes six positions through blocks 1, 2 and 3, then ``second`` runs."""
    first = StepPlan(step=0, sequences=[row("r0", 6, [1, 2, 3])])
    return seen([first], second, **config)


def seen(before: list[StepPlan], last: StepPlan, **config: object) -> list[str]:
    """What is broken when r1 comes before the ``last`` step."""
    session = Session(ScriptedEngine(*before, last, features=FEATURES), small_pool(**config))
    for operation in (ADD, Step(len(before)), ADD, Step()):
        session.apply(operation)
    return [violation.requirement for violation in session.violations]


def given_to_another(block: int) -> StepPlan:
    return StepPlan(step=1, sequences=[row("r1", 2, [block])])


def test_a_block_that_the_window_has_left_may_be_given_to_another() -> None:
    assert broken(given_to_another(1), sliding_window=4) == []


def test_a_block_of_which_the_window_still_reads_a_position_may_not() -> None:
    # The next query stands at position 6 and reads from position 2 on.
    assert broken(given_to_another(2), sliding_window=5) == ["ACC-3"]
    assert broken(given_to_another(2), sliding_window=4) == ["ACC-3"]


def test_without_a_window_no_block_may() -> None:
    assert broken(given_to_another(1)) == ["ACC-3"]


def test_a_block_that_a_plan_still_names_is_not_given_up() -> None:
    both = StepPlan(
        step=1,
        sequences=[
            SequencePlan(request_id="r0", first=6, num_tokens=1, block_tables=[[1, 2, 3, 4]], samples=True),
            row("r1", 2, [1]),
        ],
    )
    assert broken(both, sliding_window=4) == ["ACC-3"]


STATE = (KVCacheGroup(name="state", block_size=2, state=True),)


def test_of_recurrent_state_only_the_last_block_is_still_read() -> None:
    assert broken(given_to_another(2), kv_cache_groups=STATE) == []
    assert broken(given_to_another(3), kv_cache_groups=STATE) == ["ACC-3"]


def test_a_block_that_a_step_in_flight_still_reads_is_not_given_up() -> None:
    # Both chunks are in flight, and the second one's first query, at position 4, reads from position 1 on.
    chunks = [
        StepPlan(step=0, sequences=[row("r0", 4, [1, 2])]),
        StepPlan(
            step=1,
            sequences=[
                SequencePlan(request_id="r0", first=4, num_tokens=2, block_tables=[[1, 2, 3]], samples=False),
            ],
        ),
    ]
    last = StepPlan(step=2, sequences=[row("r1", 2, [1])])
    assert seen(chunks, last, sliding_window=4, pipeline_depth=3) == ["KV-5"]
    assert seen(chunks, last, sliding_window=4) == []
    states = {"kv_cache_groups": STATE, "pipeline_depth": 3}
    assert seen(chunks, StepPlan(step=2, sequences=[row("r1", 2, [2])]), **states) == ["ACC-3"]


def test_a_block_of_two_groups_of_one_sequence_is_nobody_elses() -> None:
    both = KVCacheGroup(name="full", block_size=2), *STATE
    twice = SequencePlan(request_id="r0", first=0, num_tokens=2, block_tables=[[1], [1]], samples=False)
    assert "ACC-3" in seen([], StepPlan(step=0, sequences=[twice]), kv_cache_groups=both)


RINGS = [
    # window, computed, run, tables, host blocks brought, what is seen
    (4, 2, 3, [1], [2, 3, 2], [0], []),
    (4, 2, 3, [1], [2, 3, 2], [3], ["KV-4", "KV-1"]),
    # A ring of two blocks of which the window needs three slots: position 3 outlives the step that runs 5 and 6.
    (3, 5, 2, [1, 2, 1], [3, 4, 3, 4], [0, 1], []),
    (3, 5, 2, [1, 2, 1], [3, 4, 3, 4], [0, 3], ["KV-4", "KV-1"]),
    # Here 6 comes round over 2, and 3 stays.
    (3, 4, 3, [1, 2], [3, 4, 3, 4], [0, 1], []),
    (3, 4, 3, [1, 2], [3, 4, 3, 4], [0, 3], ["KV-4"]),
]


@pytest.mark.parametrize(("window", "first", "count", "before", "table", "hosts", "seen_as"), RINGS)
def test_a_ring_that_is_swapped_in_and_comes_round_in_the_same_step(
    *, window: int, first: int, count: int, before: list[int], table: list[int], hosts: list[int], seen_as: list[str]
) -> None:
    engine = ScriptedEngine(
        StepPlan(step=0, sequences=[row("r0", first, before)]),
        StepPlan(
            step=1,
            preempted=[Preemption(request_id="r0", mode="swap")],
            moves=[BlockMove("swap_out", block, host) for host, block in enumerate(dict.fromkeys(before))],
        ),
        StepPlan(
            step=2,
            sequences=[
                SequencePlan(request_id="r0", first=first, num_tokens=count, block_tables=[table], samples=True)
            ],
            moves=[BlockMove("swap_in", host, block) for host, block in zip(hosts, table, strict=False)],
        ),
        features=FEATURES,
    )
    config = small_pool(sliding_window=window, preemption_mode="swap", num_swap_blocks=4)
    session = Session(engine, config, judge={"KV-1", "KV-4", "ACC-3"})
    for operation in (Add(prompt_len=first + count, max_tokens=3), Step(3)):
        session.apply(operation)
    assert [violation.requirement for violation in session.violations] == seen_as
