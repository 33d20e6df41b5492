"""A trace for Perfetto: what its format asks for, and what a reader looks for."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from conformance.adapters.reference import make
from conformance.execute import execute, trace_of
from conformance.operations import Add, Drain, Operation, Step
from conformance.protocol import EngineConfig
from conformance.reports.perfetto import perfetto


def events(operations: list[Operation], **fields: Any) -> list[dict[str, Any]]:
    config = EngineConfig(**fields)
    execution = execute(make, config, operations, stop_at_first=False, record=True)
    document = json.loads(perfetto(trace_of("reference", config, execution)))
    found: list[dict[str, Any]] = document["traceEvents"]
    return found


def test_a_track_for_each_request_and_slices_that_do_not_overlap() -> None:
    found = events([Add(9, 9), Add(9, 9), Add(9, 9), Drain()], num_blocks=7, block_size=4)
    names = {one["args"]["name"] for one in found if one["name"] == "thread_name"}
    assert names == {"r0", "r1", "r2"}
    for track in range(3):
        slices = [one for one in found if one["ph"] == "X" and one["tid"] == track]
        assert slices
        for one, after in pairwise(slices):
            assert one["ts"] + one["dur"] <= after["ts"]


def test_free_blocks_are_a_counter_with_a_value_for_each_step() -> None:
    found = events([Add(5, 3), Drain()], num_blocks=4, block_size=4)
    assert [one["args"]["blocks"] for one in found if one["name"] == "free blocks"] == [4, 2, 2]


def test_a_preemption_is_an_arrow_from_who_asked_to_the_victim_and_a_violation_is_global() -> None:
    found = events(
        [Add(10, 3), Add(10, 3), Drain()],
        num_blocks=2, block_size=32, max_num_seqs=2, engine_options={"append_check": "touched"},
    )  # fmt: skip
    starts = [one for one in found if one["ph"] == "s"]
    ends = {one["id"]: one for one in found if one["ph"] == "f"}
    assert [(one["name"], one["tid"], ends[one["id"]]["tid"]) for one in starts] == [("preempts", 0, 1)] * 2
    assert [one["s"] for one in found if one["name"] == "PRE-1"] == ["g"]


def test_a_shared_block_is_an_arrow_between_its_holders() -> None:
    add = Add(9, 9, family=1, shared_len=8)
    found = events([add, Step(), add, Drain()], num_blocks=16, block_size=4, enable_prefix_caching=True)
    shared = [one for one in found if one["ph"] == "s" and one["name"].startswith("shares block")]
    assert len(shared) == 2
    assert {one["tid"] for one in shared} == {0}
