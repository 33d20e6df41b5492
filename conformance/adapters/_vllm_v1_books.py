"""Reading what vLLM V1 keeps to itself: its block pool and tables, and how it comes to preempt. Nothing is changed."""

from __future__ import annotations

from typing import Any

from conformance.protocol import Preemption, RequestId, Snapshot


def snapshot_of(scheduler: Any) -> Snapshot:
    """The block pool, every request's tables and the queues. O(pool)."""
    manager = scheduler.kv_cache_manager
    pool = manager.block_pool
    null = pool.null_block
    free: list[int] = []
    cached: list[int] = []
    for block in pool.free_block_queue.get_all_free_blocks():
        (free if block.block_hash is None else cached).append(block.block_id)
    held: dict[RequestId, list[list[int]]] = {}
    for group in manager.coordinator.single_type_managers:
        for request_id, blocks in group.req_to_blocks.items():
            held.setdefault(request_id, []).append([block.block_id for block in blocks])
    running = scheduler.running
    known = {request.request_id for request in running}
    return Snapshot(
        free=free,
        cached=cached,
        reserved=[null.block_id],
        held=held,
        ref_counts={block.block_id: block.ref_cnt for block in pool.blocks if block.ref_cnt and block is not null},
        waiting=[
            name for name, request in scheduler.requests.items() if name not in known and not request.is_finished()
        ],
        running=[request.request_id for request in running],
    )


class PreemptionLog:
    """Watches a scheduler preempt: calls through, changes nothing, keeps victims and whom they made room for.

    In every release a victim is put back at the head of the waiting queue by ``prepend_request``, and was chosen
    because ``allocate_slots`` found no blocks for somebody.
    """

    def __init__(self, scheduler: Any, preempted: Any) -> None:
        self._victims: list[Preemption] = []
        self._asked_by: RequestId | None = None
        self._free: int | None = None
        manager, waiting = scheduler.kv_cache_manager, scheduler.waiting
        pool = manager.block_pool
        allocate_slots, prepend_request = manager.allocate_slots, waiting.prepend_request

        def watched_allocate_slots(request: Any, *rest: Any, **named: Any) -> Any:
            blocks = allocate_slots(request, *rest, **named)
            if blocks is None:
                self._asked_by, self._free = request.request_id, pool.get_num_free_blocks()
            return blocks

        def watched_prepend_request(request: Any) -> None:
            prepend_request(request)
            if request.status == preempted:
                self._victims.append(
                    Preemption(
                        request_id=request.request_id,
                        mode="recompute",
                        blocks_free=self._free,
                        asked_by=self._asked_by,
                    )
                )

        manager.allocate_slots = watched_allocate_slots
        waiting.prepend_request = watched_prepend_request

    def take(self) -> list[Preemption]:
        """The victims since the last call, in the order the engine chose them."""
        victims = self._victims
        if victims:
            self._victims = []
        self._asked_by = self._free = None
        return victims
