"""The loop between an engine and a model runner: add, schedule, execute, commit. Standard library only."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol, TypeAlias

from reference_engine.engine import Engine
from reference_engine.request import Request
from reference_engine.scheduler import Plan

SequenceKey: TypeAlias = tuple[str, int]
"""(request id, sequence index)."""

Arrival: TypeAlias = tuple[int, Request]
"""A request and the step before which it is added, counted from 0."""


class Runner(Protocol):
    """What executes the steps of an engine."""

    def check(self, request: Request) -> None:
        """Raise `RequestError` for a request that this runner could not serve, before the engine has it."""

    def execute(self, plan: Plan) -> dict[SequenceKey, int]:
        """Run a step; returns the sampled tokens. Steps are executed in the order planned."""

    def settle(self, engine: Engine) -> None:
        """Called when a step was committed: what is free now may be given up."""


class Serving:
    """An engine and its runner, one step at a time.

    A step is executed when it is planned, and committed when the pipeline is full or nothing can be planned.
    ``observe`` sees every plan before it is executed. `outputs` fills as requests finish.
    """

    def __init__(self, engine: Engine, runner: Runner, observe: Callable[[Plan], None] | None = None) -> None:
        self.engine = engine
        self.runner = runner
        self.outputs: dict[str, list[list[int]]] = {}
        """The output tokens of every sequence, by request id."""
        self._observe = observe
        self._in_flight: deque[tuple[int, dict[SequenceKey, int]]] = deque()

    @property
    def busy(self) -> bool:
        """Whether some request is live or some step in flight."""
        return bool(self.engine.requests or self._in_flight)

    def add(self, request: Request) -> None:
        """Queue a request. Raises `RequestError` when the runner or the engine will not serve it."""
        self.runner.check(request)
        self.engine.add_request(request)

    def step(self) -> Plan:
        """Plan and execute one step, and commit what is due.

        Raises what the runner raises, and RuntimeError when no live request progresses.
        """
        plan = self.engine.schedule()
        if self._observe is not None:
            self._observe(plan)
        sampled = self.runner.execute(plan)  # also when nothing runs: there may be moves
        if plan.sequences:
            self._in_flight.append((plan.step, sampled))
        elif self.engine.requests and not self._in_flight and not plan.preempted:
            raise RuntimeError(f"step {plan.step} runs nothing and {', '.join(self.engine.requests)} wait (PRG-1)")
        if self._in_flight and (len(self._in_flight) >= self.engine.config.pipeline_depth or not plan.sequences):
            for finished in self.engine.commit(*self._in_flight.popleft()):
                self.outputs[finished.request_id] = finished.outputs
            self.runner.settle(self.engine)
        return plan

    def drain(self) -> dict[str, list[list[int]]]:
        """Step until nobody is live; returns all outputs so far."""
        while self.busy:
            self.step()
        return self.outputs


def serve(
    engine: Engine,
    runner: Runner,
    arrivals: Iterable[Arrival],
    observe: Callable[[Plan], None] | None = None,
) -> dict[str, list[list[int]]]:
    """Serve ``arrivals`` to the end; returns the output tokens of every sequence, by request id.

    Raises what `Serving.add` and `Serving.step` raise.
    """
    serving = Serving(engine, runner, observe)
    waiting = deque(sorted(arrivals, key=lambda arrival: arrival[0]))
    turn = 0
    while waiting or serving.busy:
        while waiting and waiting[0][0] <= turn:
            serving.add(waiting.popleft()[1])
        turn += 1
        serving.step()
    return serving.outputs
