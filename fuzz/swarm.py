"""Swarm draws: each run gets its own small, odd configuration and its own mix of operations.

Testing many unlike configurations with few features each finds more than one configuration with all of them
(Groce et al., "Swarm Testing", ISSTA 2012). Everything is drawn from one `random.Random`.
"""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec

from conformance.operations import Abort, AbortEnded, Add, Drain, Operation, ResetPrefixCache, Step
from conformance.protocol import Capabilities, EngineConfig, Feature, KVCacheGroup

ON_DEVICE = 0.2
"""Share of the configurations that run on a fixed-batch device, of an engine that has one and can do without."""
NOT_ON_A_DEVICE: frozenset[Feature] = frozenset(
    {
        "chunked_prefill",
        "kv_cache_groups",
        "lookahead",
        "pipeline",
        "prefix_caching",
        "sliding_window",
        "speculation",
        "swap",
    }
)
"""What is not drawn together with it: whole prompts go in, one token a step comes out, and lines share nothing."""


class Swarm(msgspec.Struct, frozen=True, kw_only=True):
    """What one run draws from: a configuration, a weight per operation kind, and habits of its requests.

    Probabilities are in [0, 1]; ``prompt_max``, ``output_min`` and ``output_max`` are tokens. Most runs are short, a
    few dozen steps and a handful of requests: another configuration finds more than another request on the same one.
    """

    config: EngineConfig
    weights: tuple[tuple[str, int], ...]
    blocks: int
    """Blocks that one request may come to hold, all its sequences together."""
    steps: int
    """After so many the run is drained."""
    requests: int
    """After so many no more are added."""
    prompt_max: int
    output_min: int
    output_max: int
    boundary: float
    continuing: float
    """Requests that go on with an ended conversation, as the next turn of a chat does."""
    families: int
    sharing: float
    priorities: int
    forking: float
    stopping: float
    identities: int
    oversize: float
    burst_max: int
    encoder: float = 0.0


GROUPED = 0.15
"""How often layers are split into KV-cache groups."""


def _draw_groups(rng: Random, fields: dict[str, Any]) -> dict[str, Any]:
    """Full attention and one or two groups behind a window, whose blocks may be larger; a pool to match."""
    size, length = fields["block_size"], fields["max_model_len"]
    groups = [
        KVCacheGroup("full", size),
        *(
            KVCacheGroup(f"window{number}", size * rng.choice((1, 1, 2)), rng.randint(1, length))
            for number in range(rng.choice((1, 1, 2)))
        ),
    ]
    rng.shuffle(groups)
    blocks = fields["num_blocks"] * len(groups) + rng.choice((0, 0, 1, 2))
    return {"kv_cache_groups": tuple(groups), "sliding_window": None, "num_blocks": blocks}


def draw_config(rng: Random, capabilities: Capabilities, pinned: dict[str, Any]) -> EngineConfig:
    """A configuration within the declared capabilities; the fields in ``pinned`` keep their values.

    Pools lie within a block or two of what the running set needs, because that is where engines break.
    """
    features = capabilities.features
    always = capabilities.device is not None
    chosen = not always and "device" in features and pinned.get("fixed_batch", rng.random() < ON_DEVICE)
    fields: dict[str, Any] = {"fixed_batch": chosen}
    features -= NOT_ON_A_DEVICE if chosen else frozenset()
    fields.update(_draw_sizes(rng, capabilities, pinned, whole_sequences=always or chosen))
    model_len, block_size, seqs, blocks = (
        fields[name] for name in ("max_model_len", "block_size", "max_num_seqs", "num_blocks")
    )
    chunked = "chunked_prefill" in features and rng.random() < 0.45
    fields["enable_chunked_prefill"] = chunked
    chunked = pinned.get("enable_chunked_prefill", chunked)
    if chunked:
        fields["max_num_batched_tokens"] = rng.choice(
            (rng.randint(1, seqs), seqs, seqs + block_size, seqs + rng.randint(1, model_len), 64, 64)
        )
    else:
        fields["max_num_batched_tokens"] = model_len * rng.choice((1, 1, 2, seqs))
    fields["enable_prefix_caching"] = "prefix_caching" in features and rng.random() < 0.5
    if "priority" in features and rng.random() < 0.3:
        fields["scheduling_policy"] = "priority"
    if "swap" in features and rng.random() < 0.4:
        fields["preemption_mode"] = "swap"
        fields["num_swap_blocks"] = rng.choice((rng.randint(1, max(2, blocks)), 2 * blocks))
    if "sliding_window" in features and rng.random() < 0.3:
        fields["sliding_window"] = rng.randint(1, max(1, model_len // rng.choice((1, 2, 4))))
    if "kv_cache_groups" in features and rng.random() < GROUPED:
        fields.update(_draw_groups(rng, {**fields, **pinned}))
    if "lookahead" in features and rng.random() < 0.25:
        fields["num_lookahead_slots"] = rng.randint(1, 3)
    if "speculation" in features and rng.random() < 0.2:
        fields["num_speculative_tokens"] = rng.randint(1, 3)
    if "watermark" in features and rng.random() < 0.25:
        fields["watermark"] = rng.choice((0.01, 0.1, 0.25, 0.5))
    if "pipeline" in features and rng.random() < 0.35:
        fields["pipeline_depth"] = rng.choice((2, 2, 3))
    if "encoder_cache" in features and rng.random() < 0.3:
        fields["encoder_cache_size"] = rng.randint(1, model_len)
    options = {name: rng.choice(values) for name, values in capabilities.swarm_options.items() if rng.random() < 0.5}
    fields["engine_options"] = {**options, **pinned.get("engine_options", {})}
    fields.update({name: value for name, value in pinned.items() if name != "engine_options"})
    return EngineConfig(**fields)


def _draw_sizes(
    rng: Random, capabilities: Capabilities, pinned: dict[str, Any], *, whole_sequences: bool
) -> dict[str, int]:
    """Pool, blocks, batch and model length. ``whole_sequences``: a block holds one, as a line of a device does."""
    block_size = rng.choice((1, 1, 2, 2, 3, 4, 4, 8))
    beside = rng.choice((0, 0, 0, rng.randrange(block_size)))  # a last block that is never filled
    model_len = min(24, max(6, block_size * rng.choice((2, 3, 3, 4, 5, 6, 8)) - beside))
    if rng.random() < 0.1:
        block_size = model_len
    least = capabilities.block_size_min
    if least > 4:  # sequences of several blocks, whatever the size of a block
        model_len *= least // 4
        block_size = -(-block_size // least) * least
    block_size = max(block_size, least)
    if capabilities.block_size_max is not None:
        block_size = min(block_size, capabilities.block_size_max)
    if whole_sequences:
        block_size = model_len = max(model_len, capabilities.block_size_min)
    model_len = pinned.get("max_model_len", pinned.get("block_size", model_len) if whole_sequences else model_len)
    block_size = pinned.get("block_size", model_len if whole_sequences else block_size)
    seqs = pinned.get("max_num_seqs", rng.choice((1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 6, 6)))
    per_sequence = -(-model_len // block_size)
    reserved = capabilities.reserved_blocks
    everybody = per_sequence * seqs + rng.choice((-1, 0, 1, 2))
    some = per_sequence * rng.randint(min(2, seqs), seqs) - rng.randrange(per_sequence)
    one = per_sequence + rng.randint(0, per_sequence)
    blocks = rng.choice((everybody, everybody, some, some, some, one, one, per_sequence, rng.randint(1, 14)))
    return {
        "max_model_len": model_len,
        "block_size": block_size,
        "max_num_seqs": seqs,
        "num_blocks": reserved + max(1, blocks),
    }


def draw_swarm(rng: Random, capabilities: Capabilities, config: EngineConfig) -> Swarm:
    """Operation weights and request habits for one run on ``config``."""
    features = capabilities.features
    optional = {
        "step_many": 2,
        "burst": 2,
        "drain": 1,
        "abort": 4 if "abort" in features else 0,
        "abort_ended": 1 if "abort" in features else 0,
        "reset": 1 if "reset_prefix_cache" in features and config.enable_prefix_caching else 0,
    }
    weights = [("add", rng.randint(3, 12)), ("step", rng.randint(4, 16))]
    weights += [(name, rng.randint(1, 2 * most)) for name, most in optional.items() if most and rng.random() < 0.5]
    usable = config.num_blocks - capabilities.reserved_blocks - int(config.watermark * config.num_blocks)
    blocks = usable // max(1, len(config.kv_cache_groups))
    length = longest(config, blocks, 1)
    company = rng.randint(1, 1 + config.max_num_seqs)
    output_max = max(1, length // rng.choice((1, 1, 1, 2, 4)))
    return Swarm(
        config=config,
        weights=tuple(weights),
        blocks=blocks,
        steps=rng.choice((20, 40, 80, 160)),
        requests=rng.randint(2, 2 + rng.choice((1, 1, 2, 2, 4, 16)) * config.max_num_seqs),
        prompt_max=max(1, min((length - 1) // rng.choice((1, 1, 2, 4)), blocks * config.block_size // company)),
        output_min=rng.choice((1, 1, output_max // 2 or 1, output_max)),
        output_max=output_max,
        boundary=rng.choice((0.0, 0.2, 0.6)),
        continuing=rng.choice((0.0, 0.3)) if config.enable_prefix_caching else 0.0,
        families=rng.choice((1, 1, 2, 3)),
        sharing=rng.choice((0.5, 0.9, 0.9) if config.enable_prefix_caching else (0.0, 0.5)),
        priorities=rng.randint(2, 4) if config.scheduling_policy == "priority" else 1,
        forking=_draw_forking(rng, config) if "fork" in features else 0.0,
        stopping=rng.choice((0.0, 0.5)) if "stop_token" in features else 0.0,
        identities=rng.choice((1, 1, 1, 2)) if "identity" in features else 1,
        oversize=rng.choice((0.0, 0.0, 0.05)),
        burst_max=rng.randint(2, 2 * config.max_num_seqs),
        encoder=rng.choice((0.0, 0.5)) if config.encoder_cache_size else 0.0,
    )


def _draw_forking(rng: Random, config: EngineConfig) -> float:
    return rng.choice((0.0, 0.0, 0.5, 0.9) if config.max_num_seqs > 1 else (0.0, 0.0, 0.1))


def longest(config: EngineConfig, blocks: int, n: int) -> int:
    """Tokens of the longest request of ``n`` sequences that the model's length allows and ``blocks`` hold."""
    return max(2, min(config.max_model_len, blocks // n * config.block_size + 1))


class OperationSource:
    """Draws operations of one run. The state it keeps does not depend on the engine, so draws never do."""

    __slots__ = ("_kinds", "_left", "_pending", "_rng", "_totals", "swarm")

    def __init__(self, rng: Random, swarm: Swarm) -> None:
        self._rng = rng
        self.swarm = swarm
        self._kinds = [kind for kind, _ in swarm.weights]
        totals, total = [], 0
        for _, weight in swarm.weights:
            total += weight
            totals.append(total)
        self._totals = totals
        self._pending = min(swarm.requests, rng.randint(0, swarm.config.max_num_seqs + 1))
        self._left = swarm.requests

    @property
    def exhausted(self) -> bool:
        """No request is left to add."""
        return not self._left

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
                if not self._left:
                    return Step()
                if kind == "burst":
                    self._pending = min(rng.randint(1, self.swarm.burst_max), self._left - 1)
                operation = self.draw_add()
        return operation

    def draw_add(self) -> Add:
        """A request: often at a block or model-length boundary, often sharing a prefix."""
        rng, swarm = self._rng, self.swarm
        self._left -= 1
        config = swarm.config
        size = config.block_size
        n = rng.randint(2, max(2, min(3, config.max_num_seqs, swarm.blocks))) if rng.random() < swarm.forking else 1
        too_long = rng.random() < swarm.oversize
        length = config.max_model_len if too_long else longest(config, swarm.blocks, n)
        prompt = rng.randint(1, swarm.prompt_max)
        outputs = rng.randint(min(swarm.output_min, swarm.output_max), swarm.output_max)
        if rng.random() < swarm.boundary:
            prompt = max(1, rng.choice((size, 2 * size, size * rng.randint(1, 4), length - 1)) + rng.choice((-1, 0, 1)))
        if prompt < length and rng.random() < swarm.boundary:
            outputs = max(1, length - prompt + rng.choice((-1, 0, 1)))
        if not too_long:
            prompt = min(prompt, length - 1) or 1
            outputs = max(1, min(outputs, length - prompt))
        shared = 0
        if rng.random() < swarm.sharing:
            shared = prompt if rng.random() < 0.5 else rng.randint(1, prompt)
        continues = rng.randrange(8) if rng.random() < swarm.continuing else None
        encoder: tuple[int, ...] = ()
        if swarm.encoder and rng.random() < swarm.encoder:
            encoder = tuple(rng.randint(1, config.encoder_cache_size) for _ in range(rng.randint(1, 2)))
        return Add(
            prompt_len=prompt,
            max_tokens=outputs,
            family=rng.randrange(swarm.families) if shared or encoder else 0,
            shared_len=shared,
            priority=rng.randrange(swarm.priorities),
            n=n,
            stop_after=rng.randint(1, outputs) if rng.random() < swarm.stopping else None,
            salt=rng.randrange(swarm.identities),
            adapter=rng.randrange(swarm.identities),
            encoder_sizes=encoder,
            continues=continues,
        )
