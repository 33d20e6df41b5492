"""Swarm draws: each run gets its own small, odd configuration and its own mix of operations.

Testing many unlike configurations with few features each finds more than one configuration with all of them
(Groce et al., "Swarm Testing", ISSTA 2012). Everything is drawn from one `random.Random`.
"""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec

from conformance.operations import Abort, AbortEnded, Add, Drain, Operation, ResetPrefixCache, Step
from conformance.protocol import Capabilities, EngineConfig


class Swarm(msgspec.Struct, frozen=True, kw_only=True):
    """What one run draws from: a configuration, a weight per operation kind, and habits of its requests.

    Probabilities are in [0, 1]; ``prompt_max`` and ``output_max`` are tokens.
    """

    config: EngineConfig
    weights: tuple[tuple[str, int], ...]
    prompt_max: int
    output_max: int
    boundary: float
    families: int
    sharing: float
    priorities: int
    forking: float
    stopping: float
    identities: int
    oversize: float
    burst_max: int
    encoder: float = 0.0


def draw_config(rng: Random, capabilities: Capabilities, pinned: dict[str, Any]) -> EngineConfig:
    """A configuration within the declared capabilities; the fields in ``pinned`` keep their values.

    Pools lie within a block or two of what the running set needs, because that is where engines break.
    """
    features = capabilities.features
    fields: dict[str, Any] = {}
    model_len = rng.choice((4, 6, 8, 12, 16, 24, 32))
    block_size = rng.choice((1, 2, 3, 4, 4, 8, model_len))
    block_size = max(block_size, capabilities.block_size_min)
    if capabilities.block_size_max is not None:
        block_size = min(block_size, capabilities.block_size_max)
    model_len = pinned.get("max_model_len", model_len)
    block_size = pinned.get("block_size", block_size)
    seqs = pinned.get("max_num_seqs", rng.choice((1, 2, 2, 3, 4, 4, 6)))
    per_sequence = -(-model_len // block_size)
    reserved = capabilities.reserved_blocks
    blocks = rng.choice(
        (
            reserved + per_sequence,
            reserved + per_sequence * seqs + rng.choice((-1, 0, 1, 2)),
            reserved + per_sequence + rng.randint(0, max(1, per_sequence)),
            reserved + rng.randint(1, 14),
        )
    )
    fields.update(
        max_model_len=model_len,
        block_size=block_size,
        max_num_seqs=seqs,
        num_blocks=max(1 + reserved, blocks),
    )
    chunked = "chunked_prefill" in features and rng.random() < 0.5
    fields["enable_chunked_prefill"] = chunked
    chunked = pinned.get("enable_chunked_prefill", chunked)
    if chunked:
        fields["max_num_batched_tokens"] = max(seqs, rng.choice((1, 2, 3, 5, block_size, 2 * block_size, 64)))
    else:
        fields["max_num_batched_tokens"] = model_len * rng.choice((1, 1, 2, seqs))
    fields["enable_prefix_caching"] = "prefix_caching" in features and rng.random() < 0.5
    if "priority" in features and rng.random() < 0.3:
        fields["scheduling_policy"] = "priority"
    if "swap" in features and rng.random() < 0.3:
        fields["preemption_mode"] = "swap"
        fields["num_swap_blocks"] = rng.randint(1, max(2, blocks))
    if "sliding_window" in features and rng.random() < 0.15:
        fields["sliding_window"] = rng.randint(1, model_len)
    if "lookahead" in features and rng.random() < 0.2:
        fields["num_lookahead_slots"] = rng.randint(1, 3)
    if "speculation" in features and rng.random() < 0.2:
        fields["num_speculative_tokens"] = rng.randint(1, 3)
    if "watermark" in features and rng.random() < 0.2:
        fields["watermark"] = rng.choice((0.01, 0.1, 0.25))
    if "pipeline" in features and rng.random() < 0.3:
        fields["pipeline_depth"] = rng.choice((2, 2, 3))
    if "encoder_cache" in features and rng.random() < 0.3:
        fields["encoder_cache_size"] = rng.randint(1, model_len)
    options = {name: rng.choice(values) for name, values in capabilities.swarm_options.items() if rng.random() < 0.5}
    fields["engine_options"] = {**options, **pinned.get("engine_options", {})}
    fields.update({name: value for name, value in pinned.items() if name != "engine_options"})
    return EngineConfig(**fields)


def draw_swarm(rng: Random, capabilities: Capabilities, config: EngineConfig) -> Swarm:
    """Operation weights and request habits for one run on ``config``."""
    features = capabilities.features
    optional = {
        "step_many": 2,
        "burst": 2,
        "drain": 1,
        "abort": 2 if "abort" in features else 0,
        "abort_ended": 1 if "abort" in features else 0,
        "reset": 1 if "reset_prefix_cache" in features and config.enable_prefix_caching else 0,
    }
    weights = [("add", rng.randint(2, 12)), ("step", rng.randint(4, 30))]
    weights += [(name, rng.randint(1, 2 * most)) for name, most in optional.items() if most and rng.random() < 0.5]
    length = config.max_model_len
    long = rng.random() < 0.3
    return Swarm(
        config=config,
        weights=tuple(weights),
        prompt_max=length if long else max(1, rng.randint(1, max(1, length // 2))),
        output_max=max(1, length if rng.random() < 0.4 else length // 4),
        boundary=rng.choice((0.0, 0.2, 0.6)),
        families=rng.randint(1, 3),
        sharing=rng.choice((0.0, 0.5, 0.9)),
        priorities=rng.randint(2, 4) if config.scheduling_policy == "priority" else 1,
        forking=rng.choice((0.0, 0.0, 0.4)) if "fork" in features else 0.0,
        stopping=rng.choice((0.0, 0.3)) if "stop_token" in features else 0.0,
        identities=rng.choice((1, 1, 2)) if "identity" in features else 1,
        oversize=rng.choice((0.0, 0.0, 0.05)),
        burst_max=rng.randint(2, 2 * config.max_num_seqs),
        encoder=rng.choice((0.0, 0.5)) if config.encoder_cache_size else 0.0,
    )


class OperationSource:
    """Draws operations of one run. The state it keeps does not depend on the engine, so draws never do."""

    __slots__ = ("_kinds", "_pending", "_rng", "_totals", "swarm")

    def __init__(self, rng: Random, swarm: Swarm) -> None:
        self._rng = rng
        self.swarm = swarm
        self._kinds = [kind for kind, _ in swarm.weights]
        totals, total = [], 0
        for _, weight in swarm.weights:
            total += weight
            totals.append(total)
        self._totals = totals
        self._pending = 0

    def draw(self) -> Operation:
        """The next operation."""
        rng = self._rng
        if self._pending:
            self._pending -= 1
            return self.draw_add()
        kind = rng.choices(self._kinds, cum_weights=self._totals)[0]
        operation: Operation
        match kind:
            case "step":
                operation = Step()
            case "step_many":
                operation = Step(count=rng.randint(2, 8))
            case "drain":
                operation = Drain()
            case "abort":
                operation = Abort(index=rng.randint(0, 7))
            case "abort_ended":
                operation = AbortEnded(index=rng.randint(0, 7))
            case "reset":
                operation = ResetPrefixCache()
            case _:
                if kind == "burst":
                    self._pending = rng.randint(1, self.swarm.burst_max)
                operation = self.draw_add()
        return operation

    def draw_add(self) -> Add:
        """A request: often at a block or model-length boundary, often sharing a prefix."""
        rng, swarm = self._rng, self.swarm
        config = swarm.config
        size, length = config.block_size, config.max_model_len
        prompt = rng.randint(1, swarm.prompt_max)
        outputs = rng.randint(1, swarm.output_max)
        if rng.random() < swarm.boundary:
            prompt = max(1, rng.choice((size, 2 * size, size * rng.randint(1, 4), length - 1)) + rng.choice((-1, 0, 1)))
        if prompt < length and rng.random() < swarm.boundary:
            outputs = max(1, length - prompt + rng.choice((-1, 0, 1)))
        if rng.random() >= swarm.oversize:
            prompt = min(prompt, length - 1) or 1
            outputs = max(1, min(outputs, length - prompt))
        shared = 0
        if rng.random() < swarm.sharing:
            shared = prompt if rng.random() < 0.5 else rng.randint(1, prompt)
        encoder: tuple[int, ...] = ()
        if swarm.encoder and rng.random() < swarm.encoder:
            encoder = tuple(rng.randint(1, config.encoder_cache_size) for _ in range(rng.randint(1, 2)))
        return Add(
            prompt_len=prompt,
            max_tokens=outputs,
            family=rng.randrange(swarm.families) if shared or encoder else 0,
            shared_len=shared,
            priority=rng.randrange(swarm.priorities),
            n=rng.randint(2, max(2, min(3, config.max_num_seqs))) if rng.random() < swarm.forking else 1,
            stop_after=rng.randint(1, outputs) if rng.random() < swarm.stopping else None,
            salt=rng.randrange(swarm.identities),
            adapter=rng.randrange(swarm.identities),
            encoder_sizes=encoder,
        )
