"""Saving a checkpoint with one file a tensor."""

from __future__ import annotations

from reference_engine.runners.neuron.emulated.checkpoint import save_pretrained_split

__all__ = ["save_pretrained_split"]
