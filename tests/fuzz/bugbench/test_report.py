"""What is said of the cells: figures, targets met and missed, comparisons at one budget."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance.operations import Step
from conformance.protocol import EngineConfig
from fuzz.bugbench.registry import load
from fuzz.bugbench.report import header_cells, markdown, row_cells, summarise
from fuzz.bugbench.results import Cell, Header, Results, ShrunkTrace

FAULT = "end_keeps_the_last_block"
OTHER = "preemption_keeps_the_blocks"


def results(tmp_path: Path, cells: list[Cell]) -> Results:
    kept = Results(tmp_path / "bench.jsonl", Header(budgets={"swarm": 1000, "uniform": 100}))
    for cell in cells:
        kept.add(cell)
    return kept


def seen(fuzzer: str, steps: list[int | None], fault: str = FAULT) -> list[Cell]:
    return [
        Cell(fault=fault, fuzzer=fuzzer, seed=seed, steps=value or 5000, seen_as="" if value is None else "ACC-4")
        for seed, value in enumerate(steps, 1)
    ]


def shrunk(cell: Cell, operations: int, *, stable: int = 3) -> Cell:
    cell.shrunk = ShrunkTrace(
        operations=[Step()] * operations, config=EngineConfig(), before=50, executions=9, stable=stable, cpu_seconds=0.5
    )
    return cell


def test_nineteen_of_twenty_are_enough_and_eighteen_are_not(tmp_path: Path) -> None:
    enough = summarise(results(tmp_path / "a", seen("swarm", [10] * 19 + [None])), load(), {})
    short = summarise(results(tmp_path / "b", seen("swarm", [10] * 18 + [None] * 2)), load(), {})
    assert enough.targets[0].met
    assert not short.targets[0].met
    assert FAULT in short.targets[0].found


def test_the_median_over_the_faults_is_what_counts(tmp_path: Path) -> None:
    slow = seen("swarm", [900] * 3) + seen("swarm", [2] * 3, OTHER)
    assert not summarise(results(tmp_path / "a", slow), load(), {}).targets[1].met
    fast = seen("swarm", [400] * 3) + seen("swarm", [2] * 3, OTHER)
    assert summarise(results(tmp_path / "b", fast), load(), {}).targets[1].met


@pytest.mark.parametrize(
    ("operations", "stable", "met"), [(3, 3, (True, True)), (4, 3, (False, True)), (3, 2, (True, False))]
)
def test_shrunk_traces_against_the_smallest_known(
    operations: int, stable: int, met: tuple[bool, bool], tmp_path: Path
) -> None:
    cells = [shrunk(cell, 1) for cell in seen("swarm", [5, 6, 7])] + [
        shrunk(cell, operations, stable=stable) for cell in seen("swarm", [8], OTHER)
    ]
    summary = summarise(results(tmp_path, cells), load(), {FAULT: 1, OTHER: 1})
    assert tuple(target.met for target in summary.targets[2:]) == met


def test_fuzzers_are_compared_at_the_smaller_budget(tmp_path: Path) -> None:
    """What the one sees between 100 and 1000 steps the other had no chance to see."""
    late = seen("swarm", [500] * 8) + seen("uniform", [None] * 8)
    summary = summarise(results(tmp_path / "a", late), load(), {})
    assert summary.faults[0].against["uniform"] == (0.5, 1.0)
    early = seen("swarm", [50 + n for n in range(8)]) + seen("uniform", [None] * 8)
    summary = summarise(results(tmp_path / "b", early), load(), {})
    a12, p_value = summary.faults[0].against["uniform"]
    assert (a12, p_value < 0.01) == (1.0, True)
    assert summary.pairs == [("swarm", "uniform", 1.0, 1, 0)]


def test_a_row_and_the_page_have_a_cell_for_each_column(tmp_path: Path) -> None:
    cells = [shrunk(cell, 2) for cell in seen("swarm", [5, 6, None])] + seen("uniform", [None] * 3)
    summary = summarise(results(tmp_path, cells), load(), {FAULT: 1})
    row = row_cells(summary.faults[0])
    assert len(row) == len(header_cells(summary))
    assert row == [FAULT, "leak", "2/3  6", "0/3  -", "0.83 ns", "2 (1)"]
    table = markdown(summary).split("\n\n")[-1].splitlines()
    assert len({line.count("|") for line in table}) == 1
