"""What a bench shows: one row for each fault, one sentence for each target, one comparison for each pair of fuzzers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Final

import msgspec

from fuzz.bugbench.registry import PlantedFault
from fuzz.bugbench.results import Cell, Results
from fuzz.bugbench.statistics import Comparison, compare, median

SIGNIFICANT: Final = 0.05
DETECTED_SHARE: Final = 0.95
"""Of the seeds, for every fault: 19 of 20."""
MEDIAN_STEPS_MAX: Final = 500
SHRUNK_MEDIAN_MAX: Final = 1.5
SHRUNK_WORST_MAX: Final = 3.0
"""Operations in the shrunk trace, in multiples of the smallest known."""
SHRINK_SECONDS_MAX: Final = 1.0


class FuzzerFigures(msgspec.Struct, kw_only=True):
    """One fuzzer on one fault. Steps are None when fewer than half of the seeds saw it."""

    hunts: int
    detected: int
    median_steps: float | None
    worst_steps: float | None
    median_triggered_at: float | None
    seen_as: dict[str, int]


class ShrinkFigures(msgspec.Struct, kw_only=True):
    """One shrunk trace: operations against the smallest known, and what it cost."""

    operations: int
    smallest: int | None
    """None: none is known yet. A trace of no operation at all counts as one."""
    ratio: float
    executions: int
    cpu_seconds: float
    stable: bool


class FaultFigures(msgspec.Struct, kw_only=True):
    """One row of the table."""

    fault: str
    family: str
    deep: bool
    fuzzers: dict[str, FuzzerFigures]
    against: dict[str, Comparison]
    """Other fuzzer -> how often the first one is faster (A12), and the p-value."""
    shrinks: list[ShrinkFigures]


class Target(msgspec.Struct, kw_only=True):
    """Something that must be shown, and whether it was."""

    text: str
    met: bool
    found: str


class Summary(msgspec.Struct, kw_only=True):
    """All figures of a bench, in the order of the records."""

    schema: int = 1
    budgets: dict[str, int]
    assertions: bool
    faults: list[FaultFigures]
    targets: list[Target]
    pairs: list[tuple[str, str, float, int, int]]
    """First fuzzer, other one, median A12, faults on which the first is significantly faster, and the other."""


def summarise(results: Results, records: dict[str, PlantedFault], smallest: dict[str, int]) -> Summary:
    """Everything that is said of the cells. ``smallest``: fault -> operations of its smallest known trace."""
    cells: dict[tuple[str, str], list[Cell]] = {}
    for cell in sorted(results.cells.values(), key=lambda cell: cell.key):
        cells.setdefault((cell.fault, cell.fuzzer), []).append(cell)
    fuzzers = [name for name in results.header.budgets if any(key[1] == name for key in cells)]
    rows = [
        _row(record, fuzzers, cells, smallest.get(fault), results.header.budgets)
        for fault, record in records.items()
        if any(key[0] == fault for key in cells)
    ]
    return Summary(
        budgets=results.header.budgets,
        assertions=results.header.assertions,
        faults=rows,
        targets=_targets(rows, fuzzers[0]) if rows else [],
        pairs=[
            _pair(one, other, rows, cells, results.header.budgets) for one, other in itertools.combinations(fuzzers, 2)
        ],
    )


def _row(
    record: PlantedFault,
    fuzzers: Sequence[str],
    cells: dict[tuple[str, str], list[Cell]],
    smallest: int | None,
    budgets: dict[str, int],
) -> FaultFigures:
    mine = {name: cells[record.id, name] for name in fuzzers if (record.id, name) in cells}
    first = mine.get(fuzzers[0], [])
    return FaultFigures(
        fault=record.id,
        family=record.family,
        deep=bool(record.deep),
        fuzzers={name: _figures(some) for name, some in mine.items()},
        against={name: _compared(first, some, budgets) for name, some in mine.items() if name != fuzzers[0] and first},
        shrinks=[
            ShrinkFigures(
                operations=len(cell.shrunk.operations),
                smallest=smallest,
                ratio=max(1, len(cell.shrunk.operations)) / max(1, smallest) if smallest is not None else math.inf,
                executions=cell.shrunk.executions,
                cpu_seconds=cell.shrunk.cpu_seconds,
                stable=cell.shrunk.stable == 3,
            )
            for cell in first
            if cell.shrunk is not None
        ],
    )


def _figures(cells: Sequence[Cell]) -> FuzzerFigures:
    steps = [cell.steps if cell.detected else None for cell in cells]
    seen_as: dict[str, int] = {}
    for cell in cells:
        if cell.detected:
            seen_as[cell.seen_as] = seen_as.get(cell.seen_as, 0) + 1
    return FuzzerFigures(
        hunts=len(cells),
        detected=sum(cell.detected for cell in cells),
        median_steps=_finite(median(steps)),
        worst_steps=_finite(max(math.inf if value is None else value for value in steps)),
        median_triggered_at=_finite(median([cell.triggered_at for cell in cells])),
        seen_as=dict(sorted(seen_as.items(), key=lambda item: (-item[1], item[0]))),
    )


def _finite(value: float) -> float | None:
    return None if math.isinf(value) else value


def _compared(first: Sequence[Cell], other: Sequence[Cell], budgets: dict[str, int]) -> Comparison:
    """Both cut off at the smaller of the two budgets, so that a longer hunt is no advantage."""
    budget = min(budgets[first[0].fuzzer], budgets[other[0].fuzzer])

    def cut(cells: Sequence[Cell]) -> list[float]:
        return [cell.steps if cell.detected and cell.steps <= budget else math.inf for cell in cells]

    return compare(cut(first), cut(other))


def _pair(
    one: str,
    other: str,
    rows: Sequence[FaultFigures],
    cells: dict[tuple[str, str], list[Cell]],
    budgets: dict[str, int],
) -> tuple[str, str, float, int, int]:
    compared = [
        _compared(cells[row.fault, one], cells[row.fault, other], budgets)
        for row in rows
        if (row.fault, one) in cells and (row.fault, other) in cells
    ]
    faster = sum(each.p_value < SIGNIFICANT and each.a12 > 0.5 for each in compared)
    slower = sum(each.p_value < SIGNIFICANT and each.a12 < 0.5 for each in compared)
    return one, other, median([each.a12 for each in compared]) if compared else 0.5, faster, slower


def _targets(rows: Sequence[FaultFigures], first: str) -> list[Target]:
    figures = {row.fault: row.fuzzers[first] for row in rows if first in row.fuzzers}
    if not figures:
        return []
    short = [fault for fault, one in figures.items() if one.detected < DETECTED_SHARE * one.hunts]
    middle = median([one.median_steps for one in figures.values()])
    targets = [
        Target(
            text="every fault is seen in at least 19 of 20 hunts",
            met=not short,
            found=f"{len(figures) - len(short)} of {len(figures)} faults"
            + (f"; short: {', '.join(short)}" if short else ""),
        ),
        Target(
            text=f"the median fault is seen within {MEDIAN_STEPS_MAX} steps",
            met=middle <= MEDIAN_STEPS_MAX,
            found=f"median {middle:,.0f} steps",
        ),
    ]
    shrinks = [shrink for row in rows for shrink in row.shrinks]
    if shrinks:
        worst = max(shrinks, key=lambda shrink: shrink.ratio)
        where = next(row.fault for row in rows if worst in row.shrinks)
        ratio = median([shrink.ratio for shrink in shrinks])
        seconds = median([shrink.cpu_seconds for shrink in shrinks])
        targets += [
            Target(
                text=f"a shrunk trace is at most {SHRUNK_MEDIAN_MAX} times the smallest known, {SHRUNK_WORST_MAX:.0f} "
                "times at worst",
                met=ratio <= SHRUNK_MEDIAN_MAX and worst.ratio <= SHRUNK_WORST_MAX,
                found=f"median {ratio:.2f}, worst {worst.ratio:.2f} ({where}: {worst.operations} operations for "
                f"{worst.smallest})",
            ),
            Target(
                text=f"the median trace is shrunk in {SHRINK_SECONDS_MAX:.0f} s of CPU time, and all fail again",
                met=seconds <= SHRINK_SECONDS_MAX and all(shrink.stable for shrink in shrinks),
                found=f"median {seconds:.2f} s, {median([shrink.executions for shrink in shrinks]):.0f} executions, "
                f"{sum(shrink.stable for shrink in shrinks)} of {len(shrinks)} stable",
            ),
        ]
    return targets


# ----------------------------------------------------------------------------------------------------- as text


def header_cells(summary: Summary) -> list[str]:
    """The titles of the table's columns."""
    names = list(summary.budgets)
    used = [name for name in names if any(name in row.fuzzers for row in summary.faults)]
    columns = ["fault", "family"]
    columns += [f"{name} (of {budget:,})" for name, budget in summary.budgets.items() if name in used]
    columns += [f"A12 v {name}" for name in used[1:]]
    return [*columns, "operations (smallest)"]


def row_cells(row: FaultFigures) -> list[str]:
    """One row of the table: seen in how many hunts and median steps, effect sizes, shrunk operations."""
    cells = [row.fault + (" *" if row.deep else ""), row.family]
    for figures in row.fuzzers.values():
        steps = "-" if figures.median_steps is None else f"{figures.median_steps:,.0f}"
        cells.append(f"{figures.detected}/{figures.hunts}  {steps}")
    cells += [f"{a12:.2f}{'' if p_value < SIGNIFICANT else ' ns'}" for a12, p_value in row.against.values()]
    if row.shrinks:
        operations = sorted(shrink.operations for shrink in row.shrinks)
        cells.append(f"{operations[len(operations) // 2]} ({row.shrinks[0].smallest})")
    else:
        cells.append("")
    return cells


def markdown(summary: Summary) -> str:
    """The whole bench as a section of a page."""
    columns = header_cells(summary)
    lines = ["| must be shown | shown | found |", "|---|---|---|"]
    lines += [f"| {target.text} | {'yes' if target.met else 'no'} | {target.found} |" for target in summary.targets]
    lines += ["", "| fuzzer | against | median A12 | faster on | slower on |", "|---|---|---|---|---|"]
    lines += [f"| {one} | {other} | {a12:.2f} | {won} | {lost} |" for one, other, a12, won, lost in summary.pairs]
    lines += ["", "| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    lines += ["| " + " | ".join(row_cells(row)) + " |" for row in summary.faults]
    return "\n".join(lines) + "\n"
