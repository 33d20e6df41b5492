"""The trace page: one offline HTML file that shows a finding, blocks down and steps across."""

from __future__ import annotations

import re
from typing import Any, Final

from conformance.explain import setting
from conformance.reports.embedding import page
from conformance.reports.step_lines import phrases
from conformance.reports.timeline import Doing, Hold, Timeline, request_of, timeline
from conformance.requirements import load as load_requirements
from conformance.trace import Trace

_HOLDS: Final[tuple[Hold, ...]] = ("held", "shared", "left", "null")
_DOINGS: Final[tuple[Doing, ...]] = ("waiting", "prefill", "recompute", "decode", "idle", "preempted", "swapped")


def trace_page(trace: Trace, command: str = "") -> str:
    """The page of ``trace``; ``command`` is what runs it again, shown to be copied."""
    layout = timeline(trace)
    contract = load_requirements()
    findings = trace.footer.violations
    violations = []
    for column, index in layout.violations:
        finding = findings[index]
        row = contract.get(finding.requirement)
        violations.append(
            {
                "column": column,
                "requirement": finding.requirement,
                "level": "" if row is None else row.level,
                "text": "" if row is None else row.text,
                "message": finding.message,
                "expected": finding.expected,
                "got": finding.got,
                "step": finding.step,
            }
        )
    broken = ", ".join(dict.fromkeys(finding.requirement for finding in findings))
    title = f"{broken} on " if broken else ""
    return page(
        "trace",
        f"{title}{trace.header.engine} {trace.header.engine_version}".rstrip(),
        page_data(layout, trace),
        setting=setting(trace),
        violations=violations,
        command=command,
    )


def page_data(layout: Timeline, trace: Trace) -> dict[str, Any]:
    """What the script of the page draws, compact: names become indices."""
    requests = {lane.request_id: number for number, lane in enumerate(layout.lanes)}
    owners: dict[str, int] = {}
    spans = [
        [
            span.block,
            span.first,
            span.last,
            _HOLDS.index(span.hold),
            [owners.setdefault(name, len(owners)) for name in span.owners],
            span.logical,
        ]
        for span in layout.spans
    ]
    findings = trace.footer.violations
    return {
        "block_size": trace.header.config.block_size,
        "blocks": layout.num_blocks,
        "free_max": max((step.free for step in layout.steps), default=0),
        "lanes": [
            {
                "id": lane.request_id,
                "end": lane.end,
                "column": lane.end_column,
                "spans": [[first, last, _DOINGS.index(doing)] for first, last, doing in lane.spans],
            }
            for lane in layout.lanes
        ],
        "operations": [[mark.text, mark.column] for mark in layout.operations],
        "owners": [[name, requests.get(request_of(name), 0)] for name in owners],
        "preempted": [int(bool(step.preempted)) for step in layout.steps],
        "said": phrases(layout),
        "spans": spans,
        "steps": [[step.step, step.free] for step in layout.steps],
        "touched": _touched(layout, trace),
        "violations": [[column, f"{findings[index].requirement}: {findings[index].message}"]
                       for column, index in layout.violations],
        "written": layout.written,
    }  # fmt: skip


def _touched(layout: Timeline, trace: Trace) -> dict[int, int]:
    """Column of a violation -> the block it is about: the one it names, or one of the preempted request."""
    found: dict[int, int] = {}
    for column, index in layout.violations:
        named = re.search(r"\bblock (\d+)", trace.footer.violations[index].message)
        if named is not None and int(named[1]) < layout.num_blocks:
            found[column] = int(named[1])
        elif layout.steps:
            victims = [block for verdict in layout.steps[column].preempted for block in verdict.block_ids]
            if victims:
                found[column] = victims[0]
    return found
