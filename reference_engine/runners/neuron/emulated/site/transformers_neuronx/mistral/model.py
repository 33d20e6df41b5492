"""The model class."""

from __future__ import annotations

from reference_engine.runners.neuron.emulated.model import MistralForSampling

__all__ = ["MistralForSampling"]
