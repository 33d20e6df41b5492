"""A trace laid out in time: who holds each block in each step, and what each request is doing.

Works on what the trace recorded; no engine is needed. A *column* is one step of the trace, counted from 0 in the
order recorded. A block is *held* from the step whose plan first has it in a table until its holder gives it up: by
a preemption, by its end, or because a later table of the holder lacks it. What nobody holds any more still contains
the KV of its last holder (it is *left*); whether the engine keeps it for a prefix hit is not in a trace.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, TypeAlias

import msgspec

from conformance.operations import Add, describe
from conformance.protocol import BlockId
from conformance.token_model import request_from
from conformance.trace import SequenceOutcome, StepOutcome, Trace

Hold: TypeAlias = Literal["held", "shared", "left", "null"]
Doing: TypeAlias = Literal["waiting", "prefill", "recompute", "decode", "idle", "preempted", "swapped"]
End: TypeAlias = Literal["finished", "aborted", "refused", ""]


class BlockSpan(msgspec.Struct, frozen=True):
    """Block ``block`` in columns ``[first, last]``.

    ``owners``: names of sequences; of a block that is *left*, who held it last. ``logical``: its place in the first
    owner's table, so that it has the positions from ``logical * block_size``.
    """

    block: BlockId
    first: int
    last: int
    hold: Hold
    owners: tuple[str, ...]
    logical: int = 0


class Lane(msgspec.Struct, kw_only=True):
    """One request: what it is doing, as (first column, last column, doing), and how it ended."""

    request_id: str
    prompt_len: int
    max_tokens: int
    priority: int = 0
    spans: list[tuple[int, int, Doing]] = []
    end: End = ""
    end_column: int | None = None
    reason: str = ""


class OperationMark(msgspec.Struct, frozen=True):
    """An operation in words, and the columns it produced (none: the column that comes next)."""

    text: str
    column: int
    columns: int


class Timeline(msgspec.Struct, kw_only=True):
    """The whole layout. ``written[column]``: the blocks written in it."""

    steps: list[StepOutcome]
    num_blocks: int
    spans: list[BlockSpan]
    lanes: list[Lane]
    operations: list[OperationMark]
    written: list[list[BlockId]]
    violations: list[tuple[int, int]]
    """(column, index into the violations of the footer)."""


def request_of(name: str) -> str:
    """The request of a sequence's name: ``r1`` of ``r1/2``."""
    return name.partition("/")[0]


def timeline(trace: Trace) -> Timeline:
    """Lay out ``trace``. O(blocks in its tables + steps)."""
    return _Layout(trace).run()


def written_blocks(ran: SequenceOutcome, block_size: int) -> Iterator[BlockId]:
    """Blocks of the first KV-cache group that hold the positions computed."""
    if not ran.tables:
        return
    table = ran.tables[0]
    for logical in range(ran.first // block_size, (ran.first + ran.tokens - 1) // block_size + 1):
        if logical < len(table):
            yield table[logical]


class _Layout:
    """One pass over the operations and steps of a trace."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.block_size = trace.header.config.block_size
        self.steps: list[StepOutcome] = []
        self.spans: list[BlockSpan] = []
        self.lanes: dict[str, Lane] = {}
        self.operations: list[OperationMark] = []
        self.written: list[list[BlockId]] = []
        self._tables: dict[str, tuple[BlockId, ...]] = {}
        self._holders: dict[BlockId, list[str]] = {}
        self._shown: dict[BlockId, BlockSpan] = {}
        """Block -> its span that is still open."""
        self._logical: dict[BlockId, int] = {}
        self._null = {
            block
            for line in trace.lines
            for step in line.steps
            for ran in step.ran
            for table in ran.tables
            if len(set(table)) < len(table)
            for block in set(table)
            if table.count(block) > 1
        }
        """Who stands twice in one table is no block but the absence of one."""
        self._doing: dict[str, tuple[int, Doing]] = {}
        self._computed: dict[str, int] = {}
        """Sequence -> positions computed so far, preempted or not."""
        self._again: set[str] = set()
        """Requests that compute again what a preemption threw away."""

    def run(self) -> Timeline:
        for line in self.trace.lines:
            first = len(self.steps)
            operation = line.operation
            if isinstance(operation, Add):
                self._add(operation, str(line.outcome.get("refused", "")))
            if "aborted" in line.outcome:
                self._end(str(line.outcome["aborted"]), "aborted", first)
            for step in line.steps:
                self._step(step)
            self.operations.append(OperationMark(describe(operation), first, len(self.steps) - first))
        self._close()
        ids = [span.block for span in self.spans]
        numbers = {step.step: column for column, step in enumerate(self.steps)}
        last = max(0, len(self.steps) - 1)
        return Timeline(
            steps=self.steps,
            num_blocks=max(self.trace.header.config.num_blocks, *(block + 1 for block in ids), 0),
            spans=sorted(self.spans, key=lambda span: (span.block, span.first)),
            lanes=list(self.lanes.values()),
            operations=self.operations,
            written=self.written,
            violations=[
                (numbers.get(finding.step, last), index) for index, finding in enumerate(self.trace.footer.violations)
            ],
        )

    # -- requests ----------------------------------------------------------------------------------------

    def _add(self, operation: Add, refused: str) -> None:
        request = request_from(operation, len(self.lanes))
        lane = Lane(
            request_id=request.request_id,
            prompt_len=len(request.prompt),
            max_tokens=request.max_tokens,
            priority=request.priority,
        )
        self.lanes[lane.request_id] = lane
        if refused:
            lane.end, lane.end_column, lane.reason = "refused", len(self.steps), refused
        else:
            self._doing[lane.request_id] = (len(self.steps), "waiting")

    def _does(self, request_id: str, doing: Doing, column: int) -> None:
        start, before = self._doing.get(request_id, (column, doing))
        if before != doing:
            self._finish_span(request_id, start, column - 1, before)
            start = column
        self._doing[request_id] = (start, doing)

    def _finish_span(self, request_id: str, first: int, last: int, doing: Doing) -> None:
        if last >= first and request_id in self.lanes:
            self.lanes[request_id].spans.append((first, last, doing))

    def _end(self, request_id: str, end: End, column: int, reason: str = "") -> None:
        """The request is over before ``column``."""
        if request_id in self._doing:
            start, doing = self._doing.pop(request_id)
            self._finish_span(request_id, start, column - 1, doing)
        lane = self.lanes.get(request_id)
        if lane is not None and not lane.end:
            lane.end, lane.end_column, lane.reason = end, column, reason
        self._give_up(request_id, column)

    # -- steps -------------------------------------------------------------------------------------------

    def _step(self, step: StepOutcome) -> None:
        column = len(self.steps)
        self.steps.append(step)
        for verdict in step.preempted:
            self._give_up(verdict.request_id, column)
            swapped = verdict.mode == "swap"
            self._does(verdict.request_id, "swapped" if swapped else "preempted", column)
            if not swapped:
                self._again.add(verdict.request_id)
        ran = {request_of(one.name) for one in step.ran}
        for one in step.ran:
            self._take(one, column)
        for request_id, (_, doing) in list(self._doing.items()):
            if request_id not in ran and doing in {"prefill", "recompute", "decode"}:
                self._does(request_id, "idle", column)
        self.written.append(sorted({block for one in step.ran for block in written_blocks(one, self.block_size)}))
        for request_id, reason in step.rejected:
            self._end(request_id, "refused", column, reason)
        for request_id in step.finished:
            self._end(request_id, "finished", column + 1)

    def _take(self, ran: SequenceOutcome, column: int) -> None:
        request_id = request_of(ran.name)
        lane = self.lanes.get(request_id)
        end, computed = ran.first + ran.tokens, self._computed.get(ran.name, 0)
        doing: Doing = "prefill" if lane is not None and ran.first < lane.prompt_len else "decode"
        if request_id in self._again:
            if ran.first < computed:
                doing = "recompute"
            if end > computed:
                self._again.discard(request_id)
        self._does(request_id, doing, column)
        self._computed[ran.name] = max(computed, end)
        table = tuple(dict.fromkeys(block for one in ran.tables for block in one))
        old = self._tables.get(ran.name, ())
        self._tables[ran.name] = table
        kept = set(table)
        for block in old:
            if block not in kept:
                self._release(block, ran.name, column)
        owned = set(old)
        for logical, block in enumerate(table):
            if block not in owned:
                if not self._holders.get(block):
                    self._logical[block] = ran.tables[0].index(block) if block in ran.tables[0] else logical
                self._holders.setdefault(block, []).append(ran.name)
                self._show(block, column)

    # -- blocks ------------------------------------------------------------------------------------------

    def _give_up(self, request_id: str, column: int) -> None:
        for name in [name for name in self._tables if request_of(name) == request_id]:
            for block in self._tables.pop(name):
                self._release(block, name, column)

    def _release(self, block: BlockId, name: str, column: int) -> None:
        self._holders[block].remove(name)
        self._show(block, column, last_owner=name)

    def _show(self, block: BlockId, column: int, last_owner: str = "") -> None:
        """From ``column`` on the block looks as it now is."""
        owners = tuple(self._holders.get(block, ()))
        hold: Hold = "shared" if len(owners) > 1 else "held" if owners else "left"
        if block in self._null:
            hold, owners = "null", ()
        new = (hold, owners or ((last_owner,) if last_owner and hold == "left" else ()))
        shown = self._shown.get(block)
        if shown is not None:
            if (shown.hold, shown.owners) == new:
                return
            if shown.first < column:
                self.spans.append(msgspec.structs.replace(shown, last=column - 1))
        self._shown[block] = BlockSpan(block, column, column, *new, self._logical.get(block, 0))

    def _close(self) -> None:
        end = len(self.steps) - 1
        for request_id, (start, doing) in self._doing.items():
            self._finish_span(request_id, start, end, doing)
        self.spans += [msgspec.structs.replace(span, last=end) for span in self._shown.values() if span.first <= end]
