"""Block tables: who holds which blocks, and everything that grows, shares, moves or drops them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Literal, NamedTuple

from .block_pool import NULL_BLOCK, BlockPool
from .config import EngineConfig
from .prefix_cache import PrefixCache
from .request import Request, Sequence

NO_HOST_BLOCK = -1
"""Stands in a host table for a block that was out of the window when the sequence was swapped out."""


class Move(NamedTuple):
    """A block operation the model runner does before the step, on the device or between device and host."""

    kind: Literal["copy", "swap_out", "swap_in"]
    src: int
    dst: int


class BlockManager:
    """The block tables of all sequences over one device pool, one host pool and one prefix cache.

    Each ``can_*``, and `admission`, changes nothing (ACC-8); what follows it takes what it counted.
    """

    __slots__ = (
        "block_size",
        "cache",
        "deferred",
        "hit_tokens",
        "host",
        "lookahead",
        "pool",
        "queried_tokens",
        "watermark",
        "window",
    )

    def __init__(self, config: EngineConfig) -> None:
        self.block_size = config.block_size
        self.window = config.sliding_window
        self.lookahead = config.num_lookahead_slots
        self.watermark = config.watermark_blocks
        self.pool = BlockPool(config.num_blocks, config.free_list, null_block=config.null_block)
        self.host = BlockPool(config.num_swap_blocks)
        self.cache = PrefixCache(self.pool, config.block_size) if config.enable_prefix_caching else None
        self.deferred: list[Sequence] = []
        """Ended sequences whose blocks a step in flight still uses (KV-5)."""
        self.queried_tokens = 0
        """Tokens looked up in the prefix cache, of each request when it first starts."""
        self.hit_tokens = 0
        """How many of those were there."""

    def blocks_for(self, num_tokens: int) -> int:
        """ceil(num_tokens / block_size)."""
        return -(-num_tokens // self.block_size)

    # -- admission ---------------------------------------------------------------------------------------

    def admission(self, request: Request) -> list[list[int]] | None:
        """The cached blocks each live sequence would start with, or None when its other blocks are not there.

        All tokens of all sequences must fit beside the watermark, so that nobody starts a prefill the pool
        cannot hold. A hit on an evictable block takes it from those available, once, and never costs more
        than a fresh block would (CCH-2). Changes nothing (ACC-8).
        """
        need = sum(self.blocks_for(len(sequence.tokens)) for sequence in request.live)
        room = self.pool.available - self.watermark
        if self.cache is None:
            return [[] for _ in request.live] if need <= room else None
        hits = [self.cache.lookup(request.identity, sequence.tokens) for sequence in request.live]
        revived = {block for blocks in hits for block in blocks if not self.pool.refs[block]}
        return hits if need - sum(map(len, hits)) + len(revived) <= room else None

    def admit(self, starts: list[tuple[Sequence, list[int]]]) -> None:
        """Give each sequence blocks for all its tokens, beginning with its hits (KV-2, ACC-4, ACC-5).

        All hits are held before the first block is allocated, so that none is evicted for another.
        """
        for _, hits in starts:
            self.pool.share(hits)
        for sequence, hits in starts:
            assert not sequence.table and not sequence.scheduled, "only a sequence without blocks is admitted"
            sequence.table = hits + self.pool.allocate(self.blocks_for(len(sequence.tokens)) - len(hits))
            sequence.scheduled = sequence.done = len(hits) * self.block_size
            sequence.published = len(hits)

    def count_hits(self, starts: list[tuple[Sequence, list[int]]]) -> None:
        """Count what was looked up in the prefix cache, and found, for a request that starts (ACC-10)."""
        if self.cache is not None:
            self.queried_tokens += sum(len(sequence.tokens) for sequence, _ in starts)
            self.hit_tokens += sum(len(hits) for _, hits in starts) * self.block_size

    # -- growth ------------------------------------------------------------------------------------------

    def real_need(self, sequences: list[Sequence]) -> int:
        """Blocks that the granted tokens of ``sequences`` (of one request) really take: new ones and copies.

        A shared block must be copied before it is written; when all its holders write in this step, the last
        one may write in place (PRE-1, ACC-3).
        """
        need = 0
        writers: dict[int, int] = {}
        refs, size = self.pool.refs, self.block_size
        for sequence in sequences:
            table = sequence.table
            grown = -(-(sequence.scheduled + sequence.grant) // size) - len(table)
            if grown > 0:
                need += grown
            index = sequence.scheduled // size
            if index < len(table) and refs[table[index]] > 1:
                writers[table[index]] = writers.get(table[index], 0) + 1
        for block, count in writers.items():
            need += count if refs[block] > count else count - 1
        return need

    def append(self, sequence: Sequence, moves: list[Move], lookahead: int = 0) -> None:
        """Make the table cover the granted tokens and ``lookahead`` slots, copying a shared block first.

        The caller has checked that the blocks are there. Upholds ACC-3, ACC-5, ACC-9 and LIM-4.
        """
        pool, table = self.pool, sequence.table
        index = sequence.scheduled // self.block_size
        if index < len(table) and pool.refs[table[index]] > 1:
            source = table[index]
            (copy,) = pool.allocate(1)
            moves.append(Move("copy", source, copy))
            pool.release((source,))
            table[index] = copy
        end = sequence.scheduled + sequence.grant
        if lookahead and table and sequence.request.forked:
            # The KV of a sequence's last token is never computed, so slots end with the token before it.
            end = max(end, min(end + lookahead, sequence.request.max_len - 1))
        missing = -(-end // self.block_size) - len(table)
        if missing > 0:
            table += pool.allocate(missing)

    def extend_lookahead(self, sequence: Sequence) -> None:
        """Add blocks for the lookahead slots from what is left over; nobody is preempted for them (LIM-4)."""
        if not sequence.request.forked:
            return  # nothing is speculated before the fork, and its children share written blocks alone
        end = min(sequence.scheduled + self.lookahead, sequence.request.max_len - 1)
        count = min(self.blocks_for(end) - len(sequence.table), self.pool.available - self.watermark)
        if count > 0:
            sequence.table += self.pool.allocate(count)

    # -- progress ----------------------------------------------------------------------------------------

    def publish(self, sequence: Sequence) -> None:
        """Offer the blocks that committed steps have filled to the prefix cache (KV-2, CCH-1)."""
        full = sequence.done // self.block_size
        if self.cache is not None and full:
            self.cache.publish(sequence.request.identity, sequence.tokens, sequence.table, full)
            sequence.published = full

    def released_by_sliding(self, sequences: list[Sequence]) -> int:
        """Blocks that `slide` would make available for ``sequences`` (of one request). Changes nothing."""
        left = [sequence.table[index] for sequence in sequences for index in self._left_window(sequence)]
        return self._held_alone(left)

    def slide(self, sequence: Sequence) -> None:
        """Put the null block in place of the blocks that no later position can read (ACC-2, ACC-9)."""
        for index in self._left_window(sequence):
            self.pool.release((sequence.table[index],))
            sequence.table[index] = NULL_BLOCK

    def _left_window(self, sequence: Sequence) -> range:
        """Logical blocks still held that lie out of the window, the last one first.

        Counted from what is committed, not from what is scheduled: a step in flight may still read (KV-5).
        """
        assert self.window is not None
        last = (sequence.done - self.window + 1) // self.block_size - 1
        first = last
        while first >= 0 and sequence.table[first] != NULL_BLOCK:
            first -= 1
        return range(last, first, -1)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let ``child`` share the blocks that ``parent`` has computed (ACC-4)."""
        assert not child.table and not parent.in_flight
        child.table = parent.table[: self.blocks_for(parent.done)]
        self.pool.share(self._device_blocks(child.table))
        child.scheduled = child.done = parent.done
        child.published = parent.published

    # -- release -----------------------------------------------------------------------------------------

    def release(self, sequence: Sequence) -> None:
        """Give back all blocks, the last one first so that it is the first to be evicted (ACC-7, CCH-1)."""
        if sequence.table:
            self.publish(sequence)
            table, sequence.table = self._device_blocks(sequence.table), []
            table.reverse()
            self.pool.release(table)

    def retire(self, sequence: Sequence, *, defer: bool) -> None:
        """The sequence has ended: its blocks go now, or with ``defer`` when its last step is committed.

        Upholds ACC-7 and KV-5.
        """
        assert sequence.ended
        if sequence.host_table:
            self._release_host(sequence)
        if not defer:
            self.release(sequence)
        elif sequence.table:
            self.publish(sequence)
            sequence.done = 0  # nothing more to publish when the blocks go
            self.deferred.append(sequence)

    def release_deferred(self, sequence: Sequence) -> None:
        """The last step in flight of an ended sequence is committed: its blocks go (KV-5, ACC-7)."""
        if sequence in self.deferred:
            self.deferred.remove(sequence)
            self.release(sequence)

    def frees_a_block(self, request: Request) -> bool:
        """Whether some block is held by the request's sequences alone (PRE-5)."""
        return self._held_alone(block for sequence in request.live for block in sequence.table) > 0

    # -- swap --------------------------------------------------------------------------------------------

    def can_swap_out(self, request: Request) -> bool:
        """Whether the host pool holds every block with content, shared ones once. Changes nothing."""
        distinct = {block for sequence in request.live for block in self._computed_blocks(sequence)}
        distinct.discard(self._null)
        return len(distinct) <= self.host.available

    def swap_out(self, request: Request, moves: list[Move]) -> None:
        """Copy the computed blocks to the host pool, shared ones once, and give the others back (KV-4)."""
        copies: dict[int, int] = {}
        for sequence in request.live:
            assert not sequence.host_table and not sequence.in_flight
            for block in self._computed_blocks(sequence):
                if block == self._null:
                    sequence.host_table.append(NO_HOST_BLOCK)
                    continue
                if block in copies:
                    self.host.share((copies[block],))
                else:
                    (copies[block],) = self.host.allocate(1)
                    moves.append(Move("swap_out", block, copies[block]))
                sequence.host_table.append(copies[block])
        for sequence in request.live:
            self.release(sequence)

    def can_swap_in(self, request: Request) -> bool:
        """Whether the swapped blocks and those of the step that follows at once fit beside the watermark."""
        distinct: dict[int, None] = {}
        need = 0
        for sequence in request.live:
            distinct.update(dict.fromkeys(block for block in sequence.host_table if block != NO_HOST_BLOCK))
            need += self.blocks_for(len(sequence.tokens)) - len(sequence.host_table)
        # Those that go on writing in one block: the last of them may write in place, the others get a copy.
        writers = Counter(sequence.host_table[-1] for sequence in request.live if sequence.done % self.block_size)
        need += len(distinct) + writers.total() - len(writers)
        return need <= self.pool.available - self.watermark

    def swap_in(self, request: Request, moves: list[Move]) -> None:
        """Copy the blocks back to the device, shared ones once, and give the host blocks back (KV-4)."""
        copies: dict[int, int] = {}
        for sequence in request.live:
            for block in sequence.host_table:
                if block == NO_HOST_BLOCK:
                    sequence.table.append(NULL_BLOCK)
                    continue
                if block in copies:
                    self.pool.share((copies[block],))
                else:
                    (copies[block],) = self.pool.allocate(1)
                    moves.append(Move("swap_in", block, copies[block]))
                sequence.table.append(copies[block])
            sequence.published = 0
        for sequence in request.live:
            self._release_host(sequence)

    # -- private -----------------------------------------------------------------------------------------

    @property
    def _null(self) -> int:
        return NULL_BLOCK if self.pool.reserved else -1

    def _held_alone(self, blocks: Iterable[int]) -> int:
        """How many of ``blocks``, each named once for every holder that is counted, nobody else holds."""
        refs = self.pool.refs
        return sum(refs[block] == count for block, count in Counter(blocks).items())

    def _device_blocks(self, table: list[int]) -> list[int]:
        """A copy of ``table`` without null blocks."""
        return [block for block in table if block != NULL_BLOCK] if self.pool.reserved else table[:]

    def _computed_blocks(self, sequence: Sequence) -> list[int]:
        """The blocks of the table that hold computed positions, null blocks included."""
        return sequence.table[: self.blocks_for(sequence.done)]

    def _release_host(self, sequence: Sequence) -> None:
        table, sequence.host_table = sequence.host_table, []
        self.host.release([block for block in table if block != NO_HOST_BLOCK])
