"""The blocks of the clean miniature: reference counts, a free list, and the cached blocks that may be hit."""

from __future__ import annotations

from typing import TypeAlias

Key: TypeAlias = tuple[object, tuple[int, ...]]
"""What the content of a full block depends on: the identity of the request, and every token up to its end."""


class Pool:
    """Block ids ``[first, first + count)``. With no reference, a block is free, or cached while it has a key."""

    def __init__(self, first: int, count: int) -> None:
        self.free = list(range(first, first + count))
        self.cached: dict[int, None] = {}
        """Cached blocks nobody holds, the longest unused first."""
        self.references: dict[int, int] = {}
        self.keys: dict[int, Key] = {}
        self.blocks: dict[Key, int] = {}

    @property
    def available(self) -> int:
        """Blocks that can be handed out now."""
        return len(self.free) + len(self.cached)

    def take(self) -> int:
        """A block of one's own: a free one, else the one that has been cached longest."""
        if self.free:
            block = self.free.pop(0)
        else:
            block = next(iter(self.cached))
            del self.cached[block]
            self.forget(block)
        self.references[block] = 1
        return block

    def share(self, block: int) -> int:
        """One more holder of ``block``, which may be a cached one."""
        self.cached.pop(block, None)
        self.references[block] = self.references.get(block, 0) + 1
        return block

    def release(self, block: int) -> None:
        """One holder fewer."""
        self.references[block] -= 1
        if self.references[block] == 0:
            del self.references[block]
            if block in self.keys:
                self.cached[block] = None
            else:
                self.free.append(block)

    def publish(self, block: int, key: Key) -> None:
        """The block is full and its content final: it may be hit, unless another one already serves."""
        if key not in self.blocks and block not in self.keys:
            self.blocks[key] = block
            self.keys[block] = key

    def forget(self, block: int) -> None:
        """The block may no longer be hit."""
        del self.blocks[self.keys.pop(block)]

    def forget_all(self) -> None:
        """Nothing may be hit any more; cached blocks become free."""
        self.keys.clear()
        self.blocks.clear()
        self.free.extend(self.cached)
        self.cached.clear()
