"""``kvconform check``: the contract as a table, engine after engine, with the reason for each red line."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from conformance.advice import installing
from conformance.check import check
from conformance.engines import EngineSource, installed
from conformance.protocol import EngineConfig
from conformance.reports.events import ColumnClosed, EventWriter, column_of, verdict_of
from conformance.requirements import load as load_requirements
from conformance.results import CheckReport, CheckResult, Status
from conformance.trace import write_trace
from conformance.watchdog import Watchdog
from fuzz.findings import file_name
from kvconform.console import INDENT, config_line, make_console, quoted, wrapped

STYLES: dict[Status, str] = {
    "pass": "green",
    "known": "yellow",
    "stale": "bold red",
    "fail": "bold red",
    "error": "bold magenta",
    "skip": "cyan",
    "unsupported": "dim",
}


def check_engines(
    sources: Sequence[EngineSource],
    config: EngineConfig,
    pinned: frozenset[str],
    *,
    requirements: list[str] | None,
    out: Path,
    call_seconds: float,
    everything: bool,
    events: EventWriter | None = None,
    label: str = "",
) -> int:
    """Check each engine and print what came of it. Returns the exit code: the worst of all engines.

    ``events`` takes the verdicts too; ``label`` is the name of the column there, of a single engine.
    """
    console = make_console()
    if everything:
        for source in installed():
            if not source.available:
                wrapped(console, f"{source.name}: skipped, {source.reason}")
    code = 0
    for source in sources:
        report, traces = _check_one(console, source, config, pinned, requirements, out, call_seconds)
        if events is not None:
            record(events, report, label or f"{report.engine} {report.engine_version}", traces)
        code = max(code, _print_summary(console, report, everything=everything))
    return code


def record(events: EventWriter, report: CheckReport, column: str, traces: Mapping[str, Path]) -> None:
    """Write the verdicts of a check into an event file. ``traces``: requirement -> the file of its trace."""
    events.add(column_of(report, column))
    for result in report.results:
        events.add(verdict_of(result, column, events.link(traces.get(result.requirement))))
    events.add(ColumnClosed(column=column, status=report.status))


def _check_one(
    console: Console,
    source: EngineSource,
    config: EngineConfig,
    pinned: frozenset[str],
    requirements: list[str] | None,
    out: Path,
    call_seconds: float,
) -> tuple[CheckReport, dict[str, Path]]:
    watchdog = Watchdog(call_seconds_max=call_seconds) if call_seconds else Watchdog(0, 0)
    levels = load_requirements()
    traces: dict[str, Path] = {}

    def show(result: CheckResult) -> None:
        trace = _print_result(console, result, source, out)
        if trace is not None:
            traces[result.requirement] = trace

    wrapped(console, f"{source.name} {source.installed_version}".rstrip())
    if pinned:
        wrapped(console, f"with {config_line(config)}", INDENT)
    try:
        report = check(
            source,
            base=config,
            pinned=pinned,
            requirements=requirements or list(levels),
            watchdog=watchdog,
            on_result=show,
        )
    finally:
        watchdog.stop()
    return report, traces


def _print_result(console: Console, result: CheckResult, source: EngineSource, out: Path) -> Path | None:
    """Print one verdict. Returns where its trace was written, when it left one."""
    line = Text()
    line.append(f"  {result.status.upper():<11} ", style=STYLES[result.status])
    line.append(f"{result.requirement:<7} {result.level:<6} {result.title}")
    console.print(line, no_wrap=not console.is_terminal)
    if result.status in {"fail", "stale", "error", "known", "skip"} and result.reason:
        for part in result.reason.split(" | "):
            wrapped(console, part, INDENT * 3)
    case = result.deciding
    if result.status == "fail" and case is not None and case.trace is not None:
        case_name = re.sub(r"[^a-z0-9]+", "-", f"{result.requirement}-{case.case}".lower()).strip("-")
        stem = f"{file_name(source.name)}-{case_name}"
        path = out / f"check-{stem}.jsonl"
        write_trace(path, case.trace)
        console.print(f"{INDENT * 3}kvconform explain {quoted(path)}", markup=False)
        return path
    return None


def _print_summary(console: Console, report: CheckReport, *, everything: bool) -> int:
    """One closing line; returns 0 when the contract holds, 1 when it does not, 3 when the suite broke.

    2 when the engine refuses the configuration, unless ``everything`` there is was asked for and nothing by name.
    """
    if report.smoke.status == "refused":
        wrapped(console, f"  {'skipped' if everything else 'refused'}: {report.smoke.reason}")
        if not everything:
            wrapped(console, f"next: kvconform engines, which lists what {report.engine} takes and declares", INDENT)
        console.print()
        return 0 if everything else 2
    if report.smoke.status != "ok":
        wrapped(console, f"  ERROR smoke test: {report.smoke.reason}")
        wrapped(
            console,
            "  the adapter does not do the least that any adapter must: nothing is said of the engine",
        )
        mend = f"kvconform check {report.engine}, once the adapter is mended"
        wrapped(console, f"next: {installing(report.smoke.reason) or mend}", INDENT)
        return 3
    must = sum(result.status == "fail" and result.level == "MUST" for result in report.results)
    counts = ", ".join(f"{count} {status}" for status, count in report.counts().items())
    verdict = "the contract holds" if report.ok else f"the contract is violated ({must} MUST)"
    if report.status == "known":
        verdict = "nothing fails but what is known to"
    elif report.status == "error":
        verdict = "the suite or the adapter broke"
    elif report.status == "stale":
        verdict = "expectations are stale: what was expected to fail passes"
    wrapped(console, f"{report.engine} {report.engine_version}: {verdict}: {counts}")
    console.print()
    return {True: 0, False: 3 if report.status == "error" else 1}[report.ok]
