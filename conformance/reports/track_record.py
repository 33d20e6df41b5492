"""The track record: what was found in released engines, a row and a page for each trace, beside the table."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conformance.operations import describe
from conformance.reports.embedding import page
from conformance.reports.trace_page import trace_page
from conformance.trace import read_trace

_LINK = re.compile(r"(https?://[^\s,;)]+)")


def write_track_record(traces: Sequence[Path], path: Path, *, back: str) -> None:
    """Write the page of ``traces`` to ``path``, and one of each trace into a folder of the same name beside it.

    ``back``: the page that it belongs to, named from ``path``. Raises `TraceError` and OSError.
    """
    folder = path.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    rows = [_row(trace, folder) for trace in traces]
    title = "Track record of kvconform"
    path.write_text(page("track", title, {}, style="conformance", rows=rows, back=back), encoding="utf-8")


def _row(path: Path, folder: Path) -> dict[str, Any]:
    trace = read_trace(path)
    header, finding = trace.header, trace.footer.violations[0]
    target = folder / f"{header.engine}-{path.stem}.html"
    target.write_text(trace_page(trace, f"kvconform replay {path.name}"), encoding="utf-8")
    return {
        "name": f"{header.engine} {path.stem}",
        "engine": header.engine,
        "release": header.engine_version,
        "requirement": finding.requirement,
        "seen": finding.message,
        "requests": "; ".join(describe(operation) for operation in trace.operations),
        "page": f"{folder.name}/{target.name}",
        "cause": [(word, word if _LINK.fullmatch(word) else "") for word in _LINK.split(header.note)],
    }
