"""lmdeploy's PyTorch `Engine` as its constructor puts it together, with the harness where its executor would be."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import logging
import sys
from collections.abc import Generator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import msgspec

from conformance.protocol import ConfigRefused, EngineConfig

KERNEL_BLOCK_SIZE = 16
"""The smallest block its attention kernels know; a KV block is one or more of theirs."""
RESERVED_BLOCKS = 1
"""Block 0 takes dummy inputs and padding."""


@dataclass
class BatchedOutputs:
    """The outputs of a forward pass, with the fields that the engine's loop looks at."""

    next_token_ids: Any
    stopped: Any
    stop_pos: Any = None
    extra_outputs: Any = None
    logits: None = None
    model_metas: None = None
    logprobs: None = None
    new_token_timestamp: int = 0
    all_routed_experts: None = None
    ce_loss: None = None
    kv_connector_output: None = None


_MODEL_SIDE: dict[str, dict[str, type]] = {
    "model_agent": {"BatchedOutputs": BatchedOutputs},
    "guided_process": {"GuidedDecodingManager": object},
}
"""Modules of the model's side, each with what the engine's side imports from it."""


class Modules(NamedTuple):
    """The modules of lmdeploy the adapter names things from."""

    version: str
    config: Any
    config_builder: Any
    engine: Any
    engine_loop: Any
    envs: Any
    messages: Any
    paging: Any
    pytorch_messages: Any
    request: Any
    strategies: Any
    adapter: Any
    torch: Any


@functools.cache
def modules() -> Modules:
    """Import what is driven: not the package's own ``__init__``, which imports its servers, and not its model.

    Raises ModuleNotFoundError when lmdeploy, or what it needs, is not installed.
    """
    if "lmdeploy" not in sys.modules:
        spec = importlib.util.find_spec("lmdeploy")
        if spec is None:
            raise ModuleNotFoundError("No module named 'lmdeploy'", name="lmdeploy")
        sys.modules["lmdeploy"] = importlib.util.module_from_spec(spec)
    for name, names in _MODEL_SIDE.items():
        module = ModuleType(f"lmdeploy.pytorch.engine.{name}", "A stand-in: no model is run.")
        vars(module).update(names)
        sys.modules.setdefault(module.__name__, module)

    def load(name: str) -> Any:
        return importlib.import_module(f"lmdeploy.{name}")

    found = Modules(
        version=importlib.metadata.version("lmdeploy"),
        config=load("pytorch.config"),
        config_builder=load("pytorch.engine.config_builder"),
        engine=load("pytorch.engine.engine"),
        engine_loop=load("pytorch.engine.engine_loop"),
        envs=load("pytorch.envs"),
        messages=load("messages"),
        paging=load("pytorch.paging"),
        pytorch_messages=load("pytorch.messages"),
        request=load("pytorch.engine.request"),
        strategies=load("pytorch.strategies"),
        adapter=load("pytorch.adapter.adapter"),
        torch=importlib.import_module("torch"),
    )
    logging.getLogger("lmdeploy").setLevel(logging.CRITICAL)
    return found


class _Output:
    """What the engine's loop waits for: the outputs of a forward pass, which `Seat` hands to it."""

    def __await__(self) -> Generator[None, Any, Any]:
        outputs = yield
        return outputs


class Seat:
    """The executor. ``sent`` holds the forward inputs the engine has sent and nobody has taken yet."""

    device_type = "cpu"

    def __init__(self, model_config: Any, cache_config: Any, misc_config: Any) -> None:
        self.model_config = model_config
        self.cache_config = cache_config
        self.misc_config = misc_config
        self.sent: list[dict[str, Any]] = []

    async def forward_async(self, inputs: dict[str, Any]) -> None:
        self.sent.append(inputs)

    async def get_output_async(self) -> Any:
        return await _Output()


def _whole_kernel_blocks(config: EngineConfig) -> EngineConfig:
    """``config`` with a block that the kernels know, and sequences of as many blocks."""
    size = KERNEL_BLOCK_SIZE
    while size < config.block_size:
        size *= 2
    length = -(-config.max_model_len // config.block_size) * size
    return msgspec.structs.replace(
        config,
        block_size=size,
        max_model_len=length,
        max_num_batched_tokens=max(config.max_num_batched_tokens, length),
    )


def build(config: EngineConfig, *, kernel_block_size: int, prefill_interval: int, ttft_policy: str) -> Any:
    """An `Engine` with its scheduler, and no model. Raises `ConfigRefused` in lmdeploy's words."""
    lib = modules()
    spec_tokens = config.num_speculative_tokens
    try:
        engine_config = lib.messages.PytorchEngineConfig(
            session_len=config.max_model_len,
            max_batch_size=config.max_num_seqs,
            prefill_interval=prefill_interval,
            block_size=config.block_size,
            kernel_block_size=kernel_block_size,
            num_gpu_blocks=config.num_blocks,
            max_prefill_token_num=config.max_num_batched_tokens,
            enable_prefix_caching=config.enable_prefix_caching,
        )
    except AssertionError as refusal:
        raise ConfigRefused(str(refusal), _whole_kernel_blocks(config)) from refusal
    builder = lib.config_builder.ConfigBuilder
    engine = lib.engine.Engine.__new__(lib.engine.Engine)
    engine.engine_config = engine_config
    engine.scheduler_config = builder.build_scheduler_config(engine_config)
    cache_config = engine.cache_config = builder.build_cache_config(engine_config)
    cache_config.window_size = -1 if config.sliding_window is None else config.sliding_window
    engine.misc_config = builder.build_misc_config(engine_config)
    engine.dist_config = SimpleNamespace(dp=1)
    engine.specdecode_config = SimpleNamespace(num_speculative_tokens=spec_tokens) if spec_tokens else None
    model_config = SimpleNamespace(bos_token_id=0, model_paradigm="ar_spec" if spec_tokens else "ar", use_mrope=False)
    engine.executor = Seat(model_config, cache_config, engine.misc_config)
    factory = lib.strategies.build_strategy_factory(model_config, engine.misc_config, engine.specdecode_config)
    engine.sampling_strategy = factory.build_sampling_strategy()
    engine.model_agent_strategy = factory.build_model_agent_strategy()
    engine.engine_strategy = factory.build_engine_strategy(
        cache_config=cache_config, scheduler_config=engine.scheduler_config
    )
    engine.seq_strategy = factory.build_sequence_strategy()
    engine.input_processor = None
    engine.adapter_manager = lib.adapter.AdapterManager(None)
    engine.seq_meta = lib.pytorch_messages.SequenceMeta(
        cache_config.block_size, strategy=engine.seq_strategy, sampling_strategy=engine.sampling_strategy
    )
    lib.envs.opt_ttft_policy = ttft_policy
    engine.scheduler = lib.paging.Scheduler(engine.scheduler_config, cache_config, seq_meta=engine.seq_meta)
    engine.max_session_len = engine._get_max_session_len()
    engine.req_manager = engine._bind_request_manager()
    engine.engine_conn = None
    return engine
