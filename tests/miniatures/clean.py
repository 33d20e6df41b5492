"""A small engine that keeps the whole contract: slow, readable, and open at every decision.

A faulty miniature is this engine with one method made wrong; see the other modules of this package.
Requests are *jobs*; the running set is kept in the order of the policy, so the latest or least urgent job is
always its last, and is the victim when a block is missing. Blocks of a step still in flight are freed when
that step is committed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import ClassVar

from conformance.protocol import (
    BlockMove,
    Capabilities,
    CommitResult,
    ConfigRefused,
    EngineConfig,
    Feature,
    Finished,
    Preemption,
    Request,
    RequestRefused,
    Sampled,
    SequenceKey,
    SequencePlan,
    Snapshot,
    StepPlan,
    Usage,
)

from .encoder import EncoderCache
from .pool import Key, Pool

FEATURES: frozenset[Feature] = frozenset({
    "abort", "chunked_prefill", "encoder_cache", "fork", "identity", "length_limit", "lookahead", "pipeline",
    "prefix_caching", "priority", "recompute", "reset_prefix_cache", "snapshot", "speculation", "stop_token",
    "swap", "token_budget", "usage", "watermark",
})  # fmt: skip


class Sequence:
    """One sequence of a job. ``computed`` counts what is scheduled; ``pending`` tokens are still in flight."""

    def __init__(self, index: int, tokens: list[int]) -> None:
        self.index = index
        self.tokens = tokens
        self.table: list[int] = []
        self.host: list[int] = []
        self.computed = 0
        self.pending = 0
        self.published = 0
        self.drafts: list[int] = []
        self.done = False

    @property
    def length(self) -> int:
        return len(self.tokens) + self.pending


class Job:
    """One request in the engine."""

    def __init__(self, spec: Request) -> None:
        self.spec = spec
        self.rid = spec.request_id
        self.sequences = [Sequence(0, list(spec.prompt))]
        self.identity = (spec.cache_salt, spec.adapter, spec.encoder_items)

    @property
    def forked(self) -> bool:
        return len(self.sequences) == self.spec.n

    @property
    def live(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if not sequence.done]

    @property
    def width(self) -> int:
        """Sequences it counts for against max_num_seqs."""
        return len(self.live) if self.forked else self.spec.n


class Miniature:
    """The clean miniature engine. ``engine_options``: ``null_block`` sets block 0 aside as padding."""

    breaks: ClassVar[str] = ""
    """The requirement a faulty miniature breaks; of the clean one, none."""

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
        self.pool = Pool(len(self.reserved), config.num_blocks - len(self.reserved))
        self.host_free = list(range(config.num_swap_blocks))
        self.encoder = EncoderCache(config.encoder_cache_size)
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

    # -- one step ----------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        self.plan = StepPlan(step=self.steps)
        self.steps += 1
        self.budget = self.config.max_num_batched_tokens
        self.rows: list[tuple[Job, Sequence, SequencePlan]] = []
        self.make_plan()
        if self.rows:
            self.in_flight[self.plan.step] = self.rows
        self.plan.encoder_freed, self.plan.encoder_run = self.encoder.take_orders()
        return self.plan

    def make_plan(self) -> None:
        """Who runs goes on, in order; who waits comes in unless somebody had to go."""
        for job in list(self.running):
            if job in self.running and not self.go_on(job):
                break
        if not self.plan.preempted:
            self.add_drafts()
            self.swap_in()
            self.admit()

    def go_on(self, job: Job) -> bool:
        """Run a running job on, preempting from the end of the running set; False: wait for blocks to come."""
        need = self.need(job)
        while need > self.pool.available:
            if self.deferred:
                return False
            victim = self.victim(job)
            self.preempt(victim, need, job)
            if victim is job:
                return True
            need = self.need(job)
        for sequence in job.live:
            self.run(job, sequence)
        return True

    def victim(self, job: Job) -> Job:
        """Who makes room for ``job``, itself perhaps: the last of the running set whose blocks are not all shared."""
        for other in reversed(self.running):
            held = Counter(block for sequence in other.sequences for block in sequence.table)
            if any(count == self.pool.references[block] for block, count in held.items()):
                return other
        return job

    def may_run(self, job: Job, sequence: Sequence) -> bool:
        """Whether it has a position to compute: not after its fork or last token has been sampled in flight."""
        spec, outputs = job.spec, sequence.length - len(job.spec.prompt)
        if not job.forked and sequence.pending:
            return False
        return outputs < spec.max_tokens and sequence.length < self.config.max_model_len

    def end(self, job: Job, sequence: Sequence, first: int, budget: int) -> int:
        """Up to where the sequence runs from ``first``; ``first`` itself when it does not."""
        if not self.may_run(job, sequence):
            return first
        end = sequence.length
        if end - first > budget:
            end = first + budget if self.config.enable_chunked_prefill else first
        return self.encoder.end(job.spec.encoder_items, first, end)

    def need(self, job: Job) -> int:
        """Blocks the job takes from the pool in this step, copies included."""
        budget, total = self.budget, 0
        writers: dict[int, int] = {}
        for sequence in job.live:
            hits = self.hits(job, sequence) if not sequence.table else []
            first = max(sequence.computed, len(hits) * self.config.block_size)
            end = self.end(job, sequence, first, budget)
            if end <= first:
                continue
            budget -= end - first
            total += max(0, self.table_length(end) - len(sequence.table or hits))
            total += sum(block not in self.pool.references for block in hits)
            if self.copies(sequence):
                block = sequence.table[sequence.computed // self.config.block_size]
                writers[block] = writers.get(block, 0) + 1
        for block, count in writers.items():
            total += min(count, self.pool.references[block] - 1)
        return total

    def run(self, job: Job, sequence: Sequence) -> bool:
        """Plan the sequence as far as budget, pool and encoder cache allow; False when not at all."""
        hits = self.hits(job, sequence) if not sequence.table else []
        first = max(sequence.computed, len(hits) * self.config.block_size)
        end = self.end(job, sequence, first, self.budget)
        more = self.table_length(end) - len(sequence.table or hits) + self.copies(sequence)
        if end <= first or more + sum(block in self.pool.cached for block in hits) > self.pool.available:
            return False
        sequence.table += [self.pool.share(block) for block in hits]
        sequence.computed = first
        if self.copies(sequence):
            self.copy_on_write(job, sequence, first // self.config.block_size)
        while len(sequence.table) < self.table_length(end):
            sequence.table.append(self.pool.take())
        self.encoder.use(job.rid, sequence.index, job.spec.encoder_items, first, end)
        samples = end == sequence.length
        self.budget -= end - first
        sequence.computed = end
        sequence.pending += samples
        row = SequencePlan(
            request_id=job.rid,
            seq=sequence.index,
            first=first,
            num_tokens=end - first,
            block_tables=[list(sequence.table)],
            samples=samples,
        )
        self.plan.sequences.append(row)
        self.rows.append((job, sequence, row))
        return True

    def copy_on_write(self, job: Job, sequence: Sequence, index: int) -> None:
        source = sequence.table[index]
        sequence.table[index] = self.pool.take()
        self.plan.moves.append(BlockMove("copy", source, sequence.table[index]))
        self.free_block(job, source)

    def add_drafts(self) -> None:
        """Give decoding sequences their drafts, from what budget and pool have left over."""
        for job, sequence, row in self.rows:
            room = min(len(job.spec.prompt) + job.spec.max_tokens, self.config.max_model_len) - len(sequence.tokens) - 1
            drafts = sequence.drafts[: max(0, min(room, self.budget, self.config.num_speculative_tokens))]
            more = max(0, self.blocks_for(sequence.computed + len(drafts)) - len(sequence.table))
            if row.num_tokens != 1 or not row.samples or not drafts or more > self.pool.available:
                continue
            sequence.table += [self.pool.take() for _ in range(more)]
            row.block_tables = [list(sequence.table)]
            row.draft_tokens = drafts
            row.num_tokens += len(drafts)
            self.budget -= len(drafts)

    def admit(self) -> None:
        """Admit from the head of the queue for as long as the head fits; nobody while somebody is swapped out."""
        while self.waiting and not self.swapped and self.fits(self.waiting[0]):
            job = self.waiting.pop(0)
            self.enqueue(self.running, job)
            for sequence in job.live:
                self.run(job, sequence)

    def fits(self, job: Job) -> bool:
        """Whether all its present tokens fit the pool above the watermark, and some the rest of the step."""
        if sum(other.width for other in self.running) + job.width > self.config.max_num_seqs:
            return False
        sequence = job.live[0]
        first = len(self.hits(job, sequence)) * self.config.block_size
        if self.end(job, sequence, first, self.budget) <= first:
            return False
        return self.admission_need(job) + self.watermark <= self.pool.available

    def admission_need(self, job: Job) -> int:
        need = 0
        cached: set[int] = set()
        for sequence in job.live:
            hits = self.hits(job, sequence)
            need += self.table_length(sequence.length) - len(hits)
            cached.update(block for block in hits if block in self.pool.cached)
        return need + len(cached)

    # -- preemption --------------------------------------------------------------------------------------

    def preempt(self, job: Job, need: int, asked_by: Job) -> None:
        """Take the job off the running set; its blocks are swapped out where that is possible."""
        config = self.config
        held = {block: block for s in job.sequences for block in s.table[: self.blocks_for(s.computed)]}
        swap = config.preemption_mode == "swap" and 0 < len(held) <= len(self.host_free)
        self.plan.preempted.append(
            Preemption(
                request_id=job.rid,
                mode="swap" if swap else "recompute",
                blocks_counted=need,
                blocks_free=self.pool.available,
                asked_by=asked_by.rid,
            )
        )
        self.preemptions += 1
        if swap:
            for block in list(held):
                host = self.host_free.pop(0)
                held[block] = host
                self.plan.moves.append(BlockMove("swap_out", block, host))
        self.running.remove(job)
        self.enqueue(self.swapped if swap else self.waiting, job)
        for sequence in job.sequences:
            if swap:
                sequence.host = [held[block] for block in sequence.table[: self.blocks_for(sequence.computed)]]
            else:
                sequence.computed = 0
            sequence.published = 0
            self.free_table(job, sequence)
        self.encoder.release(job.rid)

    def swap_in(self) -> None:
        """Bring swapped jobs back, in order, for as long as the head and its next tokens fit."""
        while self.swapped:
            job = self.swapped[0]
            blocks = dict.fromkeys(block for sequence in job.sequences for block in sequence.host)
            more = [max(0, self.table_length(s.length) - len(s.host)) + 1 for s in job.live]  # one for a copy
            need = len(blocks) + sum(more)
            alone = not self.running and not self.deferred
            ready = self.budget >= len(job.live) and all(self.may_run(job, s) for s in job.live)
            room = sum(other.width for other in self.running) + job.width <= self.config.max_num_seqs
            if not ready or not room or (need > self.pool.available and not alone):
                return
            self.enqueue(self.running, self.swapped.pop(0))
            taken = {host: self.pool.take() for host in blocks}
            for host, block in taken.items():
                self.plan.moves.append(BlockMove("swap_in", host, block))
                self.host_free.append(host)
            for sequence in job.sequences:
                sequence.table = [self.pool.share(taken[host]) for host in sequence.host]
                sequence.host = []
            for block in taken.values():
                self.pool.release(block)
            for sequence in job.live:
                self.run(job, sequence)

    # -- tokens ------------------------------------------------------------------------------------------

    def commit(self, step: int, sampled: Mapping[SequenceKey, Sampled]) -> CommitResult:
        result = CommitResult()
        rows = self.in_flight.pop(step, [])
        for job, sequence, row in rows:
            if job.rid in self.jobs and not sequence.done:
                self.take_tokens(job, sequence, row, sampled)
        for job in dict.fromkeys(job for job, _, _ in rows):
            if job.rid in self.jobs and job.forked and not job.live:
                self.let_go(job)
                prompt = len(job.spec.prompt)
                outputs = [sequence.tokens[prompt:] for sequence in job.sequences]
                result.finished.append(Finished(request_id=job.rid, outputs=outputs, reason="done"))
        due = [block for last, _, block in self.deferred if last <= step]
        self.deferred = [entry for entry in self.deferred if entry[0] > step]
        for block in due:
            self.pool.release(block)
        return result

    def take_tokens(
        self, job: Job, sequence: Sequence, row: SequencePlan, sampled: Mapping[SequenceKey, Sampled]
    ) -> None:
        """Append what was sampled, fork when the prompt is complete, publish full blocks, see who is done."""
        taken = [sequence]
        if row.samples:
            sequence.pending -= 1
            if not job.forked:
                taken = self.fork(job)
            for each in taken:
                answer = sampled[job.rid, each.index]
                each.tokens.extend(answer.tokens)
                each.drafts = answer.drafts
            if sequence.table:
                sequence.computed += len(sampled[job.rid, sequence.index].tokens) - 1
        valid = row.first + row.num_tokens - len(row.draft_tokens)
        if sequence.table:
            self.publish(job, sequence, valid)
        self.encoder.release_passed(job.rid, sequence.index, job.spec.encoder_items, valid)
        for each in taken:
            if self.ended(job, each):
                each.done = True
                self.free_table(job, each)

    def ended(self, job: Job, sequence: Sequence) -> bool:
        outputs = len(sequence.tokens) - len(job.spec.prompt)
        return outputs > 0 and (
            outputs >= job.spec.max_tokens
            or len(sequence.tokens) >= self.config.max_model_len
            or sequence.tokens[-1] == job.spec.stop_token
        )

    def fork(self, job: Job) -> list[Sequence]:
        """The other n - 1 sequences start with the prompt of the first, and with the blocks it fills."""
        first = job.sequences[0]
        filled = self.blocks_for(first.computed)
        for index in range(1, job.spec.n):
            child = Sequence(index, list(first.tokens))
            child.table = [self.pool.share(block) for block in first.table[:filled]]
            child.host = list(first.host)
            child.computed, child.published = first.computed, first.published
            job.sequences.append(child)
        return job.sequences

    def publish(self, job: Job, sequence: Sequence, valid: int) -> None:
        """Full blocks of computed, committed positions may be hit from now on."""
        size = self.config.block_size
        while self.config.enable_prefix_caching and (sequence.published + 1) * size <= valid:
            end = (sequence.published + 1) * size
            self.pool.publish(sequence.table[sequence.published], self.key(job, sequence.tokens[:end]))
            sequence.published += 1

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


class PrefillsFirst(Miniature):
    """As clean as the other, under another policy: a step that can admit somebody runs only whom it admits."""

    def make_plan(self) -> None:
        self.admit()
        if not self.plan.sequences:
            super().make_plan()
