"""Runs workloads on fresh engines and keeps what came of them, for scenarios to judge and to compare."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TypeAlias

from conformance.execute import Execution, open_session, trace_of
from conformance.ledger import Ledger
from conformance.operations import Abort, AbortEnded, Add, Operation, ResetPrefixCache
from conformance.protocol import Capabilities, EngineConfig, EngineFactory, Feature, Finished
from conformance.records import RequestRecord, RequestState, StepFacts
from conformance.session import Session
from conformance.trace import Recorder, Trace
from conformance.violations import CORRUPTING, Violation
from conformance.watchdog import Watchdog
from conformance.wording import some

Script: TypeAlias = Callable[[Session], Iterator[Operation]]
"""A workload that looks at the session to decide what comes next; what it does is recorded as a plain list."""

ALWAYS_JUDGED = CORRUPTING | {"CCH-3", "PRG-6"}
"""Judged in every run, because after a violation a run says nothing more of anything."""


class Unsupported(Exception):  # noqa: N818 - an answer, not an error
    """A run needs features the engine does not declare."""

    def __init__(self, features: Collection[Feature]) -> None:
        super().__init__(f"the engine does not declare {', '.join(sorted(features))}")


class Unjudged(Exception):  # noqa: N818 - an answer, not an error
    """A comparison is impossible, because one of its runs was cut short or never finished."""


class Watch:
    """Listens to a session, and keeps what comparisons need."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.peak = 0
        """Most sequences that were on the running set at once."""
        self.first_positions: dict[str, int] = {}
        """First position that was ever run of a request: what came before it was a prefix-cache hit."""
        self.outputs: dict[str, list[list[int]]] = {}
        """What the engine itself reported as a request's outputs."""

    def before_step(self, facts: StepFacts) -> None:
        self.peak = max(self.peak, self.ledger.running_sequences, len(facts.rows))
        for row in facts.rows:
            self.first_positions.setdefault(row.record.request.spec.request_id, row.plan.first)

    def on_commit(self, step: int, finished: list[Finished], ended: list[RequestRecord]) -> None:
        for report in finished:
            self.outputs.setdefault(report.request_id, report.outputs)


class Run:
    """One session that is over, and what was seen of it."""

    def __init__(self, config: EngineConfig, session: Session, recorder: Recorder, watch: Watch, *, cut: bool) -> None:
        self.config = config
        self.recorder = recorder
        self.watch = watch
        self.violations = list(session.violations)
        self.ledger = session.ledger
        self.steps = session.steps
        self.preemptions = session.preemptions
        self.prefills = session.prefills
        self.engine_version = session.capabilities.version
        self.cut_short = cut
        """The session ended before its workload did."""

    @property
    def operations(self) -> list[Operation]:
        return [line.operation for line in self.recorder.lines]

    @property
    def requests(self) -> dict[str, RequestRecord]:
        return self.ledger.requests

    def report(self, requirement: str, message: str, *, expected: str, got: str) -> None:
        """A comparison found this run to break ``requirement``; the first such report counts."""
        if all(violation.requirement != requirement for violation in self.violations):
            self.violations.append(
                Violation(
                    requirement=requirement,
                    message=message,
                    expected=expected,
                    got=got,
                    step=self.steps,
                    operation=max(0, len(self.recorder.lines) - 1),
                )
            )

    def completed(self) -> Run:
        """This run. Raises `Unjudged` when it was cut short or a request never finished."""
        if self.cut_short:
            raise Unjudged(f"a run it is compared with ended early ({self.requirements_broken()})")
        if self.ledger.live:
            raise Unjudged(f"{', '.join(self.ledger.live)} never finished, which PRG-1, PRG-2 and PRG-4 judge")
        return self

    def requirements_broken(self) -> str:
        return ", ".join(violation.requirement for violation in self.violations)

    def state(self, rid: str) -> RequestState:
        return self.ledger.requests[rid].state

    def sentence(self) -> str:
        """``4 requests: 59 steps, 29 preemptions, 33 prefills``."""
        return (
            f"{some(len(self.ledger.requests), 'request')}: {some(self.steps, 'step')}, "
            f"{some(self.preemptions, 'preemption')}, {some(self.prefills, 'prefill')}"
        )

    def tally(self) -> str:
        """``4 requests at batch size 4 with 4 blocks: 59 steps, 29 preemptions, 33 prefills``."""
        requests, _, figures = self.sentence().partition(":")
        config = self.config
        return f"{requests} at batch size {config.max_num_seqs} with {some(config.num_blocks, 'block')}:{figures}"

    def trace(self, engine: str, note: str, violations: Sequence[Violation]) -> Trace:
        """The run as a trace whose footer says that ``violations`` were found."""
        execution = Execution(
            violations=list(violations),
            steps=self.steps,
            lines=self.recorder.lines,
            digest=self.recorder.digest(),
            engine_version=self.engine_version,
        )
        return trace_of(engine, self.config, execution, note=note)


class Bench:
    """Builds an engine for every run. ``runs`` are those made since the last `clear`, in order."""

    def __init__(self, factory: EngineFactory, capabilities: Capabilities, watchdog: Watchdog | None = None) -> None:
        self.capabilities = capabilities
        self.runs: list[Run] = []
        self._factory = factory
        self._watchdog = watchdog
        self._judge: frozenset[str] = ALWAYS_JUDGED

    def begin(self, judge: Collection[str]) -> None:
        """A new case begins: forget the runs so far, and judge these requirements from now on."""
        self.runs = []
        self._judge = ALWAYS_JUDGED | frozenset(judge)

    def run(self, config: EngineConfig, workload: Sequence[Operation] | Script) -> Run:
        """Run ``workload`` to its end, drain and audit.

        Raises `ConfigRefused`, `AdapterError`, and `Unsupported` when configuration or workload need a feature
        that the engine does not declare.
        """
        self._must_declare(config.features_needed(), self.capabilities)
        recorder = Recorder()
        session = open_session(self._factory, config, judge=self._judge, watchdog=self._watchdog, recorder=recorder)
        watch = Watch(session.ledger)
        session.listen(watch)
        try:
            for operation in workload(session) if callable(workload) else workload:
                self._must_declare(features_of(operation), session.capabilities)
                session.apply(operation)
                if session.over:
                    break
            session.drain()
        finally:
            cut = session.over
            session.finish()
        run = Run(config, session, recorder, watch, cut=cut)
        self.runs.append(run)
        return run

    @staticmethod
    def _must_declare(features: set[Feature], capabilities: Capabilities) -> None:
        missing = features - capabilities.features
        if missing:
            raise Unsupported(missing)


OPTIONAL: frozenset[Feature] = frozenset({"abort", "reset_prefix_cache", "stop_token"})
"""Features of operations that make a workload richer and that it can do without."""


def as_declared(operations: Sequence[Operation]) -> Script:
    """``operations`` without those that need an `OPTIONAL` feature the engine, as it is built, does not declare."""

    def script(session: Session) -> Iterator[Operation]:
        undeclared = OPTIONAL - session.capabilities.features
        return (one for one in operations if not features_of(one) & undeclared)

    return script


def features_of(operation: Operation) -> set[Feature]:
    """Features without which an engine cannot be asked to do ``operation``."""
    needed: set[Feature] = set()
    match operation:
        case Add():
            if operation.n > 1:
                needed.add("fork")
            if operation.stop_after is not None:
                needed.add("stop_token")
            if operation.salt or operation.adapter:
                needed.add("identity")
            if operation.encoder_sizes:
                needed.add("encoder_cache")
            if operation.streamed:
                needed.add("streaming_input")
        case Abort() | AbortEnded():
            needed.add("abort")
        case ResetPrefixCache():
            needed.add("reset_prefix_cache")
        case _:
            pass
    return needed
