"""The books of the clean miniature: who waits, runs and is swapped out, and which blocks are whose.

Blocks of a step still in flight are freed when that step is committed.
"""

from __future__ import annotations

from typing import ClassVar

from conformance.protocol import (
    Capabilities,
    ConfigRefused,
    EngineConfig,
    Feature,
    Request,
    RequestRefused,
    SequencePlan,
    Snapshot,
    StepPlan,
    Usage,
)

from .encoder import EncoderCache
from .jobs import Job, Sequence
from .pool import Key, Pool

FEATURES: frozenset[Feature] = frozenset({
    "abort", "chunked_prefill", "encoder_cache", "fork", "identity", "length_limit", "lookahead", "pipeline",
    "prefix_caching", "priority", "recompute", "reset_prefix_cache", "snapshot", "speculation", "stop_token",
    "swap", "token_budget", "usage", "watermark",
})  # fmt: skip


class Books:
    """Queues, pool and tables of the clean miniature. ``engine_options``: ``null_block`` sets block 0 aside."""

    breaks: ClassVar[str] = ""
    """The requirement a faulty miniature breaks; of the clean one, none."""
    pool_kind: ClassVar[type[Pool]] = Pool
    encoder_kind: ClassVar[type[EncoderCache]] = EncoderCache

    def __init__(self, config: EngineConfig) -> None:
        if config.pipeline_depth > 2 or (config.pipeline_depth > 1 and config.num_speculative_tokens):
            raise ConfigRefused(f"pipeline_depth = {config.pipeline_depth}: at most 2, and 1 with drafts")
        if not config.enable_chunked_prefill and config.max_num_batched_tokens < config.max_model_len:
            raise ConfigRefused("max_num_batched_tokens < max_model_len needs chunked prefill")
        if config.encoder_cache_size and (config.num_swap_blocks or not config.enable_chunked_prefill):
            raise ConfigRefused("encoder_cache_size: only with chunked prefill and without swap")
        if config.sliding_window is not None or config.kv_cache_groups:
            raise ConfigRefused("sliding_window and kv_cache_groups are not served")
        self.config = config
        self.reserved = [0] if config.engine_options.get("null_block") else []
        self.pool = self.pool_kind(len(self.reserved), config.num_blocks - len(self.reserved))
        self.host_free = list(range(config.num_swap_blocks))
        self.encoder = self.encoder_kind(config.encoder_cache_size)
        self.jobs: dict[str, Job] = {}
        self.waiting: list[Job] = []
        self.running: list[Job] = []
        self.swapped: list[Job] = []
        self.in_flight: dict[int, list[tuple[Job, Sequence, SequencePlan]]] = {}
        self.deferred: list[tuple[int, str, int]] = []
        """(step, request, block): to be freed when the step is committed."""
        self.steps = 0
        self.preemptions = 0
        self.plan = StepPlan(step=-1)
        self.budget = 0

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            engine="miniature",
            version="1",
            features=FEATURES,
            null_block=0 if self.reserved else None,
            reserved_blocks=len(self.reserved),
            deferred_free_steps=self.config.pipeline_depth - 1,
            refuses_outgrowing=True,
        )

    # -- requests ----------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        reason = self.refusal(request)
        if reason:
            raise RequestRefused(reason)
        job = self.jobs[request.request_id] = Job(request)
        self.enqueue(self.waiting, job)

    def refusal(self, request: Request) -> str:
        """Why the request can never be served; empty when it can."""
        config = self.config
        if len(request.prompt) >= config.max_model_len:
            return f"prompt of {len(request.prompt)} leaves no room under max_model_len {config.max_model_len}"
        if request.n > config.max_num_seqs:
            return f"n = {request.n} exceeds max_num_seqs {config.max_num_seqs}"
        length = len(request.prompt) + request.max_tokens + config.num_lookahead_slots
        blocks = self.blocks_for(min(length, config.max_model_len)) * request.n
        usable = config.num_blocks - len(self.reserved) - self.watermark
        if blocks > usable:
            return f"needs {blocks} blocks of {usable}"
        if any(item.size > config.encoder_cache_size for item in request.encoder_items):
            return f"an encoder item exceeds the encoder cache of {config.encoder_cache_size}"
        return ""

    def abort_request(self, request_id: str) -> None:
        job = self.jobs.get(request_id)
        if job is not None:
            self.let_go(job)

    def let_go(self, job: Job) -> None:
        """The job is over: it leaves every queue and holds nothing."""
        del self.jobs[job.rid]
        for queue in (self.waiting, self.running, self.swapped):
            if job in queue:
                queue.remove(job)
        for sequence in job.sequences:
            self.free_table(job, sequence)
        for block in dict.fromkeys(block for sequence in job.sequences for block in sequence.host):
            self.host_free.append(block)
        self.encoder.release(job.rid)

    def rank(self, job: Job) -> tuple[int, int]:
        """The smaller goes first."""
        return (job.spec.priority if self.config.scheduling_policy == "priority" else 0, job.spec.arrival)

    def enqueue(self, queue: list[Job], job: Job) -> None:
        queue.append(job)
        queue.sort(key=self.rank)

    # -- blocks ------------------------------------------------------------------------------------------

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.config.block_size)

    @property
    def watermark(self) -> int:
        return int(self.config.watermark * self.config.num_blocks)

    def table_length(self, end: int) -> int:
        """Blocks a table needs for positions below ``end`` and the lookahead, never past the model's length."""
        ahead = min(end + self.config.num_lookahead_slots, max(end, self.config.max_model_len))
        return self.blocks_for(ahead)

    def free_table(self, job: Job, sequence: Sequence) -> None:
        """Give the blocks back, or, while a step that may use them is in flight, when that step is over."""
        table, sequence.table = sequence.table, []
        for block in reversed(table):
            self.free_block(job, block)

    def free_block(self, job: Job, block: int) -> None:
        if self.in_flight:
            self.deferred.append((max(self.in_flight), job.rid, block))
        else:
            self.pool.release(block)

    def key(self, job: Job, tokens: list[int]) -> Key:
        """What a block whose last position is the last of ``tokens`` is cached under."""
        return (job.identity, tuple(tokens))

    def hits(self, job: Job, sequence: Sequence) -> list[int]:
        """The cached blocks of the sequence's longest known prefix; its last token is always computed."""
        size, found = self.config.block_size, []
        if self.config.enable_prefix_caching:
            for end in range(size, len(sequence.tokens), size):
                block = self.pool.blocks.get(self.key(job, sequence.tokens[:end]))
                if block is None:
                    break
                found.append(block)
        return found

    def copies(self, sequence: Sequence) -> bool:
        """Whether the block the sequence writes next has other holders."""
        index = sequence.computed // self.config.block_size
        return index < len(sequence.table) and self.pool.references[sequence.table[index]] > 1

    # -- the books ---------------------------------------------------------------------------------------

    def reset_prefix_cache(self) -> bool:
        if self.jobs:
            return False
        self.pool.forget_all()
        return True

    def usage(self) -> Usage:
        return Usage(
            free_blocks=self.pool.available,
            running=sum(job.width for job in self.running),
            waiting=len(self.waiting),
            swapped=len(self.swapped),
            preemptions=self.preemptions,
        )

    def snapshot(self) -> Snapshot:
        held: dict[str, list[list[int]]] = {}
        for job in self.jobs.values():
            held[job.rid] = [list(sequence.table) for sequence in job.sequences if sequence.table]
        for _, rid, block in self.deferred:
            held.setdefault(rid, []).append([block])
        return Snapshot(
            free=list(self.pool.free),
            cached=list(self.pool.cached),
            reserved=list(self.reserved),
            held={rid: tables for rid, tables in held.items() if tables},
            ref_counts=dict(self.pool.references),
            waiting=[job.rid for job in self.waiting],
            running=[job.rid for job in self.running],
            swapped=[job.rid for job in self.swapped],
        )

    def close(self) -> None:
        self.jobs.clear()
