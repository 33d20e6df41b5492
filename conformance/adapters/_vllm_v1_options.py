"""What the installed vLLM V1 can be asked to do: the adapter's options, what it declares, what is refused."""

from __future__ import annotations

import functools

from conformance.adapters._vllm_v1_release import Release, takes
from conformance.protocol import Capabilities, ConfigRefused, EngineConfig, Feature, OptionValue

_RUNNERS = ("v1", "v2")
_DEPTH_MAX = 3
"""Batches under way of an asynchronous scheduler with two pipeline stages."""
_METHODS = ("ngram", "eagle")

_OPTIONS = {
    "async_scheduling": "Schedule ahead of the tokens (true), the default with pipeline_depth > 1 where the release "
    "defaults to it, or treat the pipeline as that of pipeline parallelism (false).",
    "model_runner": "The model runner that the scheduler writes for: v1 or v2 (default, where there is one).",
    "long_prefill_token_threshold": "Most prefill tokens of one request in a step, when not alone; 0: no limit.",
    "scheduler_reserve_full_isl": "Admit a request only when its whole prompt fits the pool (true, the engine's "
    "default), or when its first chunk does (false).",
    "max_num_active_seqs": "Requests admitted to the running set, when fewer than max_num_seqs; 0: as many.",
    "prefill_schedule_interval": "Steps from one prefill to the next while somebody decodes (default 1).",
    "prefix_match_unit": "With KV-cache groups, tokens for each of which a prefix is hashed; 0 (default): as many as "
    "divide every group's blocks. Hits inside a block need recurrent state, of which no group is driven.",
    "speculative_method": "How drafts are proposed, with num_speculative_tokens: ngram (default), or eagle, whose "
    "draft model writes KV of its own ahead of the drafts and makes the engine drop or prove the end of a hit.",
    "reset_running_requests": "reset_prefix_cache preempts whoever runs (true) or is refused (false, default).",
}
"""Each is taken where the release has the setting it stands for."""
SCHEDULER_FIELDS = (
    "long_prefill_token_threshold",
    "scheduler_reserve_full_isl",
    "max_num_active_seqs",
    "prefill_schedule_interval",
)

_REIMPLEMENTS = (
    "Keeps the model runner's input batch: block tables and positions follow from the scheduler's outputs alone.",
    "Names the null block for what lies before the window, which attention never reads, once it is computed.",
    "Plays the engine core's step and its queue of batches: what is scheduled is processed in the same order.",
    "Gives the scheduler an encoder cache and budget of the size asked for, which it would have from its model.",
    "Turns an n-gram proposer into an EAGLE one by the name of its method, for want of a draft model.",
    "Collects the output tokens that the engine core would send to its client.",
)


def _option_names(release: Release) -> dict[str, str]:
    there = {name for name in SCHEDULER_FIELDS if takes(release.scheduler_config, name)}
    if release.async_scheduler is not None and takes(release.scheduler_config, "async_scheduling"):
        there.add("async_scheduling")
    there.add("speculative_method")
    if takes(release.cache_config, "prefix_match_unit"):
        there.add("prefix_match_unit")
    if release.has_model_runner_v2:
        there.add("model_runner")
    if takes(release.scheduler.reset_prefix_cache, "reset_running_requests"):
        there.add("reset_running_requests")
    return {name: text for name, text in _OPTIONS.items() if name in there}


def is_async(release: Release, config: EngineConfig) -> bool:
    """Whether `AsyncScheduler` is to be driven."""
    asked = config.engine_options.get("async_scheduling")
    if asked is not None:
        return bool(asked)
    return config.pipeline_depth > 1 and _defaults_to_async(release)


@functools.cache
def _defaults_to_async(release: Release) -> bool:
    """Whether the release decides for itself and so schedules asynchronously wherever it can."""
    fields = release.scheduler_config.__dataclass_fields__
    return (
        release.async_scheduler is not None
        and "async_scheduling" in fields
        and fields["async_scheduling"].default is None
    )


def is_eagle(config: EngineConfig) -> bool:
    """Whether drafts come from a draft model with KV of its own."""
    return config.engine_options.get("speculative_method") == "eagle"


def _drafts_ahead(config: EngineConfig) -> int:
    """Tokens for which a table may have room beyond those that are known: drafts that are rejected leave it behind."""
    drafts = config.num_speculative_tokens
    return drafts * (config.pipeline_depth - 1 + is_eagle(config))


def model_runner_of(release: Release, config: EngineConfig) -> str:
    """``"v1"`` or ``"v2"``."""
    default = "v2" if release.has_model_runner_v2 else "v1"
    return str(config.engine_options.get("model_runner", default))


def _features(release: Release, config: EngineConfig) -> frozenset[Feature]:
    features: set[Feature] = {
        "abort",
        "chunked_prefill",
        "identity",
        "kv_cache_groups",
        "length_limit",
        "pipeline",
        "prefix_caching",
        "priority",
        "recompute",
        "sliding_window",
        "snapshot",
        "speculation",
        "stop_token",
        "token_budget",
        "usage",
    }
    if release.mm_feature is not None and takes(release.request, "mm_features"):
        features.add("encoder_cache")
    if takes(release.scheduler_config, "watermark"):
        features.add("watermark")
    if config.enable_prefix_caching:
        features.add("reset_prefix_cache")
    return frozenset(features)


def capabilities_of(release: Release, config: EngineConfig) -> Capabilities:
    """What the release declares under this configuration."""
    options = _option_names(release)
    swarm: dict[str, tuple[OptionValue, ...]] = {
        "async_scheduling": (True, False),
        "model_runner": _RUNNERS,
        "long_prefill_token_threshold": (1, 3, 8),
        "scheduler_reserve_full_isl": (True, False),
        "max_num_active_seqs": (1, 2),
        "prefill_schedule_interval": (2, 3),
        "speculative_method": _METHODS,
        "reset_running_requests": (True, False),
    }
    variant = "async" if is_async(release, config) else "pipeline parallel" if config.pipeline_depth > 1 else "sync"
    runner = f", model runner {model_runner_of(release, config)}" if release.has_model_runner_v2 else ""
    active = int(config.engine_options.get("max_num_active_seqs", 0))
    return Capabilities(
        engine=f"vllm-v1 ({variant}{runner})",
        version=release.version,
        features=_features(release, config),
        null_block=0,
        reserved_blocks=1,
        steps_in_order=True,
        lookahead_tokens=config.num_speculative_tokens if is_eagle(config) else 0,
        preallocated_blocks=-(-_drafts_ahead(config) // config.block_size),
        running_max=active or None,
        prefill_interval=int(config.engine_options.get("prefill_schedule_interval", 1)),
        reset_with_live="preempts" if config.engine_options.get("reset_running_requests", False) else "refused",
        options=options,
        swarm_options={name: values for name, values in swarm.items() if name in options},
        reimplements=_REIMPLEMENTS,
    )


def check(release: Release, config: EngineConfig, capabilities: Capabilities) -> None:
    """Raise `ConfigRefused` for what this release does not have, options it does not know included."""
    options = config.engine_options
    unknown = sorted(set(options) - set(capabilities.options))
    if unknown:
        raise ConfigRefused(
            f"engine_options {', '.join(unknown)}: not known; taken are {', '.join(capabilities.options)}"
        )
    missing = sorted(config.features_needed() - capabilities.features)
    if missing:
        raise ConfigRefused(f"{capabilities.engine} {capabilities.version} does not have: {', '.join(missing)}")
    if options.get("model_runner", "v1") not in _RUNNERS:
        raise ConfigRefused(
            f"engine_options model_runner = {options['model_runner']!r}: taken are {', '.join(_RUNNERS)}"
        )
    if options.get("speculative_method", "ngram") not in _METHODS:
        raise ConfigRefused(
            f"engine_options speculative_method = {options['speculative_method']!r}: taken are {', '.join(_METHODS)}"
        )
    if config.num_speculative_tokens and config.pipeline_depth > 1 and not is_async(release, config):
        raise ConfigRefused(
            f"num_speculative_tokens with pipeline_depth = {config.pipeline_depth}: the adapter drives drafts in "
            "synchronous and in asynchronous steps, not in those of pipeline parallelism"
        )
    if is_async(release, config):
        _check_async(release, config)


def _check_async(release: Release, config: EngineConfig) -> None:
    """The depths at which the engine core runs an asynchronous scheduler: one batch more than pipeline stages."""
    most = _DEPTH_MAX if release.has_model_runner_v2 and model_runner_of(release, config) == "v2" else 2
    if not 1 < config.pipeline_depth <= most:
        raise ConfigRefused(
            f"async_scheduling with pipeline_depth = {config.pipeline_depth}: the engine core has 2 batches under way"
            + (", or 3 with two pipeline stages" if most == _DEPTH_MAX else "")
        )
