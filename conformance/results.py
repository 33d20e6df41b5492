"""What a check comes to: statuses, and the records that the terminal, the reports and the suite are made from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal, TypeAlias

import msgspec

from conformance.protocol import Capabilities, EngineConfig
from conformance.trace import Trace
from conformance.version import __version__
from conformance.violations import Violation

Status: TypeAlias = Literal["unsupported", "skip", "pass", "known", "stale", "fail", "error"]

SEVERITY: Final[tuple[Status, ...]] = ("unsupported", "skip", "pass", "known", "stale", "fail", "error")
"""Worst last. ``known``: fails, as is expected of this engine. ``stale``: was expected to fail and does not.
``error``: the suite or the adapter broke, which says nothing of the engine."""

BAD: Final[frozenset[Status]] = frozenset({"stale", "fail", "error"})
"""Statuses that make a check fail."""


def worst(statuses: Iterable[Status]) -> Status:
    """The status that wins; ``unsupported`` of none."""
    return max(statuses, key=SEVERITY.index, default="unsupported")


class CaseResult(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What one case says of one requirement. ``case`` is ``scenario/case``."""

    requirement: str
    case: str
    status: Status
    reason: str = ""
    """Why it was skipped, is unsupported, known, or went wrong in the suite: one sentence."""
    violation: Violation | None = None
    tally: str = ""
    """The run in figures, next to what it is compared with."""
    trace: Trace | None = None
    """The run that broke the requirement."""
    spoilt_by: tuple[str, ...] = ()
    """Requirements of which a violation ended the run before this one could be judged."""

    def describe(self) -> str:
        """One paragraph: the violation with its figures, or the reason."""
        if self.violation is None:
            return self.reason
        parts = [self.violation.message]
        if self.violation.expected or self.violation.got:
            parts.append(f"expected {self.violation.expected}; got {self.violation.got}")
        if self.tally:
            parts.append(self.tally)
        if self.reason:
            parts.append(self.reason)
        return " | ".join(parts)


class CheckResult(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The verdict on one requirement: the worst of its cases."""

    requirement: str
    level: str
    title: str
    status: Status
    reason: str = ""
    """In one paragraph, from the case that decided."""
    cases: list[CaseResult] = []

    @property
    def deciding(self) -> CaseResult | None:
        """The first case that has the requirement's status."""
        return next((case for case in self.cases if case.status == self.status), None)

    @property
    def trace(self) -> Trace | None:
        """A run that breaks the requirement, to be written to a file and replayed."""
        return next((case.trace for case in self.cases if case.trace is not None), None)


class SmokeResult(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What the smoke test says of the adapter. ``passed``: names of the checks that held, in order."""

    status: Literal["ok", "red", "refused"]
    reason: str = ""
    passed: list[str] = []
    capabilities: Capabilities | None = None


class CheckReport(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One engine against the contract."""

    kvconform: str = __version__
    edition: str = ""
    """Of the contract."""
    engine: str
    engine_version: str = ""
    config: EngineConfig
    """The base configuration; each case's trace has the one it ran with."""
    pinned: list[str] = []
    smoke: SmokeResult
    results: list[CheckResult] = []

    @property
    def status(self) -> Status:
        """The worst of all; ``error`` when the smoke test is red or the configuration refused."""
        if self.smoke.status != "ok":
            return "error"
        return worst(result.status for result in self.results)

    @property
    def ok(self) -> bool:
        """Whether nothing fails, errs, or is expected to fail and does not."""
        return self.status not in BAD

    def counts(self) -> dict[Status, int]:
        """How many requirements have each status, worst first; absent ones left out."""
        found = [result.status for result in self.results]
        return {status: found.count(status) for status in reversed(SEVERITY) if status in found}
