"""A trace for https://ui.perfetto.dev: a track for each request, counters, and arrows for preemption and sharing.

The JSON of the Trace Event Format (Google, "Trace Event Format", 2016) and not TrackEvent protobuf: Perfetto opens
both, JSON needs no protobuf library on our side and can be read by eye and by other tools. One step is drawn as one
millisecond; there is no clock in a trace.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from conformance.explain import setting
from conformance.reports.timeline import Timeline, request_of, timeline
from conformance.trace import Trace

STEP_MICROSECONDS: Final = 1000
_REQUESTS, _POOL = 1, 2
"""Processes, which Perfetto shows as groups of tracks."""


def perfetto(trace: Trace) -> str:
    """The trace as Trace Event JSON."""
    layout = timeline(trace)
    events = [*_names(layout), *_lanes(layout), *_counters(layout), *_arrows(layout), *_violations(layout, trace)]
    document = {"displayTimeUnit": "ms", "otherData": {"setting": setting(trace)}, "traceEvents": events}
    return msgspec.json.encode(document).decode() + "\n"


def _names(layout: Timeline) -> Iterator[dict[str, Any]]:
    for process, name in ((_REQUESTS, "requests"), (_POOL, "blocks")):
        yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": process, "tid": 0, "args": {"sort_index": process}}
    for number, lane in enumerate(layout.lanes):
        yield {"ph": "M", "name": "thread_name", "pid": _REQUESTS, "tid": number, "args": {"name": lane.request_id}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": _REQUESTS, "tid": number, "args": {"sort_index": number}}


def _lanes(layout: Timeline) -> Iterator[dict[str, Any]]:
    for number, lane in enumerate(layout.lanes):
        asked = {"prompt": lane.prompt_len, "max_tokens": lane.max_tokens, "priority": lane.priority}
        for first, last, doing in lane.spans:
            length = (last - first + 1) * STEP_MICROSECONDS
            yield _event("X", doing, _REQUESTS, number, first, dur=length, cat="request", args=asked)
        if lane.end_column is not None:
            arguments = {"reason": lane.reason} if lane.reason else {}
            yield _event("i", lane.end, _REQUESTS, number, lane.end_column, s="t", args=arguments)


def _counters(layout: Timeline) -> Iterator[dict[str, Any]]:
    for column, step in enumerate(layout.steps):
        yield _event("C", "free blocks", _POOL, 0, column, args={"blocks": step.free})
        yield _event("C", "sequences run", _POOL, 0, column, args={"sequences": len(step.ran)})
        tokens = sum(one.tokens for one in step.ran)
        yield _event("C", "tokens computed", _POOL, 0, column, args={"tokens": tokens})


def _arrows(layout: Timeline) -> Iterator[dict[str, Any]]:
    """From who asked to the victim of a preemption, and from the first holder of a block to those who share it."""
    tracks = {lane.request_id: number for number, lane in enumerate(layout.lanes)}
    number = 0
    for column, step in enumerate(layout.steps):
        for verdict in step.preempted:
            victim, asker = tracks.get(verdict.request_id), tracks.get(verdict.asked_by or "")
            if victim is None or asker is None or victim == asker:
                continue
            number += 1
            yield from _arrow("preempts", number, asker, victim, column)
    for span in layout.spans:
        if span.hold != "shared":
            continue
        first = tracks.get(request_of(span.owners[0]))
        for owner in dict.fromkeys(map(request_of, span.owners[1:])):
            other = tracks.get(owner)
            if first is not None and other is not None and first != other:
                number += 1
                yield from _arrow(f"shares block {span.block}", number, first, other, span.first)


def _arrow(name: str, number: int, source: int, target: int, column: int) -> Iterator[dict[str, Any]]:
    yield _event("s", name, _REQUESTS, source, column, id=number, cat="flow")
    yield _event("f", name, _REQUESTS, target, column, id=number, cat="flow", bp="e")


def _violations(layout: Timeline, trace: Trace) -> Iterator[dict[str, Any]]:
    for column, index in layout.violations:
        finding = trace.footer.violations[index]
        arguments = {"message": finding.message, "expected": finding.expected, "got": finding.got}
        yield _event("i", finding.requirement, _POOL, 0, column, s="g", args=arguments)


def _event(phase: str, name: str, process: int, track: int, column: int, **more: Any) -> dict[str, Any]:
    return {"ph": phase, "name": name, "pid": process, "tid": track, "ts": column * STEP_MICROSECONDS, **more}
