"""The class that picks a class."""

from __future__ import annotations

from reference_engine.runners.neuron.emulated.model import NeuronAutoModelForCausalLM

__all__ = ["NeuronAutoModelForCausalLM"]
