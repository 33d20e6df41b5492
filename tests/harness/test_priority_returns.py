"""FAIR-2 holds for who comes back as for who comes: a preempted request waits under its priority like any other."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from conformance.adapters.reference import make
from conformance.protocol import Capabilities, Engine, EngineConfig
from fuzz.driver import Driver, campaign
from reference_engine.request import Request, Status
from reference_engine.scheduler import Scheduler

CAPABILITIES: Capabilities = make(EngineConfig()).capabilities
RECOMPUTE = {"scheduling_policy": "priority", "pipeline_depth": 1, "preemption_mode": "recompute", "num_swap_blocks": 0}
SWAP = {**RECOMPUTE, "preemption_mode": "swap", "num_swap_blocks": 64}
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


def last_swapped_out_first(scheduler: Scheduler) -> Request | None:
    """Of those swapped out the least urgent comes back first."""
    head = Scheduler._head(scheduler)
    return scheduler.swapped[-1] if head is not None and head.status is Status.SWAPPED else head


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


@pytest.mark.parametrize(
    ("head", "pinned"),
    [(newcomer_before_preempted, RECOMPUTE), (preempted_before_newcomer, RECOMPUTE), (last_swapped_out_first, SWAP)],
)
def test_an_unfair_return_is_reported(head: Head, pinned: dict[str, object]) -> None:
    driver = Driver(with_head(head), CAPABILITIES, seed=2, pinned=pinned)
    found = campaign(driver, steps_max=6000, judged=frozenset({"FAIR-2"}))
    assert {item.violation.requirement for item in found.discoveries.values()} == {"FAIR-2"}


@pytest.mark.parametrize("pinned", [RECOMPUTE, SWAP])
def test_the_reference_engine_is_fair(pinned: dict[str, object]) -> None:
    found = campaign(Driver(make, CAPABILITIES, seed=1, pinned=pinned), steps_max=6000, judged=frozenset({"FAIR-2"}))
    assert not found.discoveries
