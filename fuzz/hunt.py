"""A hunt: a campaign whose discoveries are shrunk, kept as files and told apart, as they come."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import msgspec

from conformance.execute import Execution, trace_of
from conformance.operations import Operation
from conformance.protocol import Capabilities, EngineConfig, EngineFactory
from conformance.trace import Line, Trace, write_trace
from conformance.violations import Violation
from conformance.watchdog import Watchdog
from fuzz.driver import Campaign, Discovery, Driver, Run, campaign
from fuzz.findings import Kept, file_name, keep
from fuzz.shrink import EXECUTIONS_MAX, Shrunk

HUNG_FAILURES_MAX = 20
"""Failures to spend on shrinking a hang, each of which costs the whole bound on a call, and on the end of a Python
process elsewhere, each of which costs the import of a framework."""


class Listener(Protocol):
    """Who is told while a hunt goes on."""

    def progress(self, state: Campaign) -> None:
        """Another run was done."""

    def found(self, kept: Kept, discovery: Discovery) -> None:
        """A new fault was shrunk and written."""

    def same(self, kept: Kept, discovery: Discovery) -> None:
        """Another symptom of a fault already kept."""


class Hunt(msgspec.Struct, kw_only=True):
    """What a hunt did. ``kept`` is in order of discovery."""

    campaign: Campaign
    kept: list[Kept]
    executions: int


class Hunter:
    """Runs one hunt. Every finding is on disk before the next run begins, so nothing found is ever lost."""

    def __init__(
        self,
        name: str,
        factory: EngineFactory,
        capabilities: Capabilities,
        *,
        seed: int,
        directory: Path,
        pinned: dict[str, Any] | None = None,
        judged: frozenset[str],
        watchdog: Watchdog | None = None,
        shrink_executions_max: int = EXECUTIONS_MAX,
        listener: Listener | None = None,
    ) -> None:
        self._name = name
        self._factory = factory
        self._directory = directory
        self._pinned = dict(pinned or {})
        self._judged = judged
        self._watchdog = watchdog
        self._shrink_executions_max = shrink_executions_max
        self._listener = listener
        self._driver = Driver(factory, capabilities, seed=seed, pinned=self._pinned, watchdog=watchdog)
        self.kept: list[Kept] = []
        self.executions = 0
        self.unshrunk: Path | None = None
        """The finding that is being shrunk, as it was found."""
        self._by_trace: dict[bytes, Kept] = {}
        if watchdog is not None:
            watchdog.last_words = self._last_words

    def run(self, steps_max: int) -> Hunt:
        """Hunt until ``steps_max`` steps are done, shrinking not counted."""
        state = campaign(
            self._driver,
            steps_max=steps_max,
            judged=self._judged,
            on_run=self._on_run,
            on_discovery=self._on_discovery,
        )
        return Hunt(campaign=state, kept=self.kept, executions=self.executions)

    def _on_run(self, state: Campaign, run: Run) -> None:
        if self._listener is not None:
            self._listener.progress(state)

    def _on_discovery(self, discovery: Discovery) -> None:
        self.unshrunk = self._keep_unshrunk(discovery)
        message = discovery.violation.message
        slow = any(word in message for word in ("EngineHung", "MemoryExhausted"))
        slow = slow or ("@" in self._name and "ends the engine's process" in message)
        shrunk = self._driver.shrink(discovery, self._shrink_executions_max, HUNG_FAILURES_MAX if slow else None)
        self.executions += shrunk.executions
        self._keep(discovery, shrunk)
        self.unshrunk.unlink()
        self.unshrunk = None

    def _keep_unshrunk(self, discovery: Discovery) -> Path:
        """Write the run as it was found: shrinking takes its time, and may be interrupted."""
        violation = discovery.violation
        path = self._directory / f"{file_name(self._name)}-{violation.requirement.lower()}-unshrunk.jsonl"
        run = discovery.run
        write_trace(path, _unfinished(self._name, run.swarm.config, run.operations, violation, "not shrunk yet"))
        return path

    def _keep(self, discovery: Discovery, shrunk: Shrunk) -> None:
        key = msgspec.json.encode((shrunk.config, shrunk.operations))
        known = self._by_trace.get(key)
        if known is not None:
            if all(symptom.requirement != shrunk.violation.requirement for symptom in known.symptoms):
                known.symptoms.append(shrunk.violation)
            if self._listener is not None:
                self._listener.same(known, discovery)
            return
        kept = keep(
            self._factory,
            self._name,
            shrunk,
            self._directory,
            seed=self._driver.seed,
            watchdog=self._watchdog,
        )
        self._by_trace[key] = kept
        self.kept.append(kept)
        if self._listener is not None:
            self._listener.found(kept, discovery)

    def _last_words(self, message: str) -> None:
        """The engine is stuck for good: write down what it was doing. Runs on the watchdog's thread."""
        if self._driver.current is None:
            return
        config, operations = self._driver.current
        stuck = Violation(requirement="PRG-8", message=message, expected="the call returns", got="it does not")
        write_trace(
            self._directory / f"{file_name(self._name)}-prg-8-stuck.jsonl",
            _unfinished(self._name, config, operations, stuck, "the process had to end"),
        )


def _unfinished(name: str, config: EngineConfig, operations: list[Operation], violation: Violation, note: str) -> Trace:
    lines = [Line(operation=operation) for operation in operations]
    return trace_of(name, config, Execution(violations=[violation], lines=lines, stopped_at_first=True), note=note)
