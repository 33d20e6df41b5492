"""Layouts by name."""

from __future__ import annotations

from reference_engine.runners.neuron.emulated.configuration import GQA, LAYOUT_BSH, LAYOUT_HSB, LAYOUT_SBH, Layout

__all__ = ["GQA", "LAYOUT_BSH", "LAYOUT_HSB", "LAYOUT_SBH", "Layout"]
