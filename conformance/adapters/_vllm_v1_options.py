"""What the installed vLLM V1 can be asked to do: the adapter's options, what it declares, what is refused."""

from __future__ import annotations

import functools
import math

from conformance.adapters._vllm_v1_connector import TransferSettings
from conformance.adapters._vllm_v1_faults import has_window, known_faults
from conformance.adapters._vllm_v1_release import Release, takes
from conformance.protocol import Capabilities, ConfigRefused, EngineConfig, Feature, OptionValue

_RUNNERS = ("v1", "v2")
_DEPTH_MAX = 3
"""Batches under way of an asynchronous scheduler with two pipeline stages."""
_METHODS = ("ngram", "eagle")
_CHOICES: dict[str, tuple[str, ...]] = {
    "model_runner": _RUNNERS,
    "speculative_method": _METHODS,
    "pause": ("none", "new", "all"),
    "streaming_input": ("none", "queued", "late"),
    "kv_connector": ("none", "sync", "async"),
    "kv_role": ("kv_both", "kv_consumer", "kv_producer"),
    "kv_load_failure_policy": ("recompute", "fail"),
}
"""Options that are one of a few words."""

_OPTIONS = {
    "async_scheduling": "Schedule ahead of the tokens (true), the default with pipeline_depth > 1 where the release "
    "defaults to it, or treat the pipeline as that of pipeline parallelism (false).",
    "model_runner": "The model runner that the scheduler writes for: v1 or v2 (default, where there is one).",
    "long_prefill_token_threshold": "Most prefill tokens of one request in a step, when not alone; 0: no limit.",
    "scheduler_reserve_full_isl": "Admit a request only when its whole prompt fits the pool (true, the engine's "
    "default), or when its first chunk does (false).",
    "max_num_active_seqs": "Requests admitted to the running set, when fewer than max_num_seqs; 0: as many.",
    "prefill_schedule_interval": "Steps from one prefill to the next while somebody decodes (default 1).",
    "max_num_queued_reqs": "Requests the engine's front takes at a time, running ones included; further ones are "
    "refused (default: no limit).",
    "max_num_queued_tokens": "Prompt tokens of requests without a first token from which on its front refuses further "
    "ones (default: no limit).",
    "long_prefill_token_threshold_adaptive": "The threshold is at least a fair share of the budget (default false).",
    "pause": "Every 8 steps, 3 are paused: new (nobody is admitted), or all (nobody runs); none is the default.",
    "prefix_match_unit": "With KV-cache groups, tokens for each of which a prefix is hashed; 0 (default): as many as "
    "divide every group's blocks. Hits inside a block need a group of recurrent state.",
    "speculative_method": "How drafts are proposed, with num_speculative_tokens: ngram (default), or eagle, whose "
    "draft model writes KV of its own ahead of the drafts and makes the engine drop or prove the end of a hit.",
    "streaming_input": "Requests whose prompt comes in parts: not taken (none, default), all parts sent at once "
    "(queued), or each a few steps after the answer to the one before (late).",
    "kv_connector": "Where KV of prompts is loaded from: none (default), or a connector of ours whose loads are there "
    "in time (sync) or in a later step (async).",
    "kv_role": "Whether the connector loads (kv_consumer), sends (kv_producer) or both (kv_both, default).",
    "kv_load_steps": "Steps that a load of an async connector takes beyond its first: up to so many (default 0).",
    "kv_load_failures": "Every load of this number fails, wholly or in part; 0 (default): none.",
    "known_faults": "Allow combinations of options that no release gets right, each with a trace in the corpus "
    "(false, default: they are refused).",
    "kv_load_failure_policy": "What becomes of whoever needs KV that did not come: recompute (default) or fail.",
    "kv_send_steps": "Steps for which the connector keeps the blocks of a finished request; 0 (default): none.",
    "reset_running_requests": "reset_prefix_cache preempts whoever runs (true) or is refused (false, default).",
}
"""Each is taken where the release has the setting it stands for."""
SCHEDULER_FIELDS = (
    "long_prefill_token_threshold",
    "long_prefill_token_threshold_adaptive",
    "max_num_queued_reqs",
    "max_num_queued_tokens",
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
    "Is the KV connector and its workers: what is loaded, how late, what fails and what is sent is drawn by request.",
    "Has both model runners forget tokens that follow a failed load, which that of v2 does not (vLLM issue 49250).",
    "Keeps recurrent state as model runners do in cache mode align: the last state is carried on from block to block.",
    "Sends the parts of a prompt that comes in parts, as the engine's front does for its client.",
    "Pauses, and counts for the limits of the queue, in place of the engine's front.",
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
    if takes(release.request, "resumable"):
        there.add("streaming_input")
    if hasattr(release.scheduler, "set_pause_state"):
        there.add("pause")
    if takes(release.scheduler.reset_prefix_cache, "reset_running_requests"):
        there.add("reset_running_requests")
    if release.kv_connector_output is not None:
        there |= {"kv_connector", "kv_role", "kv_load_steps", "kv_send_steps", "known_faults"}
    if release.kv_connector_output is not None and takes(release.kv_connector_output, "invalid_block_ids"):
        there.add("kv_load_failures")
    if takes(release.kv_transfer_config, "kv_load_failure_policy"):
        there.add("kv_load_failure_policy")
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


def transfers_of(config: EngineConfig) -> TransferSettings | None:
    """How the connector's loads and sends go; None without one."""
    options = config.engine_options
    kind = options.get("kv_connector", "none")
    if kind == "none":
        return None
    role = options.get("kv_role", "kv_both")
    groups = config.kv_cache_groups
    return TransferSettings(
        late=kind == "async",
        loads=role != "kv_producer",
        unit=math.lcm(*[group.block_size for group in groups]) if groups else config.block_size,
        load_steps_max=int(options.get("kv_load_steps", 0)),
        failing=int(options.get("kv_load_failures", 0)),
        by_request=len(groups) > 1,
        whole=not any(group.state for group in groups)
        and (not has_window(config) or bool(options.get("known_faults"))),
        send_steps=0 if role == "kv_consumer" else int(options.get("kv_send_steps", 0)),
    )


def _deferred_free_steps(config: EngineConfig) -> int:
    """Commits, two for each empty step, for which loads, sends and steps in flight may keep blocks of the dead."""
    transfers = transfers_of(config)
    if transfers is None:
        return 0
    return 2 * (config.pipeline_depth + max(transfers.load_steps_max, transfers.send_steps) + 1)


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
        "length_limit",
        "prefix_caching",
        "recompute",
        "snapshot",
        "stop_token",
        "token_budget",
        "usage",
    }
    if takes(release.request, "cache_salt"):
        features.add("identity")
    if takes(release.request, "priority"):
        features.add("priority")
    if not release.is_early:  # of which what is plain is driven
        features |= {"kv_cache_groups", "pipeline", "sliding_window", "speculation"}
    if release.mm_feature is not None and takes(release.request, "mm_features"):
        features.add("encoder_cache")
    if hasattr(release.specs, "MambaSpec") and takes(release.specs.MambaSpec, "mamba_cache_mode"):
        features.add("state_groups")
    if takes(release.scheduler_config, "watermark"):
        features.add("watermark")
    if transfers_of(config) is not None:
        features.add("kv_connector")
    if config.enable_prefix_caching:
        features.add("reset_prefix_cache")
    if config.engine_options.get("streaming_input", "none") != "none":
        features.add("streaming_input")
    return frozenset(features)


def _limit(config: EngineConfig, name: str) -> int | None:
    value = config.engine_options.get(name)
    return int(value) if value else None


def capabilities_of(release: Release, config: EngineConfig) -> Capabilities:
    """What the release declares under this configuration."""
    options = _option_names(release)
    swarm: dict[str, tuple[OptionValue, ...]] = {
        "async_scheduling": (True, False),
        "model_runner": _RUNNERS,
        "long_prefill_token_threshold": (1, 3, 8),
        "scheduler_reserve_full_isl": (True, False),
        "max_num_active_seqs": (1, 2),
        "max_num_queued_reqs": (0, 0, 0, 4, 8),
        "max_num_queued_tokens": (0, 0, 0, 8, 16),
        "long_prefill_token_threshold_adaptive": (True, False),
        "pause": ("none", "none", "new", "all"),
        "prefix_match_unit": (1, 2),
        "prefill_schedule_interval": (2, 3),
        "speculative_method": _METHODS,
        "reset_running_requests": (True, False),
        "streaming_input": ("none", "queued", "late"),
        "kv_connector": ("none", "none", "sync", "async"),
        "kv_role": _CHOICES["kv_role"],
        "kv_load_steps": (0, 1, 3),
        "kv_load_failures": (2, 3),
        "kv_load_failure_policy": _CHOICES["kv_load_failure_policy"],
        "kv_send_steps": (0, 1, 3),
    }
    variant = "async" if is_async(release, config) else "pipeline parallel" if config.pipeline_depth > 1 else "sync"
    runner = f", model runner {model_runner_of(release, config)}" if release.has_model_runner_v2 else ""
    active = int(config.engine_options.get("max_num_active_seqs", 0))
    return Capabilities(
        engine=f"vllm-v1 ({variant}{runner}{', known faults' if config.engine_options.get('known_faults') else ''})",
        version=release.version,
        features=_features(release, config),
        null_block=0,
        reserved_blocks=1,
        steps_in_order=True,
        copies_cached_states=config.enable_prefix_caching and not config.engine_options.get("known_faults"),
        deferred_free_steps=_deferred_free_steps(config),
        load_failures="fail" if config.engine_options.get("kv_load_failure_policy") == "fail" else "recompute",
        lookahead_tokens=config.num_speculative_tokens if is_eagle(config) else 0,
        preallocated_blocks=-(-_drafts_ahead(config) // config.block_size),
        running_max=active or None,
        queue_max=_limit(config, "max_num_queued_reqs"),
        queue_tokens_max=_limit(config, "max_num_queued_tokens"),
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
    for name, choices in _CHOICES.items():
        if name in options and options[name] not in choices:
            raise ConfigRefused(f"engine_options {name} = {options[name]!r}: taken are {', '.join(choices)}")
    transfers = transfers_of(config)
    if not options.get("known_faults"):
        for fault in known_faults(release, config, transfers):
            raise ConfigRefused(f"{fault}: the engine is known to break with it; taken with known_faults = true")
    if any(group.state for group in config.kv_cache_groups):
        _check_states(config, transfers)
    if transfers is not None:
        _check_transfers(release, config, transfers)
    if config.num_speculative_tokens and config.pipeline_depth > 1 and not is_async(release, config):
        raise ConfigRefused(
            f"num_speculative_tokens with pipeline_depth = {config.pipeline_depth}: the adapter drives drafts in "
            "synchronous and in asynchronous steps, not in those of pipeline parallelism"
        )
    if is_async(release, config):
        _check_async(release, config)


def _check_states(config: EngineConfig, transfers: TransferSettings | None) -> None:
    """What groups of recurrent state are not driven with, and how large their blocks are."""
    if config.num_speculative_tokens:
        raise ConfigRefused("kv_cache_groups of recurrent state: not driven with drafts")
    if transfers is not None and config.pipeline_depth > 1 and config.engine_options.get("prefix_match_unit"):
        raise ConfigRefused(
            "kv_cache_groups of recurrent state: not driven with a connector, prefix_match_unit and steps in flight, "
            "until whose end the engine keeps the blocks of a copy apart from its tables"
        )
    sizes = {group.block_size for group in config.kv_cache_groups if group.state}
    if config.enable_prefix_caching and sizes != {config.block_size}:
        raise ConfigRefused("kv_cache_groups: with a prefix cache, blocks of recurrent state are of block_size tokens")
    if not config.enable_prefix_caching and min(sizes) < config.max_model_len:
        raise ConfigRefused("kv_cache_groups: without a prefix cache a block of recurrent state is for max_model_len")


def _check_transfers(release: Release, config: EngineConfig, transfers: TransferSettings) -> None:
    """What a connector cannot be combined with."""
    if config.kv_cache_groups and transfers.failing and transfers.loads:
        if not takes(release.kv_connector_output, "failed_recving"):
            raise ConfigRefused("kv_load_failures with kv_cache_groups: the release tells failures by block alone")
        if not transfers.late:
            raise ConfigRefused("kv_load_failures with kv_cache_groups: the engine takes them of async loads alone")
    if transfers.late and transfers.loads and config.engine_options.get("reset_running_requests"):
        raise ConfigRefused("reset_running_requests with async loads: not supported yet, says the engine")


def _check_async(release: Release, config: EngineConfig) -> None:
    """The depths at which the engine core runs an asynchronous scheduler: one batch more than pipeline stages."""
    most = _DEPTH_MAX if release.has_model_runner_v2 and model_runner_of(release, config) == "v2" else 2
    if not 1 < config.pipeline_depth <= most:
        raise ConfigRefused(
            f"async_scheduling with pipeline_depth = {config.pipeline_depth}: the engine core has 2 batches under way"
            + (", or 3 with two pipeline stages" if most == _DEPTH_MAX else "")
        )
