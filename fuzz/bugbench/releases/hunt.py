"""Hunts on one release, in a process of that release's own: orders come in, an outcome goes out for each.

    python -m fuzz.bugbench.releases.hunt OUTCOMES < ORDERS

The orders are a JSON list on standard input. Each outcome is appended to the file as a line of JSON when its hunt
ends, in the order of the orders, so that those done are there whatever becomes of the process; what engines print
while they are imported does not get among them.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any, cast

import msgspec

from conformance.engines import load
from conformance.execute import SURVIVES, probe
from conformance.operations import Operation
from conformance.protocol import Engine, EngineConfig, Feature
from conformance.settings import parse_settings
from conformance.watchdog import Watchdog
from fuzz.driver import Discovery, Driver, flatten
from fuzz.shrink import normalised

OTHERS_MAX = 20
"""Kinds of other violations to tell apart; further ones are counted together."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What to hunt for, where, and how long. ``settings`` are words as ``kvconform fuzz --set`` takes them."""

    engine: str
    settings: tuple[str, ...] = ()
    without: tuple[Feature, ...] = ()
    """Features that are not declared to the driver, so that neither configurations nor requests use them."""
    breaks: tuple[str, ...]
    message: str = ""
    """A regular expression to be found in the message of a violation of ``breaks``."""
    seed: int
    steps_max: int
    until_found: bool
    """Stop at the first sight of the fault, or go on to the end and count."""
    shrink_executions_max: int = 0
    """To spend on the trace of the first sight; 0: it stays as it was found."""

    def recognises(self, requirement: str, message: str) -> bool:
        """Whether such a violation is the fault that is looked for."""
        return requirement in self.breaks and re.search(self.message, message) is not None


class Sighting(msgspec.Struct, kw_only=True):
    """The fault as it was first seen. ``stable`` of 3 replays of a shrunk trace failed in the same way."""

    requirement: str
    message: str
    config: EngineConfig
    operations: list[Operation]
    stable: int | None = None


class Outcome(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What a hunt came to. ``steps``: calls of `schedule`, shrinking not counted."""

    version: str
    steps: int = 0
    runs: int = 0
    sights: int = 0
    """Runs that showed the fault."""
    first: Sighting | None = None
    others: dict[str, int] = {}
    """Violations that are not the fault, by requirement and message without its numbers."""


class _Without:
    """An engine that does not declare some of its features."""

    def __init__(self, engine: Engine, features: frozenset[Feature]) -> None:
        self._engine = engine
        declared = engine.capabilities
        self.capabilities = msgspec.structs.replace(declared, features=declared.features - features)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def hunt(order: Order) -> Outcome:
    """Carry out one order in this process. Raises `EngineNotFound`, `ConfigRefused` and `AdapterError`."""
    whole = load(order.engine).factory

    def factory(config: EngineConfig) -> Engine:
        return cast("Engine", _Without(whole(config), frozenset(order.without)))

    config, names = parse_settings(None, order.settings)
    pinned: dict[str, Any] = {name: getattr(config, name) for name in names}
    capabilities = probe(factory, config, pinned)
    outcome = Outcome(version=capabilities.version)
    watchdog = Watchdog()
    driver = Driver(factory, capabilities, seed=order.seed, pinned=pinned, watchdog=watchdog)
    judged = frozenset(order.breaks) | {SURVIVES}
    first: Discovery | None = None
    try:
        while outcome.steps < order.steps_max and not (first is not None and order.until_found):
            run = driver.run(outcome.runs, judge=judged)
            outcome.runs += 1
            outcome.steps += run.steps + 1  # a run may have no step at all
            for violation in run.violations:
                if not order.recognises(violation.requirement, violation.message):
                    _count(outcome.others, normalised(violation))
                    continue
                outcome.sights += 1
                first = first or Discovery(fingerprint="", run=run, violation=violation, steps_until=outcome.steps)
        if first is not None:
            outcome.first = _sighting(driver, first, order.shrink_executions_max)
    finally:
        watchdog.stop()
    return outcome


def _count(others: dict[str, int], kind: str) -> None:
    kind = kind if kind in others or len(others) < OTHERS_MAX else "of other kinds"
    others[kind] = others.get(kind, 0) + 1


def _sighting(driver: Driver, discovery: Discovery, executions_max: int) -> Sighting:
    run, violation = discovery.run, discovery.violation
    config, operations, stable = run.swarm.config, flatten(run.operations[: violation.operation + 1]), None
    if executions_max:
        shrunk = driver.shrink(discovery, executions_max)
        config, operations, violation, stable = shrunk.config, shrunk.operations, shrunk.violation, shrunk.stable
    return Sighting(
        requirement=violation.requirement,
        message=violation.message,
        config=config,
        operations=operations,
        stable=stable,
    )


def main(outcomes: Path, orders: list[Order]) -> None:
    """Carry out ``orders``, appending to ``outcomes``."""
    with outcomes.open("ab", buffering=0) as file:
        for order in orders:
            file.write(msgspec.json.encode(hunt(order)) + b"\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), msgspec.json.decode(sys.stdin.buffer.read(), type=list[Order]))
