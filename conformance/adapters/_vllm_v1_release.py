"""The installed vLLM release as the V1 adapter needs it: imported once, then probed, not guessed.

Importing is quiet (log level and usage statistics are set unless the user has set them), needs no network and no
device. Two things make it light. The platform object is one that stands for no device, so that no device's own
limits (block sizes, chunking, hybrid models) are taken for the engine's. And the model that the configuration
names is a class of a few lines, registered with vLLM's public `ModelRegistry`, so that vLLM does not import a
real model in a process of its own to look at it; the scheduler never sees a model. For the same reason Triton, which
only kernels need, is claimed to be there.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import json
import logging
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from conformance.adapters._vllm_v0_release import accepted, takes
from conformance.protocol import AdapterError, EngineConfig, Request

_QUIET = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}
_LANDMARKS = ("vllm.v1.core.kv_cache_coordinator", "vllm.v1.core.specialized_manager")
"""Later releases have the first, vLLM 0.8 the second and those between neither; looked for before anything is touched
that another adapter might use."""
_EARLY = _LANDMARKS[1]
_ARCHITECTURE = "KvconformForCausalLM"
_MODEL_CONFIG = {
    "architectures": [_ARCHITECTURE],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "vocab_size": 64,
    "max_position_embeddings": 1 << 20,
    "torch_dtype": "float32",
}
"""A Llama as small as they come. Its length is no limit: max_model_len is what is configured."""


@dataclass(frozen=True, eq=False)
class Release:
    """The classes the adapter drives, and what this release's own signatures say it can do."""

    version: str
    vllm_config: Any
    model_config: Any
    cache_config: Any
    scheduler_config: Any
    parallel_config: Any
    device_config: Any
    lora_config: Any
    kv_transfer_config: Any
    kv_connector_output: Any
    """None in 0.10.0, where a connector cannot be driven."""
    scheduler: Any
    async_scheduler: Any
    """None where the release has no asynchronous scheduler."""
    structured_output_manager: Any
    request: Any
    request_status: Any
    sampling_params: Any
    lora_request: Any
    speculative_config: Any
    model_runner_output: Any
    draft_token_ids: Any
    """None where drafts come with the output of the model runner."""
    mm_feature: Any
    mm_position: Any
    specs: Any
    """The module of KV-cache specifications."""
    utils: Any
    """The module of `init_none_hash` and its neighbours."""
    planning: Any
    """The module that plans the KV cache at start-up."""
    hash_by_name: Any
    dtype: Any
    validate_prompt: Callable[[Request, EngineConfig], None]
    """The engine's own check of a prompt, above the scheduler: its length, the size of its encoder items. Raises one
    of ``refusals``."""
    check_admission: Callable[[], Any]
    """Gives the check of the queue's length that the engine's front makes; raises one of ``refusals``."""
    pause_state: Any
    """None where the scheduler cannot be paused."""
    refusals: tuple[type[Exception], ...]
    """What the engine's front raises when it does not take what its user asks for."""

    @property
    def is_early(self) -> bool:
        """Whether the scheduler is one of before there were KV-cache groups (vLLM 0.8)."""
        return importlib.util.find_spec(_EARLY) is not None

    @property
    def has_model_runner_v2(self) -> bool:
        """Whether the scheduler can write for either of two model runners."""
        return hasattr(self.vllm_config, "use_v2_model_runner")


def _no_device(interface: Any) -> Any:
    """A platform that stands for no device and claims whatever the scheduler could be denied for lack of it."""

    class NoDevice(interface.UnspecifiedPlatform):  # type: ignore[misc]  # a base found at run time
        @classmethod
        def is_async_output_supported(cls, enforce_eager: bool | None) -> bool:  # noqa: ARG003, FBT001 - the platform's own signature
            return False

        @classmethod
        def support_hybrid_kv_cache(cls) -> bool:
            return True

        @classmethod
        def check_max_model_len(cls, max_model_len: int) -> int:
            return max_model_len

    return NoDevice()


def _register_model() -> None:
    torch = importlib.import_module("torch")

    class KvconformForCausalLM(torch.nn.Module):  # type: ignore[name-defined, misc]  # a base found at run time
        """What vLLM asks of a class before it counts as a text model that can be split over a pipeline."""

        supports_pp = True
        supports_lora = True
        supports_multimodal = False
        embedding_modules: ClassVar[dict[str, str]] = {}
        packed_modules_mapping: ClassVar[dict[str, list[str]]] = {}

        def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
            raise AdapterError(f"the engine wants to build its model ({vllm_config}, {prefix}); none is run here")

        def embed_input_ids(self, input_ids: Any) -> Any: ...

        get_input_embeddings = embed_input_ids

        def forward(self, input_ids: Any, positions: Any, intermediate_tensors: Any = None) -> Any: ...

        def compute_logits(self, hidden_states: Any) -> Any: ...

        def make_empty_intermediate_tensors(self, batch_size: int, dtype: Any, device: Any) -> Any: ...

    importlib.import_module("vllm").ModelRegistry.register_model(_ARCHITECTURE, KvconformForCausalLM)


@functools.cache
def model_folder() -> Path:
    """A folder with the ``config.json`` of a tiny model and nothing else, removed when the process ends."""
    folder = tempfile.TemporaryDirectory(prefix="kvconform-model-")
    model_folder.owner = folder  # type: ignore[attr-defined]  # kept alive by the function
    (Path(folder.name) / "config.json").write_text(json.dumps(_MODEL_CONFIG), encoding="utf-8")
    return Path(folder.name)


def _prompt_check(engine: Any, position: Any) -> Callable[[Request, EngineConfig], None]:
    """The release's own check of inputs, bound to the few attributes of an input processor that it reads."""

    def validate(request: Request, config: EngineConfig) -> None:
        model = SimpleNamespace(
            max_model_len=config.max_model_len,
            runner_type="generate",
            is_multimodal_model=False,
            is_encoder_decoder=False,
            skip_tokenizer_init=True,
        )
        stand_in = SimpleNamespace(
            model_config=model,
            tokenizer=None,
            renderer=SimpleNamespace(validate_token_ids=list),
            supports_mm_inputs=bool(request.encoder_items),
            skip_prompt_length_check=False,
            mm_encoder_cache_size=config.encoder_cache_size,
        )
        if "get_lora_tokenizer" in engine._validate_model_input.__code__.co_names:
            stand_in.tokenizer = SimpleNamespace(get_lora_tokenizer=lambda _: SimpleNamespace(max_token_id=1 << 20))
        if hasattr(engine, "_validate_prompt_len"):
            stand_in._validate_prompt_len = functools.partial(engine._validate_prompt_len, stand_in)
        inputs: dict[str, Any] = {"type": "token", "prompt_token_ids": request.prompt}
        if request.encoder_items:
            places = [position(offset=item.first, length=item.size) for item in request.encoder_items]
            inputs |= {"type": "multimodal", "mm_placeholders": {"image": places}}
        more = [None] if takes(engine._validate_model_input, "lora_request") else []
        engine._validate_model_input(stand_in, inputs, *more, prompt_type="decoder")

    return validate


@functools.cache
def installed_release() -> Release:
    """Import and probe the installed vLLM. Takes seconds the first time, nothing afterwards.

    Raises ModuleNotFoundError when vLLM is not installed, `AdapterError` when it has no V1 scheduler.
    """
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])
    if importlib.util.find_spec("vllm") is None:
        raise ModuleNotFoundError("vLLM is not installed", name="vllm")
    version = "of unknown version"
    try:
        version = str(importlib.import_module("vllm").__version__)
        importlib.import_module(_EARLY.rpartition(".")[0])
        if any(importlib.util.find_spec(name) is not None for name in _LANDMARKS):
            platforms: Any = importlib.import_module("vllm.platforms")
            platforms._current_platform = _no_device(importlib.import_module("vllm.platforms.interface"))
            _register_model()
        return _probe(version)
    except (ImportError, AttributeError, RuntimeError) as error:
        raise AdapterError(f"vLLM {version} has no V1 scheduler that this adapter knows ({error})") from error


def _first(*names: str) -> Any:
    """The first of these modules that the release has."""
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
    raise AttributeError(f"none of {', '.join(names)}")


def _probe(version: str) -> Release:
    _first(*_LANDMARKS)
    config = importlib.import_module("vllm.config")
    inputs = importlib.import_module("vllm.multimodal.inputs")
    outputs = importlib.import_module("vllm.v1.outputs")
    request = importlib.import_module("vllm.v1.request")
    utils = importlib.import_module("vllm.v1.core.kv_cache_utils")
    refusals: list[type[Exception]] = [ValueError, NotImplementedError]
    with contextlib.suppress(ModuleNotFoundError, AttributeError):  # it is a ValueError then
        exceptions = importlib.import_module("vllm.exceptions")
        refusals.append(exceptions.VLLMValidationError)
        refusals += [exceptions.QueueOverflowError, exceptions.MaxQueuedTokensError]
    processor = _first("vllm.v1.engine.input_processor", "vllm.v1.engine.processor")
    hashing = _first("vllm.utils.hashing", "vllm.utils")
    owner = importlib.import_module(config.VllmConfig.__module__)
    if hasattr(owner, "HAS_TRITON"):
        owner.HAS_TRITON = True  # type: ignore[attr-defined]  # a module found at run time
    try:
        asynchronous = importlib.import_module("vllm.v1.core.sched.async_scheduler").AsyncScheduler
    except ModuleNotFoundError:
        asynchronous = None
    return Release(
        version=version,
        vllm_config=config.VllmConfig,
        model_config=config.ModelConfig,
        cache_config=config.CacheConfig,
        scheduler_config=config.SchedulerConfig,
        parallel_config=config.ParallelConfig,
        device_config=config.DeviceConfig,
        lora_config=config.LoRAConfig,
        kv_transfer_config=config.KVTransferConfig,
        kv_connector_output=getattr(outputs, "KVConnectorOutput", None),
        scheduler=importlib.import_module("vllm.v1.core.sched.scheduler").Scheduler,
        async_scheduler=asynchronous,
        structured_output_manager=importlib.import_module("vllm.v1.structured_output").StructuredOutputManager,
        request=request.Request,
        request_status=request.RequestStatus,
        sampling_params=importlib.import_module("vllm.sampling_params").SamplingParams,
        lora_request=importlib.import_module("vllm.lora.request").LoRARequest,
        speculative_config=config.SpeculativeConfig,
        model_runner_output=outputs.ModelRunnerOutput,
        draft_token_ids=getattr(outputs, "DraftTokenIds", None),
        mm_feature=getattr(inputs, "MultiModalFeatureSpec", None),
        mm_position=inputs.PlaceholderRange,
        specs=importlib.import_module("vllm.v1.kv_cache_interface"),
        utils=utils,
        planning=_first("vllm.v1.core.kv_cache_planning", "vllm.v1.core.kv_cache_utils"),
        hash_by_name=getattr(hashing, "get_hash_fn_by_name", None),
        dtype=importlib.import_module("torch").float32,
        validate_prompt=_prompt_check(
            getattr(processor, "InputProcessor", None) or processor.Processor, inputs.PlaceholderRange
        ),
        check_admission=lambda: importlib.import_module("vllm.v1.engine.async_llm").AsyncLLM.check_admission,
        pause_state=getattr(importlib.import_module("vllm.v1.core.sched.interface"), "PauseState", None),
        refusals=tuple(refusals),
    )


__all__ = ["Release", "accepted", "installed_release", "model_folder", "takes"]
