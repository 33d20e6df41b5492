"""The event file: everything a run found out, as JSON lines, from which every report is made.

One header, then for each *column* (an engine in one release and configuration) a line that opens it, its verdicts
and findings, and a line that closes it; one footer. There is no clock in it. A file without a footer is of a run that
was cut off: it is refused as a report, and a run that is taken up again keeps the columns that were closed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final, TypeAlias

import msgspec

from conformance.protocol import EngineConfig
from conformance.results import SEVERITY, CaseResult, CheckReport, CheckResult, SmokeResult, Status, worst
from conformance.version import __version__

FORMAT: Final = 1


class EventsError(ValueError):
    """An event file cannot be used: where, what was expected, what was found, what to do."""


class RunHeader(msgspec.Struct, kw_only=True, tag="header", tag_field="kind", omit_defaults=True):
    """The first line. ``command``: ``check``, ``fuzz``, ``matrix`` or ``pytest``."""

    format: int = FORMAT
    kvconform: str = __version__
    edition: str = ""
    command: str
    seed: int | None = None


class ColumnOpened(msgspec.Struct, kw_only=True, tag="column", tag_field="kind", omit_defaults=True):
    """An engine under test. ``column`` is its name within the file, such as ``vllm-v0 0.6.0``."""

    column: str
    engine: str
    version: str = ""
    variant: str = ""
    """What the engine calls itself, where that says more than its name."""
    features: tuple[str, ...] = ()
    reimplements: tuple[str, ...] = ()
    config: EngineConfig = EngineConfig()
    pinned: tuple[str, ...] = ()
    smoke: SmokeResult | None = None


class Verdict(msgspec.Struct, kw_only=True, tag="verdict", tag_field="kind", omit_defaults=True):
    """The verdict on one requirement; ``trace`` is a file, relative to the event file."""

    column: str
    requirement: str
    level: str
    title: str
    status: Status
    reason: str = ""
    cases: list[CaseResult] = []
    """Without their traces."""
    trace: str = ""


class FindingKept(msgspec.Struct, kw_only=True, tag="finding", tag_field="kind", omit_defaults=True):
    """A violation that the fuzzer found and shrank; ``trace`` is a file, relative to the event file."""

    column: str
    requirement: str
    level: str
    message: str
    expected: str = ""
    got: str = ""
    identity: str = ""
    operations: int = 0
    trace: str = ""
    also: tuple[str, ...] = ()
    """Other requirements that the same trace breaks."""
    known: str = ""
    """Reason and link, when the engine is known to break the requirement; empty when it is not."""


class ColumnClosed(msgspec.Struct, kw_only=True, tag="closed", tag_field="kind", omit_defaults=True):
    """The engine is done. ``steps`` and ``runs`` are of the fuzzer."""

    column: str
    status: Status
    runs: int = 0
    steps: int = 0
    behaviours: dict[str, int] = {}
    """How often each named behaviour was reached."""


class RunFooter(msgspec.Struct, kw_only=True, tag="footer", tag_field="kind", omit_defaults=True):
    """The last line. ``events`` counts the lines between header and footer."""

    status: Status
    events: int


Event: TypeAlias = ColumnOpened | Verdict | FindingKept | ColumnClosed
_Record: TypeAlias = RunHeader | Event | RunFooter
_decoder = msgspec.json.Decoder(_Record)
_encoder = msgspec.json.Encoder()


class Column(msgspec.Struct, kw_only=True):
    """One engine of a run that was read back."""

    opened: ColumnOpened
    verdicts: dict[str, Verdict] = {}
    findings: list[FindingKept] = []
    closed: ColumnClosed | None = None

    @property
    def name(self) -> str:
        return self.opened.column

    @property
    def status(self) -> Status:
        """The worst of what was found."""
        if self.opened.smoke is not None and self.opened.smoke.status != "ok":
            return "error"
        found: list[Status] = [verdict.status for verdict in self.verdicts.values()]
        found += ["known" if finding.known else "fail" for finding in self.findings]
        return "pass" if not found and self.closed is not None else worst(found)

    def counts(self) -> dict[Status, int]:
        """How many requirements have each status, worst first; absent ones left out."""
        found = [verdict.status for verdict in self.verdicts.values()]
        return {status: found.count(status) for status in reversed(SEVERITY) if status in found}

    def failing(self, level: str, *, known: bool = False) -> list[str]:
        """Ids of the requirements of ``level`` that fail here, in a check or under the fuzzer.

        ``known``: those that are known to, which are none of the others.
        """
        status: Status = "known" if known else "fail"
        ids = [one.requirement for one in self.verdicts.values() if one.status == status and one.level == level]
        ids += [one.requirement for one in self.findings if one.level == level and bool(one.known) == known]
        others = self.failing(level) if known else []
        return [one for one in dict.fromkeys(ids) if one not in others]

    def events(self) -> list[Event]:
        """The lines it is made of."""
        closing = [] if self.closed is None else [self.closed]
        return [self.opened, *self.verdicts.values(), *self.findings, *closing]


class Run(msgspec.Struct, kw_only=True):
    """An event file that was read back. ``complete``: it has its footer."""

    header: RunHeader
    columns: dict[str, Column]
    complete: bool = True

    @property
    def status(self) -> Status:
        return worst(column.status for column in self.columns.values())


class EventWriter:
    """Writes an event file line by line, each flushed, so that a run that is killed leaves what it found.

    Made by `event_file`.
    """

    def __init__(self, path: Path, file: BinaryIO, header: RunHeader) -> None:
        self.path = path
        self._file = file
        self._events = 0
        self._statuses: list[Status] = []
        self._write(header)

    def add(self, event: Event) -> None:
        """Append one event."""
        if isinstance(event, ColumnClosed):
            self._statuses.append(event.status)
        self._events += 1
        self._write(event)

    def _write(self, record: _Record) -> None:
        self._file.write(_encoder.encode(record) + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Write the footer: the run came to its end."""
        self._write(RunFooter(status=worst(self._statuses), events=self._events))

    def link(self, target: Path | None) -> str:
        """``target`` as it is written into the file: relative to it where it lies below it."""
        if target is None:
            return ""
        base = self.path.parent.resolve()
        target = target.resolve()
        return str(target.relative_to(base)) if target.is_relative_to(base) else str(target)


@contextmanager
def event_file(
    path: Path, command: str, *, edition: str = "", seed: int | None = None, footer: bool = True
) -> Iterator[EventWriter]:
    """An event file to write to. Left by an exception, or without ``footer``, it stays one that was cut off.

    Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        writer = EventWriter(path, file, RunHeader(command=command, edition=edition, seed=seed))
        yield writer
        if footer:
            writer.close()


def column_of(report: CheckReport, column: str) -> ColumnOpened:
    """The line that opens the column of a check."""
    capabilities = report.smoke.capabilities
    return ColumnOpened(
        column=column,
        engine=report.engine,
        version=report.engine_version,
        variant="" if capabilities is None or capabilities.engine == report.engine else capabilities.engine,
        features=() if capabilities is None else tuple(sorted(capabilities.features)),
        reimplements=() if capabilities is None else capabilities.reimplements,
        config=report.config,
        pinned=tuple(report.pinned),
        # What it declares stands above; a second copy would make the file twice as long.
        smoke=msgspec.structs.replace(report.smoke, capabilities=None),
    )


def verdict_of(result: CheckResult, column: str, trace: str = "") -> Verdict:
    """The line for one requirement."""
    return Verdict(
        column=column,
        requirement=result.requirement,
        level=result.level,
        title=result.title,
        status=result.status,
        reason=result.reason,
        cases=[msgspec.structs.replace(case, trace=None) for case in result.cases],
        trace=trace,
    )


def read_run(path: Path, *, partial: bool = False) -> Run:
    """Read an event file. ``partial``: one that was cut off is welcome, its unfinished last line is dropped.

    Raises `EventsError` naming the line, what was expected and what to do.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise EventsError(f"{path}: cannot be read: {error.strerror or error}; expected an event file") from None
    rows = raw.splitlines()
    if partial and rows and not raw.endswith(b"\n"):
        rows.pop()
    records = list(_decoded(path, rows))
    if not records or not isinstance(records[0], RunHeader):
        raise EventsError(
            f"{path}:1: expected the header of an event file, got {_kind(records)}; `--events FILE` writes one"
        )
    footer = records[-1]
    complete = isinstance(footer, RunFooter)
    if not complete and not partial:
        raise EventsError(
            f"{path}:{len(rows)}: the file has no footer: its run was cut off; expected a footer, "
            f"got {_kind(records[-1:])}; run it again"
        )
    events = records[1:-1] if complete else records[1:]
    if isinstance(footer, RunFooter) and footer.events != len(events):
        raise EventsError(
            f"{path}: expected {footer.events} events, as the footer counts, got {len(events)}: lines are missing"
        )
    return Run(header=records[0], columns=_columns(path, events), complete=complete)


def _kind(records: Sequence[_Record]) -> str:
    return str(records[0].__struct_config__.tag) if records else "nothing"


def _decoded(path: Path, rows: Sequence[bytes]) -> Iterable[_Record]:
    for number, row in enumerate(rows, 1):
        try:
            record = _decoder.decode(row)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise EventsError(
                f"{path}:{number}: not an event: {error}; expected one line of JSON each; "
                "the file is damaged or cut off here"
            ) from None
        if isinstance(record, RunHeader) and record.format != FORMAT:
            raise EventsError(
                f"{path}:{number}: event format: expected {FORMAT}, which this kvconform reads, got {record.format}"
            )
        yield record


def _columns(path: Path, events: Sequence[_Record]) -> dict[str, Column]:
    columns: dict[str, Column] = {}
    for number, event in enumerate(events, 2):
        if isinstance(event, RunHeader | RunFooter):
            raise EventsError(
                f"{path}:{number}: a second {type(event).__name__}: two files joined? give them one by one"
            )
        if isinstance(event, ColumnOpened):
            if event.column in columns:
                raise EventsError(f"{path}:{number}: column {event.column!r} is opened twice")
            columns[event.column] = Column(opened=event)
            continue
        column = columns.get(event.column)
        if column is None:
            raise EventsError(f"{path}:{number}: {event.column!r} was never opened: a line is missing above")
        match event:
            case Verdict():
                column.verdicts[event.requirement] = event
            case FindingKept():
                column.findings.append(event)
            case ColumnClosed():
                column.closed = event
    return columns


def combine(runs: Sequence[Run]) -> Run:
    """Several runs as one. A column that several have is one: per requirement the worst verdict stands.

    Raises `EventsError` when runs of different editions of the contract are to be combined.
    """
    editions = {run.header.edition for run in runs if run.header.edition}
    if len(editions) > 1:
        raise EventsError(
            f"runs of editions {', '.join(sorted(editions))} of the contract cannot stand in one table; "
            "expected one edition"
        )
    columns: dict[str, Column] = {}
    for run in runs:
        for name, column in run.columns.items():
            if name not in columns:
                columns[name] = Column(
                    opened=column.opened,
                    verdicts=dict(column.verdicts),
                    findings=list(column.findings),
                    closed=column.closed,
                )
            else:
                _merge(columns[name], column)
    command = runs[0].header.command if len(runs) == 1 else "report"
    header = RunHeader(command=command, edition=next(iter(editions), ""))
    return Run(header=header, columns=columns, complete=all(run.complete for run in runs))


def _merge(into: Column, other: Column) -> None:
    for requirement, verdict in other.verdicts.items():
        known = into.verdicts.get(requirement)
        if known is None or worst((known.status, verdict.status)) != known.status:
            into.verdicts[requirement] = verdict
    seen = {(one.requirement, one.identity) for one in into.findings}
    into.findings += [one for one in other.findings if (one.requirement, one.identity) not in seen]
    into.closed = into.closed or other.closed
