"""``kvconform bench``: how good the fuzzer is, measured on planted faults."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from conformance.protocol import ConfigRefused
from fuzz.bugbench.plan import BUDGETS, SEEDS, SHRINK_SEEDS, Plan
from fuzz.bugbench.registry import PlantedFault, load
from fuzz.bugbench.report import Summary, header_cells, markdown, row_cells, summarise
from fuzz.bugbench.results import Cell, Results, ResultsError
from kvconform.console import make_console, wrapped

HOLDS, FALLS_SHORT = 0, 1
RESULTS = Path("kvconform-bench")


def bench_command(
    faults: Annotated[
        list[str] | None, typer.Argument(help="Faults or families of faults; all when none is named")
    ] = None,
    fuzzer: Annotated[
        list[str] | None, typer.Option("--fuzzer", help=f"Only this one of {', '.join(BUDGETS)}; repeatable")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Hunts for each fault and fuzzer: seeds 1 to this")] = SEEDS,
    budget: Annotated[
        list[str] | None, typer.Option("--budget", help="FUZZER=STEPS after which a hunt is cut off; repeatable")
    ] = None,
    shrink_seeds: Annotated[int, typer.Option(min=0, help="Traces to shrink for each fault")] = SHRINK_SEEDS,
    jobs: Annotated[int, typer.Option(min=0, help="Processes; 0 for one on each core")] = 0,
    folder: Annotated[
        Path, typer.Option("--out", help="Folder for the results; a bench that was stopped goes on there")
    ] = RESULTS,
    fresh: Annotated[bool, typer.Option("--fresh", help="Begin again, whatever the folder holds")] = False,
    assertions: Annotated[
        bool, typer.Option("--assertions", help="Leave the reference engine its own assertions")
    ] = False,
    plots: Annotated[bool, typer.Option("--plots", help="Draw survival curves; needs the extra plots")] = False,
    gate: Annotated[
        bool, typer.Option("--gate", help="Few fixed seeds, the canary and the sound engine: a gate for every change")
    ] = False,
    listed: Annotated[bool, typer.Option("--list", help="Name the faults and do nothing")] = False,
) -> None:
    """Measure the fuzzer on planted faults: how soon it sees each, beside other fuzzers, and how far it shrinks."""
    from fuzz.bugbench.bench import run  # noqa: PLC0415 - Hypothesis, which it imports, is slow to import
    from fuzz.bugbench.smallest import smallest  # noqa: PLC0415 - only who asks for it pays for the import

    console = make_console()
    records = _chosen(faults or [])
    processes = jobs or os.cpu_count() or 1
    if listed:
        for fault in records.values():
            wrapped(console, f"fuzz.bugbench:{fault.id}  {fault.family}: {fault.description}")
        raise typer.Exit(HOLDS)
    if gate:
        raise typer.Exit(_gate(console, records, folder, processes))
    plan = Plan(
        faults=tuple(records),
        fuzzers=_fuzzers(fuzzer),
        seeds=seeds,
        shrink_seeds=shrink_seeds,
        budgets=_budgets(budget or []),
        assertions=assertions,
    )
    path = folder / "bench.jsonl"
    if fresh:
        path.unlink(missing_ok=True)
    try:
        results = run(plan, path, jobs=processes, on_cell=Progress(console))
    except ResultsError as error:
        raise ConfigRefused(str(error)) from None
    summary = summarise(results, records, {fault: len(trace.operations) for fault, trace in smallest().items()})
    (folder / "summary.json").write_bytes(msgspec.json.format(msgspec.json.encode(summary)) + b"\n")
    (folder / "bench.md").write_text(markdown(summary), encoding="utf-8")
    _print(console, summary)
    if plots:
        _draw(console, results, records, folder)
    wrapped(
        console,
        f"cells in {path}, figures in {folder / 'summary.json'}, as a section of a page in {folder / 'bench.md'}",
    )
    raise typer.Exit(HOLDS if all(target.met for target in summary.targets) else FALLS_SHORT)


def _chosen(words: list[str]) -> dict[str, PlantedFault]:
    records = load()
    families = {fault.family for fault in records.values()}
    for word in words:
        if word not in records and word not in families:
            raise ConfigRefused(
                f"{word}: no planted fault and no family of faults; `kvconform bench --list` names them"
            )
    return {name: fault for name, fault in records.items() if not words or name in words or fault.family in words}


def _fuzzers(named: list[str] | None) -> tuple[str, ...]:
    for name in named or []:
        if name not in BUDGETS:
            raise ConfigRefused(f"{name}: no such fuzzer; they are {', '.join(BUDGETS)}")
    return tuple(name for name in BUDGETS if not named or name in named)


def _budgets(words: list[str]) -> dict[str, int]:
    budgets = dict(BUDGETS)
    for word in words:
        name, _, steps = word.partition("=")
        if name not in budgets or not steps.isdecimal() or int(steps) < 1:
            raise ConfigRefused(f"--budget {word}: expected FUZZER=STEPS with one of {', '.join(budgets)}")
        budgets[name] = int(steps)
    return budgets


class Progress:
    """Says how far the bench is: one line that is written over on a terminal, one in every hundred elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def __call__(self, cell: Cell, done: int, total: int) -> None:
        console = self._console
        if console.is_terminal:
            seen = f"{cell.steps:,} steps" if cell.detected else "not seen"
            console.print(
                f"{done}/{total}  {cell.fault} {cell.fuzzer} {cell.seed}: {seen}".ljust(console.width - 1), end="\r"
            )
            if done == total:
                console.print(" " * (console.width - 1), end="\r")
        elif done % 100 == 0 or done == total:
            console.print(f"{done} of {total} cells")


def _print(console: Console, summary: Summary) -> None:
    table = Table(*header_cells(summary), box=None, header_style="bold", pad_edge=False)
    for row in summary.faults:
        table.add_row(*row_cells(row))
    console.print(table)
    wrapped(
        console, "per fuzzer: hunts that saw the fault, median steps. * deep on purpose. ns: not significant at 5 %."
    )
    for one, other, a12, won, lost in summary.pairs:
        wrapped(console, f"{one} against {other}: median A12 {a12:.2f}, faster on {won} faults, slower on {lost}")
    for target in summary.targets:
        wrapped(console, f"{'SHOWN' if target.met else 'FALLS SHORT'}: {target.text}: {target.found}")


def _draw(console: Console, results: Results, records: dict[str, PlantedFault], out: Path) -> None:
    try:
        from fuzz.bugbench.plots import draw  # noqa: PLC0415 - the extra is needed here alone
    except ModuleNotFoundError as error:
        raise ConfigRefused(f"--plots needs {error.name}: pip install 'kvconform[plots]'") from None
    for picture in draw(results, records, out):
        wrapped(console, f"curves in {picture}")


def _gate(console: Console, records: dict[str, PlantedFault], out: Path, jobs: int) -> int:
    """The exit code: 0 when every check passes."""
    from fuzz.bugbench import gate as gates  # noqa: PLC0415 - as above
    from fuzz.bugbench.bench import run  # noqa: PLC0415 - only who asks for it pays for the import

    path = gates.results_path(out)
    path.unlink(missing_ok=True)
    results = run(gates.plan(records), path, jobs=jobs, on_cell=Progress(console))
    passed = True
    for check in gates.checks(results, records):
        passed = passed and check.passed
        wrapped(console, f"{'PASS' if check.passed else 'FAIL'}  {check.name}: {check.found}")
    return HOLDS if passed else FALLS_SHORT
