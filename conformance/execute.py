"""Run a whole list of operations on a fresh engine, and replay a trace: FIXED, FAILED or ERROR."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal, cast

import msgspec

from conformance.calls import ENGINE_RAISES, EngineCalls
from conformance.engines import EngineNotFound
from conformance.operations import Operation
from conformance.protocol import AdapterError, Capabilities, ConfigRefused, Engine, EngineConfig, EngineFactory
from conformance.requirements import load as load_requirements
from conformance.session import Session
from conformance.trace import Footer, Header, Line, Recorder, Trace
from conformance.version import __version__
from conformance.violations import Violation
from conformance.watchdog import Watchdog

BUILD_SECONDS_MAX = 120.0
"""Bound on building an engine under a watchdog: the first one of a process imports its framework."""


SURVIVES = "PRG-8"
"""An engine that breaks down shows nothing of any other requirement."""


class NeverBuilt:
    """Stands for an engine whose constructor raised; nothing is asked of it."""

    capabilities = Capabilities(engine="never built", version="", features=frozenset())

    def close(self) -> None:
        """There is nothing to close."""


class Execution(msgspec.Struct, kw_only=True):
    """What came of running operations on one engine. ``refused``: the configuration was not accepted."""

    violations: list[Violation] = []
    steps: int = 0
    preemptions: int = 0
    prefills: int = 0
    behaviours: dict[str, int] = {}
    refused: str | None = None
    lines: list[Line] = []
    digest: str = ""
    engine_version: str = ""
    stopped_at_first: bool = False
    """The run was to end at the first violation."""


def open_session(
    factory: EngineFactory,
    config: EngineConfig,
    *,
    judge: Collection[str] | None = None,
    stop_at_first: bool = False,
    watchdog: Watchdog | None = None,
    recorder: Recorder | None = None,
) -> Session:
    """Build the engine and a session on it. Raises `ConfigRefused` when the engine will not run so, `EngineNotFound`.

    A feature the configuration needs and the engine does not declare is refused here, in one place.
    """
    try:
        engine = _built(factory, config, watchdog)
    except (AdapterError, ConfigRefused, EngineNotFound):
        raise
    except ENGINE_RAISES as error:
        session = Session(cast("Engine", NeverBuilt()), config, judge=judge, stop_at_first=stop_at_first)
        EngineCalls(session.engine_failed, watchdog).raised("the constructor", error)
        return session
    undeclared = config.features_needed() - engine.capabilities.features
    if undeclared:
        engine.close()
        names = ", ".join(sorted(undeclared))
        raise ConfigRefused(
            f"{engine.capabilities.engine} does not declare {names}, which the configuration needs; "
            "expected a configuration without, got one with it"
        )
    return Session(engine, config, judge=judge, stop_at_first=stop_at_first, watchdog=watchdog, recorder=recorder)


def _built(factory: EngineFactory, config: EngineConfig, watchdog: Watchdog | None) -> Engine:
    if watchdog is None:
        return factory(config)
    watchdog.start()
    watchdog.begin("the constructor", BUILD_SECONDS_MAX)
    try:
        return factory(config)
    finally:
        watchdog.end()


def open_nearest(
    factory: EngineFactory,
    config: EngineConfig,
    pinned: Collection[str] = (),
    *,
    judge: Collection[str] | None = None,
    stop_at_first: bool = False,
    watchdog: Watchdog | None = None,
) -> Session:
    """`open_session`, on what the engine names in place of ``config`` when it refuses that, ``pinned`` fields aside."""
    try:
        return open_session(factory, config, judge=judge, stop_at_first=stop_at_first, watchdog=watchdog)
    except ConfigRefused as refusal:
        nearest = refusal.instead_of(config, pinned)
        if nearest is None:
            raise
    return open_session(factory, nearest, judge=judge, stop_at_first=stop_at_first, watchdog=watchdog)


def probe(
    factory: EngineFactory,
    config: EngineConfig,
    pinned: Collection[str] = (),
    watchdog: Watchdog | None = None,
) -> Capabilities:
    """What the engine declares under ``config``, or what it names in its place.

    Raises `ConfigRefused`, and whatever the engine's constructor raises.
    """
    try:
        engine = _built(factory, config, watchdog)
    except ConfigRefused as refusal:
        nearest = refusal.instead_of(config, pinned)
        if nearest is None:
            raise
        engine = _built(factory, nearest, watchdog)
    try:
        return engine.capabilities
    finally:
        engine.close()


def execute(
    factory: EngineFactory,
    config: EngineConfig,
    operations: Collection[Operation],
    *,
    judge: Collection[str] | None = None,
    stop_at_first: bool = True,
    watchdog: Watchdog | None = None,
    record: bool = False,
) -> Execution:
    """Run ``operations``, drain, audit. With ``record`` the outcome of every operation is kept."""
    recorder = Recorder() if record else None
    try:
        session = open_session(
            factory, config, judge=judge, stop_at_first=stop_at_first, watchdog=watchdog, recorder=recorder
        )
    except ConfigRefused as refusal:
        return Execution(refused=str(refusal))
    session.run(operations)
    return Execution(
        violations=session.violations,
        steps=session.steps,
        preemptions=session.preemptions,
        prefills=session.prefills,
        behaviours=session.ledger.behaviours,
        lines=recorder.lines if recorder else [],
        digest=recorder.digest() if recorder else "",
        engine_version=session.capabilities.version,
        stopped_at_first=stop_at_first,
    )


def trace_of(
    engine: str, config: EngineConfig, execution: Execution, *, seed: int | None = None, note: str = ""
) -> Trace:
    """The trace of a recorded execution."""
    return Trace(
        header=Header(
            kvconform=__version__,
            engine=engine,
            engine_version=execution.engine_version,
            config=config,
            seed=seed,
            note=note,
            to_the_end=not execution.stopped_at_first,
        ),
        lines=execution.lines,
        footer=Footer(
            verdict="violated" if execution.violations else "holds",
            steps=execution.steps,
            violations=execution.violations,
            digest=execution.digest,
        ),
    )


class Replay(msgspec.Struct, kw_only=True):
    """A trace run again. FAILED: the recorded violation is still there. FIXED: it is not. ERROR: it cannot run."""

    status: Literal["FIXED", "FAILED", "ERROR"]
    reason: str
    execution: Execution
    same_digest: bool = False


def replay(factory: EngineFactory, trace: Trace, watchdog: Watchdog | None = None) -> Replay:
    """Run a trace's operations again under its configuration and judge what its footer says was broken.

    ERROR, and not FIXED, is an engine that breaks down on the way.
    """
    judged = [finding.requirement for finding in trace.footer.violations]
    unknown = [requirement for requirement in judged if requirement not in load_requirements()]
    if unknown:
        reason = f"the trace breaks {', '.join(unknown)}, which this kvconform's contract does not have"
        return Replay(status="ERROR", reason=reason, execution=Execution())
    operations: Sequence[Operation] = trace.operations
    execution = execute(
        factory,
        trace.header.config,
        operations,
        judge=[*judged, SURVIVES] if judged else None,
        stop_at_first=not trace.header.to_the_end,
        watchdog=watchdog,
        record=True,
    )
    same = execution.digest == trace.footer.digest
    if execution.refused is not None:
        return Replay(
            status="ERROR",
            reason=f"the engine refuses the configuration: {execution.refused}",
            execution=execution,
        )
    broken = [found for found in execution.violations if not judged or found.requirement in judged]
    if broken:
        return Replay(status="FAILED", reason=str(broken[0]), execution=execution, same_digest=same)
    if execution.violations:
        reason = f"the engine broke down before {', '.join(judged)} could be judged: {execution.violations[0]}"
        return Replay(status="ERROR", reason=reason, execution=execution, same_digest=same)
    reason = f"{', '.join(judged)} holds on this trace" if judged else "every requirement holds on this trace"
    return Replay(status="FIXED", reason=reason, execution=execution, same_digest=same)
