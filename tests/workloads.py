"""Workloads that tests share: seeded operations, and the same requests for the reference engine by itself."""

from __future__ import annotations

from random import Random

from conformance.adapters.reference import ReferenceAdapter, make
from conformance.operations import Abort, AbortEnded, Add, Operation, Step
from conformance.protocol import EngineConfig
from conformance.token_model import request_from
from reference_engine import config as core
from reference_engine.request import Request


def core_config(config: EngineConfig) -> core.EngineConfig:
    """The reference engine's own form of ``config``."""
    adapter = make(config)
    assert isinstance(adapter, ReferenceAdapter)
    return adapter.config


def random_traffic(random: Random, prompt_len: range, max_tokens: int) -> list[Operation]:
    """Arrivals of three families, steps and aborts, with no regard for what an engine can serve."""
    operations: list[Operation] = []
    for _ in range(random.randint(5, 20)):
        draw = random.random()
        if draw < 0.45:
            length = random.choice(prompt_len)
            shared = random.randint(0, length)
            operations.append(Add(length, random.randint(1, max_tokens), random.randint(0, 2), shared))
        elif draw < 0.9:
            operations.append(Step(random.randint(1, 9)))
        else:
            operations.append(Abort(random.randint(0, 5)) if draw < 0.97 else AbortEnded(0))
    return operations


def random_operations(random: Random, config: EngineConfig, count: int = 16) -> list[Operation]:
    """Requests in bursts, some of two families, some with several sequences, with lengths up to the limit.

    Each of them fits the pool. Two configurations of one ``max_model_len`` get requests of the same lengths.
    """
    limit, size = config.max_model_len, config.block_size
    own = core_config(config)
    usable = own.usable_blocks - own.watermark_blocks
    operations: list[Operation] = []
    for _ in range(count):
        prompt_len = random.randint(1, random.choice((limit // 3, limit - 2)))
        max_tokens = random.randint(1, limit - prompt_len + 2)
        blocks = -(-(min(prompt_len + max_tokens, limit) - 1) // size)
        operations.append(
            Add(
                prompt_len=prompt_len,
                max_tokens=max_tokens,
                family=random.randrange(2),
                shared_len=random.choice((0, prompt_len, prompt_len * 2 // 3)),
                priority=random.randrange(3),
                n=min(random.choice((1, 1, 2, 3)), usable // blocks),
            )
        )
        if random.random() < 0.6:
            operations.append(Step(random.randint(1, 4)))
    return operations


def arrivals_of(operations: list[Operation]) -> list[tuple[int, Request]]:
    """The requests that a session makes of ``operations``, each with the step before which it is added."""
    arrivals: list[tuple[int, Request]] = []
    step = 0
    for operation in operations:
        if isinstance(operation, Step):
            step += operation.count
        elif isinstance(operation, Add):
            asked = request_from(operation, len(arrivals))
            request = Request(
                asked.request_id,
                asked.prompt,
                asked.max_tokens,
                n=asked.n,
                priority=asked.priority,
                arrival=asked.arrival,
            )
            arrivals.append((step, request))
    return arrivals
