"""The encoder cache of the clean miniature: who needs which item, and what may be evicted for another."""

from __future__ import annotations

from collections.abc import Sequence

from conformance.protocol import EncoderItem


class EncoderCache:
    """Items by key; each position range of a sequence that still needs one holds a reference of its own."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.items: dict[str, int] = {}
        """Key -> size of what is cached, the oldest first."""
        self.users: dict[str, set[tuple[str, int, int]]] = {}
        """Key -> (request, sequence, item index) of everybody who still needs it."""
        self.freed: list[str] = []
        self.run: list[tuple[str, int]] = []

    def room(self) -> int:
        """Embedding slots that are free or held by items that nobody needs."""
        return self.size - sum(size for key, size in self.items.items() if self.users.get(key))

    def end(self, items: Sequence[EncoderItem], first: int, end: int) -> int:
        """Up to where positions from ``first`` can run: an item that finds no room cuts them off."""
        room = self.room()
        for item in items:
            if item.first >= end or item.first + item.size <= first or self.users.get(item.key):
                continue
            if item.size > room:
                return max(first, item.first)
            room -= item.size
        return end

    def use(self, rid: str, seq: int, items: Sequence[EncoderItem], first: int, end: int) -> None:
        """Positions ``[first, end)`` are scheduled: the items they touch are encoded and held."""
        touched = [(i, item) for i, item in enumerate(items) if item.first < end and first < item.first + item.size]
        for index, item in touched:
            self.users.setdefault(item.key, set()).add((rid, seq, index))
        for index, item in touched:
            if item.key in self.items:
                continue
            for key in list(self.items):
                if sum(self.items.values()) + item.size <= self.size:
                    break
                if not self.users.get(key):
                    del self.items[key]
                    self.freed.append(key)
            self.items[item.key] = item.size
            self.run.append((rid, index))

    def release_passed(self, rid: str, seq: int, items: Sequence[EncoderItem], computed: int) -> None:
        """Positions below ``computed`` are done: items that end there are needed no longer."""
        for index, item in enumerate(items):
            if item.first + item.size <= computed:
                self.users.get(item.key, set()).discard((rid, seq, index))

    def release(self, rid: str) -> None:
        """The request needs nothing any more."""
        for users in self.users.values():
            users -= {user for user in users if user[0] == rid}

    def take_orders(self) -> tuple[list[str], list[tuple[str, int]]]:
        """What is evicted and what is encoded in this step."""
        orders = (self.freed, self.run)
        self.freed, self.run = [], []
        return orders
