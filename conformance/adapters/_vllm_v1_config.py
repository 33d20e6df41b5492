"""From an `EngineConfig` to a vLLM V1 scheduler, by way of the engine's own configuration and start-up plan."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

from conformance.adapters import _vllm_v1_connector
from conformance.adapters._vllm_v1_connector import CONNECTOR, TransferSettings
from conformance.adapters._vllm_v1_early import WITHOUT_A_MODEL, EarlyScheduler
from conformance.adapters._vllm_v1_options import SCHEDULER_FIELDS, is_async, is_eagle, model_runner_of, transfers_of
from conformance.adapters._vllm_v1_release import Release, accepted, model_folder, takes
from conformance.protocol import ConfigRefused, EngineConfig, KVCacheGroup

LORAS_MAX = 16
"""Adapters that may run in one batch; more than a workload has, so that it is no limit of its own."""
_LAYOUT = "LBNHC"
"""How layers, blocks, tokens, heads lie in memory: resolved by the attention backends, of which there are none."""


class Setup(NamedTuple):
    """A scheduler and what goes with it."""

    scheduler: Any
    hasher: Any
    """Hashes a request's blocks; None without a prefix cache."""
    windows: tuple[int | None, ...]
    """The sliding window of each KV-cache group, in the order of the configuration."""
    sizes: tuple[int, ...]
    """Tokens of a block of each."""
    order: tuple[int, ...]
    """Where the engine has put each of them among its own groups."""


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    """The configuration objects look at the environment, while they are built and later."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@functools.cache
def _model_config(release: Release) -> Any:
    folder = str(model_folder())
    arguments = {
        "model": folder,
        "tokenizer": folder,
        "tokenizer_mode": "auto",
        "trust_remote_code": False,
        "seed": 0,
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "max_model_len": 1 << 16,
        "enforce_eager": True,
    }
    if takes(release.model_config, "task") and release.is_early:
        arguments["task"] = "generate"
    return release.model_config(**accepted(release.model_config, arguments))


def _vllm_config(release: Release, config: EngineConfig) -> Any:
    """A `VllmConfig` as the engine makes it from its arguments. Raises ValueError where vLLM objects."""
    asynchronous = is_async(release, config)
    model = copy.copy(_model_config(release))
    model.max_model_len = config.max_model_len
    stages = config.pipeline_depth - 1 if asynchronous else config.pipeline_depth
    options = config.engine_options
    scheduler_arguments = {
        "runner_type": "generate",
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "max_num_seqs": config.max_num_seqs,
        "max_model_len": config.max_model_len,
        "is_encoder_decoder": False,
        "enable_chunked_prefill": config.enable_chunked_prefill,
        "policy": config.scheduling_policy,
        "watermark": config.watermark,
        "async_scheduling": asynchronous,
        **{name: options[name] for name in SCHEDULER_FIELDS if options.get(name)},
    }
    if "scheduler_reserve_full_isl" in options:
        scheduler_arguments["scheduler_reserve_full_isl"] = bool(options["scheduler_reserve_full_isl"])
    cache_arguments = {
        "block_size": config.block_size,
        "gpu_memory_utilization": 0.9,
        "swap_space": 0,
        "cache_dtype": "auto",
        "enable_prefix_caching": config.enable_prefix_caching,
        "sliding_window": config.sliding_window,
    }
    if any(group.state for group in config.kv_cache_groups):
        cache_arguments["mamba_cache_mode"] = _state_mode(config)
    if options.get("prefix_match_unit") and config.kv_cache_groups:
        cache_arguments["prefix_match_unit"] = options["prefix_match_unit"]
    scheduler_config = release.scheduler_config(**accepted(release.scheduler_config, scheduler_arguments))
    # Releases that made their engine choose for itself keep the choice under this name.
    if hasattr(scheduler_config, "chunked_prefill_enabled"):
        scheduler_config.chunked_prefill_enabled = config.enable_chunked_prefill
    cache_config = release.cache_config(**accepted(release.cache_config, cache_arguments))
    cache_config.num_gpu_blocks = config.num_blocks
    if hasattr(cache_config, "kv_cache_layout"):
        cache_config.kv_cache_layout = _LAYOUT
    transfers = transfers_of(config)
    lora = release.lora_config(max_loras=LORAS_MAX, max_cpu_loras=LORAS_MAX)
    built = release.vllm_config(
        model_config=model,
        scheduler_config=scheduler_config,
        cache_config=cache_config,
        parallel_config=release.parallel_config(pipeline_parallel_size=stages),
        device_config=release.device_config(device="cpu"),
        lora_config=lora,
        speculative_config=_speculative_config(release, config, model),
        kv_transfer_config=None if transfers is None else _kv_transfer_config(release, config, transfers),
    )
    if built.scheduler_config.enable_chunked_prefill != config.enable_chunked_prefill:
        raise ConfigRefused(f"enable_chunked_prefill = {config.enable_chunked_prefill}: the engine overrides it")
    return built


def _kv_transfer_config(release: Release, config: EngineConfig, transfers: TransferSettings) -> Any:
    arguments = {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": _vllm_v1_connector.__name__,
        "kv_connector_extra_config": transfers._asdict(),
        "kv_role": config.engine_options.get("kv_role", "kv_both"),
        "kv_load_failure_policy": config.engine_options.get("kv_load_failure_policy", "recompute"),
    }
    return release.kv_transfer_config(**accepted(release.kv_transfer_config, arguments))


def _speculative_config(release: Release, config: EngineConfig, model: Any) -> Any:
    """None without drafts. An ngram proposer needs no draft model; an EAGLE one, which does, differs by its name."""
    if not config.num_speculative_tokens:
        return None
    arguments = {
        "method": "ngram",
        "model": "ngram",
        "num_speculative_tokens": config.num_speculative_tokens,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 1,
        "target_model_config": model,
        "target_parallel_config": release.parallel_config(),
    }
    speculative = release.speculative_config(**accepted(release.speculative_config, arguments))
    if is_eagle(config):
        speculative.method = "eagle"
    return speculative


def _groups_of(config: EngineConfig) -> tuple[KVCacheGroup, ...]:
    return config.kv_cache_groups or (KVCacheGroup("all", config.block_size, config.sliding_window),)


def _state_mode(config: EngineConfig) -> str:
    """How states are kept: one for the whole sequence, or, with a prefix cache, those at the ends of blocks as well."""
    return "align" if config.enable_prefix_caching else "none"


def _layer_specs(release: Release, config: EngineConfig) -> dict[str, Any]:
    """A layer's KV-cache specification for each group, as an attention module would hand it over.

    Blocks of all groups take the same memory, as in hybrid models: heads are the wider, the fewer tokens a block has.
    """
    groups = _groups_of(config)
    page = math.lcm(*[group.block_size for group in groups])
    layers = {}
    for group in groups:
        shape = {
            "block_size": group.block_size,
            "num_kv_heads": 1,
            "head_size": page // group.block_size,
            "dtype": release.dtype,
            "use_mla": False,
            "sliding_window": group.sliding_window,
        }
        if group.state:
            shape = {
                "block_size": group.block_size,
                "shapes": ((2 * page,),),
                "dtypes": (release.dtype,),
                "mamba_cache_mode": _state_mode(config),
            }
            layers[group.name] = release.specs.MambaSpec(**accepted(release.specs.MambaSpec, shape))
            continue
        spec = release.specs.FullAttentionSpec if group.sliding_window is None else release.specs.SlidingWindowSpec
        layers[group.name] = spec(**accepted(spec, shape))
    return layers


def _kv_cache_config(release: Release, vllm_config: Any, config: EngineConfig) -> Any:
    """The engine's own start-up plan for a device with room for ``num_blocks``, its check of capacity included."""
    layers = _layer_specs(release, config)
    memory = config.num_blocks * next(iter(layers.values())).page_size_bytes
    planning = release.planning
    if not hasattr(planning, "get_kv_cache_configs"):
        return planning.get_kv_cache_config(vllm_config, layers, memory)
    more = []
    if takes(planning.get_kv_cache_configs, "global_kv_cache_groups"):
        more.append(planning.get_global_kv_cache_groups(vllm_config, [layers]))
    configs = planning.get_kv_cache_configs(vllm_config, [layers], [memory], *more)
    return release.utils.generate_scheduler_kv_cache_config(configs)


def build(release: Release, config: EngineConfig) -> Setup:
    """A scheduler as the engine core builds it. Raises `ConfigRefused` with vLLM's words where it refuses."""
    runner = model_runner_of(release, config)
    with _environment(VLLM_USE_V1="1", VLLM_USE_V2_MODEL_RUNNER="1" if runner == "v2" else "0"):
        try:
            vllm_config = _vllm_config(release, config)
            kv_cache_config = _kv_cache_config(release, vllm_config, config)
        except release.refusals as error:
            raise ConfigRefused(str(error)) from error
        if kv_cache_config.num_blocks != config.num_blocks:
            raise ConfigRefused(f"num_blocks = {config.num_blocks}: the engine makes it {kv_cache_config.num_blocks}")
        order = _order(kv_cache_config, config)
        block_size = hash_block_size = config.block_size
        if hasattr(release.utils, "resolve_kv_cache_block_sizes"):
            try:
                block_size, hash_block_size = release.utils.resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
            except release.refusals as error:
                raise ConfigRefused(str(error)) from error
        scheduler_class = release.async_scheduler if is_async(release, config) else release.scheduler
        arguments = {
            "vllm_config": vllm_config,
            "kv_cache_config": kv_cache_config,
            "structured_output_manager": None if release.is_early else release.structured_output_manager(vllm_config),
            "block_size": block_size,
            "hash_block_size": hash_block_size,
            "log_stats": True,
        }
        if release.is_early:
            arguments |= WITHOUT_A_MODEL
        try:
            scheduler = scheduler_class(**accepted(release.scheduler.__init__, arguments))
        except AssertionError as error:
            raise ConfigRefused(str(error) or "the scheduler asserts otherwise") from error
    if release.is_early:
        scheduler = EarlyScheduler(scheduler)
    if config.encoder_cache_size:
        scheduler.encoder_cache_manager = type(scheduler.encoder_cache_manager)(config.encoder_cache_size)
        scheduler.max_num_encoder_input_tokens = config.encoder_cache_size
    hasher = _block_hasher(release, vllm_config, hash_block_size) if config.enable_prefix_caching else None
    groups = _groups_of(config)
    # Of recurrent state, the block of the position before the step is all that is read.
    windows = [2 if group.state else group.sliding_window for group in groups]
    sizes = [group.block_size for group in groups]
    return Setup(scheduler, hasher, tuple(windows), tuple(sizes), order)


def _order(kv_cache_config: Any, config: EngineConfig) -> tuple[int, ...]:
    """Where each group of ours is among the engine's. Raises `ConfigRefused` when the engine makes others of them."""
    theirs = kv_cache_config.kv_cache_groups
    places = {name: index for index, group in enumerate(theirs) for name in group.layer_names}
    groups = _groups_of(config)
    order = tuple(places[group.name] for group in groups)
    sizes = [theirs[place].kv_cache_spec.block_size for place in order]
    if sorted(order) != list(range(len(theirs))) or sizes != [group.block_size for group in groups]:
        raise ConfigRefused(
            f"kv_cache_groups: the engine makes {len(theirs)} groups of these {len(groups)}, "
            f"of blocks of {sizes} tokens"
        )
    return order


def _block_hasher(release: Release, vllm_config: Any, hash_block_size: int) -> Any:
    """None where the scheduler hashes by itself, with Python's own ``hash``."""
    if not hasattr(release.utils, "get_request_block_hasher"):
        return None
    hash_function = release.hash_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
    with _environment(PYTHONHASHSEED="0"):
        release.utils.init_none_hash(hash_function)
    lookahead = getattr(vllm_config, "num_hash_lookahead_tokens", 0)
    more = [lookahead] if lookahead else []
    return release.utils.get_request_block_hasher(hash_block_size, hash_function, *more)
