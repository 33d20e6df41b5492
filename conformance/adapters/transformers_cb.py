"""transformers' continuous batching: its real processor, scheduler, cache and offloading, from the model's seat.

A step is `ContinuousBatchProcessor.prepare_next_batch`; its tokens are written where the model would write them and
taken by `update_batch`. What a plan shows is read off the tensors made for the model: input ids, positions, and the
indices through which the KV cache is read and written, or the block table where that is passed instead.

What an oracle has to know about this engine:

- ``max_num_seqs`` is its ``max_requests_per_batch``: it bounds a batch, not the set of requests that hold cache.
  There is no ``max_model_len``.
- ``pipeline_depth = 2`` is its asynchronous batching, the default on a GPU: the next batch is prepared and launched
  before the tokens of the last one are taken. Streams are stood in for; work runs in the order it is given.
- Prompts are split over steps whenever the token budget says so, whether ``enable_chunked_prefill`` is set or not.
- Two blocks of the pool take the reads and writes of padding.
- With ``preemption_mode = "swap"`` a victim's blocks are copied to the host while that has room, else dropped. Which
  of the two is decided for each; the request is computed again from its prompt and outputs when they are dropped.
- A request with several sequences is forked one token before its prompt ends; a child for which there is no room is
  prefilled from the start. Children are requests of their own, with ids that the engine makes from their parent's.
  What waits for its fork is a row of no token. A batch of nothing else is an error, but for asynchronous batching,
  where CUDA graphs pad it.
- Behind a sliding window a table is a ring of blocks, whose size must be a divisor of the window for it to be shown
  as one.
- An abort takes effect when the next batch is prepared (``deferred_free_steps``).
- Blocks of equal content become one when they are full (``merges_equal_blocks``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import msgspec

from conformance.adapters._transformers_cb_processor import PAGE_SIZE_MIN, RESERVED_BLOCKS, build, modules
from conformance.protocol import (
    AdapterError,
    BlockMove,
    Capabilities,
    CommitResult,
    ConfigRefused,
    EngineConfig,
    EngineFault,
    Feature,
    Finished,
    OptionValue,
    Preemption,
    Rejection,
    Request,
    RequestId,
    Sampled,
    SequenceKey,
    SequencePlan,
    Snapshot,
    StepPlan,
    Usage,
)

_FEATURES: frozenset[Feature] = frozenset(
    {
        "abort",
        "chunked_prefill",
        "fork",
        "pipeline",
        "prefix_caching",
        "recompute",
        "sliding_window",
        "snapshot",
        "stop_token",
        "swap",
        "token_budget",
        "usage",
    }
)
_OPTIONS = {
    "scheduler_type": "Its scheduler: fifo (default), decodes first, or prefill_first.",
    "safety_margin": "Share of free blocks under which few prompts are admitted; the scheduler's own by default.",
    "max_blocks_per_request": "Blocks up to which a decode is given a block table instead of indices (0: never).",
}
_CHILD = "__child#"
_DEPTH_MAX = 2


class _Batch:
    """A batch that was launched: the step it is, and the sequences whose tokens it gives, in order."""

    __slots__ = ("keys", "step")

    def __init__(self, step: int) -> None:
        self.step = step
        self.keys: list[SequenceKey] = []


class TransformersEngine:
    """One continuous batching processor. Made by `make`."""

    def __init__(self, config: EngineConfig, processor: Any, capabilities: Capabilities) -> None:
        self._capabilities = capabilities
        self._processor = processor
        self._scheduler = processor.scheduler
        self._cache = processor.cache
        self._pool = processor.cache.pool
        self._ios = processor.inputs_and_outputs
        ((self._layers, self._allocator),) = processor.cache.cache_allocators.items()
        self._pipelined = config.pipeline_depth > 1
        self._block_size = config.block_size
        self._window = config.sliding_window
        self._stride = self._allocator.block_physical_stride
        self._keys: dict[str, SequenceKey] = {}
        self._widths: dict[RequestId, int] = {}
        self._outputs: dict[RequestId, dict[int, list[int]]] = {}
        self._flying: deque[_Batch] = deque()
        self._ran: set[str] = set()
        """Who has run since it was last taken off the active set, which a prefix match alone puts it on."""
        self._moves: list[BlockMove] = []
        self._preempted: list[Preemption] = []
        self._rejected: list[Rejection] = []
        self._finished: list[Finished] = []
        self._step = 0
        self._watch_offloading()
        self._watch_forks()

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    # -- watching ----------------------------------------------------------------------------------------

    def _watch_offloading(self) -> None:
        """Note who is taken off the active set and how, and the copies that are made for it."""
        manager = self._processor.offloading_manager
        offload, restore = manager._offload_to_cpu, manager.restore_scheduled_requests

        def watched_offload(victims: list[Any], tables: dict[str, dict[str, list[int]]]) -> set[str]:
            kept: set[str] = offload(victims, tables)
            for state in victims:
                name = state.request_id
                if name in kept:
                    hosts = manager._request_id_to_cpu_blocks[name][self._layers]
                    pairs = zip(tables[name][self._layers], hosts, strict=True)
                    self._moves += [BlockMove("swap_out", block, host) for block, host in pairs]
                self._note_preemption(name, "swap" if name in kept else "recompute")
            return kept

        def watched_restore(batch: list[Any]) -> None:
            hosts = {
                one.state.request_id: manager._request_id_to_cpu_blocks[one.state.request_id][self._layers][:]
                for one in batch
                if one.state.is_cpu_offloaded
            }
            restore(batch)
            for name, blocks in hosts.items():
                table = self._allocator.block_table[name]
                pairs = zip(blocks, table, strict=False)  # as many as both have, which is the engine's rule
                self._moves += [BlockMove("swap_in", host, block) for host, block in pairs]

        manager._offload_to_cpu = watched_offload
        manager.restore_scheduled_requests = watched_restore

    def _note_preemption(self, name: str, mode: Any) -> None:
        if name not in self._ran:
            return
        self._ran.discard(name)
        request_id, index = self._keys[name]
        self._preempted.append(
            Preemption(
                request_id=request_id,
                mode=mode,
                seq=index if self._widths[request_id] > 1 else None,
                blocks_free=self._pool.num_free_sectors,
            )
        )

    def _watch_forks(self) -> None:
        """Note the copies made for forked sequences; they come before the next batch."""
        copy = self._cache.perform_cache_copy

        def watched(pairs: dict[str, tuple[list[int], list[int]]]) -> None:
            copy(pairs)
            self._moves += [BlockMove("copy", src, dst) for src, dst in zip(*pairs[self._layers], strict=True)]

        self._cache.perform_cache_copy = watched

    # -- requests ----------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Put the request into the queue from which the engine takes it when it prepares its next batch."""
        names = [request.request_id] + [f"{request.request_id}{_CHILD}{index}" for index in range(request.n - 1)]
        self._keys.update({name: (request.request_id, index) for index, name in enumerate(names)})
        self._widths[request.request_id] = request.n
        self._processor.input_queue.put(
            modules().requests.RequestState(
                request_id=request.request_id,
                initial_tokens=list(request.prompt),
                num_children=request.n - 1,
                max_new_tokens=request.max_tokens,
                eos_token_id=-1 if request.stop_token is None else request.stop_token,
            )
        )

    def abort_request(self, request_id: RequestId) -> None:
        """Cancel the request and its children; the engine does it when it prepares its next batch."""
        for index in range(self._widths.get(request_id, 1)):
            self._processor.cancel_queue.put(request_id if index == 0 else f"{request_id}{_CHILD}{index - 1}")

    # -- steps -------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Prepare a batch, and read what the model is given off its tensors."""
        if len(self._flying) > self._pipelined:
            raise AdapterError(f"schedule() with {len(self._flying)} steps in flight")
        plan = StepPlan(step=self._step)
        self._step += 1
        launched = self._processor.prepare_next_batch()
        plan.preempted, self._preempted = self._preempted, []
        plan.moves, self._moves = self._moves, []
        plan.rejected, self._rejected = self._rejected, []
        if launched:
            batch = _Batch(plan.step)
            self._read(self._tensors(), batch, plan)
            self._flying.append(batch)
            if self._pipelined:
                self._ios.swap_io_pairs()
        return plan

    def _tensors(self) -> Any:
        """What the model is given, and gives: of the pair that is current, where there are two."""
        return self._ios.io_pairs[self._ios.current_pair].host_io if self._pipelined else self._ios

    def _read(self, tensors: Any, batch: _Batch, plan: StepPlan) -> None:
        """The rows of a batch: what each runs, and through which blocks."""
        tokens, positions = tensors.input_ids.tolist(), tensors.position_ids.tolist()
        starts = tensors.cumulative_seqlens_q.tolist()
        writes = tensors.write_index_storage[0].tolist()
        reads = tensors.read_index_storage[0].tolist() if tensors.max_kv_read else []
        if not self._pipelined and not starts[len(tensors.requests_in_batch)]:
            names = ", ".join(future.state.request_id for future in tensors.requests_in_batch)
            raise EngineFault(f"the model is given a batch of no token (for {names}), which none can run")
        read_from = 0
        for row, future in enumerate(tensors.requests_in_batch):
            start, end = starts[row], starts[row + 1]
            key = self._keys[future.state.request_id]
            self._ran.add(future.state.request_id)
            if future.has_new_token:
                batch.keys.append(key)
            length = end - start
            # A request about to be forked may wait for it in a row of no token.
            first = positions[start] if length else future.state.position_offset
            if tensors.use_block_table:
                table = self._table_of_row(tensors.block_table[0, row].tolist())
            else:
                count = self._allocator.get_seqlen_k(first, length) if reads else 0
                indices = reads[read_from : read_from + count]
                read_from += count
                table = self._table(first, length, indices, writes[start:end])
            given = tokens[start:end]
            plan.sequences.append(
                SequencePlan(
                    request_id=key[0],
                    seq=key[1],
                    first=first,
                    num_tokens=length,
                    block_tables=[table],
                    samples=future.has_new_token,
                    token_ids=None if self._is_carried_over(tensors, future, end - 1) else given,
                )
            )

    def _is_carried_over(self, tensors: Any, future: Any, position: int) -> bool:
        """Whether the input at ``position`` of the batch is what the one in flight gives for the same request."""
        if not self._pipelined:
            return False
        source = int(tensors.carry_over_ids[position])
        previous = self._ios.io_pairs[1 - self._ios.current_pair].host_io.req_id_to_new_token_position
        return 0 <= source < len(previous) and list(previous)[source] == future.state.request_id

    def _table_of_row(self, entries: list[int]) -> list[int]:
        """A row of the block table that kernels are given: the first page of each block, then padding."""
        pages = self._stride // self._block_size
        return [entry // pages for entry in entries if entry >= 0]

    def _table(self, first: int, length: int, reads: list[int], writes: list[int]) -> list[int]:
        """The block table from which these indices follow. Raises `EngineFault` when there is none.

        ``reads`` are of positions ``[0, first + length)``; behind a window, of the last ones before ``first``.
        """
        size, stride = self._block_size, self._stride
        end = first + length
        table: dict[int, int] = {}

        def place(position: int, index: int) -> None:
            block, offset = divmod(index, stride)
            if table.setdefault(position // size, block) != block or offset != position % size:
                raise EngineFault(f"position {position} is cached at index {index}, block {block} offset {offset}")

        if self._window is None:
            for position, index in enumerate(reads):
                place(position, index)
            written = range(first, end)
        else:
            kept = min(first, self._window - 1)
            for position, index in zip(range(first - kept, first), reads, strict=False):
                place(position, index)
            written = range(max(first, end - self._window), end)
            writes = writes[len(writes) - len(written) :]
        for position, index in zip(written, writes, strict=True):
            place(position, index)
        return self._around_the_ring(table, -(-end // size))

    def _around_the_ring(self, table: dict[int, int], count: int) -> list[int]:
        """The whole table: what lies behind the window is where its successors round the ring are now."""
        ring = 1 if self._window is None else self._window // self._block_size
        for index in range(count - 1, -1, -1):
            if index not in table and index + ring in table:
                table[index] = table[index + ring]
        missing = [index for index in range(count) if index not in table]
        if missing:
            raise EngineFault(f"no index says where logical blocks {missing} of {count} are")
        return [table[index] for index in range(count)]

    def commit(self, step: int, sampled: Mapping[SequenceKey, Sampled]) -> CommitResult:
        """Write the tokens where the model would and let the engine take them."""
        if self._flying and self._pipelined and len(self._flying) == 1:
            self._flush(sampled)
        elif self._flying:
            self._update(sampled)
        finished, self._finished = self._finished, []
        return CommitResult(finished)

    def _flush(self, sampled: Mapping[SequenceKey, Sampled]) -> None:
        """Take the last batch in flight as the engine does when its loop ends: it waits for no other."""
        self._ios.swap_io_pairs()
        self._update(sampled)
        self._ios.swap_io_pairs()

    def _update(self, sampled: Mapping[SequenceKey, Sampled]) -> None:
        batch = self._flying.popleft()
        tensors = self._tensors()
        for index, key in enumerate(batch.keys):
            sample = sampled.get(key)
            tensors.output_ids[0, index] = 0 if sample is None else sample.tokens[0]
        self._processor.update_batch()
        self._take_outputs()

    def _take_outputs(self) -> None:
        """What the engine delivers to whoever asked: a request is done when all its sequences are."""
        lib = modules()
        queue = self._processor.output_router.output_queue
        while not queue.empty():
            output = queue.get_nowait()
            request_id, index = self._keys[output.request_id]
            if output.status == lib.requests.RequestStatus.FAILED:
                self._rejected.append(Rejection(request_id, str(output.error)))
                continue
            outputs = self._outputs.setdefault(request_id, {})
            outputs[index] = list(output.generated_tokens)
            if len(outputs) == self._widths[request_id]:
                self._finished.append(
                    Finished(request_id=request_id, outputs=[outputs[number] for number in range(len(outputs))])
                )
                del self._outputs[request_id]

    def reset_prefix_cache(self) -> bool:
        """The engine has no such call."""
        return False

    # -- books -------------------------------------------------------------------------------------------

    def usage(self) -> Usage:
        """Free and cached blocks and the lengths of the queues. O(requests).

        Sequences wait each for itself, so that no length is of requests when one of several is among them.
        """
        scheduler = self._scheduler
        states = scheduler.waiting_requests.values()
        whole = all(self._widths[self._keys[state.request_id][0]] == 1 for state in states)
        swapped = sum(state.is_cpu_offloaded for state in states)
        return Usage(
            free_blocks=self._pool.num_free_sectors
            + self._pool.count_free_blocks(self._allocator.index)
            + len(self._allocator.ledger.cached_blocks),
            running=len(scheduler.active_requests),
            waiting=len(states) - swapped + self._processor.input_queue.qsize() if whole else None,
            swapped=swapped if whole else None,
        )

    def snapshot(self) -> Snapshot:
        """The pool's free lists and the allocator's tables and ledger. O(pool)."""
        pool, allocator = self._pool, self._allocator
        free = list(pool.free_sectors)  # a sector is a block
        for tree in pool._free_blocks[allocator.index].trees.values():
            free += tree
        held: dict[RequestId, list[list[int]]] = {}
        counts: dict[int, int] = {}
        for name, table in allocator.block_table.items():
            held.setdefault(self._keys[name][0], []).append(list(table))
            for block in dict.fromkeys(table):
                counts[block] = allocator.ledger.shared_ref_counts.get(block, 1)
        counts |= {block: count for block, count in allocator.ledger.shared_ref_counts.items() if block not in counts}
        manager = self._processor.offloading_manager
        swap_free = None
        if manager._cpu_pool is not None:
            swap_free = list(manager._cpu_pool.free_sectors)
            for tree in manager._cpu_pool._free_blocks[allocator.index].trees.values():
                swap_free += tree
        waiting = self._scheduler.waiting_requests.values()
        return Snapshot(
            free=free,
            cached=list(allocator.ledger.cached_blocks),
            reserved=list(range(RESERVED_BLOCKS)),
            held=held,
            ref_counts=counts,
            swap_free=swap_free,
            waiting=[self._keys[state.request_id][0] for state in waiting if not state.is_cpu_offloaded],
            running=list(dict.fromkeys(self._keys[name][0] for name in self._scheduler.active_requests)),
            swapped=[self._keys[state.request_id][0] for state in waiting if state.is_cpu_offloaded],
        )

    def close(self) -> None:
        """Nothing runs in the background."""


def make(config: EngineConfig) -> TransformersEngine:
    """An engine on the installed transformers.

    Raises `ConfigRefused` for what its configuration refuses (in its words) and for what it does not have,
    ModuleNotFoundError when it is not installed, `AdapterError` when the adapter does not know the release.
    """
    options = config.engine_options
    unknown = sorted(set(options) - set(_OPTIONS))
    if unknown:
        raise ConfigRefused(f"engine_options {', '.join(unknown)}: not known; taken are {', '.join(_OPTIONS)}")
    capabilities = _capabilities()
    missing: list[str] = sorted(config.features_needed() - capabilities.features)
    if config.kv_cache_groups:
        missing.append("kv_cache_groups")
    if missing:
        raise ConfigRefused(f"transformers {capabilities.version} does not have: {', '.join(missing)}")
    if config.pipeline_depth > _DEPTH_MAX:
        raise ConfigRefused(f"pipeline_depth = {config.pipeline_depth}: one batch is prepared ahead, 2 at most")
    if config.num_blocks <= RESERVED_BLOCKS:
        raise ConfigRefused(
            f"num_blocks = {config.num_blocks}: {RESERVED_BLOCKS} are for padding",
            msgspec.structs.replace(config, num_blocks=RESERVED_BLOCKS + 1),
        )
    window = config.sliding_window
    if window is not None and window % config.block_size:
        whole = -(-window // config.block_size) * config.block_size
        raise ConfigRefused(
            f"sliding_window = {window}: its ring of blocks of {config.block_size} cannot be shown as a table unless "
            "the one divides the other",
            msgspec.structs.replace(config, sliding_window=whole),
        )
    processor = build(
        config,
        scheduler_type=_choice(options, "scheduler_type", ("fifo", "prefill_first")),
        safety_margin=_number(options, "safety_margin"),
        max_blocks_per_request=int(_number(options, "max_blocks_per_request") or 0) if window is None else 0,
    )
    return TransformersEngine(config, processor, capabilities)


def _choice(options: Mapping[str, OptionValue], name: str, choices: tuple[str, ...]) -> str:
    value = options.get(name, choices[0])
    if value not in choices:
        raise ConfigRefused(f"engine_options {name} = {value!r}: one of {', '.join(choices)}")
    return str(value)


def _number(options: Mapping[str, OptionValue], name: str) -> float | None:
    value = options.get(name)
    if value is not None and (isinstance(value, (str, bool)) or value < 0):
        raise ConfigRefused(f"engine_options {name} = {value!r}: a number from 0 on")
    return value


def _capabilities() -> Capabilities:
    return Capabilities(
        engine="transformers",
        version=modules().version,
        features=_FEATURES,
        reserved_blocks=RESERVED_BLOCKS,
        block_size_min=PAGE_SIZE_MIN,
        deferred_free_steps=1,
        merges_equal_blocks=True,
        sequences_apart=True,
        steps_in_order=True,
        options=_OPTIONS,
        swarm_options={
            "scheduler_type": ("fifo", "prefill_first"),
            "safety_margin": (0.0, 0.15),
            "max_blocks_per_request": (0, 4),
        },
        reimplements=(
            "Creates the processor as its manager does, for a model of one layer and one head that is never run.",
            "Host memory is not pinned; streams and events of asynchronous batching are stood in for.",
            "Takes the turns of the generation loop: prepare, launch, update.",
            "Reads a block table off the indices of the cache that the model is given.",
        ),
    )
