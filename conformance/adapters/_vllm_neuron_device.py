"""The device below vLLM's Neuron code: the one that is there or the emulated one, and what vLLM asks of it."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple, cast

from conformance.protocol import ConfigRefused, DeviceCall, SequenceKey
from reference_engine.runners.neuron import emulated

PACKAGE = "transformers_neuronx"
_POSITIONS = {"max_position_embeddings": 1 << 20}
"""They cost nothing until they are used, so any ``max_model_len`` will do."""
_SMALLER = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
"""What a CPU need not compute; a device has to compile it, and so small a model is not what compilers are made for."""


class Emulation(NamedTuple):
    """How the emulated device behaves where devices differ; see `reference_engine.runners.neuron.emulated`."""

    row_order: str
    out_of_range: str
    poison: bool


@contextlib.contextmanager
def device_present(emulation: Emulation | None) -> Iterator[None]:
    """`transformers_neuronx` can be imported, and vLLM takes this for a machine with a Neuron device.

    Without an ``emulation`` it is the package that is installed. Raises `ConfigRefused` when there is none, or when
    there is one and the emulated device was asked for.
    """
    with contextlib.ExitStack() as stack:
        if emulation is None:
            import_installed()
        else:
            behaviour = emulated.Behaviour(
                row_order=cast("Literal['new', 'old']", emulation.row_order),
                out_of_range=cast("Literal['drop', 'raise']", emulation.out_of_range),
                poison=emulation.poison,
                forbid_new_graphs=False,  # they are counted and reported
                calls_kept=0,
            )
            try:
                stack.enter_context(emulated.installed(behaviour))
            except emulated.AlreadyInstalledError as error:
                raise ConfigRefused(f"engine_options device = 'emulated': {error}") from error
        stack.enter_context(_vllm_on_neuron())
        yield


def import_installed() -> None:
    """Raises `ConfigRefused` when there is no `transformers_neuronx`, or only a placeholder of that name."""
    try:
        importlib.import_module(PACKAGE)  # the placeholders of the public index can be found, and fail here
    except ImportError as error:
        raise ConfigRefused(
            f"engine_options device = 'installed': {PACKAGE} cannot be imported ({error}). It comes with the Neuron "
            "SDK, on a machine with the device; anywhere else use --set engine_options.device=emulated"
        ) from error


@contextlib.contextmanager
def _vllm_on_neuron() -> Iterator[None]:
    """On what machine it is, vLLM settles once, and may have done so before the device was there."""
    tools = importlib.import_module("vllm.utils")
    platforms = importlib.import_module("vllm.platforms")
    remembered = getattr(tools, "is_neuron", None)  # up to 0.6.3 or so
    if remembered is not None:
        remembered.cache_clear()
    try:
        neuron = importlib.import_module("vllm.platforms.neuron").NeuronPlatform()
    except ModuleNotFoundError:
        neuron = None
    before = None if neuron is None else platforms.current_platform
    if neuron is not None and type(before) is not type(neuron):
        _replace_platform(before, neuron)
    try:
        yield
    finally:
        if remembered is not None:
            remembered.cache_clear()
        if neuron is not None and type(before) is not type(neuron):
            _replace_platform(neuron, before)


def _replace_platform(old: Any, new: Any) -> None:
    """Each module of vLLM imports the platform by name, and so has its own reference."""
    for module in _vllm_modules(len(sys.modules)):
        for attribute in ("current_platform", "_current_platform"):
            if vars(module).get(attribute) is old:
                setattr(module, attribute, new)


@functools.lru_cache(maxsize=4)
def _vllm_modules(loaded: int) -> list[ModuleType]:  # noqa: ARG001 - modules are loaded, and never replaced
    """What is loaded of vLLM, looked for anew when the number of ``loaded`` modules is another: there are thousands."""
    return [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == "vllm"]


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Tiny tensors are computed by one thread: several would spend their time waiting for one another."""
    torch = importlib.import_module("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Environment variables for as long as vLLM reads them."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class _HostCall:
    """One call as vLLM hands it over: a line and the position of the last token for each row."""

    __slots__ = ("compiled", "first", "lines", "positions", "returned", "width")

    def __init__(self, input_ids: Any, positions: Any, lines: Any) -> None:
        self.width = int(input_ids.shape[1])
        self.first = int(positions[0, 0])
        self.positions: list[int] = positions.max(dim=1).values.tolist()
        self.lines: list[int] = lines.flatten().tolist()
        self.returned = False
        """It came back, and did not raise."""
        self.compiled = 0

    @property
    def route(self) -> Literal["prefill", "decode"]:
        """By the width and the first position alone (transformers-neuronx base.py)."""
        return "prefill" if self.width > 1 and self.first == 0 else "decode"


class DeviceLog:
    """Listens at the one place where vLLM calls the device: ``forward`` of its wrapper around the model."""

    def __init__(self, wrapper: Any, *, is_emulated: bool) -> None:
        self._model = wrapper.model
        self._is_emulated = is_emulated
        self._calls: list[_HostCall] = []
        forward = wrapper.forward

        def watched(*, input_ids: Any, positions: Any, input_block_ids: Any, **others: Any) -> Any:
            call = _HostCall(input_ids, positions, input_block_ids)
            self._calls.append(call)
            compiled = self._compiled
            result = forward(input_ids=input_ids, positions=positions, input_block_ids=input_block_ids, **others)
            call.returned = True
            call.compiled = self._compiled - compiled
            return result

        wrapper.forward = watched

    @property
    def _compiled(self) -> int:
        """Graphs made since start-up; a real device does not tell."""
        return len(self._model.ledger.late) if self._is_emulated else 0

    def take(self, rows: list[SequenceKey]) -> list[DeviceCall]:
        """The calls since the last time. ``rows``: the sequences vLLM takes their rows for, the same in each."""
        calls = [
            DeviceCall(
                route=call.route,
                rows=rows,
                lines=call.lines,
                positions=call.positions,
                width=call.width,
                returned=self._given_to(call, rows),
                compiled=call.compiled,
            )
            for call in self._calls
        ]
        self._calls.clear()
        return calls

    def _given_to(self, call: _HostCall, rows: list[SequenceKey]) -> list[SequenceKey] | None:
        """Row i of the result goes to ``rows[i]``; which line that row is of, only the emulated device tells."""
        if not self._is_emulated or not call.returned:
            return None
        if call.route == "decode" and self._model.behaviour.row_order == "old" and len(rows) == self._model.lines:
            order = sorted(call.lines)
            return [rows[order.index(line)] for line in call.lines]
        return rows


@functools.cache
def tiny_llama(*, on_cpu: bool) -> Path:
    """A folder with a tiny Llama of random weights, the same in every process; it is gone when the process ends."""
    from reference_engine.runners.neuron.emulated.checkpoint import save_tiny_llama  # noqa: PLC0415 - needs torch

    folder = Path(tempfile.mkdtemp(prefix="kvconform-tiny-llama-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    save_tiny_llama(folder, **_POSITIONS, **(_SMALLER if on_cpu else {}))
    return folder
