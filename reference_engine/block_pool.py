"""A pool of block ids: reference counts, a free list, and the unreferenced blocks kept for a prefix hit."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

from .config import FreeListOrder

NULL_BLOCK = 0


class BlockPool:
    """Block ids ``0 .. num_blocks - 1``, each free, held (references above 0), evictable or the null block.

    Upholds ACC-1, ACC-2 and ACC-4; `available` counts evictable blocks as well (CCH-2).
    """

    __slots__ = (
        "_on_evict",
        "_take",
        "cached",
        "evictable",
        "free",
        "held",
        "num_blocks",
        "refs",
        "reserved",
    )

    def __init__(self, num_blocks: int, order: FreeListOrder = "first-in", *, null_block: bool = False) -> None:
        self.num_blocks = num_blocks
        self.reserved = 1 if null_block else 0
        self.refs = [0] * num_blocks
        ids = range(self.reserved, num_blocks)
        self.free: deque[int] = deque(reversed(ids) if order == "last-in" else ids)
        self._take: Callable[[], int] = self.free.popleft if order == "first-in" else self.free.pop
        self.evictable: OrderedDict[int, None] = OrderedDict()
        """Unreferenced blocks with cached content, the least recently used first."""
        self.cached = bytearray(num_blocks)
        """1 for a block whose content the prefix cache knows, held or not."""
        self.held = 0
        self._on_evict: Callable[[int], None] | None = None

    @property
    def available(self) -> int:
        """Blocks that can be handed out now: free or evictable."""
        return len(self.free) + len(self.evictable)

    def on_evict(self, callback: Callable[[int], None]) -> None:
        """Have ``callback(block)`` called before an evictable block is handed out for new content."""
        self._on_evict = callback

    def allocate(self, count: int) -> list[int]:
        """Hand out ``count`` blocks with one reference each, free ones first, then the least recently used.

        The caller has made sure that `available` is enough (ACC-1, ACC-2, ACC-4).
        """
        assert 0 <= count <= self.available, f"{count} blocks asked, {self.available} available"
        blocks = [self._take() if self.free else self._evict() for _ in range(count)]
        for block in blocks:
            assert self.refs[block] == 0, f"block {block} is on the free list and held"
            self.refs[block] = 1
        self.held += count
        self._check()
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Add one reference to each block; an evictable one becomes held again (ACC-4)."""
        refs = self.refs
        for block in blocks:
            if refs[block] == 0:
                assert block in self.evictable, f"block {block} is free: it cannot be shared"
                del self.evictable[block]
                self.held += 1
            refs[block] += 1
        self._check()

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference from each block, in the order given; the last one frees it (ACC-4)."""
        refs = self.refs
        for block in blocks:
            assert refs[block] > 0, f"block {block} is released and not held"
            refs[block] -= 1
            if refs[block] == 0:
                self.held -= 1
                if self.cached[block]:
                    self.evictable[block] = None
                else:
                    self.free.append(block)
        self._check()

    def mark_cached(self, block: int) -> None:
        """Note that the prefix cache knows the content of ``block``, which is held."""
        assert self.refs[block] > 0 and not self.cached[block], f"block {block} cannot be published"
        self.cached[block] = 1

    def forget_cached(self) -> None:
        """Make every evictable block free and every held one ordinary (CCH-3)."""
        self.cached = bytearray(self.num_blocks)
        self.free.extend(self.evictable)
        self.evictable.clear()
        self._check()

    def _evict(self) -> int:
        block, _ = self.evictable.popitem(last=False)
        assert self.cached[block] and self._on_evict is not None
        self.cached[block] = 0
        self._on_evict(block)
        return block

    def _check(self) -> None:
        """Conservation, from counters (ACC-1)."""
        assert self.held + len(self.free) + len(self.evictable) + self.reserved == self.num_blocks, (
            "blocks lost or made up"
        )
