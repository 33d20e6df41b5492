"""Shadow KV: for every slot of the device pool, which token prefix was written there.

Each plan is executed on it the way a model runner would: block moves, then all writes of the pass, then a
check of every position that attention reads. It is to block accounting what AddressSanitizer is to memory,
and needs nothing from the engine but its plans.

Cost: memory and time follow what was written, never the size of the pool. Every change of a block gives it
a new *stamp*, from a clock that all share; a reader keeps, per logical block, which block it saw full and right
and under which stamp, and need not look at its slots again while both stand. While no block changes at all, a
decode step costs one comparison of tables and one slot.

Writes of a pass come before its reads: a full-attention layer writes all KV of the pass before it reads,
so a request may hit a block that another request fills in the same pass.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from conformance.protocol import BlockId

EMPTY: Final = 0
"""The node of a slot that nothing was written to since the block was zeroed, or ever."""


class Mismatch(NamedTuple):
    """A position that attention reads and whose slot holds something else."""

    position: int
    block: BlockId
    expected: int
    found: int


class Reader:
    """What one sequence has verified: per logical block which one was last seen right, and under which stamp.

    ``clock``: the time at which all of them were.
    """

    __slots__ = ("blocks", "clock", "stamps")

    def __init__(self) -> None:
        self.blocks: list[BlockId] = []
        self.stamps: list[int] = []
        self.clock = 0

    def forget(self) -> None:
        """Verify every block anew, because the table was replaced."""
        self.blocks.clear()
        self.stamps.clear()


class ShadowKV:
    """The content of one device pool and its host (swap) pool, for one KV-cache group layout.

    ``block_size`` is in tokens. Blocks appear when they are first written; node 0 means never written.
    """

    __slots__ = ("_block_size", "_blocks", "_clock", "_host", "_stamps")

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._blocks: dict[BlockId, list[int]] = {}
        self._host: dict[BlockId, list[int]] = {}
        self._stamps: dict[BlockId, int] = {}
        self._clock = 0

    def holds(self, block: BlockId, offset: int) -> int:
        """The node in a slot, `EMPTY` when nothing was written."""
        slots = self._blocks.get(block)
        return EMPTY if slots is None else slots[offset]

    def content(self, block: BlockId) -> list[int]:
        """A copy of the block's nodes, offset by offset."""
        return list(self._blocks.get(block, [EMPTY] * self._block_size))

    def _touch(self, block: BlockId) -> None:
        self._clock += 1
        self._stamps[block] = self._clock

    def write(self, table: list[BlockId], first: int, nodes: list[int]) -> None:
        """Write ``nodes`` at positions ``first``, ``first + 1``, … through ``table``."""
        size = self._block_size
        position = first
        for node in nodes:
            index, offset = divmod(position, size)
            block = table[index]
            slots = self._blocks.get(block)
            if slots is None:
                slots = self._blocks[block] = [EMPTY] * size
            if slots[offset] != node:
                # Appending to an untouched slot leaves what others verified in this block valid.
                if slots[offset] != EMPTY:
                    self._touch(block)
                slots[offset] = node
            position += 1

    def copy(self, src: BlockId, dst: BlockId) -> None:
        """Device block ``src`` is copied over device block ``dst``."""
        self._blocks[dst] = self.content(src)
        self._touch(dst)

    def zero(self, block: BlockId) -> None:
        """Device block is cleared: whatever it held is gone."""
        self._blocks.pop(block, None)
        self._touch(block)

    def swap_out(self, src: BlockId, dst: BlockId) -> None:
        """Device block ``src`` is copied to host block ``dst``."""
        self._host[dst] = self.content(src)

    def swap_in(self, src: BlockId, dst: BlockId) -> None:
        """Host block ``src`` is copied to device block ``dst``; an unknown host block brings nothing."""
        self._blocks[dst] = list(self._host.get(src, [EMPTY] * self._block_size))
        self._touch(dst)

    def is_written(self, block: BlockId) -> bool:
        """Whether anything was ever written to the device block (and not zeroed since)."""
        return block in self._blocks

    def host_is_written(self, block: BlockId) -> bool:
        """Whether the host block was ever swapped out to."""
        return block in self._host

    def verify(self, reader: Reader, table: list[BlockId], nodes: list[int], start: int, end: int) -> Mismatch | None:
        """Check that positions ``[start, end)`` read through ``table`` hold ``nodes``; the first that does not.

        O(blocks of the table) for what was verified before and is untouched, O(slots) for the rest.
        """
        size = self._block_size
        blocks, stamps = reader.blocks, reader.stamps
        verified = len(blocks)
        full = end // size
        first = start // size
        if reader.clock == self._clock and table[:verified] == blocks:
            first = max(first, verified)
        for index in range(first, -(-end // size)):
            block = table[index]
            stamp = self._stamps.get(block, 0)
            if index < verified and blocks[index] == block and stamps[index] == stamp:
                continue
            base = index * size
            low, high = max(start, base), min(end, base + size)
            slots = self._blocks.get(block)
            if slots is None or slots[low - base : high - base] != nodes[low:high]:
                for position in range(low, high):
                    found = EMPTY if slots is None else slots[position - base]
                    if found != nodes[position]:
                        return Mismatch(position, block, nodes[position], found)
            if index < full and low == base and index <= len(blocks):
                blocks[index : index + 1], stamps[index : index + 1] = [block], [stamp]
        if start == 0 and full >= len(blocks):
            reader.clock = self._clock
        return None
