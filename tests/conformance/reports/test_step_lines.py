"""A trace as text: a line for each step, none longer than the terminal is wide."""

from __future__ import annotations

from typing import Any

import pytest

from conformance.adapters.reference import make
from conformance.execute import execute, trace_of
from conformance.operations import Abort, Add, Drain, Operation, Step
from conformance.protocol import EngineConfig
from conformance.reports.step_lines import step_lines
from conformance.trace import Trace


def recorded(operations: list[Operation], **fields: Any) -> Trace:
    config = EngineConfig(**fields)
    return trace_of("reference", config, execute(make, config, operations, stop_at_first=False, record=True))


def test_prefill_preemption_recompute_decode_and_finish() -> None:
    trace = recorded(
        [Add(10, 3), Add(10, 3), Drain()],
        num_blocks=2, block_size=32, max_num_seqs=2, engine_options={"append_check": "touched"},
    )  # fmt: skip
    assert list(step_lines(trace)) == [
        "  step free  what",
        "     0    2  r0 P0-9  r1 P0-9",
        ">    1    0  !r1 counted 1, needed 0  r0 D10",
        "     2    1  r1 R0-10",
        "     3    0  !r1 counted 1, needed 0  r0 D11  =r0",
        "     4    2  r1 R0-11  =r1",
    ]


def test_aborted_and_swapped() -> None:
    lines = list(step_lines(recorded([Add(4, 8), Add(4, 8), Step(2), Abort(0), Step()], num_blocks=8)))
    assert lines[3].startswith("     2    6  xr0")
    swapped = recorded(
        [Add(7, 8), Add(7, 8), Drain()], num_blocks=5, max_num_seqs=2, preemption_mode="swap", num_swap_blocks=8
    )
    assert any("~r1" in line for line in step_lines(swapped))


@pytest.mark.parametrize("width", [40, 80, 132])
def test_no_line_is_longer_than_the_terminal_is_wide_and_what_is_left_out_is_counted(width: int) -> None:
    adds: list[Operation] = [Add(9, 9)] * 30
    trace = recorded([*adds, Drain()], num_blocks=200, max_num_seqs=30, max_num_batched_tokens=1000)
    lines = list(step_lines(trace, width))
    assert max(map(len, lines)) <= width
    shown = len([word for word in lines[1].split() if word.startswith("P0")])
    assert f"+{30 - shown} more" in lines[1]
