"""A stand-in for transformers-neuronx on a machine without a Neuron device; see reference_engine.runners.neuron."""

from __future__ import annotations

from reference_engine.runners.neuron.emulated.configuration import (
    GQA,
    ContinuousBatchingConfig,
    GenerationConfig,
    Layout,
    NeuronConfig,
    QuantizationConfig,
    SparseAttnConfig,
)
from reference_engine.runners.neuron.emulated.model import (
    LlamaForSampling,
    MistralForSampling,
    NeuronAutoModelForCausalLM,
)

EMULATED = True
"""Only the stand-in has this name."""

__version__ = "0.13.1216+emulated"

__all__ = [
    "GQA",
    "ContinuousBatchingConfig",
    "GenerationConfig",
    "Layout",
    "LlamaForSampling",
    "MistralForSampling",
    "NeuronAutoModelForCausalLM",
    "NeuronConfig",
    "QuantizationConfig",
    "SparseAttnConfig",
]
