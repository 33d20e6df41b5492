"""Reading what vLLM V0 keeps to itself: the books of its block managers, and how it comes to preempt.

Nothing here changes engine state. There are two layouts: block manager v1 (`BlockSpaceManagerV1`, an object
with a reference count per block) and block manager v2, which later releases call `SelfAttnBlockSpaceManager`
(block ids and a counter). Device ids are those of the device pool; host ids count from 0 in the host pool.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from conformance.adapters._vllm_v0_release import Release
from conformance.protocol import BlockId, Preemption, RequestId, SequenceKey, Snapshot, Usage

HeldTables = dict[RequestId, list[list[BlockId]]]


class Books(Protocol):
    """How one kind of block manager is read."""

    def snapshot(self, owners: Mapping[int, SequenceKey]) -> Snapshot:
        """All of it, O(pool). ``owners`` maps the engine's sequence ids to the harness's keys."""

    def blocks_counted(self, group: Any, running: Any, lookahead: int) -> int:
        """The blocks ``can_append_slots`` counts as needed for ``group`` at this moment."""

    def null_block(self) -> BlockId | None:
        """The block that stands for positions out of the window, once the engine has set it aside."""


def _owner(owners: Mapping[int, SequenceKey], sequence_id: int) -> RequestId:
    """The request of a sequence; one the adapter does not know is shown, not hidden."""
    key = owners.get(sequence_id)
    return f"<unknown sequence {sequence_id}>" if key is None else key[0]


class BooksV1:
    """Block manager v1. Its uncached allocator knows only its free blocks; counts are read off the tables."""

    def __init__(self, manager: Any, device: Any) -> None:
        self._manager = manager
        self._gpu = device.GPU

    def null_block(self) -> BlockId | None:
        return None

    def blocks_counted(self, group: Any, running: Any, lookahead: int) -> int:
        return int(group.num_seqs(status=running))

    def snapshot(self, owners: Mapping[int, SequenceKey]) -> Snapshot:
        held: HeldTables = {}
        counts: dict[BlockId, int] = {}
        for sequence_id, table in self._manager.block_tables.items():
            blocks = list(table)
            if blocks and blocks[0].device != self._gpu:
                continue
            tables = held.setdefault(_owner(owners, sequence_id), [])
            tables.append([block.block_number for block in blocks])
            for block in blocks:
                counts[block.block_number] = block.ref_count
        free, cached = self._free_and_cached(self._manager.gpu_allocator)
        host_free, host_cached = self._free_and_cached(self._manager.cpu_allocator)
        return Snapshot(free=free, cached=cached, held=held, ref_counts=counts, swap_free=host_free + host_cached)

    def _free_and_cached(self, allocator: Any) -> tuple[list[BlockId], list[BlockId]]:
        if not self._manager.enable_caching:
            return [block.block_number for block in allocator.free_blocks], []
        never_used = range(allocator.current_num_blocks, allocator.num_blocks)
        return list(never_used), [block.block_number for block in allocator.evictor.free_table.values()]


class BooksV2:
    """Block manager v2. A host block has an id of its own beside its number in the host pool."""

    def __init__(self, manager: Any, device: Any) -> None:
        self._manager = manager
        pools = manager.block_allocator._allocators
        self._device_pool = pools[device.GPU]
        self._host_pool = pools[device.CPU]
        self._device_ids = frozenset(self._device_pool.all_block_ids)
        self._host_base = min(self._host_pool.all_block_ids, default=0)

    def null_block(self) -> BlockId | None:
        block = self._manager.block_allocator._null_block
        return None if block is None else int(block.block_id)

    def blocks_counted(self, group: Any, running: Any, lookahead: int) -> int:
        tables = self._manager.block_tables
        return sum(
            tables[seq.seq_id].get_num_blocks_touched_by_append_slots(
                token_ids=tables[seq.seq_id].get_unseen_token_ids(seq.get_token_ids()),
                num_lookahead_slots=lookahead,
            )
            for seq in group.get_seqs(status=running)
        )

    def snapshot(self, owners: Mapping[int, SequenceKey]) -> Snapshot:
        held: HeldTables = {}
        for sequence_id, table in self._manager.block_tables.items():
            ids = list(table.physical_block_ids)
            if ids and ids[0] in self._device_ids:
                held.setdefault(_owner(owners, sequence_id), []).append(ids)
        free, cached = self._free_and_cached(self._device_pool)
        host_free, host_cached = self._free_and_cached(self._host_pool)
        null = self.null_block()
        counts = self._device_pool._refcounter._refcounts
        return Snapshot(
            free=free,
            cached=cached,
            reserved=[] if null is None else [null],
            held=held,
            ref_counts={block: count for block, count in counts.items() if count},
            swap_free=[block - self._host_base for block in host_free + host_cached],
        )

    def _free_and_cached(self, pool: Any) -> tuple[list[BlockId], list[BlockId]]:
        if not self._manager.enable_caching:
            return list(pool._free_block_indices), []
        return list(pool._hashless_allocator._free_block_indices), list(pool.evictor.free_table)


def books_of(manager: Any, device: Any) -> Books:
    """The reader for this block manager, chosen by what it has, not by its name."""
    return BooksV2(manager, device) if hasattr(manager, "block_allocator") else BooksV1(manager, device)


def usage_of(scheduler: Any, running: int | None = None) -> Usage:
    """The scheduler's queues and counters. ``running``: sequences, where they are more than the groups. O(1)."""
    return Usage(
        free_blocks=scheduler.block_manager.get_num_free_gpu_blocks(),
        running=len(scheduler.running) if running is None else running,
        waiting=len(scheduler.waiting),
        swapped=len(scheduler.swapped),
        preemptions=scheduler.num_cumulative_preemption,
    )


def snapshot_of(scheduler: Any, books: Books, owners: Mapping[int, SequenceKey]) -> Snapshot:
    """The block manager's books and the scheduler's queues. O(pool)."""
    snapshot = books.snapshot(owners)
    snapshot.waiting = [group.request_id for group in scheduler.waiting]
    snapshot.running = [group.request_id for group in scheduler.running]
    snapshot.swapped = [group.request_id for group in scheduler.swapped]
    return snapshot


class PreemptionLog:
    """Watches a scheduler preempt: calls through, changes nothing, keeps victims and the engine's figures."""

    def __init__(self, release: Release, scheduler: Any, books: Books) -> None:
        self._victims: list[Preemption] = []
        self._asked_by: RequestId | None = None
        self._counted: int | None = None
        self._free: int | None = None
        manager = scheduler.block_manager
        running = release.sequence_status.RUNNING
        can_append_slots, can_allocate = manager.can_append_slots, manager.can_allocate
        preempt = scheduler._preempt

        def watched_can_append_slots(seq_group: Any, num_lookahead_slots: int = 0) -> bool:
            answer: bool = can_append_slots(seq_group, num_lookahead_slots)
            if not answer:
                self._asked_by = seq_group.request_id
                self._counted = books.blocks_counted(seq_group, running, num_lookahead_slots)
                self._free = manager.get_num_free_gpu_blocks()
            return answer

        def watched_can_allocate(seq_group: Any, *rest: Any, **named: Any) -> Any:
            # Under the priority policy a waiting request may have others preempted. The budget may be the
            # reason as well as the pool, so no figures are claimed.
            self._asked_by, self._counted, self._free = seq_group.request_id, None, None
            return can_allocate(seq_group, *rest, **named)

        def watched_preempt(seq_group: Any, *rest: Any, **named: Any) -> Any:
            mode = preempt(seq_group, *rest, **named)
            self._victims.append(
                Preemption(
                    request_id=seq_group.request_id,
                    mode="swap" if mode.name == "SWAP" else "recompute",
                    blocks_counted=self._counted,
                    blocks_free=self._free,
                    asked_by=self._asked_by,
                )
            )
            return mode

        manager.can_append_slots = watched_can_append_slots
        scheduler._preempt = watched_preempt
        if release.has_priority:
            manager.can_allocate = watched_can_allocate

    def take(self) -> list[Preemption]:
        """The victims since the last call, in the order the engine chose them."""
        victims = self._victims
        self._victims = []
        return victims
