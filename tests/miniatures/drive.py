"""Drive a miniature: operations by hand, or many random ones over many random configurations."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from conformance.operations import Abort, AbortEnded, Add, Drain, Operation, ResetPrefixCache, Step
from conformance.protocol import ConfigRefused, EngineConfig
from conformance.session import Session
from conformance.violations import Violation

from .clean import Miniature, PrefillsFirst

Factory = Callable[[EngineConfig], Miniature]


def caught(broken: type[Miniature], config: EngineConfig, *operations: Operation) -> Violation:
    """The first violation of ``broken``, which must be of the requirement it breaks; the clean engine has none."""
    for clean in (Miniature, PrefillsFirst):
        assert violations(clean, config, operations) == []
    found = violations(broken, config, operations)
    assert found, f"{broken.__name__} went unnoticed"
    assert found[0].requirement == broken.breaks, "\n".join(map(str, found))
    return found[0]


def violations(factory: Factory, config: EngineConfig, operations: Sequence[Operation]) -> list[Violation]:
    """What a session of all oracles reports, in the order in which it was seen."""
    return Session(factory(config), config).run(operations)


def random_config(rng: random.Random) -> EngineConfig:
    """A small configuration with a random choice of features that the miniature serves."""
    block_size = rng.choice([1, 2, 3, 4, 4, 8, 16])
    max_model_len = rng.choice([8, 16, 24, 32])
    chunked = rng.random() < 0.5
    swap = rng.random() < 0.3
    pipelined = rng.random() < 0.4
    return EngineConfig(
        num_blocks=rng.randint(1, 3) + rng.choice([2, 3, 4, 8]) * -(-max_model_len // block_size) // 2,
        block_size=block_size,
        max_num_seqs=rng.choice([1, 2, 3, 4, 8]),
        max_num_batched_tokens=rng.choice([4, 8, 16, 64]) if chunked else rng.choice([32, 64]),
        max_model_len=max_model_len,
        enable_prefix_caching=rng.random() < 0.6,
        enable_chunked_prefill=chunked,
        scheduling_policy=rng.choice(["fcfs", "fcfs", "priority"]),
        preemption_mode="swap" if swap else "recompute",
        num_swap_blocks=rng.choice([2, 8, 32]) if swap else 0,
        num_lookahead_slots=rng.choice([0, 0, 0, 1, 3]),
        num_speculative_tokens=0 if pipelined else rng.choice([0, 0, 1, 3]),
        watermark=rng.choice([0.0, 0.0, 0.1]),
        pipeline_depth=2 if pipelined else 1,
        encoder_cache_size=rng.choice([0, 6]) if chunked and not swap else 0,
        engine_options={"null_block": True} if rng.random() < 0.3 else {},
    )


def random_operations(rng: random.Random, count: int, config: EngineConfig) -> list[Operation]:
    """Adds, aborts, steps and resets; prompts mostly shorter than the model's length, often alike."""
    operations: list[Operation] = []
    for _ in range(count):
        draw = rng.random()
        if draw < 0.4:
            prompt_len = rng.randint(1, config.max_model_len if rng.random() < 0.1 else config.max_model_len // 2)
            encoder = config.encoder_cache_size and rng.random() < 0.5
            operations.append(
                Add(
                    prompt_len=prompt_len,
                    max_tokens=rng.choice(
                        [rng.randint(1, 8), config.max_model_len, rng.randint(1, config.max_model_len)]
                    ),
                    family=rng.randint(0, 1),
                    shared_len=rng.choice([0, prompt_len, prompt_len, rng.randint(0, prompt_len)]),
                    priority=rng.randint(0, 2),
                    n=rng.choice([1, 1, 1, 1, 2, 3]),
                    stop_after=rng.choice([None, None, None, rng.randint(1, 8)]),
                    salt=rng.choice([0, 0, 0, 0, 0, 1]),
                    adapter=rng.choice([0, 0, 0, 0, 0, 1]),
                    encoder_sizes=tuple(rng.randint(1, 7) for _ in range(rng.randint(1, 3))) if encoder else (),
                )
            )
        elif draw < 0.85:
            operations.append(Step(rng.choice([1, 1, 1, 3, 8])))
        elif draw < 0.9:
            operations.append(Abort(rng.randint(0, 8)))
        elif draw < 0.95:
            operations.append(AbortEnded(rng.randint(0, 8)))
        elif draw < 0.98:
            operations.append(ResetPrefixCache())
        else:
            operations.append(Drain())
    return operations


def random_session(factory: Factory, seed: int, count: int = 60) -> Session | None:
    """A session after one random run; None when the configuration drawn is refused."""
    rng = random.Random(seed)
    config = random_config(rng)
    operations = random_operations(rng, count, config)
    try:
        session = Session(factory(config), config)
    except ConfigRefused:
        return None
    session.run(operations)
    return session
