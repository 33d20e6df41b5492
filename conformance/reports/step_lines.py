"""A trace as text: one fixed-width line a step, readable at 80 columns.

    step free  what
       0    6  r0 P0-9   r1 P0-9
    >  1    0  r0 D10   !r1 counted 1, needed 0
       2    3  r1 R8-10

``free``: blocks nobody holds before the step. ``P`` prefill, ``R`` recompute, ``D`` decode, with the positions
computed; ``!r1`` preempted, ``~r1`` preempted by swap; ``=r1`` finished; ``xr1`` aborted or refused before the step;
``>`` a requirement is violated in the step.
"""

from __future__ import annotations

from collections.abc import Iterator

from conformance.reports.timeline import Doing, Timeline, request_of, timeline
from conformance.trace import SequenceOutcome, Trace

LEGEND = (
    "free: blocks nobody holds before the step; P prefill, R recompute, D decode, with the positions computed; "
    "! preempted, ~ swapped out, = finished, x aborted or refused; > a requirement is violated here"
)
HEAD = "  step free  what"
_LETTERS: dict[Doing, str] = {"prefill": "P", "recompute": "R", "decode": "D"}


def step_lines(trace: Trace, width: int = 80) -> Iterator[str]:
    """The head, then a line for each step, none longer than ``width``."""
    layout = timeline(trace)
    violated = {column for column, _ in layout.violations}
    yield HEAD
    for column, words in enumerate(phrases(layout)):
        step = layout.steps[column]
        mark = ">" if column in violated else " "
        line = f"{mark}{step.step:>5} {step.free:>4}  "
        yield line + _fitted(words, width - len(line))


def phrases(layout: Timeline) -> list[list[str]]:
    """What happens in each column, request by request, in the notation above."""
    found: list[list[str]] = [[] for _ in layout.steps]
    doing: list[dict[str, Doing]] = [{} for _ in layout.steps]
    for lane in layout.lanes:
        if lane.end in {"aborted", "refused"} and lane.end_column is not None and lane.end_column < len(found):
            found[lane.end_column].append(f"x{lane.request_id}")
        for first, last, what in lane.spans:
            for column in range(first, last + 1):
                doing[column][lane.request_id] = what
    for column, step in enumerate(layout.steps):
        for verdict in step.preempted:
            sign = "~" if verdict.mode == "swap" else "!"
            counted = "" if verdict.counted is None else f" counted {verdict.counted},"
            found[column].append(f"{sign}{verdict.request_id}{counted} needed {verdict.needed}")
        found[column] += [_ran(one, doing[column].get(request_of(one.name), "decode")) for one in step.ran]
        found[column] += [f"={request_id}" for request_id in step.finished]
    return found


def _ran(one: SequenceOutcome, doing: Doing) -> str:
    last = one.first + one.tokens - 1
    positions = str(one.first) if one.tokens == 1 else f"{one.first}-{last}"
    return f"{one.name} {_LETTERS.get(doing, 'D')}{positions}"


def _fitted(words: list[str], width: int) -> str:
    """The words that fit, then how many do not."""
    line = ""
    for number, word in enumerate(words):
        longer = f"{line}  {word}" if line else word
        rest = len(words) - number - 1
        more = f"  +{rest} more" if rest else ""
        if len(longer) + len(more) > width:
            hidden = f"  +{rest + 1} more"
            return (line + hidden)[:width] if line else word[:width]
        line = longer
    return line
