"""Drives transformers-neuronx, the real package or the emulated one: whichever `import transformers_neuronx` finds.

Written against transformers-neuronx 0.13 (SDK 2.21 to 2.26) under continuous batching, where ``start_ids`` are line
numbers and the width of ``input_ids`` chooses the route. Importing this module imports neither it nor torch.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from reference_engine.runners.neuron.device import (
    DeviceCall,
    DeviceConfig,
    DeviceError,
    DeviceStats,
    DeviceUnavailableError,
    Route,
    Rows,
)

COMPILER_FLAGS = "NEURON_CC_FLAGS"
_DEFAULT_FLAGS = (
    (re.compile(r"(^|\s)(-O\s*\d|--optlevel\b)"), "--optlevel 1"),  # quickest to compile
    (re.compile(r"(^|\s)--auto-cast(=|\s|$)"), "--auto-cast=none"),  # or float32 is rounded to bfloat16
)


def compiler_flags(users: str) -> str:
    """The user's flags for neuronx-cc, and ours for what they leave open."""
    return " ".join(
        [*filter(None, [users.strip()]), *(flag for known, flag in _DEFAULT_FLAGS if not known.search(users))]
    )


class TransformersNeuronxDevice:
    """A Llama checkpoint on a Neuron device, in this process. See `Device` for what the calls do.

    The runtime starts with `build` and holds its cores until the process ends. ``NEURON_COMPILE_CACHE_URL`` and the
    other variables of the SDK keep the values the user gave them.
    """

    def __init__(self, config: DeviceConfig) -> None:
        self._config = config
        self._stats = DeviceStats()
        self._torch: Any = None
        self._model: Any = None

    @property
    def config(self) -> DeviceConfig:
        return self._config

    @property
    def stats(self) -> DeviceStats:
        return self._stats

    def build(self) -> None:
        self._torch, package, llama = _import(
            "torch", "transformers_neuronx.config", "transformers_neuronx.llama.model"
        )
        config = self._config
        batching = package.ContinuousBatchingConfig(batch_size_for_shared_caches=config.lines)
        fields = {"continuous_batching": batching, "compilation_worker_count": config.compile_workers}
        if config.sample_on_device:
            fields["on_device_generation"] = package.GenerationConfig(do_sample=True, top_k=1)

        def compiled() -> Any:
            model = llama.LlamaForSampling.from_pretrained(
                config.model_path,
                batch_size=config.lines,
                amp=config.amp,
                tp_degree=config.tp_degree,
                n_positions=list(config.token_buckets),
                context_length_estimate=list(config.context_buckets),
                neuron_config=package.NeuronConfig(**fields),
            )
            with _compiler_environment():
                model.to_neuron()
            return model

        self._model = _reported(f"building {config}", compiled)

    def prefill(self, lines: Sequence[int], prompts: Sequence[Sequence[int]], width: int | None = None) -> Rows:
        width = width or max(map(len, prompts))
        padding = [[0] * (width - len(prompt)) for prompt in prompts]
        return self._call(
            "prefill",
            lines,
            [[*prompt, *pad] for prompt, pad in zip(prompts, padding, strict=True)],
            [[*range(len(prompt)), *pad] for prompt, pad in zip(prompts, padding, strict=True)],
        )

    def decode(self, lines: Sequence[int], tokens: Sequence[int], positions: Sequence[int]) -> Rows:
        return self._call("decode", lines, [[token] for token in tokens], [[position] for position in positions])

    def reset(self) -> None:
        _reported("reset", self._built().reset)

    def close(self) -> None:
        self._model = None

    def _built(self) -> Any:
        if self._model is None:
            raise DeviceError("the device is not built: call build() first")
        return self._model

    def _call(self, route: Route, lines: Sequence[int], tokens: list[list[int]], positions: list[list[int]]) -> Rows:
        """One forward pass; the last position of a row is its largest, since padding stands at position 0."""
        model, torch = self._built(), self._torch
        input_ids, cache_ids, start_ids = (torch.tensor(ids, dtype=torch.long) for ids in (tokens, positions, lines))
        last = tuple(map(max, positions))
        began = time.perf_counter()
        with torch.no_grad():
            given = _reported(
                f"{route} of lines {list(lines)} up to positions {list(last)}",
                lambda: model(input_ids, cache_ids=cache_ids, start_ids=start_ids),
            )
        seconds = time.perf_counter() - began
        self._stats.calls.append(DeviceCall(route, tuple(lines), last, len(tokens[0]), seconds))
        if self._config.sample_on_device:
            given = given.reshape(len(lines), -1)[:, -1:]
        rows: Rows = given.tolist()
        return rows


def _import(*names: str) -> list[Any]:
    try:
        return [importlib.import_module(name) for name in names]
    except ImportError as error:
        raise DeviceUnavailableError(f"transformers-neuronx cannot be imported: {_first_line(error)}") from error


@contextlib.contextmanager
def _compiler_environment() -> Iterator[None]:
    """Our compiler flags, for as long as graphs are compiled."""
    users = os.environ.get(COMPILER_FLAGS)
    os.environ[COMPILER_FLAGS] = compiler_flags(users or "")
    try:
        yield
    finally:
        if users is None:
            del os.environ[COMPILER_FLAGS]
        else:
            os.environ[COMPILER_FLAGS] = users


def _reported(what: str, call: Callable[[], Any]) -> Any:
    """Whatever the package raises (a StopIteration among it) becomes a `DeviceError` that says during which call."""
    try:
        return call()
    except Exception as error:
        raise DeviceError(f"{what}: {type(error).__name__}: {error}") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
