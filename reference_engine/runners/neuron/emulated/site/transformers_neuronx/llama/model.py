"""The model class."""

from __future__ import annotations

from reference_engine.runners.neuron.emulated.model import LlamaForSampling

__all__ = ["LlamaForSampling"]
