"""Engines driven by hand, and engines written by hand: requests, steps with their tokens, plans told in advance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conformance.operations import Operation
from conformance.protocol import (
    Capabilities,
    CommitResult,
    Engine,
    EngineConfig,
    EngineFactory,
    Request,
    Sampled,
    SequenceKey,
    SequencePlan,
    Snapshot,
    StepPlan,
    Usage,
)
from conformance.session import Session

ADAPTER_FAULTS = frozenset(
    {"ACC-1", "ACC-2", "ACC-4", "ACC-5", "ACC-7", "ACC-9", "ACC-10", "KV-1", "KV-2", "KV-3", "KV-6", "PRG-5", "PRG-8"}
)
"""What an adapter that misreports would be seen by, where the engine is right."""


def request(number: int, prompt_len: int, max_tokens: int, **fields: Any) -> Request:
    """The request ``r{number}``, with a prompt of its own."""
    prompt = [2 + (number * 13 + position * 5) % 40 for position in range(prompt_len)]
    return Request(request_id=f"r{number}", prompt=prompt, max_tokens=max_tokens, arrival=number, **fields)


def sampled(plan: StepPlan, token: int = 7) -> dict[SequenceKey, Sampled]:
    """``token`` for every sequence that samples."""
    return {(one.request_id, one.seq): Sampled([token]) for one in plan.sequences if one.samples}


def step(engine: Engine, token: int = 7) -> StepPlan:
    """Schedule, and commit a token for every sequence that samples."""
    plan = engine.schedule()
    engine.commit(plan.step, sampled(plan, token))
    return plan


def shape(plan: SequencePlan) -> tuple[str, int, int, list[int]]:
    """Who runs, from which position, how many tokens, through which blocks."""
    return plan.request_id, plan.first, plan.num_tokens, plan.block_tables[0]


def extent(plan: SequencePlan) -> tuple[str, int, int, int]:
    """Who runs, from which position, how many tokens, through how many blocks."""
    return (*shape(plan)[:3], len(plan.block_tables[0]))


def broken(factory: EngineFactory, config: EngineConfig, *operations: Operation) -> set[str]:
    """The requirements that the engine breaks under ``operations``."""
    return {violation.requirement for violation in Session(factory(config), config).run(operations)}


class ScriptedEngine:
    """Plans what it is told to, then nothing; finishes nobody and shows no books."""

    def __init__(self, *plans: StepPlan, **declared: Any) -> None:
        self.capabilities = Capabilities(engine="scripted", version="1", **declared)
        self._plans = plans
        self._scheduled = 0

    def add_request(self, request: Request) -> None: ...

    def abort_request(self, request_id: str) -> None: ...

    def schedule(self) -> StepPlan:
        number = self._scheduled
        self._scheduled += 1
        return self._plans[number] if number < len(self._plans) else StepPlan(step=number)

    def commit(self, step: int, sampled: Mapping[SequenceKey, Sampled]) -> CommitResult:
        return CommitResult()

    def reset_prefix_cache(self) -> bool:
        return False

    def usage(self) -> Usage:
        return Usage()

    def snapshot(self) -> Snapshot:
        return Snapshot(free=[])

    def close(self) -> None: ...
