"""The installed vLLM release as the V0 adapter needs it: imported once, then probed, not guessed.

Importing is quiet (log level and usage statistics are set unless the user has set them) and needs no network.
Releases whose scheduler works without compiled code still ask for it while they are imported; where the
compiled module cannot be loaded (a CPU machine, another torch), `_stand_in_for_core_ext` takes its place.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from conformance.protocol import AdapterError

_QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


class _NanRepr(enum.Enum):
    """The values are those of the compiled enumeration; the scheduler never looks at them."""

    NONE = 0
    IEEE_754 = 1
    EXTD_RANGE_MAX_MIN = 2


class _ScalarType:
    """Keeps what a numeric type was described with; nothing on the scheduler's path computes with it."""

    def __init__(self, *description: object) -> None:
        self.description = description

    int_ = uint = float_ = classmethod(lambda cls, *description: cls(*description))
    float_IEEE754 = int_  # noqa: N815 - vLLM's name


def _stand_in_for_core_ext() -> bool:
    """Put a stand-in for ``vllm._core_ext`` into ``sys.modules`` if its compiled half cannot be loaded.

    Only releases that have that module (0.6.0 and its neighbours) are concerned. Returns whether it was done.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None or "vllm" in sys.modules:
        return False
    package = Path(spec.origin).parent
    if not (package / "_core_ext.py").exists():
        return False
    torch = importlib.import_module("torch")
    for library in package.glob("_core_C*.so"):
        with contextlib.suppress(OSError):
            torch.classes.load_library(str(library))
            return False
    module = ModuleType("vllm._core_ext", "Stands in for vLLM's compiled numeric types.")
    vars(module).update(NanRepr=_NanRepr, ScalarType=_ScalarType)
    sys.modules["vllm._core_ext"] = module
    return True


@contextlib.contextmanager
def v0_selected() -> Iterator[None]:
    """Ask vLLM for its V0 engine while its configuration objects are built; they look at the environment."""
    before = os.environ.get("VLLM_USE_V1")
    os.environ["VLLM_USE_V1"] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ["VLLM_USE_V1"]
        else:
            os.environ["VLLM_USE_V1"] = before


@dataclass(frozen=True, eq=False)
class Release:
    """The classes the adapter drives, and what this release's own signatures say it can do."""

    version: str
    scheduler: Any
    scheduler_config: Any
    cache_config: Any
    sequence: Any
    sequence_group: Any
    sequence_status: Any
    sequence_output: Any
    group_output: Any
    logprob: Any
    sampling_params: Any
    stop_checker: Any
    output_processor: Any
    counter: Any
    device: Any
    token_inputs: Callable[[list[int]], Any]
    validate_prompt: Callable[[list[int], int], None]
    """The engine's own check of a prompt against max_model_len, above the scheduler. Raises ValueError."""
    two_block_managers: bool
    """Whether the release lets the user choose between block managers v1 and v2."""
    forks_in_engine: bool
    """Whether n > 1 is one group that forks; later releases send n requests from above the scheduler."""
    has_priority: bool
    resets_prefix_cache: bool
    stand_in_used: bool


def accepted(callee: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``arguments`` that ``callee`` takes in this release."""
    taken = _parameters(_unbound(callee))
    return {name: value for name, value in arguments.items() if name in taken}


def takes(callee: Any, name: str) -> bool:
    """Whether ``callee`` has a parameter of that name in this release."""
    return name in _parameters(_unbound(callee))


def _unbound(callee: Any) -> Any:
    """A bound method would keep its engine for as long as the process lasts."""
    return getattr(callee, "__func__", callee)


@functools.cache
def _parameters(callee: Any) -> frozenset[str]:
    return frozenset(inspect.signature(callee).parameters)


def _prompt_check(engine: Any) -> Callable[[list[int], int], None]:
    """The release's own check of inputs, bound to the few attributes of an engine that it reads."""

    def validate(prompt: list[int], max_model_len: int) -> None:
        model = SimpleNamespace(max_model_len=max_model_len, is_multimodal_model=False, is_encoder_decoder=False)
        stand_in = SimpleNamespace(model_config=model, tokenizer=None, is_encoder_decoder_model=lambda: False)
        inputs = {"type": "token", "prompt_token_ids": prompt}
        if hasattr(engine, "_validate_model_input"):
            engine._validate_model_input(stand_in, inputs, None, prompt_type="decoder")
        else:
            more = [None] if takes(engine._validate_model_inputs, "lora_request") else []
            engine._validate_model_inputs(stand_in, inputs, *more)

    return validate


def _plain_token_inputs(prompt: list[int]) -> Any:
    return {"prompt_token_ids": prompt}


@functools.cache
def installed_release() -> Release:
    """Import and probe the installed vLLM. Takes seconds the first time, nothing afterwards.

    Raises ModuleNotFoundError when vLLM is not installed, `AdapterError` when it has no V0 scheduler.
    """
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    stand_in_used = _stand_in_for_core_ext()
    vllm = importlib.import_module("vllm")
    version = str(getattr(vllm, "__version__", "unknown"))
    try:
        return _probe(version, stand_in_used=stand_in_used)
    except (ImportError, AttributeError) as error:
        raise AdapterError(f"vLLM {version} has no V0 scheduler that this adapter knows ({error})") from error


def _probe(version: str, *, stand_in_used: bool) -> Release:
    config = importlib.import_module("vllm.config")
    engine = importlib.import_module("vllm.engine.llm_engine")
    inputs = importlib.import_module("vllm.inputs")
    processing = importlib.import_module("vllm.engine.output_processor.interfaces")
    sampling = importlib.import_module("vllm.sampling_params")
    scheduler = importlib.import_module("vllm.core.scheduler")
    sequence = importlib.import_module("vllm.sequence")
    stopping = importlib.import_module("vllm.engine.output_processor.stop_checker")
    tools = importlib.import_module("vllm.utils")
    return Release(
        version=version,
        scheduler=scheduler.Scheduler,
        scheduler_config=config.SchedulerConfig,
        cache_config=config.CacheConfig,
        sequence=sequence.Sequence,
        sequence_group=sequence.SequenceGroup,
        sequence_status=sequence.SequenceStatus,
        sequence_output=sequence.SequenceOutput,
        group_output=sequence.CompletionSequenceGroupOutput,
        logprob=sequence.Logprob,
        sampling_params=sampling.SamplingParams,
        stop_checker=stopping.StopChecker,
        output_processor=processing.SequenceGroupOutputProcessor,
        counter=tools.Counter,
        device=tools.Device,
        token_inputs=getattr(inputs, "token_inputs", _plain_token_inputs),
        validate_prompt=_prompt_check(engine.LLMEngine),
        two_block_managers=takes(config.SchedulerConfig, "use_v2_block_manager"),
        forks_in_engine=not hasattr(sequence, "ParallelSampleSequenceGroup"),
        has_priority=takes(config.SchedulerConfig, "policy") and takes(sequence.SequenceGroup, "priority"),
        resets_prefix_cache=hasattr(scheduler.Scheduler, "reset_prefix_cache"),
        stand_in_used=stand_in_used,
    )
