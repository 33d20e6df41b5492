"""The fuzzers that the bench compares. Each hunts one fault with one seed until it is seen or the budget is spent.

A step is a call of `schedule`, whoever makes it: draining, audits and configurations that the engine refuses come
at the same price for all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar, Final, TypeAlias

import msgspec
from hypothesis import Phase, Verbosity, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from conformance.adapters.reference import make
from conformance.operations import Operation
from conformance.protocol import EngineConfig, EngineFactory
from conformance.requirements import load as load_requirements
from conformance.violations import Violation
from conformance.watchdog import Watchdog
from fuzz.bugbench.probe import Counters
from fuzz.bugbench.registry import PlantedFault
from fuzz.bugbench.uniform import uniform_run
from fuzz.driver import Driver, flatten
from fuzz.machine import PROFILES, EngineMachine, machine_for

HUNG_SECONDS_MAX: Final = 1.0
"""Bound on one call of an engine whose fault may hang; the others are not watched."""


class Sighting(msgspec.Struct, kw_only=True):
    """A fault was seen: after how many steps, under what, and as what."""

    steps: int
    config: EngineConfig
    operations: list[Operation]
    violation: Violation


Hunter: TypeAlias = Callable[[EngineFactory, Counters, int, int, "Watchdog | None"], "Sighting | None"]
"""``hunter(factory, counters, seed, budget, watchdog)``: the first violation within ``budget`` steps."""


def watchdog_for(fault: PlantedFault) -> Watchdog | None:
    """A watchdog for a fault that may hang a call, None for the others."""
    return Watchdog(call_seconds_max=HUNG_SECONDS_MAX) if fault.hangs else None


def swarm(
    factory: EngineFactory, counters: Counters, seed: int, budget: int, watchdog: Watchdog | None
) -> Sighting | None:
    """The seeded driver with its swarm, run after run, everything judged."""
    driver = Driver(factory, make(EngineConfig()).capabilities, seed=seed, watchdog=watchdog)
    judged = frozenset(load_requirements())
    index = 0
    while counters.steps + index < budget:  # a run may have no step at all
        run = driver.run(index, judge=judged)
        if run.violations:
            return Sighting(
                steps=counters.steps,
                config=run.swarm.config,
                operations=flatten(run.operations),
                violation=run.violations[0],
            )
        index += 1
    return None


def uniform(
    factory: EngineFactory, counters: Counters, seed: int, budget: int, watchdog: Watchdog | None
) -> Sighting | None:
    """The baseline of `fuzz.bugbench.uniform`."""
    capabilities = make(EngineConfig()).capabilities
    index = 0
    while counters.steps + index < budget:
        session, operations = uniform_run(factory, capabilities, seed, index, watchdog)
        if session.violations:
            return Sighting(
                steps=counters.steps,
                config=session.config,
                operations=flatten(operations),
                violation=session.violations[0],
            )
        index += 1
    return None


class _HuntOver(KeyboardInterrupt):
    """Ends a Hypothesis run as its user can. With any other exception it would go on about the example that failed."""


_GENERATE = settings(
    PROFILES["kvconform-deep"],
    max_examples=1_000_000,
    stateful_step_count=30,
    phases=(Phase.generate, Phase.target),
    database=None,
    verbosity=Verbosity.quiet,
    print_blob=False,
)
"""New examples until something fails or the budget is spent; what fails is not shrunk."""


def machine(
    factory: EngineFactory, counters: Counters, seed_: int, budget: int, watchdog: Watchdog | None
) -> Sighting | None:
    """The Hypothesis machine, with its examples of about thirty rules."""
    built = itertools.count()

    def within_budget(config: EngineConfig) -> Any:
        if max(counters.steps, next(built)) >= budget:  # an example may have no step at all
            raise _HuntOver
        return factory(config)

    class Hunt(machine_for("bench", within_budget, watchdog=watchdog)):  # type: ignore[misc]  # a class made at run time
        first: ClassVar[Sighting | None] = None

        def _check(self) -> None:
            assert self.session is not None and self.config is not None, "a rule has run"
            if self.session.violations:
                Hunt.first = Sighting(
                    steps=counters.steps,
                    config=self.config,
                    operations=flatten(self.operations),
                    violation=self.session.violations[0],
                )
                raise _HuntOver

    kind: type[EngineMachine] = seed(seed_)(Hunt)
    with suppress(_HuntOver):
        run_state_machine_as_test(kind, settings=_GENERATE)
    return Hunt.first


FUZZERS: Final[dict[str, Hunter]] = {"swarm": swarm, "machine": machine, "uniform": uniform}
"""By name; the first one is what is measured, the others are what it is measured against."""
