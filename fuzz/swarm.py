"""Swarm draws: each run gets its own small, odd configuration and its own mix of operations.

Testing many unlike configurations with few features each finds more than one configuration with all of them
(Groce et al., "Swarm Testing", ISSTA 2012). Everything is drawn from one `random.Random`.
"""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec

from conformance.protocol import Capabilities, EngineConfig, Feature, KVCacheGroup

ON_DEVICE = 0.15
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
    extending: float = 0.0
    """Requests whose prompt is the last one that is shared as a whole, and more."""
    families: int
    sharing: float
    priorities: int
    forking: float
    stopping: float
    identities: int
    oversize: float
    burst_max: int
    encoder: float = 0.0
    streaming: float = 0.0
    """Requests whose prompt comes in parts."""
    overlong: bool = False
    """What is oversize is as long as the model takes, or a token more, whatever the pool holds."""


GROUPED = 0.15
"""How often layers are split into KV-cache groups."""
STATEFUL = 0.5
"""How often one of those is of recurrent state, of an engine that can have such."""
TIGHT, ROOMY, SHORT = 0.25, 0.15, 0.1
"""Shares of the pools that hold one sequence and little more; everybody, so that the token budget runs out first; and
not even every single request. Of an engine that takes blocks back from who runs."""
TIGHTER = 0.12
"""More tight pools for each part that acts when the pool runs out, and not before."""


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
    if fields["state_groups"] and rng.random() < STATEFUL:
        whole = not fields["enable_prefix_caching"]  # one state for the sequence, as nothing shares it
        groups[1:] = [KVCacheGroup("state", length if whole else size, state=True)]
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
            (
                rng.randint(1, seqs),
                rng.randint(1, seqs),
                seqs,
                seqs + block_size,
                seqs + rng.randint(1, model_len),
                64,
                64,
            )
        )
    else:
        fields["max_num_batched_tokens"] = model_len * rng.choice((1, 1, 2, seqs))
    fields["enable_prefix_caching"] = "prefix_caching" in features and rng.random() < 0.5
    if "priority" in features and rng.random() < 0.4:
        fields["scheduling_policy"] = "priority"
    if "swap" in features and rng.random() < (0.5 if "recompute" in features else 0.4):
        fields["preemption_mode"] = "swap"
        fields["num_swap_blocks"] = rng.choice((rng.randint(1, max(2, blocks)), 2 * blocks))
    if "recompute" in features and "num_blocks" not in pinned and not chosen:
        fields["num_blocks"] = _draw_pool(rng, {**fields, **pinned}, capabilities.reserved_blocks)
    if "sliding_window" in features and rng.random() < 0.35:
        fields["sliding_window"] = rng.randint(1, max(1, model_len // rng.choice((1, 2, 4, 4))))
    if "kv_cache_groups" in features and rng.random() < GROUPED:
        fields.update(_draw_groups(rng, {**fields, **pinned, "state_groups": "state_groups" in features}))
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


def _draw_pool(rng: Random, fields: dict[str, Any], reserved: int) -> int:
    """Blocks of a pool that is drawn for what it has to hold, most often the one that was drawn already."""
    per_sequence, seqs = -(-fields["max_model_len"] // fields["block_size"]), fields["max_num_seqs"]
    acting = (fields["enable_prefix_caching"], "scheduling_policy" in fields, "preemption_mode" in fields)
    tight = TIGHT + TIGHTER * sum(acting)
    roomy = ROOMY if fields["enable_chunked_prefill"] else 2 * ROOMY  # it is whole prompts that a budget turns away
    share = rng.random()
    if share < tight:
        return int(reserved + per_sequence + rng.choice((0, 0, 1, rng.randint(0, 1 + per_sequence * seqs // 6))))
    if share < tight + roomy:
        return int(reserved + per_sequence * seqs)
    if share < tight + roomy + SHORT:
        return int(reserved + per_sequence - rng.randint(0, per_sequence // 2))
    return int(fields["num_blocks"])


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
    swarm = Swarm(
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
        extending=rng.choice((0.0, 0.3, 0.6)) if config.enable_prefix_caching else 0.0,
        streaming=rng.choice((0.3, 0.9)) if "streaming_input" in features else 0.0,
    )
    return _loaded(rng, swarm) if "recompute" in features or config.fixed_batch else swarm


def _loaded(rng: Random, swarm: Swarm) -> Swarm:
    """More requests where it matters what the ones before left, and such as use up what is scarce.

    A tight pool is what short prompts are let into together and long outputs outgrow, a token budget below the
    running set is what long outputs wait for, and in a roomy pool it is long prompts that exceed the budget.
    """
    config = swarm.config
    seqs, length = config.max_num_seqs, longest(config, swarm.blocks, 1)
    changes: dict[str, Any] = {"oversize": rng.choice((0.0, 0.05, 0.2)), "overlong": rng.random() < 0.5}
    everybody = -(-config.max_model_len // config.block_size) * seqs
    tight = 2 * swarm.blocks <= everybody and rng.random() < 0.9
    starved = config.max_num_batched_tokens < seqs
    heavy = not tight and not starved and swarm.blocks >= everybody - 1 and rng.random() < 0.9
    if tight or starved or heavy or config.fixed_batch or rng.random() < 0.3:
        changes["requests"] = rng.randint(1 + seqs, 1 + 2 * seqs)
    if starved:
        changes["prompt_max"] = max(1, min(swarm.prompt_max, 2 * config.block_size))
        changes["output_min"], changes["output_max"] = max(1, length // 2), length
        changes["stopping"] = rng.choice((0.0, swarm.stopping))
    elif tight:
        short = config.block_size * rng.choice((1, 1, 2)) + rng.choice((-1, 0, 1))
        changes["prompt_max"] = max(1, min(short, length - 1, swarm.blocks * config.block_size // seqs))
        changes["output_min"], changes["output_max"] = max(1, length // 2), length
        changes["oversize"] = rng.choice((0.0, 0.0, 0.1))
        changes["stopping"] = rng.choice((0.0, swarm.stopping))
    elif heavy:
        changes["prompt_max"] = max(1, length - 1)
        changes["output_min"], changes["output_max"] = 1, max(1, length // 4)
        changes["families"], changes["extending"] = 1, 0.0  # they begin alike and go on apart
    return msgspec.structs.replace(swarm, **changes)


def _draw_forking(rng: Random, config: EngineConfig) -> float:
    return rng.choice((0.0, 0.0, 0.5, 0.9) if config.max_num_seqs > 1 else (0.0, 0.0, 0.1))


def longest(config: EngineConfig, blocks: int, n: int) -> int:
    """Tokens of the longest request of ``n`` sequences that the model's length allows and ``blocks`` hold."""
    return max(2, min(config.max_model_len, blocks // n * config.block_size + 1))
