"""Which request has which line of the device. A block id is never a line. Standard library only.

A block id says where the scheduler keeps its books; the pool may have more blocks than the device has lines, hand
them out from the end, or reserve number 0. A line that does not exist is written to all the same: it aliases line 0.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

LineOrder: TypeAlias = Callable[[Sequence[int]], int]
"""Chooses one of the free lines, which are given in ascending order."""


def lowest_first(free: Sequence[int]) -> int:
    """The lowest free line: rows of a batch that came in one go are in ascending order."""
    return free[0]


def highest_first(free: Sequence[int]) -> int:
    """The highest free line: rows of a batch that came in one go are in descending order."""
    return free[-1]


def from_the_middle(free: Sequence[int]) -> int:
    """The middle one: rows of a batch are in an order of neither kind."""
    return free[len(free) // 2]


class LineMap:
    """Lines ``0 .. count - 1``, each free or held by one request."""

    __slots__ = ("_free", "_held", "_order", "count")

    def __init__(self, count: int, order: LineOrder = lowest_first) -> None:
        self.count = count
        self._order = order
        self._free = list(range(count))
        self._held: dict[str, int] = {}

    def __getitem__(self, request_id: str) -> int:
        return self._held[request_id]

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._held

    def __iter__(self) -> Iterator[str]:
        """The requests that hold a line, in the order in which they got it."""
        return iter(self._held)

    @property
    def free(self) -> tuple[int, ...]:
        """Lines nobody holds, ascending."""
        return tuple(self._free)

    def assign(self, request_id: str) -> int:
        """Give ``request_id`` a free line. The caller makes sure that there is one and that it has none yet."""
        assert request_id not in self._held, f"{request_id} has line {self._held[request_id]}"
        assert self._free, f"{request_id} needs a line, and all {self.count} are held by {', '.join(self._held)}"
        line = self._order(self._free)
        self._free.remove(line)
        self._held[request_id] = line
        return line

    def release(self, request_id: str) -> None:
        """Take the line of ``request_id`` back."""
        insort(self._free, self._held.pop(request_id))
