"""``kvconform page``: a trace to be looked at, as a page or for Perfetto."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from conformance.reports.perfetto import perfetto
from conformance.reports.step_lines import HEAD, LEGEND, step_lines
from conformance.reports.trace_page import trace_page
from conformance.trace import Trace, read_trace
from kvconform.console import make_console, quoted, wrapped

StepsOption = Annotated[bool, typer.Option("--steps", help="A line for every step, however many")]
STEPS_SHOWN = 40
"""Lines of a trace that `explain` prints around the violation, unless it is asked for all."""


def page_command(
    trace: Annotated[Path, typer.Argument(help="A trace file")],
    out: Annotated[Path | None, typer.Option(help="The file to write; beside the trace when not given")] = None,
    form: Annotated[
        Literal["html", "perfetto"], typer.Option("--format", help="A page, or JSON for ui.perfetto.dev")
    ] = "html",
) -> None:
    """Write a trace as one offline HTML page: blocks down, steps across, the violation marked."""
    loaded = read_trace(trace)
    target = trace.with_suffix(".perfetto.json" if form == "perfetto" else ".html") if out is None else out
    target.parent.mkdir(parents=True, exist_ok=True)
    text = perfetto(loaded) if form == "perfetto" else trace_page(loaded, f"kvconform replay {quoted(trace)}")
    target.write_text(text, encoding="utf-8")
    where = "open it at https://ui.perfetto.dev" if form == "perfetto" else "open it in a browser"
    wrapped(make_console(), f"{target}: {where}")


def steps_of_interest(trace: Trace, *, everything: bool) -> list[str]:
    """A line for each step: all, or those around the first violation and how many there are beside."""
    lines = list(step_lines(trace))[1:]
    if not lines:
        return []
    if everything or len(lines) <= STEPS_SHOWN:
        return [LEGEND, HEAD, *lines]
    middle = next((number for number, line in enumerate(lines) if line.startswith(">")), 0)
    start = max(0, min(middle - STEPS_SHOWN // 2, len(lines) - STEPS_SHOWN))
    shown = lines[start : start + STEPS_SHOWN]
    return [LEGEND, HEAD, *shown, f"({len(shown)} of {len(lines)} steps; --steps shows all)"]
