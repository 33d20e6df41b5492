"""What sglang's scheduler is built with, what it refuses, and what it declares."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import msgspec

from conformance.adapters._sglang_engine import importing_late, modules
from conformance.protocol import Capabilities, ConfigRefused, EngineConfig, Feature, OptionValue

PAGES_RESERVED = 1
"""Page 0 takes the outputs of padding."""
_SEQUENCE_MARGIN = 2
"""Sequences end so many tokens before the context, or the pool, would."""
_PROMPT_MARGIN = 6
"""Prompts are shorter than context and pool by more than this."""
_LEAST = _PROMPT_MARGIN + 1
"""Tokens of the smallest context that takes a prompt."""
_FEATURES: frozenset[Feature] = frozenset(
    {
        "abort",
        "chunked_prefill",
        "identity",
        "length_limit",
        "pipeline",
        "prefix_caching",
        "priority",
        "recompute",
        "reset_prefix_cache",
        "snapshot",
        "stop_token",
        "token_budget",
        "usage",
    }
)
_DEPTH_MAX = 2
_OPTIONS = {
    "conservativeness": "Share of max_tokens that admission counts with, as a factor of sglang's own (1.0).",
    "eviction": "Which prefix is evicted first: lru (default) or lfu.",
    "mixed_chunk": "Whether decodes run along with chunks of a prefill (false); needs enable_chunked_prefill.",
    "policy": "Order of the queue: fcfs (default), lpm, lof or dfs-weight; only fcfs keeps the order of arrival.",
    "priority_threshold": "A request is preempted for one more urgent by more than this (10).",
    "request_ids": "Whose ids requests bear: server (of one length, the default) or client (as they come).",
}
_SWARM_OPTIONS: dict[str, tuple[OptionValue, ...]] = {
    "conservativeness": (1.0, 0.3, 0.0),
    "eviction": ("lru", "lfu"),
    "mixed_chunk": (False, True),
    "priority_threshold": (0, 1, 10),
}


def arguments_of(config: EngineConfig) -> Any:
    """`ServerArgs` for ``config``, with sglang's defaults elsewhere.

    Raises `ConfigRefused` for what sglang's configuration refuses (in its words) and for what it does not have.
    """
    options = config.engine_options
    unknown = sorted(set(options) - set(_OPTIONS))
    if unknown:
        raise ConfigRefused(f"engine_options {', '.join(unknown)}: not known; taken are {', '.join(_OPTIONS)}")
    _check_choice(options, "eviction", ("lru", "lfu"))
    _check_choice(options, "policy", ("fcfs", "lpm", "lof", "dfs-weight"))
    _check_choice(options, "request_ids", ("server", "client"))
    missing: list[str] = sorted(config.features_needed() - _FEATURES)
    if config.kv_cache_groups:
        missing.append("kv_cache_groups")
    if missing:
        raise ConfigRefused(f"sglang {modules().version} does not have: {', '.join(missing)}")
    _check_sizes(config)
    args = _defaults()
    settings = {
        "attention_backend": "torch_native",
        "chunked_prefill_size": config.max_num_batched_tokens if config.enable_chunked_prefill else -1,
        "context_length": config.max_model_len,
        "device": "cpu",
        "disable_overlap_schedule": config.pipeline_depth == 1,
        "disable_radix_cache": not config.enable_prefix_caching,
        "enable_mixed_chunk": bool(options.get("mixed_chunk", False)),
        "enable_priority_scheduling": config.scheduling_policy == "priority",
        "max_prefill_tokens": config.max_num_batched_tokens,
        "max_running_requests": config.max_num_seqs,
        "max_total_tokens": (config.num_blocks - PAGES_RESERVED) * config.block_size,
        "model_path": "none",
        "page_size": config.block_size,
        "priority_scheduling_preemption_threshold": _number(options, "priority_threshold", 10),
        "radix_eviction_policy": options.get("eviction", "lru"),
        "random_seed": 0,
        "schedule_conservativeness": float(_number(options, "conservativeness", 1.0)),
        "schedule_low_priority_values_first": True,
        "schedule_policy": options.get("policy", "fcfs"),
        "served_model_name": "none",
        "skip_tokenizer_init": True,
    }
    for name, value in settings.items():
        setattr(args, name, value)
    try:
        with importing_late():
            args.check_server_args()
    except AssertionError as refusal:
        whole_pages = -(-config.max_num_batched_tokens // config.block_size) * config.block_size
        nearest = msgspec.structs.replace(config, max_num_batched_tokens=whole_pages)
        raise ConfigRefused(str(refusal), nearest) from refusal
    return args


def _defaults() -> Any:
    """`ServerArgs` as its fields say, without looking at the machine and for a model, as its constructor does."""
    kind: Any = modules().server_args.ServerArgs
    if not dataclasses.is_dataclass(kind):
        return kind(model_path="none")  # it looks at them later, and at nothing for no model
    args: Any = object.__new__(modules().server_args.ServerArgs)
    for field in dataclasses.fields(kind):
        if field.default is not dataclasses.MISSING:
            setattr(args, field.name, field.default)
        elif field.default_factory is not dataclasses.MISSING:
            setattr(args, field.name, field.default_factory())
    return args


def _check_sizes(config: EngineConfig) -> None:
    if config.pipeline_depth > _DEPTH_MAX:
        raise ConfigRefused(f"pipeline_depth = {config.pipeline_depth}: the overlap scheduler is one step ahead")
    fitting = _fitting(config)
    if fitting.num_blocks > config.num_blocks or fitting.max_model_len > config.max_model_len:
        raise ConfigRefused(f"Memory pool size is too small: context and pool are to hold {_LEAST} tokens", fitting)
    if fitting != config:
        raise ConfigRefused(
            f"max_model_len = {config.max_model_len}: max_tokens are cut down so that the pool has a page to spare",
            fitting,
        )
    decoded, prompt = config.max_num_seqs, 0 if config.enable_chunked_prefill else config.max_model_len
    if config.max_num_batched_tokens < max(decoded, prompt):
        raise ConfigRefused(
            f"max_num_batched_tokens = {config.max_num_batched_tokens}: it bounds prefills only; a decode step runs up "
            f"to {decoded} tokens, and a prompt that is not chunked is run whole",
            msgspec.structs.replace(config, max_num_batched_tokens=max(decoded, prompt)),
        )


def _fitting(config: EngineConfig) -> EngineConfig:
    """The nearest configuration whose context holds a prompt, and whose pool holds sequences that long.

    Some releases cut max_tokens down to what the pool leaves beside the prompt's pages, one more page and a token.
    With pages of one token that is where a sequence ends anyway; else it depends on the prompt, and so the context is
    to end before.
    """
    size = config.block_size
    clipped = modules().clips_to_pool and size > 1
    spared = 2 * size - _SEQUENCE_MARGIN if clipped else 0
    pages = max(config.num_blocks, PAGES_RESERVED + -(-(_LEAST + spared) // size))
    context = max(config.max_model_len, _LEAST)
    if clipped:
        context = min(context, (pages - PAGES_RESERVED) * size - spared)
    return msgspec.structs.replace(config, max_model_len=context, num_blocks=pages)


def _number(options: Mapping[str, OptionValue], name: str, default: float) -> float:
    value = options.get(name, default)
    if not isinstance(value, int | float) or value < 0:
        raise ConfigRefused(f"engine_options {name} = {value!r}: a number of at least 0")
    return value


def _check_choice(options: Mapping[str, OptionValue], name: str, choices: tuple[str, ...]) -> None:
    if options.get(name, choices[0]) not in choices:
        raise ConfigRefused(f"engine_options {name} = {options[name]!r}: one of {', '.join(choices)}")


def capabilities_of(config: EngineConfig) -> Capabilities:
    slots = (config.num_blocks - PAGES_RESERVED) * config.block_size
    return Capabilities(
        engine="sglang",
        version=modules().version,
        features=_FEATURES,
        null_block=0,
        reserved_blocks=PAGES_RESERVED,
        unit="token" if config.block_size == 1 else "page",
        aborted_steps=config.pipeline_depth,
        deferred_free_steps=config.pipeline_depth,
        steps_in_order=True,
        sequence_tokens_max=min(config.max_model_len, slots) - _SEQUENCE_MARGIN,
        merges_equal_blocks=True,
        chunks_whole_blocks=True,
        preempts_for_priority=True,
        options=_OPTIONS,
        swarm_options=_SWARM_OPTIONS,
        reimplements=(
            "Takes the turns of the event loops, normal and overlapped.",
            "Works out the limits of lengths and sizes the pools as the model worker does.",
            *(["Allocates the slots of pages in Python in place of two GPU kernels."] if modules().has_kernels else []),
            "Stands in for models, kernels, process groups, sockets and watchdogs: it is one rank, on the CPU.",
            "Leaves out what the tokenizer manager would refuse before the scheduler sees it.",
        ),
    )
