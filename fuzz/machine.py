"""The Hypothesis face of the fuzzer: a `RuleBasedStateMachine` over the same operations as the driver.

What pytest and tox run. Rules are total, so no run is wasted on an empty bundle. A failure is shrunk by
Hypothesis as usual; what it ends with is then shrunk further by ours, and kept as the same kind of trace file
that a campaign keeps.
"""

from __future__ import annotations

from collections.abc import Collection
from random import Random
from typing import Any, ClassVar

from hypothesis import HealthCheck, Phase, event, settings, target
from hypothesis import strategies as st
from hypothesis.errors import Flaky
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from conformance.execute import open_nearest, probe
from conformance.expectations import Expectations
from conformance.operations import Abort, AbortEnded, Add, Operation, ResetPrefixCache, Step
from conformance.protocol import Capabilities, ConfigRefused, EngineConfig, EngineFactory
from conformance.session import Session
from conformance.violations import Violation
from conformance.watchdog import Watchdog
from fuzz.shrink import Shrinker, Shrunk
from fuzz.swarm import draw_config

DRAWS_MAX = 20
"""Configurations drawn for one example before the engine's defaults are taken."""

_BASE = settings(deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
PROFILES: dict[str, settings] = {
    "kvconform-ci": settings(
        _BASE,
        max_examples=60,
        stateful_step_count=30,
        derandomize=True,
        database=None,
        phases=(Phase.explicit, Phase.generate, Phase.target, Phase.shrink),
    ),
    "kvconform-deep": settings(_BASE, max_examples=2000, stateful_step_count=60),
    "kvconform-replay": settings(_BASE, phases=(Phase.explicit, Phase.reuse, Phase.shrink)),
}
"""``ci``: the same examples each time, a gate. ``deep``: new ones each time. ``replay``: what failed before."""


class ContractBroken(AssertionError):  # noqa: N818 - named for what happened
    """A rule of the machine broke the contract."""


class Failure(ContractBroken):
    """What a machine found, shrunk by Hypothesis and then by the shrinker."""

    def __init__(self, shrunk: Shrunk) -> None:
        super().__init__(str(shrunk.violation))
        self.shrunk = shrunk


def register_profiles() -> None:
    """Make the profiles known to ``pytest --hypothesis-profile``."""
    for name, profile in PROFILES.items():
        settings.register_profile(name, profile)


class EngineMachine(RuleBasedStateMachine):
    """One engine under random operations. Subclasses (see `machine_for`) say which engine."""

    factory: ClassVar[EngineFactory]
    capabilities: ClassVar[Capabilities]
    pinned: ClassVar[dict[str, Any]]
    judged: ClassVar[Collection[str] | None]
    expectations: ClassVar[Expectations | None] = None
    watchdog: ClassVar[Watchdog | None] = None
    last_failure: ClassVar[tuple[EngineConfig, list[Operation], Violation] | None] = None

    def __init__(self) -> None:
        super().__init__()
        self.config: EngineConfig | None = None
        self.session: Session | None = None
        self.operations: list[Operation] = []
        self._occupancy = 0.0

    @initialize(seed=st.integers(0, 2**32 - 1))
    def build(self, seed: int) -> None:
        """Draw a configuration the engine accepts.

        One integer decides it: drawn value by value, Hypothesis keeps to the simplest configurations, and the
        shrinker simplifies it later anyway.
        """
        kind, random = type(self), Random(seed)
        for _ in range(DRAWS_MAX):
            config = draw_config(random, kind.capabilities, kind.pinned)
            if self._open(config):
                return
        event("no drawn configuration was accepted")
        self._open(EngineConfig(**kind.pinned))

    def _open(self, config: EngineConfig) -> bool:
        kind = type(self)
        try:
            self.session = open_nearest(
                kind.factory, config, kind.pinned, judge=kind.judged, stop_at_first=True, watchdog=kind.watchdog
            )
        except ConfigRefused:
            return False
        if kind.expectations is not None:
            self.session.known = kind.expectations.known(self.session.capabilities)
        self.config = self.session.config
        return True

    def _apply(self, operation: Operation) -> None:
        if self.session is None:
            return
        self.operations.append(operation)
        self.session.apply(operation)
        ledger = self.session.ledger
        self._occupancy = max(self._occupancy, ledger.distinct_held / max(1, ledger.usable_blocks))
        self._check()

    def _check(self) -> None:
        assert self.session is not None and self.config is not None
        if self.session.violations:
            violation = self.session.violations[0]
            type(self).last_failure = (self.config, list(self.operations), violation)
            raise ContractBroken(str(violation))

    @rule(
        prompt=st.integers(1, 40),
        outputs=st.integers(1, 40),
        shared=st.integers(0, 40),
        family=st.integers(0, 1),
        priority=st.integers(0, 2),
        n=st.sampled_from((1, 1, 1, 2)),
        stop_after=st.none() | st.integers(1, 8),
        continues=st.none() | st.integers(0, 3),
        identity=st.integers(0, 2),
    )
    def add(
        self,
        prompt: int,
        outputs: int,
        shared: int,
        family: int,
        priority: int,
        n: int,
        stop_after: int | None,
        continues: int | None,
        identity: int,
    ) -> None:
        """Add a request; lengths are folded into the model length so that most are served."""
        if self.config is None:
            return
        length = self.config.max_model_len
        prompt = 1 + (prompt - 1) % max(1, length - 1)
        self._apply(
            Add(
                prompt_len=prompt,
                max_tokens=1 + (outputs - 1) % max(1, length - prompt),
                shared_len=min(shared, prompt),
                family=family,
                priority=priority if self.config.scheduling_policy == "priority" else 0,
                n=n,
                stop_after=stop_after,
                continues=continues,
                salt=identity & 1,
                adapter=identity >> 1,
            )
        )

    @rule(prompt_len=st.integers(1, 80), max_tokens=st.integers(1, 80))
    def add_oversize(self, prompt_len: int, max_tokens: int) -> None:
        """Add a request that may be too long."""
        self._apply(Add(prompt_len=prompt_len, max_tokens=max_tokens))

    @rule()
    def again(self) -> None:
        """Add the last request once more: the same prompt."""
        adds = [operation for operation in self.operations if isinstance(operation, Add)]
        if adds:
            self._apply(adds[-1])

    @rule(count=st.sampled_from((1, 1, 2, 3, 8)))
    def step(self, count: int) -> None:
        self._apply(Step(count=count))

    @rule(index=st.integers(0, 5))
    def abort(self, index: int) -> None:
        self._apply(Abort(index=index))

    @rule(index=st.integers(0, 5))
    def abort_ended(self, index: int) -> None:
        self._apply(AbortEnded(index=index))

    @rule()
    def reset_prefix_cache(self) -> None:
        self._apply(ResetPrefixCache())

    def teardown(self) -> None:
        """Drain, audit, and steer Hypothesis towards preemptions and full pools."""
        session = self.session
        if session is None or session.violations:
            return
        session.finish()
        target(float(session.preemptions), label="preemptions")
        target(self._occupancy, label="pool occupancy")
        self._check()


def machine_for(
    name: str,
    factory: EngineFactory,
    *,
    judged: Collection[str] | None = None,
    expectations: Expectations | None = None,
    pinned: dict[str, Any] | None = None,
    watchdog: Watchdog | None = None,
) -> type[EngineMachine]:
    """A machine class of its own for one engine, so that Hypothesis keeps its examples apart.

    Raises `ConfigRefused` when the engine refuses even its default configuration with ``pinned``.
    """
    pinned = dict(pinned or {})
    capabilities = probe(factory, EngineConfig(**pinned), pinned)
    title = "".join(part.capitalize() for part in name.replace(":", "-").replace(".", "-").split("-"))
    body = {
        "factory": staticmethod(factory),
        "capabilities": capabilities,
        "pinned": pinned,
        "judged": judged,
        "expectations": expectations,
        "watchdog": watchdog,
        "last_failure": None,
    }
    return type(f"{title}Machine", (EngineMachine,), body)


def run_machine(machine: type[EngineMachine], profile: settings | None = None) -> None:
    """Run the machine. Raises `Failure` with the shrunk trace when the contract is broken, be it once and not again."""
    try:
        run_state_machine_as_test(machine, settings=profile)
    except (ContractBroken, Flaky) as broken:
        failure = machine.last_failure
        if failure is None:
            raise
        config, operations, violation = failure
        shrinker = Shrinker(machine.factory, watchdog=machine.watchdog, pinned=frozenset(machine.pinned))
        raise Failure(shrinker.shrink(config, operations, violation)) from broken
