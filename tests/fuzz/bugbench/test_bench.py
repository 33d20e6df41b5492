"""A bench can be stopped and gone on with, says what it cannot go on with, and depends on its seeds alone."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from fuzz.bugbench.bench import measure, run
from fuzz.bugbench.fuzzers import FUZZERS
from fuzz.bugbench.plan import BUDGETS, Plan
from fuzz.bugbench.probe import Counters
from fuzz.bugbench.registry import load
from fuzz.bugbench.results import Cell, Header, Results, ResultsError, read

EASY = "end_keeps_the_last_block"
PLAN = Plan(faults=(EASY,), fuzzers=("swarm",), seeds=3, shrink_seeds=1, budgets={"swarm": 2000})


def without_clock(cell: Cell) -> bytes:
    if cell.shrunk is not None:
        cell.shrunk.cpu_seconds = 0.0
    return msgspec.json.encode(cell)


@pytest.mark.parametrize("fuzzer", FUZZERS)
def test_a_cell_depends_on_its_seed_alone(fuzzer: str) -> None:
    cells = [measure(EASY, fuzzer, 4, 2000, shrink=True) for _ in range(2)]
    assert without_clock(cells[0]) == without_clock(cells[1])
    assert cells[0].detected
    assert without_clock(measure(EASY, fuzzer, 5, 2000, shrink=True)) != without_clock(cells[0])


@pytest.mark.parametrize("fuzzer", FUZZERS)
def test_a_hunt_is_cut_off_at_its_budget(fuzzer: str) -> None:
    cell = measure("watermark_holds_for_appends", fuzzer, 1, 3)
    assert not cell.detected
    assert cell.seen_as == ""
    assert 0 < cell.steps < 1000, "the run that was under way is not broken off"


@pytest.mark.parametrize("fuzzer", FUZZERS)
def test_a_hunt_ends_with_its_first_find(fuzzer: str) -> None:
    counters = Counters()
    seen = FUZZERS[fuzzer](load()[EASY].factory(counters), counters, 4, 2000, None)
    assert seen is not None
    assert counters.steps == seen.steps


def test_a_cell_says_how_far_the_fault_came() -> None:
    cell = measure(EASY, "swarm", 1, 2000)
    assert cell.reached >= cell.triggered >= 1
    assert cell.reached_at is not None and cell.triggered_at is not None
    assert cell.reached_at <= cell.triggered_at <= cell.steps
    assert cell.message


def test_a_bench_writes_a_line_for_each_cell_and_goes_on_after_the_last(tmp_path: Path) -> None:
    path = tmp_path / "bench.jsonl"
    heard: list[tuple[int, int]] = []

    def hear(cell: Cell, done: int, total: int) -> None:
        assert cell.fault == EASY
        heard.append((done, total))

    whole = run(PLAN, path, on_cell=hear)
    assert heard == [(1, 3), (2, 3), (3, 3)]
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) == 4
    path.write_bytes(b"".join(lines[:2]) + lines[2][:-20])  # stopped in the middle of the second cell
    heard.clear()
    again = run(PLAN, path, jobs=2, on_cell=hear)
    assert heard == [(2, 3), (3, 3)]
    assert {key: without_clock(cell) for key, cell in again.cells.items()} == {
        key: without_clock(cell) for key, cell in whole.cells.items()
    }
    header, cells, whole_bytes = read(path)
    assert header == PLAN.header()
    assert len(cells) == 3
    assert whole_bytes == path.stat().st_size


def test_cells_of_other_code_or_budgets_are_not_mixed(tmp_path: Path) -> None:
    path = tmp_path / "bench.jsonl"
    Results(path, Header(budgets={"swarm": 10}, code="0" * 16))
    with pytest.raises(ResultsError, match=r"bench\.jsonl: begun with code .*; budgets .*--fresh"):
        Results(path, PLAN.header())


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "expected the header of a bench"),
        (b'{"kind":"cell","fault":"x","fuzzer":"swarm","seed":1,"steps":2}\n', "expected the header of a bench"),
        (b'{"kind":"header","schema":99,"kvconform":"1","budgets":{}}\n', "schema 99; this kvconform reads schema 1"),
        (b'{"kind":"header","kvconform":"1","budgets":{}}\nnonsense\n', r"bench\.jsonl:2: not a line of a bench"),
    ],
)
def test_a_file_that_is_none_is_refused(content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "bench.jsonl"
    path.write_bytes(content)
    with pytest.raises(ResultsError, match=said):
        Results(path, PLAN.header())


def test_a_plan_goes_seed_by_seed() -> None:
    plan = Plan(faults=("a", "b"), fuzzers=("swarm", "uniform"), seeds=2)
    cells = list(plan.cells())
    assert len(cells) == len(set(cells)) == 8
    assert [seed for _, _, seed in cells] == [1] * 4 + [2] * 4
    assert set(plan.budgets) == set(FUZZERS) == set(BUDGETS)
