"""transformers' `ContinuousBatchProcessor` as its manager creates it, for a model that is never run."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import queue
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec

from conformance.protocol import AdapterError, ConfigRefused, EngineConfig

PAGE_SIZE_MIN = 4
RESERVED_BLOCKS = 2
"""A sector from which padding is read and one to which it is written; here a sector is one block."""
_HEAD_DIM = 16
"""A page of 4 tokens of one such float16 head fills the 128 bytes that sectors are aligned to."""


class Modules(NamedTuple):
    """The modules of transformers the adapter names things from."""

    version: str
    api: Any
    cache: Any
    distributed: Any
    initialization: Any
    io: Any
    offloading: Any
    processors: Any
    requests: Any
    scheduler: Any
    torch: Any
    transformers: Any


@functools.cache
def modules() -> Modules:
    """Import what is driven.

    Raises ModuleNotFoundError when transformers or torch is not installed, `AdapterError` when the release has no
    continuous batching that this adapter knows.
    """
    version = importlib.metadata.version("transformers")
    importlib.import_module("torch")
    try:
        return _probe(version)
    except (ImportError, AttributeError) as error:
        raise AdapterError(
            f"transformers {version} has no continuous batching that this adapter knows ({error}); expected 5.24 or a "
            "release like it, in an environment of its own: pip install 'transformers>=5.24'"
        ) from error


def _probe(version: str) -> Modules:
    def load(name: str) -> Any:
        return importlib.import_module(f"transformers.generation.continuous_batching.{name}")

    found = Modules(
        version=version,
        api=load("continuous_api"),
        cache=load("cache"),
        distributed=load("distributed"),
        initialization=load("initialization"),
        io=load("input_outputs"),
        offloading=load("offloading_manager"),
        processors=load("cb_logits_processors"),
        requests=load("requests"),
        scheduler=load("scheduler"),
        torch=importlib.import_module("torch"),
        transformers=importlib.import_module("transformers"),
    )
    load("utils").logger.setLevel("CRITICAL")
    return found


class _Unpinned:
    """torch for the offloading manager: the host memory it asks to be pinned needs an accelerator."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)

    def empty(self, *shape: Any, pin_memory: bool = False, **arguments: Any) -> Any:
        return self._torch.empty(*shape, **arguments)


class _Nothing:
    """A stream or an event where there is no device: what is recorded is done, nothing is waited for."""

    def record_event(self, event: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...


@functools.cache
def _classes() -> SimpleNamespace:
    """The processor without its cleaning up of CUDA graphs, and its pair of inputs and outputs without streams."""
    lib = modules()

    class Processor(lib.api.ContinuousBatchProcessor):  # type: ignore[misc, name-defined]  # a base found at run time
        def __del__(self) -> None:
            """There are no graphs; collecting all garbage for each engine takes most of the time."""

    class AsyncIOs(lib.io.ContinuousBatchingAsyncIOs):  # type: ignore[misc, name-defined]  # a base found at run time
        def __init__(self, **parts: Any) -> None:
            def pair() -> Any:
                made = lib.io.HostDeviceIOPair.__new__(lib.io.HostDeviceIOPair)
                made.host_io = made.device_io = lib.io.ContinuousBatchingIOs(**parts)
                made.h2d_over = made.compute_over = made.d2h_over = _Nothing()
                return made

            self.current_pair = 0
            self.io_pairs = [pair(), pair()]
            self.h2d_stream = self.d2h_stream = _Nothing()
            self.compute_stream = None
            self.max_batch_tokens = parts["cache"].max_batch_tokens

    return SimpleNamespace(Processor=Processor, AsyncIOs=AsyncIOs)


@functools.cache
def _model_config(sliding_window: int | None) -> Any:
    """A model of one layer with one small head; no weights belong to it."""
    windowed = {} if sliding_window is None else {"sliding_window": sliding_window}
    config = modules().transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=_HEAD_DIM,
        intermediate_size=_HEAD_DIM,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        layer_types=["full_attention" if sliding_window is None else "sliding_attention"],
        **windowed,
    )
    config._attn_implementation = "flash_attention_2"  # no mask has to be made for it
    return config


def build(
    config: EngineConfig, *, scheduler_type: str, safety_margin: float | None, max_blocks_per_request: int
) -> Any:
    """A `ContinuousBatchProcessor`. Raises `ConfigRefused` in transformers' words."""
    lib = modules()
    device = lib.torch.device("cpu")
    model_config = _model_config(config.sliding_window)
    asked = lib.transformers.ContinuousBatchingConfig(
        page_size=config.block_size,
        num_blocks=config.num_blocks - RESERVED_BLOCKS,
        max_batch_tokens=config.max_num_batched_tokens,
        max_requests_per_batch=config.max_num_seqs,
        max_blocks_per_request=0,
        allow_block_sharing=config.enable_prefix_caching,
        use_async_batching=config.pipeline_depth > 1,
        use_cuda_graph=False,
        scheduler_type=scheduler_type,
        safety_margin=safety_margin,
    )
    try:
        resolved = lib.initialization.resolve_continuous_batching_config(
            config=model_config, cb_config=asked, workload_hints=None, has_logit_processors=False, device=device
        )
    except ValueError as refusal:
        raise ConfigRefused(str(refusal), _larger_pages(config)) from refusal
    resolved.max_blocks_per_request = max_blocks_per_request
    helper = lib.distributed.DistributedHelper(None, None)
    dtype = lib.torch.float16
    cache = lib.cache.PagedAttentionCache(model_config, resolved, device, helper, dtype=dtype)
    if any(allocator.blocks_per_sector > 1 for allocator in cache.cache_allocators.values()):
        raise ConfigRefused(
            f"block_size = {config.block_size}: the sectors blocks are taken from would hold several of them, unless "
            f"it is a multiple of {PAGE_SIZE_MIN}",
            msgspec.structs.replace(config, block_size=-(-config.block_size // PAGE_SIZE_MIN) * PAGE_SIZE_MIN),
        )
    if config.num_swap_blocks:
        # A little more than asked for: the space is given in GiB and rounded down to whole sectors.
        resolved.cpu_offload_space = (config.num_swap_blocks + 0.5) * cache.bytes_per_sector / 1024**3
    lib.initialization.update_cb_config_after_cache_creation(
        cb_config=resolved, num_blocks=cache.num_blocks, max_batch_tokens=cache.max_batch_tokens
    )
    scheduler = lib.scheduler.SCHEDULER_MAPPING[scheduler_type](
        cache=cache,
        safety_margin=resolved.safety_margin,
        max_requests_per_batch=resolved.max_requests_per_batch,
    )
    classes = _classes()
    lib.api.ContinuousBatchingAsyncIOs = classes.AsyncIOs
    lib.offloading.torch = _Unpinned(lib.torch)
    return classes.Processor(
        cache=cache,
        config=model_config,
        generation_config=SimpleNamespace(do_sample=False),
        continuous_batching_config=resolved,
        logit_processor=lib.processors.ContinuousBatchingLogitsProcessorList(lib.transformers.LogitsProcessorList()),
        input_queue=queue.Queue(),
        cancel_queue=queue.Queue(),
        output_router=lib.api.OutputRouter(),
        background_thread_status=lib.api.BackgroundThreadStatus(),
        model_device=device,
        model_dtype=dtype,
        scheduler=scheduler,
        distributed_helper=helper,
    )


def _larger_pages(config: EngineConfig) -> EngineConfig:
    """``config`` with the smallest page there is."""
    length = -(-config.max_model_len // config.block_size) * PAGE_SIZE_MIN
    return msgspec.structs.replace(config, block_size=PAGE_SIZE_MIN, max_model_len=length)
