"""The conformance page: engines by requirements, one static HTML file, with a page for every trace beside it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conformance.reports.embedding import page
from conformance.reports.events import Column, FindingKept, Run, Verdict
from conformance.reports.formats import MARKS, rows_of, status_in, summary
from conformance.reports.trace_page import trace_page
from conformance.reports.track_record import write_track_record
from conformance.requirements import LEVELS, Requirement
from conformance.results import Status
from conformance.trace import TraceError, read_trace

LEGEND: tuple[tuple[Status, str], ...] = (
    ("pass", "holds"),
    ("fail", "fails"),
    ("known", "fails as it is known to"),
    ("stale", "was known to fail and does not"),
    ("error", "suite or adapter broke"),
    ("skip", "not judged here"),
    ("unsupported", "not declared"),
)


def write_conformance_page(
    run: Run, path: Path, title: str = "Conformance of KV-cache accounting", track_record: Sequence[Path] = ()
) -> None:
    """Write the page to ``path``, and a page of every trace that can be read into ``traces/`` beside it.

    ``track_record``: traces of what was found in released engines, for a page of their own that this one links to.
    Paths of traces in ``run`` are absolute (`absolute`). Raises OSError, and `TraceError` for a trace of the record.
    """
    record = path.with_name("track-record.html")
    if track_record:
        write_track_record(track_record, record, back=path.name)
    pages = _trace_pages(run, path.parent)
    columns = list(run.columns.values())
    rows = rows_of(run)
    levels = [(level, [_row(row, columns) for row in rows if row.level == level]) for level in LEVELS]
    data = {
        "columns": [column.name for column in columns],
        "requirements": {
            row.id: {
                "level": row.level,
                "title": row.title,
                "text": row.text,
                "rationale": row.rationale,
                "source": row.source,
            }
            for row in rows
        },
        "cells": {row.id: [_detail(column, row.id, pages) for column in columns] for row in rows},
    }
    html = page(
        "conformance",
        title,
        data,
        edition=run.header.edition,
        track_record=record.name if track_record else "",
        columns=[_heading(column) for column in columns],
        legend=[(status, MARKS[status], text) for status, text in LEGEND],
        levels=[(level, cells) for level, cells in levels if cells],
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(html, encoding="utf-8")


def absolute(run: Run, base: Path) -> Run:
    """``run``, read from a file in ``base``, with the paths of its traces made absolute; changed in place."""

    def resolved(trace: str) -> str:
        return str((base / trace).resolve()) if trace else ""

    for column in run.columns.values():
        for verdict in column.verdicts.values():
            verdict.trace = resolved(verdict.trace)
        for finding in column.findings:
            finding.trace = resolved(finding.trace)
    return run


def _trace_pages(run: Run, folder: Path) -> dict[str, str]:
    """Trace file -> its page, named from ``folder``; a trace that is gone or damaged has none."""
    pages: dict[str, str] = {}
    for column in run.columns.values():
        items: list[Verdict | FindingKept] = [*column.verdicts.values(), *column.findings]
        for trace in dict.fromkeys(item.trace for item in items if item.trace):
            try:
                html = trace_page(read_trace(Path(trace)), f"kvconform replay {Path(trace).name}")
            except TraceError:
                continue
            target = folder / "traces" / f"{len(pages):03}-{Path(trace).stem}.html"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(html, encoding="utf-8")
            pages[trace] = target.relative_to(folder).as_posix()
    return pages


def _heading(column: Column) -> dict[str, Any]:
    return {
        "name": column.name,
        "must": len(column.failing("MUST")) + len(column.failing("MUST", known=True)),
        "known": len(column.failing("MUST", known=True)),
        "error": column.status == "error",
        "summary": summary(column),
        "reimplements": column.opened.reimplements,
    }


def _row(row: Requirement, columns: list[Column]) -> dict[str, Any]:
    statuses = [status_in(column, row.id) for column in columns]
    cells = [{"status": status or "", "mark": "" if status is None else MARKS[status]} for status in statuses]
    return {"id": row.id, "title": row.title, "cells": cells}


def _detail(column: Column, requirement: str, pages: dict[str, str]) -> dict[str, Any]:
    verdict = column.verdicts.get(requirement)
    findings = [finding for finding in column.findings if finding.requirement == requirement]
    trace = "" if verdict is None else verdict.trace
    return {
        "status": status_in(column, requirement) or "",
        "reasons": [] if verdict is None else [part for part in verdict.reason.split(" | ") if part],
        "trace": os.path.basename(trace),  # noqa: PTH119 - "" stays ""
        "page": pages.get(trace, ""),
        "findings": [
            {
                "message": finding.message,
                "expected": finding.expected,
                "got": finding.got,
                "known": finding.known,
                "trace": os.path.basename(finding.trace),  # noqa: PTH119 - "" stays ""
                "page": pages.get(finding.trace, ""),
            }
            for finding in findings
        ],
    }
