"""What tests of the suite hand to the plugin: verdicts that survive a distributed run, and their combination."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from conformance.check import conclude
from conformance.expectations import Expectation
from conformance.reports.events import ColumnClosed, ColumnOpened, event_file, verdict_of
from conformance.requirements import load_contract
from conformance.results import CaseResult, CheckResult, worst
from conformance.scenarios import case_names


class Verdict(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What one test of the suite found, for its own requirement and for others that the run broke.

    ``requirement`` is empty when the smoke test was red, so that nothing could be judged.
    """

    engine: ColumnOpened
    requirement: str = ""
    cases: list[CaseResult] = []
    unsupported: str = ""
    known: list[Expectation] = []
    """The known failures of the requirements in ``cases``."""
    traces: dict[str, str] = {}
    """Requirement -> the file of the trace that breaks it, where traces are kept."""

    def encode(self) -> str:
        """As JSON, without the traces."""
        cases = [msgspec.structs.replace(case, trace=None) for case in self.cases]
        return msgspec.json.encode(msgspec.structs.replace(self, cases=cases)).decode()


def engine_line(encoded: str) -> str:
    """The engine that a verdict is about: name, version and features in one line."""
    engine = _decode(encoded).engine
    return f"{engine.variant or engine.engine} {engine.version}: {', '.join(engine.features) or 'no features'}"


def combine(encoded: Iterable[str]) -> list[CheckResult]:
    """The verdict on each requirement from those of its tests, in the order of the contract.

    In whatever order the tests ran: cases stand in that of the scenarios.
    """
    cases: dict[str, list[CaseResult]] = {}
    known: dict[str, list[Expectation]] = {}
    unsupported: dict[str, str] = {}
    for verdict in map(_decode, encoded):
        cases.setdefault(verdict.requirement, [])
        unsupported.setdefault(verdict.requirement, verdict.unsupported)
        for case in verdict.cases:
            cases.setdefault(case.requirement, []).append(case)
        for entry in verdict.known:
            entries = known.setdefault(entry.requirement, [])
            if entry not in entries:
                entries.append(entry)
    order = {name: place for place, name in enumerate(case_names())}
    return [
        conclude(
            row,
            sorted(cases[row.id], key=lambda case: order.get(case.case, len(order))),
            known.get(row.id, ()),
            unsupported=unsupported.get(row.id, ""),
        )
        for row in load_contract().requirements.values()
        if row.id in cases
    ]


def write_events(path: Path, encoded: Sequence[str], *, cut_off: bool) -> None:
    """Write an event file of the verdicts, one at least. ``cut_off``: not every test was run, so no footer.

    Raises OSError.
    """
    with event_file(path, "pytest", edition=load_contract().edition, footer=not cut_off) as events:
        verdicts = [_decode(one) for one in encoded]
        traces: dict[str, str] = {}
        for name, trace in sorted(item for verdict in verdicts for item in verdict.traces.items()):
            traces.setdefault(name, trace)
        column = verdicts[0].engine
        events.add(column)
        results = combine(encoded)
        for result in results:
            trace = traces.get(result.requirement, "") if result.status == "fail" else ""
            events.add(verdict_of(result, column.column, events.link(Path(trace) if trace else None)))
        red = column.smoke is not None and column.smoke.status != "ok"
        status = "error" if red else worst(result.status for result in results)
        events.add(ColumnClosed(column=column.column, status=status))


def _decode(encoded: str) -> Verdict:
    return msgspec.json.decode(encoded, type=Verdict)
