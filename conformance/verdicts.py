"""What tests of the suite hand to the plugin: verdicts that survive a distributed run, and their combination."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from conformance.check import conclude
from conformance.expectations import Expectation
from conformance.requirements import load_contract
from conformance.results import CaseResult, CheckResult


class Verdict(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What one test of the suite found, for its own requirement and for others that the run broke."""

    engine: str
    """Engine, version and features in one line."""
    requirement: str
    cases: list[CaseResult] = []
    unsupported: str = ""
    known: list[Expectation] = []
    """The known failures of the requirements in ``cases``."""

    def encode(self) -> str:
        """As JSON, without the traces."""
        cases = [msgspec.structs.replace(case, trace=None) for case in self.cases]
        return msgspec.json.encode(msgspec.structs.replace(self, cases=cases)).decode()


def engine_line(encoded: str) -> str:
    """The engine that a verdict is about."""
    return _decode(encoded).engine


def combine(encoded: Iterable[str]) -> list[CheckResult]:
    """The verdict on each requirement from those of its tests, in the order of the contract."""
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
    return [
        conclude(row, cases[row.id], known.get(row.id, ()), unsupported=unsupported.get(row.id, ""))
        for row in load_contract().requirements.values()
        if row.id in cases
    ]


def _decode(encoded: str) -> Verdict:
    return msgspec.json.decode(encoded, type=Verdict)
