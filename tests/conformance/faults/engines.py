"""All faulty engines, by the requirement that each of them breaks."""

from __future__ import annotations

from . import accounting, device, scheduling
from .base import Faulty

__all__ = ["FAULTS", "Faulty", "accounting", "device", "scheduling"]


def _all(of: type[Faulty]) -> list[type[Faulty]]:
    return [fault for direct in of.__subclasses__() for fault in (direct, *_all(direct))]


FAULTS: dict[str, type[Faulty]] = {fault.breaks: fault for fault in _all(Faulty) if fault.breaks}
"""Requirement -> the engine that breaks it."""
