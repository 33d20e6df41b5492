"""Traces: a finding is a file.

A trace is JSON lines: one header (format, engine, configuration, seed), one line per operation with what came
of it, one footer (verdict, violations, digest). It holds no clock and no randomness. A file without a footer
was cut off and is refused; a file of another format version is refused, not misread.

The *digest* is over the outcomes with blocks renamed in order of first appearance, so two runs have equal
digests exactly when the engine made the same plans up to renaming (DET-1).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from conformance.ledger import Ledger
from conformance.need import PreemptionVerdict, judge_preemptions
from conformance.operations import Operation
from conformance.protocol import BlockId, DeviceCall, EngineConfig
from conformance.records import StepFacts
from conformance.violations import Violation

FORMAT = 1


class TraceError(ValueError):
    """A trace file cannot be used: where, what was expected and what was found."""


class SequenceOutcome(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What a step ran of one sequence."""

    name: str
    first: int
    tokens: int
    tables: list[list[BlockId]]


class DeviceOutcome(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One call into a fixed-batch device. A row: its sequence, its line, the position of its last token."""

    route: str
    width: int
    rows: list[tuple[str, int, int]]
    returned: list[str] = []
    """To whom the rows came back, when not to those they were computed for."""
    compiled: int = 0


class StepOutcome(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What one step did, in the engine's own block ids. ``free``: blocks nobody holds before the step."""

    step: int
    free: int
    ran: list[SequenceOutcome] = []
    preempted: list[PreemptionVerdict] = []
    rejected: list[tuple[str, str]] = []
    moves: list[tuple[str, BlockId, BlockId]] = []
    device: list[DeviceOutcome] = []
    finished: list[str] = []


class Header(msgspec.Struct, kw_only=True, tag="header", tag_field="kind", omit_defaults=True):
    """What a trace was made with."""

    format: int = FORMAT
    kvconform: str
    engine: str
    engine_version: str = ""
    config: EngineConfig
    seed: int | None = None
    note: str = ""
    to_the_end: bool = False
    """The run went on after the first violation; a replay does too."""


class Line(msgspec.Struct, kw_only=True, tag="operation", tag_field="kind", omit_defaults=True):
    """One operation and what came of it."""

    operation: Operation
    steps: list[StepOutcome] = []
    outcome: dict[str, Any] = {}


class Footer(msgspec.Struct, kw_only=True, tag="footer", tag_field="kind", omit_defaults=True):
    """How it ended. ``verdict`` is ``holds`` or ``violated``."""

    verdict: str
    steps: int
    violations: list[Violation] = []
    digest: str = ""


Record: TypeAlias = Header | Line | Footer
_decoder = msgspec.json.Decoder(Record)
_encoder = msgspec.json.Encoder()


class Trace(msgspec.Struct, kw_only=True):
    """A whole trace in memory."""

    header: Header
    lines: list[Line]
    footer: Footer

    @property
    def operations(self) -> list[Operation]:
        return [line.operation for line in self.lines]


class Recorder:
    """Collects outcomes while a session runs, and the digest of them."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self._names: dict[BlockId, int] = {}
        self._lines: dict[int, int] = {}
        self._digest = hashlib.sha256()

    def operation(self, operation: Operation) -> None:
        """A new operation begins."""
        self.lines.append(Line(operation=operation))
        self._digest.update(_encoder.encode(operation))

    def note(self, outcome: dict[str, Any]) -> None:
        """What came of the operation at hand."""
        if self.lines:
            self.lines[-1].outcome.update(outcome)
        self._digest.update(_encoder.encode(outcome))

    def plan(self, ledger: Ledger, facts: StepFacts) -> None:
        """A step was planned; the ledger still shows the state before it."""
        plan = facts.plan
        outcome = StepOutcome(
            step=plan.step,
            free=facts.free_before,
            ran=[
                SequenceOutcome(
                    name=row.record.name,
                    first=row.plan.first,
                    tokens=row.plan.num_tokens,
                    tables=[list(table) for table in row.tables],
                )
                for row in facts.rows
            ],
            preempted=judge_preemptions(ledger, facts) if facts.preempted else [],
            rejected=[(rejection.request_id, rejection.reason) for rejection in plan.rejected],
            moves=[(move.kind, move.src, move.dst) for move in plan.moves],
            device=[_device_outcome(ledger, call) for call in plan.device_calls],
        )
        if self.lines:
            self.lines[-1].steps.append(outcome)
        self._digest.update(_encoder.encode(self._renamed(outcome)))

    def commit(self, finished: list[str]) -> None:
        """Requests were reported as finished."""
        if self.lines and self.lines[-1].steps:
            self.lines[-1].steps[-1].finished.extend(finished)
        self._digest.update(_encoder.encode(finished))

    def digest(self) -> str:
        """Digest of everything so far, equal for equal behaviour up to renaming of blocks."""
        return self._digest.hexdigest()

    def _renamed(self, outcome: StepOutcome) -> list[Any]:
        def name(block: BlockId) -> int:
            return self._names.setdefault(block, len(self._names))

        def line_name(line: int) -> int:
            return self._lines.setdefault(line, len(self._lines))

        return [
            outcome.step,
            [
                [ran.name, ran.first, ran.tokens, [[name(block) for block in table] for table in ran.tables]]
                for ran in outcome.ran
            ],
            [[verdict.request_id, verdict.mode] for verdict in outcome.preempted],
            [rid for rid, _ in outcome.rejected],
            [[kind, name(dst)] for kind, _, dst in outcome.moves],
            *(
                [call.route, call.width, [[who, line_name(line), at] for who, line, at in call.rows], call.returned]
                for call in outcome.device
            ),
        ]


def _device_outcome(ledger: Ledger, call: DeviceCall) -> DeviceOutcome:
    rows = zip(call.rows, call.lines, call.positions, strict=True)
    return DeviceOutcome(
        route=call.route,
        width=call.width,
        rows=[(ledger.name_of(key), line, position) for key, line, position in rows],
        returned=[] if call.returned in (None, call.rows) else [ledger.name_of(key) for key in call.returned],
        compiled=call.compiled,
    )


def write_trace(path: Path, trace: Trace) -> None:
    """Write ``trace`` to ``path``, whole or not at all. Raises `TraceError` if that is no regular file, OSError."""
    if path.exists() and not path.is_file():
        raise TraceError(f"{path}: is there and no regular file; nothing was written; name another file")
    records: Iterable[Record] = [trace.header, *trace.lines, trace.footer]
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(b"".join(_encoder.encode(record) + b"\n" for record in records))
    partial.replace(path)


def read_trace(path: Path) -> Trace:
    """Read a trace. Raises `TraceError` naming the line, what was expected and what to do."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}; expected a trace") from None
    rows = raw.splitlines()
    if not rows:
        raise TraceError(f"{path}: empty; expected a header line, got nothing")
    _check_format(path, rows[0])
    records: list[Record] = []
    for number, row in enumerate(rows, 1):
        try:
            records.append(_decoder.decode(row))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise TraceError(
                f"{path}:{number}: not a trace line: {error}; expected one line of JSON each; "
                "the file is damaged or cut off here"
            ) from None
    header, footer, lines = records[0], records[-1], records[1:-1]
    if not isinstance(header, Header):
        raise TraceError(f"{path}:1: expected a header, got {type(header).__name__.lower()}")
    if not isinstance(footer, Footer):
        raise TraceError(
            f"{path}:{len(rows)}: the trace has no footer: it was cut off while it was written; expected a footer, got "
            f"{type(footer).__name__.lower()}; run it again"
        )
    for number, line in enumerate(lines, 2):
        if not isinstance(line, Line):
            raise TraceError(f"{path}:{number}: expected an operation, got {type(line).__name__.lower()}")
    fails_at_rest = footer.violations and footer.digest == Recorder().digest()  # as an engine that hangs when idle
    if not lines and not fails_at_rest:
        raise TraceError(
            f"{path}: the trace has no operation: there is nothing to run; expected at least one, got none"
        )
    return Trace(header=header, lines=[line for line in lines if isinstance(line, Line)], footer=footer)


def _check_format(path: Path, row: bytes) -> None:
    try:
        first = msgspec.json.decode(row)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}:1: not JSON: {error}; expected a kvconform trace") from None
    found = first.get("format", FORMAT) if isinstance(first, dict) else None
    if not isinstance(first, dict) or first.get("kind") != "header":
        raise TraceError(f"{path}:1: expected a kvconform trace header, got {str(first)[:60]}")
    if found != FORMAT:
        raise TraceError(
            f"{path}:1: trace format {found}; this kvconform reads format {FORMAT}; expected {FORMAT}, got {found}"
        )
