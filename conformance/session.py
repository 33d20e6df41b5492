"""The one way to drive an engine: operations in, verdicts out.

    operation --> Session --> engine --> StepPlan --> ledger, shadow KV, oracles --> tokens back to the engine

The suite, the fuzzer, replay and the benchmarks all go through here, so a verdict never depends on who asked.
A session runs one engine once. It never raises for what the engine does: exceptions, hangs and lies of the
engine become violations. It raises `AdapterError` when the adapter, not the engine, is at fault.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from typing import Any, TypeVar

from conformance.calls import NONSENSE, EngineCalls
from conformance.commits import Commits
from conformance.ledger import Ledger
from conformance.loading import Loads
from conformance.matching import PlanMatcher, span
from conformance.notable import note_step
from conformance.operations import Abort, AbortEnded, Add, Drain, Operation, ResetPrefixCache, Step
from conformance.oracles import ORACLES, Oracle
from conformance.oracles.accounting import AccountingOracle
from conformance.oracles.progress import ProgressOracle
from conformance.protocol import (
    CommitResult,
    Engine,
    EngineConfig,
    RequestRefused,
    Sampled,
    SequenceKey,
    Snapshot,
    StepPlan,
    Usage,
)
from conformance.records import RequestRecord, RequestState, Row, StepFacts
from conformance.sampling import execute_step
from conformance.token_model import model_of, request_from
from conformance.trace import Recorder
from conformance.violations import CORRUPTING, SPOILING, Violation
from conformance.watchdog import Watchdog

T = TypeVar("T")

AUDIT_EVERY_STEPS = 64


class Session:
    """Runs operations on one engine under all oracles.

    ``judge``: the requirement ids to judge, None for all. ``stop_at_first``: end at the first violation.
    Otherwise the first violation of each requirement is kept, until one that corrupts the books ends it.
    ``over`` is true once nothing more is done; further operations are ignored.
    """

    def __init__(
        self,
        engine: Engine,
        config: EngineConfig,
        *,
        judge: Collection[str] | None = None,
        stop_at_first: bool = False,
        watchdog: Watchdog | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.engine = engine
        self.config = config
        self.capabilities = engine.capabilities
        self.ledger = Ledger(config, self.capabilities, model_of(engine))
        self.oracles = [
            oracle(self.ledger, self._report) for oracle in ORACLES if oracle.concerns(config, self.capabilities)
        ]
        self._listeners: list[object] = []
        self._hear()
        self._loads = Loads(self.ledger)
        self._commits = Commits(self.ledger, self._loads, self._end)
        self.violations: list[Violation] = []
        self.known: Callable[[str, str], bool] | None = None
        """Tells, by requirement and "MESSAGE; got GOT", the failures that are known and need no report."""
        self.over = False
        self.audit_every_steps = AUDIT_EVERY_STEPS
        self.steps = 0
        self.operations = 0
        self.preemptions = 0
        self.prefills = 0
        self._progress = next(o for o in self.oracles if isinstance(o, ProgressOracle))
        self._accounting = next(o for o in self.oracles if isinstance(o, AccountingOracle))
        self._judge = None if judge is None else frozenset(judge)
        self._stop_at_first = stop_at_first
        self._spoilt = False
        """A spoiling requirement was broken, whether it is judged or not: nothing is committed any more."""
        self._calls = EngineCalls(self.engine_failed, watchdog)
        self._recorder = recorder
        self._in_flight: deque[tuple[StepPlan, dict[SequenceKey, Sampled]]] = deque()
        self._matcher = PlanMatcher(self.ledger, self._report, self._in_flight)
        self._depth = config.pipeline_depth
        self._features = self.capabilities.features
        self._usage = Usage()
        self._audited_step = -1
        if watchdog is not None:
            watchdog.start()
        self._refresh_usage()

    def listen(self, listener: object) -> None:
        """Let somebody who judges nothing hear of every step too.

        It is called by those of `Oracle.before_step`, `on_step`, `after_step`, `on_taken` and `on_commit` that it has.
        """
        self._listeners.append(listener)
        self._hear()

    def _hear(self) -> None:
        """Who is called in every step: only the hooks that somebody has, and listeners after all oracles."""

        def hooks(name: str) -> list[Callable[..., None]]:
            unused = getattr(Oracle, name)
            judging = [getattr(one, name) for one in self.oracles if getattr(type(one), name) is not unused]
            return judging + [getattr(one, name) for one in self._listeners if hasattr(one, name)]

        self._before_step = hooks("before_step")
        self._on_step = hooks("on_step")
        self._after_step = hooks("after_step")
        self._on_taken = hooks("on_taken")
        self._on_commit = hooks("on_commit")

    # -- operations --------------------------------------------------------------------------------------

    def apply(self, operation: Operation) -> None:
        """Run one operation; a no-op when there is nothing to act on, or the session is over."""
        if self.over:
            return
        try:
            self._apply(operation)
        except NONSENSE:
            if not self._calls.find_malformed():
                raise

    def _apply(self, operation: Operation) -> None:
        if self._recorder is not None:
            self._recorder.operation(operation)
        match operation:
            case Step():
                for _ in range(max(1, operation.count)):
                    self.step()
                    if self.over:
                        break
            case Add():
                self.add(operation)
            case Abort():
                if self.ledger.live:
                    live = list(self.ledger.live)
                    self._abort(live[operation.index % len(live)])
            case AbortEnded():
                ended = self.ledger.ended
                self._abort(ended[operation.index % len(ended)] if ended else "r-unknown")
            case ResetPrefixCache():
                self._reset()
            case Drain():
                self.drain()
        self.operations += 1

    def run(self, operations: Collection[Operation]) -> list[Violation]:
        """Run all operations, then `finish`; returns the violations."""
        for operation in operations:
            self.apply(operation)
            if self.over:
                break
        self.finish()
        return self.violations

    def finish(self) -> None:
        """Commit what is in flight, drain, audit and close. Idempotent in its verdict."""
        try:
            self.drain()
        except NONSENSE:
            if not self._calls.find_malformed():
                raise
        if not self.over and self._audited_step != self.steps:
            self.audit()
        self.over = True
        self._calls.make("close", self.engine.close)

    def add(self, operation: Add) -> RequestRecord | None:
        """Add a request; None when the engine's declared features do not allow it, or it was refused."""
        if (
            (operation.n > 1 and "fork" not in self._features)
            or (operation.stop_after is not None and "stop_token" not in self._features)
            or ((operation.salt or operation.adapter) and "identity" not in self._features)
            or (operation.encoder_sizes and not self.config.encoder_cache_size)
            or (operation.streamed and (operation.n > 1 or "streaming_input" not in self._features))
        ):
            return None
        ledger = self.ledger
        spec = request_from(operation, len(ledger.requests), ledger.conversation(operation.continues))
        request = ledger.add(spec, operation.stop_after, self.steps)
        try:
            self._calls.make("add_request", self.engine.add_request, spec, answers=(RequestRefused,))
        except RequestRefused as refusal:
            ledger.end(request, RequestState.REFUSED)
            ledger.saw("refused")
            for oracle in self.oracles:
                oracle.on_refused(request, str(refusal))
            self._note({"refused": str(refusal)})
            return None
        self._refresh_usage()
        for oracle in self.oracles:
            oracle.on_add(request)
        return request

    def _abort(self, rid: str) -> None:
        if "abort" not in self._features:
            return
        request = self.ledger.live.get(rid)
        self._calls.make("abort_request", self.engine.abort_request, rid, requirement="PRG-6")
        if request is not None:
            self.ledger.saw(f"aborted while {request.state.value}")
            if request.state is RequestState.RUNNING:
                request.aborted_steps = self.capabilities.aborted_steps
            self._end(request, RequestState.ABORTED)
        self._note({"aborted": rid})
        self._refresh_usage()

    def _reset(self) -> None:
        if "reset_prefix_cache" not in self._features:
            return
        done = self._calls.make("reset_prefix_cache", self.engine.reset_prefix_cache, expects=bool, requirement="CCH-3")
        if done is not None:
            self.ledger.saw("prefix cache reset" if done else "prefix cache reset refused")
            for oracle in self.oracles:
                oracle.on_reset(done)
            self._note({"reset": done})
            if done and self.capabilities.reset_with_live == "preempts":
                for request in list(self.ledger.running.values()):
                    self.ledger.saw("preempted by a reset")
                    self._preempt(request, "recompute", self.steps)
        self._refresh_usage()
        if done and not self.ledger.live:
            self.audit()

    def drain(self) -> None:
        """Step until nothing is live, or for as long as the requests could need, recomputed many times over."""
        total = sum(request.full_len * request.spec.n for request in self.ledger.live.values())
        for _ in range(256 + 64 * len(self.ledger.live) + 8 * total):
            if self.over or self._progress.stuck or (not self.ledger.live and not self._in_flight):
                break
            self.step()
        if not self.over and not self.ledger.live and self._audited_step != self.steps:
            if self.capabilities.deferred_free_steps:
                for _ in range(self.capabilities.deferred_free_steps + 1):  # until what was deferred is due
                    self.step()
            self.audit()

    # -- one step ----------------------------------------------------------------------------------------

    def step(self) -> None:
        """Schedule once; commit the oldest step in flight when the pipeline is full or nothing was scheduled."""
        if self.over:
            return
        scheduled = self._schedule()
        if self._spoilt:
            return
        if self._in_flight and (len(self._in_flight) >= self._depth or not scheduled):
            self._commit()
        if not self.over and self.steps % self.audit_every_steps == 0:
            self.audit()

    def _schedule(self) -> bool:
        ledger = self.ledger
        facts_usage, free = self._usage, self._free_before()
        plan = self._calls.make("schedule", self.engine.schedule, expects=StepPlan)
        if plan is None:
            return False
        if self.config.sliding_window is not None:
            ledger.declare(self.engine.capabilities)  # a null block may be set aside only when it is first needed
        facts = StepFacts(plan, list(ledger.running.values()), free, facts_usage)
        facts.in_flight = len(self._in_flight)
        if not self._matcher.match(facts):
            return False
        for before_step in self._before_step:
            before_step(facts)
        if self._recorder is not None:
            self._recorder.plan(ledger, facts)
        self._apply_queue_changes(facts)
        self._loads.begin(facts)
        for row in facts.rows:
            self._enter_running(row)
        self._loads.mark(facts)
        note_step(ledger, facts)
        ledger.null_before = ledger.capabilities.null_block
        for on_step in self._on_step:
            on_step(facts)
        sampled = execute_step(ledger, facts, self.steps)
        self._loads.arrive(facts)
        self._refresh_usage()
        facts.usage_after = self._usage
        if not self.over:
            for after_step in self._after_step:
                after_step(facts)
            if self._accounting.unsettled:
                self._accounting.settle(self._snapshot(), self._usage)
        self.steps += 1
        if plan.sequences or plan.loaded or self._depth == 1:
            self._in_flight.append((plan, sampled))
            return True
        return False

    def _free_before(self) -> int:
        """Blocks that are free before a step: those nobody holds, less what the engine still keeps as it declares."""
        free, figure = self.ledger.free_blocks, self._usage.free_blocks
        if figure is None or figure >= free:
            return free
        may_hold_more = (
            self.capabilities.keeps_blocks
            or self.capabilities.deferred_free_steps
            or (any(self.ledger.group_windows) and self._depth > 1)  # what is in flight may still read them
        )
        if not may_hold_more:
            return free
        self.ledger.saw("blocks held after their use")
        return figure

    def _apply_queue_changes(self, facts: StepFacts) -> None:
        ledger = self.ledger
        running = {row.record.request.spec.request_id for row in facts.rows} if facts.preempted else set()
        for request, preemption in facts.preempted:
            rid = request.spec.request_id
            if rid in running and "preempted" not in self.capabilities.keeps_blocks:
                self._report(
                    "ACC-7",
                    f"step {facts.plan.step} preempts {rid} and runs it",
                    expected="a preempted request holds no block and does not run",
                    got=", ".join(span(s) for s in facts.plan.sequences if s.request_id == rid),
                )
            self._preempt(request, preemption.mode, facts.plan.step)
        for rejection in facts.plan.rejected:
            refused = ledger.live.get(rejection.request_id)
            if refused is None:
                continue
            ledger.end(refused, RequestState.REFUSED)
            ledger.saw("refused while scheduling")
            for oracle in self.oracles:
                oracle.on_refused(refused, rejection.reason)

    def _preempt(self, request: RequestRecord, mode: str, step: int) -> None:
        """The request is off the running set before ``step`` runs."""
        self._note_preemption(request)
        self.ledger.preempt(request, mode)
        request.preempted_step = step
        if self.capabilities.sequences_apart:
            for record in request.sequences:
                record.set_aside_step = step
        self.preemptions += 1

    def _note_preemption(self, request: RequestRecord) -> None:
        saw = self.ledger.saw
        saw("preempted")
        if any(record.computed < len(record.tokens) - 1 for record in request.unfinished()):
            saw("preempted mid-prefill")
        if request.preemptions:
            saw("preempted again")
        if request.spec.n > 1:
            saw("preempted with several sequences")
        if request.inputs_run:
            saw("preempted after more input")
        if any(other.state is RequestState.LOADING for other in self.ledger.live.values()):
            saw("preempted while somebody loads")
        for record in request.sequences:
            # What is in flight reaches the engine only after it has let go of the request.
            record.len_min = min(record.len_min, len(record.tokens))

    def _enter_running(self, row: Row) -> None:
        ledger, record = self.ledger, row.record
        request = record.request
        if request.admitted_step is None:
            request.admitted_step = self.steps
        if request.state is not RequestState.RUNNING:
            if row.resumed:
                ledger.saw("swapped in" if request.state is RequestState.SWAPPED else "recomputed")
            ledger.resume(request)
        if record.computed == 0 and row.plan.num_tokens:
            self.prefills += 1
            request.prefills += 1
            if row.plan.first:
                ledger.saw("prefix hit after preemption" if row.resumed else "prefix hit")
                if request.spec.cache_salt or request.spec.adapter:
                    ledger.saw("prefix hit under an identity")
        if request.preemptions or record.set_aside_step is not None:
            self._forget_tokens_in_flight(row)
            if all(record.key not in sampled for _, sampled in self._in_flight):  # the plan tells what the engine has
                record.len_min = max(record.len_min, min(row.end - len(row.plan.draft_tokens), len(record.tokens)))
        row.added = ledger.set_tables(record, row.tables)

    def _forget_tokens_in_flight(self, row: Row) -> None:
        """Tokens that were in flight at a preemption may be dropped and sampled again (they come out the same)."""
        record = row.record
        known = row.end - len(row.plan.draft_tokens)
        if record.len_min < len(record.tokens) and row.plan.samples and known < len(record.tokens):
            record.forget(max(record.len_min, known))

    def _commit(self) -> None:
        plan, sampled = self._in_flight.popleft()
        result = self._calls.make("commit", self.engine.commit, plan.step, sampled, expects=CommitResult)
        if result is None:
            return
        ended = self._commits.take(plan.step, sampled, result, last=not self._in_flight)
        if result.taken:
            for on_taken in self._on_taken:
                on_taken(plan.step, result.taken, sampled)
        if not self._spoilt:
            for on_commit in self._on_commit:
                on_commit(plan.step, result.finished, ended)
        if self._recorder is not None:
            streamed = {request.spec.request_id for request in ended if request.spec.streamed}
            self._recorder.commit([one.request_id for one in result.finished if one.request_id not in streamed])
        self._commits.end(ended, self.steps)
        self._refresh_usage()

    def _end(self, request: RequestRecord, state: RequestState) -> None:
        """The request is over, and every oracle hears of it."""
        self.ledger.end(request, state)
        for oracle in self.oracles:
            oracle.on_end(request)

    def audit(self) -> None:
        """Hold the engine's whole books against the ledger's, when the engine can show them."""
        self._audited_step = self.steps
        snapshot = None if self.over else self._snapshot()
        if snapshot is not None:
            for oracle in self.oracles:
                oracle.audit(snapshot, self._usage)

    def _snapshot(self) -> Snapshot | None:
        return (
            self._calls.make("snapshot", self.engine.snapshot, expects=Snapshot)
            if "snapshot" in self._features
            else None
        )

    # -- calls and reports -------------------------------------------------------------------------------

    def _refresh_usage(self) -> None:
        if "usage" in self._features and not self.over:
            usage = self._calls.make("usage", self.engine.usage, expects=Usage)
            if usage is not None:
                self._usage = usage

    def engine_failed(self, requirement: str, message: str, expected: str, got: str) -> None:
        """A call into the engine did not come back as it should: report it, and end the session."""
        self._report(requirement, message, expected=expected, got=f"{got} in step {self.steps}")
        self.over = True

    def _report(self, requirement: str, message: str, *, expected: str = "", got: str = "") -> None:
        self._spoilt = self._spoilt or requirement in SPOILING
        if self._judge is not None and requirement not in self._judge:
            self.over = self.over or requirement in CORRUPTING
            return
        if self._stop_at_first and self.violations:
            return
        if any(violation.requirement == requirement for violation in self.violations):
            return
        if self.known is not None and self.known(requirement, f"{message}; got {got}"):
            self.over = self.over or requirement in CORRUPTING
            return
        violation = Violation(
            requirement=requirement,
            message=message,
            expected=expected,
            got=got,
            step=self.steps,
            operation=self.operations,
        )
        self.violations.append(violation)
        self.over = self.over or self._stop_at_first or requirement in CORRUPTING

    def _note(self, outcome: dict[str, Any]) -> None:
        if self._recorder is not None:
            self._recorder.note(outcome)
