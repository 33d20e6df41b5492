"""The baseline: plain uniform random operations, as they are written first, before anybody has thought about it.

One ordinary family of configurations: the sizes that `EngineConfig` has by default, and every optional part that
the engine declares on with probability one half, at one fixed value. Every run makes `OPERATIONS_PER_RUN`
operations, each kind as likely as any other, arguments uniform over what is served, and is drained. It speaks the
whole vocabulary of the swarm driver; what it lacks is odd sizes, pools at the brim, bursts, boundaries and bias.
"""

from __future__ import annotations

from random import Random
from typing import Any

from conformance.execute import open_nearest
from conformance.operations import Abort, AbortEnded, Add, Operation, ResetPrefixCache, Step
from conformance.protocol import Capabilities, EngineConfig, EngineFactory, Feature
from conformance.session import Session
from conformance.watchdog import Watchdog

OPERATIONS_PER_RUN = 100

PARTS: dict[Feature, dict[str, Any]] = {
    "chunked_prefill": {"enable_chunked_prefill": True, "max_num_batched_tokens": 8},
    "device": {"fixed_batch": True, "block_size": 32, "num_blocks": 4},
    "lookahead": {"num_lookahead_slots": 2},
    "pipeline": {"pipeline_depth": 2},
    "prefix_caching": {"enable_prefix_caching": True},
    "priority": {"scheduling_policy": "priority"},
    "sliding_window": {"sliding_window": 8},
    "swap": {"preemption_mode": "swap", "num_swap_blocks": 16},
    "watermark": {"watermark": 0.1},
}
"""What each optional part is turned on with."""


def uniform_config(rng: Random, capabilities: Capabilities) -> EngineConfig:
    """Default sizes, and each part that the engine declares with probability one half.

    A device takes no part but the priorities, so it is drawn first and instead of the others.
    """
    on: list[Feature] = [part for part in PARTS if part in capabilities.features and rng.random() < 0.5]
    if "device" in on:
        on = [part for part in on if part in {"device", "priority", "watermark"}]
    fields: dict[str, Any] = {}
    for part in on:
        fields.update(PARTS[part])
    return EngineConfig(**fields)


class UniformSource:
    """Draws operations and their arguments uniformly."""

    def __init__(self, rng: Random, config: EngineConfig) -> None:
        self._rng = rng
        self._length = config.max_model_len

    def draw(self) -> Operation:
        """The next operation."""
        rng = self._rng
        match rng.randrange(5):
            case 0:
                return self._add()
            case 1:
                return Abort(index=rng.randrange(8))
            case 2:
                return AbortEnded(index=rng.randrange(8))
            case 3:
                return ResetPrefixCache()
            case _:
                return Step(count=rng.randint(1, 16))

    def _add(self) -> Add:
        rng = self._rng
        prompt = rng.randint(1, self._length - 1)
        outputs = rng.randint(1, self._length - prompt)
        return Add(
            prompt_len=prompt,
            max_tokens=outputs,
            family=rng.randrange(2),
            shared_len=rng.randint(0, prompt),
            priority=rng.randrange(3),
            n=rng.randint(1, 2),
            stop_after=rng.choice((None, rng.randint(1, outputs))),
            salt=rng.randrange(2),
            adapter=rng.randrange(2),
            continues=rng.choice((None, rng.randrange(8))),
        )


def uniform_run(
    factory: EngineFactory, capabilities: Capabilities, seed: int, index: int, watchdog: Watchdog | None = None
) -> tuple[Session, list[Operation]]:
    """Run number ``index`` of the hunt with ``seed``: the finished session, and what was done."""
    rng = Random(f"uniform:{seed}:{index}")
    config = uniform_config(rng, capabilities)
    session = open_nearest(factory, config, stop_at_first=True, watchdog=watchdog)
    source = UniformSource(rng, session.config)
    operations: list[Operation] = []
    while not session.over and len(operations) < OPERATIONS_PER_RUN:
        operations.append(source.draw())
        session.apply(operations[-1])
    session.finish()
    return session, operations
