"""What becomes of a planted fault: reached, triggered, and at which step of the hunt (the words are Magma's)."""

from __future__ import annotations

from typing import Any


class Counters:
    """Counts over all engines of one hunt for one fault. ``steps``: calls of `schedule` so far."""

    __slots__ = ("reached", "reached_at", "steps", "triggered", "triggered_at")

    def __init__(self) -> None:
        self.steps = 0
        self.reached = 0
        self.triggered = 0
        self.reached_at: int | None = None
        self.triggered_at: int | None = None


class Probe:
    """The part of a fault that lives in one engine: the hunt's counters, and what the fault itself must remember."""

    __slots__ = ("counters", "memory")

    def __init__(self, counters: Counters) -> None:
        self.counters = counters
        self.memory: dict[Any, Any] = {}

    def reach(self) -> None:
        """The decision that the fault corrupts was taken."""
        counters = self.counters
        counters.reached += 1
        if counters.reached_at is None:
            counters.reached_at = counters.steps

    def trigger(self) -> None:
        """The decision came out other than in the sound engine: from here on the state is wrong."""
        self.reach()
        counters = self.counters
        counters.triggered += 1
        if counters.triggered_at is None:
            counters.triggered_at = counters.steps

    def decide(self, wrong: bool) -> bool:  # noqa: FBT001 - reads as a sentence where it is used
        """Count the decision; returns ``wrong``, whether it goes astray here."""
        if wrong:
            self.trigger()
        else:
            self.reach()
        return wrong
