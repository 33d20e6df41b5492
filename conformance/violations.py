"""A broken requirement, and what it means for the rest of a session."""

from __future__ import annotations

import msgspec

CORRUPTING = frozenset(
    {
        "ACC-2",
        "ACC-3",
        "ACC-4",
        "ACC-9",
        "DEV-1",
        "DEV-2",
        "DEV-3",
        "DEV-4",
        "ID-1",
        "KV-1",
        "KV-2",
        "KV-3",
        "KV-4",
        "KV-5",
        "KV-6",
        "PRG-5",
        "PRG-6",
        "PRG-8",
    }
)
"""After one of these the books no longer mean anything: the session ends at the end of the step."""
SPOILING = frozenset({"DEV-1", "DEV-2", "DEV-3", "DEV-4"})
"""After one of these the tokens of an engine's own device mean nothing: wrong ones are symptoms."""


class Violation(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One broken requirement: what, where, expected and got."""

    requirement: str
    message: str
    expected: str = ""
    got: str = ""
    step: int = 0
    operation: int = 0
    """Index of the operation during which it was seen."""

    def __str__(self) -> str:
        return f"{self.requirement}: {self.message}\n  expected {self.expected}\n  got      {self.got}"
