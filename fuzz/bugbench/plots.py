"""Survival curves as pictures. Needs matplotlib, the extra ``plots``; nothing else imports this module."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import matplotlib as mpl

mpl.use("svg")
mpl.rcParams["svg.hashsalt"] = "kvconform"  # the same picture for the same figures

from matplotlib import pyplot as plt  # noqa: E402 - the backend is chosen first
from matplotlib.axes import Axes  # noqa: E402 - the backend is chosen first

from fuzz.bugbench.registry import PlantedFault  # noqa: E402 - the backend is chosen first
from fuzz.bugbench.results import Cell, Results  # noqa: E402 - the backend is chosen first
from fuzz.bugbench.statistics import survival  # noqa: E402 - the backend is chosen first

COLOURS: Final = {"swarm": "#0072b2", "machine": "#d55e00", "uniform": "#777777"}
COLUMNS: Final = 5


def draw(results: Results, records: dict[str, PlantedFault], directory: Path) -> list[Path]:
    """Write ``survival.svg`` (all faults together) and ``survival-by-fault.svg``. Returns their paths."""
    cells: dict[str, list[Cell]] = {}
    for cell in sorted(results.cells.values(), key=lambda cell: cell.key):
        cells.setdefault(cell.fault, []).append(cell)
    names = [fault for fault in records if fault in cells]
    directory.mkdir(parents=True, exist_ok=True)

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    _curves(axes, [cell for fault in names for cell in cells[fault]], results.header.budgets)
    axes.set_xlabel("steps")
    axes.set_ylabel("hunts in which the fault is unseen")
    axes.set_title(f"{len(names)} planted faults")
    axes.legend()
    together = directory / "survival.svg"
    figure.savefig(together, metadata={"Date": None})
    plt.close(figure)

    rows = -(-len(names) // COLUMNS)
    figure, grid = plt.subplots(rows, COLUMNS, figsize=(15, 2 * rows), squeeze=False, sharey=True, layout="constrained")
    for place, axes in enumerate(grid.flat):
        if place < len(names):
            _curves(axes, cells[names[place]], results.header.budgets)
            axes.set_title(names[place].replace("_", " "), fontsize=8)
            axes.tick_params(labelsize=7)
        else:
            axes.set_axis_off()
    by_fault = directory / "survival-by-fault.svg"
    figure.savefig(by_fault, metadata={"Date": None})
    plt.close(figure)
    return [together, by_fault]


def _curves(axes: Axes, cells: list[Cell], budgets: dict[str, int]) -> None:
    axes.set_xscale("symlog", linthresh=10)
    axes.set_ylim(-0.02, 1.02)
    for fuzzer, budget in budgets.items():
        steps = [cell.steps if cell.detected else None for cell in cells if cell.fuzzer == fuzzer]
        if steps:
            curve = survival(steps, budget)
            at = [*(point.steps for point in curve), budget]
            share = [*(point.share for point in curve), curve[-1].share]
            axes.step(at, share, where="post", label=fuzzer, color=COLOURS.get(fuzzer), linewidth=1.3)
