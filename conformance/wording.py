"""How figures are put into words."""

from __future__ import annotations


def some(number: int, noun: str) -> str:
    """``1 block``, ``2 blocks``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
