"""Engines driven by hand, as adapters are tested: requests, steps with their tokens, and what a workload breaks."""

from __future__ import annotations

from typing import Any

from conformance.operations import Operation
from conformance.protocol import (
    Engine,
    EngineConfig,
    EngineFactory,
    Request,
    Sampled,
    SequenceKey,
    SequencePlan,
    StepPlan,
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
