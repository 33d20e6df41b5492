"""The seeded driver: random operations on fresh engines, run after run, counted in steps.

One seed decides everything. Run ``i`` of a campaign draws from ``Random(f"{seed}:{i}")`` alone, so any run can
be had again without the others, and a seed range can be split over processes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from random import Random
from typing import Any

import msgspec

from conformance.execute import open_nearest
from conformance.expectations import Expectations
from conformance.operations import Operation, Step
from conformance.protocol import AdapterError, Capabilities, ConfigRefused, EngineConfig, EngineFactory
from conformance.session import Session
from conformance.violations import Violation
from conformance.watchdog import Watchdog
from fuzz.shrink import EXECUTIONS_MAX, Shrinker, Shrunk, normalised
from fuzz.source import OperationSource
from fuzz.swarm import Swarm, draw_config, draw_swarm

STEPS_PER_RUN = 160
IDLE_STEPS_MAX = 2
"""Step operations in a row on an engine with nothing to do; further ones are left out."""
DRAWS_MAX = 200
"""Configurations drawn for one run before the engine is said to accept none."""


class Run(msgspec.Struct, kw_only=True):
    """One run: what was drawn, what was done, what was seen."""

    index: int
    swarm: Swarm
    operations: list[Operation]
    steps: int
    violations: list[Violation]
    behaviours: dict[str, int]
    refusals: int
    """Configurations the engine refused before this one."""


class Driver:
    """Makes runs on one engine. ``pinned`` configuration fields keep their values in every run.

    ``expectations``: known failures that are told from others by what is said of them, which end no run.
    """

    def __init__(
        self,
        factory: EngineFactory,
        capabilities: Capabilities,
        *,
        seed: int,
        pinned: dict[str, Any] | None = None,
        steps_per_run: int = STEPS_PER_RUN,
        watchdog: Watchdog | None = None,
        expectations: Expectations | None = None,
    ) -> None:
        self.seed = seed
        self._expectations = expectations
        self._factory = factory
        self._capabilities = capabilities
        self._pinned = dict(pinned or {})
        self._steps_per_run = steps_per_run
        self._watchdog = watchdog
        self.current: tuple[EngineConfig, list[Operation]] | None = None
        """Configuration and operations of the run in progress, for last words."""

    def run(self, index: int, judge: Collection[str] | None = None) -> Run:
        """Run number ``index``. Raises `AdapterError` when the engine accepts none of the drawn configurations."""
        rng = Random(f"{self.seed}:{index}")
        session, swarm, refusals = self._open(rng, judge)
        source = OperationSource(rng, swarm)
        operations: list[Operation] = []
        self.current = (swarm.config, operations)
        limit = min(self._steps_per_run, swarm.steps)
        idle = 0
        while not session.over and session.steps < limit and len(operations) < 4 * limit:
            operation = source.draw()
            idle = 0 if session.ledger.live else idle + isinstance(operation, Step)
            if idle and source.exhausted:
                break
            if idle > IDLE_STEPS_MAX and isinstance(operation, Step):
                continue
            operations.append(operation)
            session.apply(operation)
        session.finish()
        self.current = None
        return Run(
            index=index,
            swarm=swarm,
            operations=operations,
            steps=session.steps,
            violations=session.violations,
            behaviours=session.ledger.behaviours,
            refusals=refusals,
        )

    def shrink(
        self, discovery: Discovery, executions_max: int = EXECUTIONS_MAX, failures_max: int | None = None
    ) -> Shrunk:
        """The discovery's run, shrunk; pinned fields are left alone."""
        shrinker = Shrinker(
            self._factory,
            executions_max=executions_max,
            failures_max=failures_max,
            watchdog=self._watchdog,
            pinned=frozenset(self._pinned),
        )
        run = discovery.run
        return shrinker.shrink(run.swarm.config, flatten(run.operations), discovery.violation)

    def _open(self, rng: Random, judge: Collection[str] | None) -> tuple[Session, Swarm, int]:
        reason = ""
        for refusals in range(DRAWS_MAX):
            config = draw_config(rng, self._capabilities, self._pinned)
            try:
                session = open_nearest(
                    self._factory, config, self._pinned, judge=judge, stop_at_first=True, watchdog=self._watchdog
                )
            except ConfigRefused as refusal:
                reason = str(refusal)
                continue
            if self._expectations is not None:
                session.known = self._expectations.known(session.capabilities)
            return session, draw_swarm(rng, session.capabilities, session.config), refusals
        raise AdapterError(
            f"{self._capabilities.engine} refused {DRAWS_MAX} drawn configurations; the last one because: {reason}"
        )


class Discovery(msgspec.Struct, kw_only=True):
    """The first run that broke a requirement in a way not seen before in the campaign."""

    fingerprint: str
    run: Run
    violation: Violation
    steps_until: int
    """Steps the campaign had done when it was found."""
    seen: int = 1


class Campaign(msgspec.Struct, kw_only=True):
    """What a campaign did."""

    seed: int
    runs: int = 0
    steps: int = 0
    refusals: int = 0
    discoveries: dict[str, Discovery] = {}
    behaviours: dict[str, int] = {}


SEEN_ENOUGH = 3


def campaign(
    driver: Driver,
    *,
    steps_max: int,
    judged: frozenset[str],
    first_run: int = 0,
    on_run: Callable[[Campaign, Run], None] | None = None,
    on_discovery: Callable[[Discovery], None] | None = None,
) -> Campaign:
    """Run until ``steps_max`` steps are done.

    A requirement whose faults were seen `SEEN_ENOUGH` times is not judged in every second run from then on,
    so that one loud fault does not hide the quiet ones.
    """
    state = Campaign(seed=driver.seed)
    loud: dict[str, int] = {}
    index = first_run
    while state.steps < steps_max:
        muted = {requirement for requirement, seen in loud.items() if seen >= SEEN_ENOUGH}
        run = driver.run(index, judge=judged - muted if index % 2 else judged)
        state.runs += 1
        state.steps += run.steps + 1
        state.refusals += run.refusals
        for behaviour, count in run.behaviours.items():
            state.behaviours[behaviour] = state.behaviours.get(behaviour, 0) + count
        for violation in run.violations:
            loud[violation.requirement] = loud.get(violation.requirement, 0) + 1
            _enter(state, run, violation, on_discovery)
        if on_run is not None:
            on_run(state, run)
        index += 1
    return state


def _enter(state: Campaign, run: Run, violation: Violation, on_discovery: Callable[[Discovery], None] | None) -> None:
    fingerprint = normalised(violation)
    known = state.discoveries.get(fingerprint)
    if known is not None:
        known.seen += 1
        return
    discovery = Discovery(fingerprint=fingerprint, run=run, violation=violation, steps_until=state.steps)
    state.discoveries[fingerprint] = discovery
    if on_discovery is not None:
        on_discovery(discovery)


def flatten(operations: list[Operation]) -> list[Operation]:
    """Every `Step` of several steps as single ones, so that a shrinker can delete inside."""
    flat: list[Operation] = []
    for operation in operations:
        flat.extend([Step()] * operation.count if isinstance(operation, Step) else [operation])
    return flat
