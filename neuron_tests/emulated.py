"""The emulated device, in this process."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from neuron_tests.rig import MAIN, Rig, Shape
from reference_engine.runners.neuron.device import Device
from reference_engine.runners.neuron.driver import TransformersNeuronxDevice
from reference_engine.runners.neuron.emulated import AlreadyInstalledError, Behaviour, Installation, installed

HEALTHY = Behaviour(strict_interface=True, calls_kept=0, forbid_new_graphs=False)
"""Every argument of every call is checked; graphs made late are counted, not forbidden."""


def missing() -> str | None:
    """Why there can be no emulated device here, in one sentence, or None."""
    for name in ("torch", "transformers", "safetensors"):
        try:
            importlib.import_module(name)
        except ImportError:
            return f"the emulated device needs {name}, which is not installed: pip install 'kvconform[torch]'"
    try:
        with installed():
            return None
    except AlreadyInstalledError as error:
        return str(error)


class EmulatedRig(Rig):
    """The stand-in for transformers-neuronx with one `Behaviour`, under the driver that drives the real one."""

    kind = "emulated"

    def __init__(self, folder: Path, behaviour: Behaviour = HEALTHY, **forced: Any) -> None:
        super().__init__(folder, **forced)
        self.behaviour = behaviour
        self._models: list[Any] = []
        self._torch: Any = importlib.import_module("torch")
        self._threads = self._torch.get_num_threads()
        self._torch.set_num_threads(1)  # tensors are tiny: more threads only wait for each other

    def new_device(self, shape: Shape) -> Device:
        return self._built(shape, self.behaviour)

    def _built(self, shape: Shape, behaviour: Behaviour) -> Device:
        device = TransformersNeuronxDevice(shape.config(self.model_path))
        installation: Installation
        with installed(behaviour) as installation:
            device.build()
        self._models += installation.models
        return device

    def compiled(self) -> frozenset[str]:
        return frozenset(
            f"model {number}: {graph}"
            for number, model in enumerate(self._models)
            for graph in (*model.ledger.compiled, *model.ledger.late)
        )

    def compiling(self) -> list[str]:
        return []

    def traced(self, lines: int, length: int, steps: Sequence[Any]) -> list[Any]:
        traced = importlib.import_module("reference_engine.runners.neuron.traced")
        outcomes: list[Any] = traced.run(
            traced.DecodeStep(lines, length), [traced.Step(*step) for step in steps], "jit"
        )
        return outcomes

    def device_to_lose(self) -> Device:
        return self._built(MAIN, dataclasses.replace(self.behaviour, strict_interface=False))

    def close(self) -> None:
        self._torch.set_num_threads(self._threads)
