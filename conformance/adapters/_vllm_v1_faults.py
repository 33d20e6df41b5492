"""Combinations of options that the releases known so far break with, always or nearly: refused unless asked for.

Each has a trace in fuzz/corpus/vllm-v1, which asks for it by ``known_faults``. Were they drawn, they would hide what
else is wrong with the features that they combine.
"""

from __future__ import annotations

from collections.abc import Iterator

from conformance.adapters._vllm_v1_connector import TransferSettings
from conformance.adapters._vllm_v1_release import Release
from conformance.protocol import EngineConfig


def has_window(config: EngineConfig) -> bool:
    """Whether some layers see a sliding window."""
    return config.sliding_window is not None or any(group.sliding_window for group in config.kv_cache_groups)


def _takes_answers_back(release: Release) -> bool:
    """Whether the scheduler gives each streamed input its own max_tokens, and forgets steps in flight at its end.

    Read off the names that its code uses: nothing else tells such releases from older ones.
    """
    update, stop = release.scheduler._update_request_as_session, release.scheduler._handle_stopped_request
    return "max_tokens" in update.__code__.co_names and "drop_stale_output" in stop.__code__.co_names


def _is_stateful(config: EngineConfig) -> bool:
    return any(group.state for group in config.kv_cache_groups)


def known_faults(release: Release, config: EngineConfig, transfers: TransferSettings | None) -> Iterator[str]:
    """What the configuration is known to break with, each in a few words."""
    if config.num_speculative_tokens >= config.max_num_batched_tokens:
        yield "num_speculative_tokens with a max_num_batched_tokens that does not hold one sequence's drafts"
    unit = int(config.engine_options.get("prefix_match_unit", 0))
    if _is_stateful(config) and 0 < unit < config.block_size:
        groups = len(config.kv_cache_groups)  # each may have a block that is hit inside, and its copy
        if sum(-(-config.max_model_len // group.block_size) + 1 for group in config.kv_cache_groups) + groups > (
            config.num_blocks - 1
        ):
            yield "prefix_match_unit with recurrent state in a pool without room for the copies of a hit inside blocks"
    if config.engine_options.get("streaming_input", "none") != "none":
        yield from _faults_of_streaming(release, config)
    if transfers is not None:
        yield from _faults_of_transfers(config, transfers)


def _faults_of_streaming(release: Release, config: EngineConfig) -> Iterator[str]:
    if not _takes_answers_back(release):
        yield "streaming_input in a release that keeps to the first max_tokens and to steps in flight"
    if config.engine_options.get("reset_running_requests"):
        yield "reset_running_requests with streaming_input"
    if config.pipeline_depth > 1 and _is_stateful(config):
        yield "streaming_input with recurrent state and pipeline_depth > 1"


def _faults_of_transfers(config: EngineConfig, transfers: TransferSettings) -> Iterator[str]:
    in_flight, resets = config.pipeline_depth > 1, bool(config.engine_options.get("reset_running_requests"))
    if transfers.loads and transfers.failing:
        if in_flight and not transfers.late:
            yield "kv_load_failures of sync loads with pipeline_depth > 1"
        if has_window(config):
            yield "kv_load_failures with a sliding window"
        if config.enable_prefix_caching and not transfers.late:
            yield "kv_load_failures of sync loads with enable_prefix_caching"
    if transfers.loads and not transfers.late and _is_stateful(config) and config.enable_prefix_caching:
        yield "sync loads with recurrent state and enable_prefix_caching"
    if resets and (in_flight or transfers.send_steps):
        yield "reset_running_requests with a connector and pipeline_depth > 1, or with kv_send_steps"
    if transfers.loads and transfers.late:
        sizes = [group.block_size for group in config.kv_cache_groups] or [config.block_size]
        ahead = 1 + 2 * config.num_speculative_tokens if config.num_speculative_tokens else 0
        sequence = sum(-(-config.max_model_len // size) for size in sizes)
        drafts = sum(-(-ahead // size) for size in sizes)
        if sequence * (2 if transfers.failing else 1) + drafts > config.num_blocks - 1:
            yield "async loads in a pool without room for a sequence and its reserve (twice itself where loads fail)"
