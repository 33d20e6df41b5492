"""A trace laid out in time, from traces of the reference engine whose every step is known."""

from __future__ import annotations

from typing import Any

from conformance.adapters.reference import make
from conformance.execute import execute, trace_of
from conformance.operations import Abort, Add, Drain, Operation, Step
from conformance.protocol import EngineConfig
from conformance.reports.timeline import Timeline, timeline


def laid_out(operations: list[Operation], **fields: Any) -> Timeline:
    config = EngineConfig(**fields)
    execution = execute(make, config, operations, stop_at_first=False, record=True)
    assert execution.refused is None, execution.refused
    return timeline(trace_of("reference", config, execution))


def cells(layout: Timeline) -> dict[tuple[int, int], tuple[str, tuple[str, ...]]]:
    found: dict[tuple[int, int], tuple[str, tuple[str, ...]]] = {}
    for span in layout.spans:
        for column in range(span.first, span.last + 1):
            assert (span.block, column) not in found, "two spans in one cell"
            found[span.block, column] = (span.hold, span.owners)
    return found


SEED = {"num_blocks": 2, "block_size": 32, "max_num_seqs": 2, "max_model_len": 32}


def test_a_needless_preemption_as_cells_and_lanes() -> None:
    layout = laid_out([Add(10, 4), Add(10, 4), Drain()], **SEED, engine_options={"append_check": "touched"})
    held = cells(layout)
    assert held[0, 0] == ("held", ("r0",))
    assert held[1, 0] == ("held", ("r1",))
    assert held[1, 1] == ("left", ("r1",)), "preempted: its KV stays behind"
    assert held[1, 2] == ("held", ("r1",))
    one, two = layout.lanes
    assert one.spans[0] == (0, 0, "prefill")
    assert [doing for _, _, doing in two.spans][:4] == ["prefill", "preempted", "recompute", "preempted"]
    assert (one.end, two.end) == ("finished", "finished")
    assert [mark.columns for mark in layout.operations[:2]] == [0, 0]
    assert layout.operations[2].columns == len(layout.steps)
    column, index = layout.violations[0]
    assert (column, index) == (1, 0)


def test_shared_blocks_name_all_their_holders_and_a_copy_ends_it() -> None:
    layout = laid_out([Add(6, 4, n=2), Drain()], num_blocks=8, block_size=4)
    held = cells(layout)
    assert held[0, 1] == ("shared", ("r0/0", "r0/1"))
    shared = [cell for cell in held.values() if cell[0] == "shared"]
    assert shared
    partial = [held[1, column] for column in range(3) if (1, column) in held]
    assert ("held", ("r0/0",)) in partial or ("held", ("r0/1",)) in partial


def test_waiting_idle_and_aborted_requests() -> None:
    layout = laid_out([Add(4, 8), Add(4, 8), Step(3), Abort(0), Step(2)], num_blocks=8, block_size=4, max_num_seqs=1)
    one, two = layout.lanes
    assert (one.end, one.end_column) == ("aborted", 3)
    assert two.spans[0] == (0, 2, "waiting")
    assert two.spans[1] == (3, 3, "prefill")
    assert two.spans[2] == (4, len(layout.steps) - 1, "decode")
    held = cells(layout)
    assert held[0, 2] == ("held", ("r0",))
    assert held.get((0, 3), ("left", ()))[0] in {"left", "held"}


def test_a_refused_request_has_a_lane_with_its_reason() -> None:
    layout = laid_out([Add(60, 8), Step()], num_blocks=8, block_size=4, max_model_len=32)
    (lane,) = layout.lanes
    assert (lane.end, lane.end_column, lane.spans) == ("refused", 0, [])
    assert "max_model_len" in lane.reason


def test_swapped_out_is_not_recomputed() -> None:
    layout = laid_out(
        [Add(7, 8), Add(7, 8), Drain()],
        num_blocks=5,
        block_size=4,
        max_num_seqs=2,
        preemption_mode="swap",
        num_swap_blocks=8,
    )
    doings = [doing for lane in layout.lanes for _, _, doing in lane.spans]
    assert "swapped" in doings
    assert "recompute" not in doings


def test_the_null_block_is_told_apart() -> None:
    layout = laid_out([Add(16, 8), Drain()], num_blocks=16, block_size=2, sliding_window=4, max_model_len=32)
    assert {span.block for span in layout.spans if span.hold == "null"} == {0}


def test_every_column_of_a_lane_is_told_once() -> None:
    layout = laid_out([Add(9, 9), Add(9, 9), Add(9, 9), Step(4), Abort(1), Drain()], num_blocks=7, block_size=4)
    for lane in layout.lanes:
        columns = [column for first, last, _ in lane.spans for column in range(first, last + 1)]
        assert columns == list(range(columns[0], columns[-1] + 1))


def test_written_blocks_are_those_of_the_positions_computed() -> None:
    layout = laid_out([Add(5, 3), Drain()], num_blocks=4, block_size=4)
    assert layout.written[:3] == [[0, 1], [1], [1]]
