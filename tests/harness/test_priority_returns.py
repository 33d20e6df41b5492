"""FAIR-2 holds for who comes back as for who comes: a preempted request waits under its priority like any other."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from conformance.adapters.reference import make
from conformance.protocol import Capabilities, Engine, EngineConfig
from fuzz.driver import Driver, campaign
from reference_engine.request import Request
from reference_engine.scheduler import Scheduler

CAPABILITIES: Capabilities = make(EngineConfig()).capabilities
PINNED = {"scheduling_policy": "priority", "pipeline_depth": 1, "preemption_mode": "recompute", "num_swap_blocks": 0}
Head = Callable[[Scheduler], "Request | None"]


def newcomer_before_preempted(scheduler: Scheduler) -> Request | None:
    """A less urgent newcomer goes before a more urgent request that was preempted."""
    preempted = [request for request in scheduler.waiting if request.preempted_in >= 0]
    for request in scheduler.waiting if preempted else ():
        if request.preempted_in < 0 and request.rank[0] > preempted[0].rank[0]:
            return request
    return Scheduler._head(scheduler)


def preempted_before_newcomer(scheduler: Scheduler) -> Request | None:
    """A preempted request returns first, however urgent the newcomers are."""
    preempted = [request for request in scheduler.waiting if request.preempted_in >= 0]
    return preempted[0] if preempted else Scheduler._head(scheduler)


def with_head(head: Head) -> Callable[[EngineConfig], Engine]:
    def factory(config: EngineConfig) -> Engine:
        adapter = make(config)
        scheduler = adapter.engine.scheduler  # type: ignore[attr-defined]

        class Unfair(Scheduler):
            __slots__ = ()

            def _head(self) -> Request | None:
                return head(self)

        scheduler.__class__ = Unfair
        return adapter

    return factory


@pytest.mark.parametrize("head", [newcomer_before_preempted, preempted_before_newcomer])
def test_an_unfair_return_is_reported(head: Head) -> None:
    driver = Driver(with_head(head), CAPABILITIES, seed=2, pinned=PINNED)
    found = campaign(driver, steps_max=6000, judged=frozenset({"FAIR-2"}))
    assert [item.violation.requirement for item in found.discoveries.values()] == ["FAIR-2"]


def test_the_reference_engine_is_fair() -> None:
    found = campaign(Driver(make, CAPABILITIES, seed=1, pinned=PINNED), steps_max=6000, judged=frozenset({"FAIR-2"}))
    assert not found.discoveries
