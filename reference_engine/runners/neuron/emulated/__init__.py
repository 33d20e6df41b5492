"""An emulated Neuron device: a stand-in for `transformers_neuronx`, on the CPU, with real Llama weights.

    from reference_engine.runners.neuron.emulated import Behaviour, installed

    with installed(Behaviour(poison=True)) as device:
        from transformers_neuronx.llama.model import LlamaForSampling   # the stand-in
        ...
        device.models[0].ledger.calls                                    # what the device was asked to do

It shows what the real one is documented to do under continuous batching: all lines run in every decode step and
those not asked for write position 0 of their slot, a prefill writes its whole bucket, an input of width 1 decodes,
a line that does not exist aliases another. `Behaviour` switches what differs between releases, and plants faults.
What it cannot show: bfloat16 rounding of the hardware, time, compiler and runtime failures, limits of memory.

This module needs the standard library only; making a model needs torch and safetensors.
"""

from __future__ import annotations

from reference_engine.runners.neuron.emulated.behaviour import (
    Behaviour,
    CostModel,
    DeviceError,
    Fault,
    InterfaceError,
    NewGraphError,
    StaleReadError,
)
from reference_engine.runners.neuron.emulated.installation import (
    AlreadyInstalledError,
    Installation,
    installed,
    site_path,
)
from reference_engine.runners.neuron.emulated.ledger import Call, Graph, Ledger

__all__ = [
    "AlreadyInstalledError",
    "Behaviour",
    "Call",
    "CostModel",
    "DeviceError",
    "Fault",
    "Graph",
    "Installation",
    "InterfaceError",
    "Ledger",
    "NewGraphError",
    "StaleReadError",
    "installed",
    "site_path",
]
