"""A small engine that keeps the whole contract: slow, readable, and open at every decision.

A faulty miniature is this engine with one method made wrong; see the other modules of this package.
Requests are *jobs*; the running set is kept in the order of the policy, so the latest or least urgent job is
always its last, and is the victim when a block is missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from conformance.protocol import (
    BlockMove,
    CommitResult,
    Finished,
    Preemption,
    Sampled,
    SequenceKey,
    SequencePlan,
    StepPlan,
)

from .books import Books
from .jobs import Job, Sequence


class Miniature(Books):
    """The clean miniature engine."""

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
            if victim is None:
                return False
            self.preempt(victim, need, job)
            if victim is job:
                return True
            need = self.need(job)
        for sequence in job.live:
            self.run(job, sequence)
        return True

    def victim(self, job: Job) -> Job | None:
        """Who makes room for ``job``, itself perhaps: the last of the running set whose blocks are not all shared.

        None when that one has its place in this step already, so that the job must wait for the next.
        """
        for other in reversed(self.running):
            held = Counter(block for sequence in other.sequences for block in sequence.table)
            if any(count == self.pool.references[block] for block, count in held.items()):
                return None if any(planned is other for planned, _, _ in self.rows) else other
        return None

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


class PrefillsFirst(Miniature):
    """As clean, under another policy: without chunks, a step that can admit somebody runs only whom it admits."""

    def make_plan(self) -> None:
        if not self.config.enable_chunked_prefill:
            self.admit()
        if not self.plan.sequences:
            super().make_plan()
