"""From an `EngineConfig` to an `LLMEngine` of vLLM on a Neuron device, and what can be said of it before it runs."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import msgspec

from conformance.adapters._vllm_neuron_device import Emulation, environment
from conformance.adapters._vllm_v0_config import block_manager_of
from conformance.adapters._vllm_v0_release import Release, accepted
from conformance.protocol import AdapterError, Capabilities, ConfigRefused, DeviceShape, EngineConfig, Feature

_ONE_MORE: Final = "blocks_plus_one"
_ON_DEVICE: Final = "on_device_sampling"
_CHOICES: Final = {
    "device": ("installed", "emulated"),
    "row_order": ("new", "old"),
    "out_of_range": ("drop", "raise"),
}
_EMULATION: Final = ("row_order", "out_of_range", "poison")
_FLAGS: Final = ("poison", _ONE_MORE, _ON_DEVICE)


@dataclass(frozen=True)
class Options:
    """``engine_options``, checked. ``emulation`` is None on a real device, ``model`` on the tiny Llama."""

    emulation: Emulation | None
    model: Path | None
    one_more_block: bool
    on_device_sampling: bool
    tensor_parallel_size: int


def options_of(config: EngineConfig) -> Options:
    """Raises `ConfigRefused` for a value that is not among those an option takes; names are checked in `check`."""
    given = config.engine_options
    for name, choices in _CHOICES.items():
        if given.get(name, choices[0]) not in choices:
            raise ConfigRefused(f"engine_options {name} = {given[name]!r}: must be one of {', '.join(choices)}")
    for name in _FLAGS:
        if not isinstance(given.get(name, False), bool):
            raise ConfigRefused(f"engine_options {name} = {given[name]!r}: must be true or false")
    is_emulated = given.get("device") == "emulated"
    for name in _EMULATION:
        if name in given and not is_emulated:
            raise ConfigRefused(f"engine_options {name} = {given[name]!r}: goes with device=emulated only")
    cores = given.get("tensor_parallel_size", 1)
    if not isinstance(cores, int) or isinstance(cores, bool) or cores < 1:
        raise ConfigRefused(f"engine_options tensor_parallel_size = {cores!r}: must be a whole number from 1")
    model = Path(str(given["model"])) if "model" in given else None
    if model is not None and not (model / "config.json").is_file():
        raise ConfigRefused(f"engine_options model = {given['model']!r}: must be a folder with a config.json")
    emulation = Emulation(
        row_order=str(given.get("row_order", "new")),
        out_of_range=str(given.get("out_of_range", "drop")),
        poison=bool(given.get("poison", False)),
    )
    return Options(
        emulation=emulation if is_emulated else None,
        model=model,
        one_more_block=bool(given.get(_ONE_MORE, False)),
        on_device_sampling=bool(given.get(_ON_DEVICE, False)),
        tensor_parallel_size=cores,
    )


class NeuronRelease:
    """What the installed vLLM has for Neuron. Made, and used, while `device_present`.

    Raises `AdapterError` when it has nothing.
    """

    def __init__(self, release: Release) -> None:
        self.release = release
        try:
            self.engine = importlib.import_module("vllm.engine.llm_engine").LLMEngine
            self.engine_args = importlib.import_module("vllm.engine.arg_utils").EngineArgs
            self.loader = importlib.import_module("vllm.model_executor.model_loader.neuron")
            self.worker = importlib.import_module("vllm.worker.neuron_worker")
        except ImportError as error:
            raise AdapterError(
                f"vLLM {release.version} has no Neuron code of its own that this adapter knows ({error}); "
                "0.5.5 to 0.9.2 have"
            ) from error

    def blocks_beyond_batch(self, max_num_seqs: int = 1) -> int:
        """Blocks of the pool less ``max_num_seqs``, by the worker's own answer: 0, or 1 from 0.8.0 on (PR 13589)."""
        worker = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs))
        blocks, _ = self.worker.NeuronWorker.determine_num_available_blocks(worker)
        return int(blocks) - max_num_seqs

    @property
    def samples_on_device(self) -> bool:
        """Whether the release can leave sampling to the device (0.6.3 and later, PR 8746)."""
        return hasattr(self.loader, "_is_neuron_on_device_sampling_disabled")

    def device_shape(self, config: EngineConfig) -> DeviceShape:
        """The buckets the loader compiles: ``max_model_len``, unless vLLM's environment variables name others."""
        length = [config.max_model_len]
        return DeviceShape(
            batch=config.max_num_seqs,
            context_buckets=tuple(sorted(self.loader._get_buckets("NEURON_CONTEXT_LENGTH_BUCKETS", length))),
            token_buckets=tuple(sorted(self.loader._get_buckets("NEURON_TOKEN_GEN_BUCKETS", length))),
        )


@contextlib.contextmanager
def one_more_block(worker_module: Any) -> Iterator[None]:
    """PR 8008 as posted: the worker asks for, and insists on, one block more than ``max_num_seqs``."""

    def determine_num_available_blocks(worker: Any) -> tuple[int, int]:
        return worker.scheduler_config.max_num_seqs + 1, 0

    def initialize_cache(worker: Any, num_gpu_blocks: int, num_cpu_blocks: int) -> None:
        assert (num_gpu_blocks, num_cpu_blocks) == determine_num_available_blocks(worker)
        worker.cache_config.num_gpu_blocks = num_gpu_blocks
        worker.cache_config.num_cpu_blocks = num_cpu_blocks

    changed = {"determine_num_available_blocks": determine_num_available_blocks, "initialize_cache": initialize_cache}
    released = worker_module.NeuronWorker
    worker_module.NeuronWorker = type("NeuronWorker", (released,), changed)
    try:
        yield
    finally:
        worker_module.NeuronWorker = released


# ------------------------------------------------------------------------------------------------- what is declared


def _option_help(neuron: NeuronRelease) -> dict[str, str]:
    managers = "v1 (default) or v2" if neuron.release.two_block_managers else "v2, the only one of this release"
    helps = {
        "device": "Where the model runs: installed (default), the device of this machine, or emulated.",
        "block_manager": f"Block manager: {managers}.",
        "row_order": "Order of the rows of a full decode on the emulated device: new (default), as handed over, or "
        "old, by line, as SDK 2.19 has it.",
        "out_of_range": "What the emulated device does with rows outside its cache: drop (default) or raise.",
        "poison": "Whether the emulated device raises when a row that is not the sequence's own would be read.",
        "model": "A folder with a Llama or Mistral that Hugging Face can load (default: a tiny random Llama).",
        "tensor_parallel_size": "NeuronCores to spread the model over (default 1).",
    }
    if not neuron.blocks_beyond_batch():
        helps[_ONE_MORE] = "PR 8008 as posted: max_num_seqs + 1 blocks (true), not max_num_seqs (false, default)."
    if neuron.samples_on_device:
        helps[_ON_DEVICE] = "Let the device sample (true), as vLLM does by itself, or the host (false, default)."
    return helps


def _features(release: Release, config: EngineConfig) -> frozenset[Feature]:
    features: set[Feature] = {
        "abort",
        "device",
        "length_limit",
        "prefix_caching",
        "recompute",
        "snapshot",
        "token_budget",
        "usage",
    }
    if release.has_priority:
        features.add("priority")
    if release.resets_prefix_cache and config.enable_prefix_caching:
        features.add("reset_prefix_cache")
    return frozenset(features)


def capabilities_of(neuron: NeuronRelease, config: EngineConfig, options: Options) -> Capabilities:
    """What the release declares under this configuration."""
    release = neuron.release
    manager = block_manager_of(release, config)
    beyond_lines = neuron.blocks_beyond_batch() + options.one_more_block
    device = "a real device"
    reimplements = [
        "Runs the engine's step in two halves: what follows the device waits for the commit.",
        "Asks for greedy sampling only, so that there is one right token.",
    ]
    if options.emulation is not None:
        device = "an emulated device" + (" of the old row order" if options.emulation.row_order == "old" else "")
        reimplements.append("Stands in for the Neuron device and for transformers-neuronx, on the CPU.")
    if options.on_device_sampling:
        device += " that samples"
    if options.one_more_block:
        reimplements.append("Applies PR 8008 as posted to the worker: one block more than max_num_seqs.")
    if release.stand_in_used:
        reimplements.append("Stands in for a compiled numeric type that only the import of the package needs.")
    return Capabilities(
        engine=f"vllm-neuron (block manager {manager}, {'N + 1' if beyond_lines else 'N'} blocks, {device})",
        version=release.version,
        features=_features(release, config),
        length_cap="computed",
        merges_equal_blocks=True,
        preempts_for_priority=release.has_priority,
        reset_with_live="refused",
        device=neuron.device_shape(config),
        blocks_beyond_lines=beyond_lines,
        own_model=True,
        options=_option_help(neuron),
        swarm_options={"block_manager": ("v1", "v2")} if release.two_block_managers else {},
        reimplements=tuple(reimplements),
    )


def check(config: EngineConfig, capabilities: Capabilities) -> None:
    """Raise `ConfigRefused` for what does not run with these capabilities, with the nearest configuration that does."""
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
    length, seqs = config.max_model_len, config.max_num_seqs
    blocks = seqs + capabilities.blocks_beyond_lines
    fitting = msgspec.structs.replace(config, block_size=length, num_blocks=blocks)
    if config.block_size != length:
        raise ConfigRefused(
            f"block_size = {config.block_size}: a block must hold a whole sequence, max_model_len = {length}",
            instead=fitting,
        )
    if config.num_blocks != blocks:
        more = "" if blocks == seqs else " + 1"
        raise ConfigRefused(
            f"num_blocks = {config.num_blocks}: the worker insists on max_num_seqs{more} = {blocks}", instead=fitting
        )


# ----------------------------------------------------------------------------------------------------- the engine


def build_engine(neuron: NeuronRelease, config: EngineConfig, options: Options, model: str) -> Any:
    """An `LLMEngine`, its model on the device. Raises `ConfigRefused` with vLLM's words where vLLM refuses."""
    release = neuron.release
    arguments = {
        "model": model,
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "device": "neuron",
        "tensor_parallel_size": options.tensor_parallel_size,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "enable_prefix_caching": config.enable_prefix_caching,
        "use_v2_block_manager": block_manager_of(release, config) == "v2",
        "scheduling_policy": config.scheduling_policy,
        "disable_log_stats": True,
    }
    host_samples = "0" if options.on_device_sampling else "1"
    read_by_vllm = {
        "NEURON_ON_DEVICE_SAMPLING_DISABLED": host_samples,
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_USE_V1": "0",
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(environment(read_by_vllm))
        if options.one_more_block:
            stack.enter_context(one_more_block(neuron.worker))
        engine_args = neuron.engine_args(**accepted(neuron.engine_args, arguments))
        try:
            engine_args.create_engine_config()
        except (ValueError, NotImplementedError) as error:
            raise ConfigRefused(str(error)) from error
        return neuron.engine.from_engine_args(engine_args)
