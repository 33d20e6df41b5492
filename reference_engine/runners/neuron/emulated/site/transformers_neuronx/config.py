"""Configuration objects."""

from __future__ import annotations

from reference_engine.runners.neuron.emulated.configuration import (
    ContinuousBatchingConfig,
    GenerationConfig,
    KVCacheQuantizationConfig,
    NeuronConfig,
    QuantizationConfig,
    SparseAttnConfig,
)

__all__ = [
    "ContinuousBatchingConfig",
    "GenerationConfig",
    "KVCacheQuantizationConfig",
    "NeuronConfig",
    "QuantizationConfig",
    "SparseAttnConfig",
]
