"""From an `EngineConfig` to a vLLM V0 scheduler, and what the installed release can be said to do with it."""

from __future__ import annotations

from typing import Any

from conformance.adapters._vllm_v0_release import Release, accepted, takes, v0_selected
from conformance.protocol import Capabilities, ConfigRefused, EngineConfig, Feature

_SCHEDULER_OPTIONS = {
    "max_num_partial_prefills": "Prompts that chunked prefill may have under way at once (an integer).",
    "max_long_partial_prefills": "How many of those may be long ones (an integer).",
    "long_prefill_token_threshold": "Tokens from which a prompt counts as long (an integer).",
}
_PREEMPTION_OPTION = "literal_preemption_mode"
_NULL_BLOCK_OPTION = "null_block_at_start"


def block_manager_of(release: Release, config: EngineConfig) -> str:
    """``"v1"`` or ``"v2"``: the one asked for, or the release's default. Raises `ConfigRefused`."""
    choices = ("v1", "v2") if release.two_block_managers else ("v2",)
    manager = config.engine_options.get("block_manager", choices[0])
    if manager not in choices:
        raise ConfigRefused(
            f"engine_options block_manager = {manager!r}: vLLM {release.version} has {', '.join(choices)}"
        )
    return str(manager)


def _options(release: Release) -> dict[str, str]:
    managers = "v1 (default) or v2" if release.two_block_managers else "v2, the only one of this release"
    options = {
        "block_manager": f"Block manager: {managers}.",
        _PREEMPTION_OPTION: "Pass preemption_mode recompute on (true) instead of leaving the choice to the "
        "engine, which recomputes single sequences and swaps wider groups (false, default).",
        _NULL_BLOCK_OPTION: "With a sliding window, have block manager v2 set its null block aside before "
        "the first request (true) instead of at the first decode (false, default).",
    }
    known = {n: text for n, text in _SCHEDULER_OPTIONS.items() if takes(release.scheduler_config, n)}
    return options | known


def _features(release: Release, config: EngineConfig, manager: str) -> frozenset[Feature]:
    features: set[Feature] = {
        "abort",
        "chunked_prefill",
        "length_limit",
        "prefix_caching",
        "recompute",
        "sliding_window",
        "snapshot",
        "stop_token",
        "swap",
        "token_budget",
        "usage",
        "watermark",
    }
    if manager == "v2":
        features.add("lookahead")
    if release.has_priority:
        features.add("priority")
    # Without a prefix cache the engine answers that the reset was done, whoever is running.
    if release.resets_prefix_cache and config.enable_prefix_caching:
        features.add("reset_prefix_cache")
    # With lookahead slots the engine picks its multi-step output processor, made for single sequences.
    if release.forks_in_engine and not config.num_lookahead_slots:
        features.add("fork")
    return frozenset(features)


def capabilities_of(release: Release, config: EngineConfig, manager: str) -> Capabilities:
    """What the release declares under this configuration, before the first request."""
    reimplements = [
        "Skips the positions of a prefix-cache hit by the model runner's rule; at least one is computed.",
        "Orders block moves as the worker does: swap-ins, swap-outs, copies.",
        "Plays the synchronous step after the model: progress, output processor, freeing what is finished.",
        "Refuses a sliding window with chunked prefill under block manager v1, as the argument parser does.",
    ]
    if config.watermark:
        reimplements.append("Builds the block manager with the given watermark; the engine never passes one.")
    if release.stand_in_used:
        reimplements.append("Stands in for a compiled numeric type that only the import of the package needs.")
    if config.engine_options.get(_NULL_BLOCK_OPTION, False):
        reimplements.append("Has the block manager set its null block aside earlier than the engine would.")
    return Capabilities(
        engine=f"vllm-v0 (block manager {manager})",
        version=release.version,
        features=_features(release, config, manager),
        length_cap="computed",
        merges_equal_blocks=True,
        chunks_whole_blocks=True,
        preempts_for_priority=release.has_priority,
        reset_with_live="refused",
        options=_options(release),
        swarm_options={"block_manager": ("v1", "v2")} if release.two_block_managers else {},
        reimplements=tuple(reimplements),
    )


def check(config: EngineConfig, capabilities: Capabilities, manager: str) -> None:
    """Raise `ConfigRefused` for what this release does not have, options it does not know included."""
    unknown = sorted(set(config.engine_options) - set(capabilities.options))
    if unknown:
        raise ConfigRefused(
            f"engine_options {', '.join(unknown)}: not known; taken are {', '.join(capabilities.options)}"
        )
    missing: list[str] = sorted(config.features_needed() - capabilities.features)
    if config.kv_cache_groups:
        missing.append("kv_cache_groups")
    if missing:
        raise ConfigRefused(f"{capabilities.engine} {capabilities.version} does not have: {', '.join(missing)}")
    if config.sliding_window is not None and config.enable_chunked_prefill and manager == "v1":
        raise ConfigRefused(
            f"sliding_window = {config.sliding_window} with enable_chunked_prefill = true: "
            "not together under block manager v1"
        )


def build_scheduler(release: Release, config: EngineConfig, manager: str) -> Any:
    """A `Scheduler` as the engine builds it. Raises `ConfigRefused` with vLLM's words where it refuses."""
    options = config.engine_options
    literal = config.preemption_mode == "swap" or bool(options.get(_PREEMPTION_OPTION, False))
    scheduler_arguments = {
        "task": "generate",
        "runner_type": "generate",
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "max_num_seqs": config.max_num_seqs,
        "max_model_len": config.max_model_len,
        "use_v2_block_manager": manager == "v2",
        "num_lookahead_slots": config.num_lookahead_slots,
        "enable_chunked_prefill": config.enable_chunked_prefill,
        "preemption_mode": config.preemption_mode if literal else None,
        "policy": config.scheduling_policy,
        **{name: value for name, value in options.items() if name in _SCHEDULER_OPTIONS},
    }
    cache_arguments = {
        "block_size": config.block_size,
        "gpu_memory_utilization": 1.0,
        "swap_space": 0,
        "cache_dtype": "auto",
        "sliding_window": config.sliding_window,
        "enable_prefix_caching": config.enable_prefix_caching,
    }
    with v0_selected():
        try:
            scheduler_config = release.scheduler_config(**accepted(release.scheduler_config, scheduler_arguments))
            cache_config = release.cache_config(**accepted(release.cache_config, cache_arguments))
        except (ValueError, NotImplementedError) as error:
            raise ConfigRefused(str(error)) from error
        cache_config.num_gpu_blocks = config.num_blocks
        cache_config.num_cpu_blocks = config.num_swap_blocks
        scheduler = release.scheduler(scheduler_config, cache_config, None)
    if config.watermark:
        scheduler.block_manager = type(scheduler.block_manager)(
            block_size=config.block_size,
            num_gpu_blocks=config.num_blocks,
            num_cpu_blocks=config.num_swap_blocks,
            watermark=config.watermark,
            sliding_window=config.sliding_window,
            enable_caching=config.enable_prefix_caching,
        )
    if options.get(_NULL_BLOCK_OPTION, False) and config.sliding_window is not None and manager == "v2":
        scheduler.block_manager.block_allocator.allocate_or_get_null_block()
    return scheduler
