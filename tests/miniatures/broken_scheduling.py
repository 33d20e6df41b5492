"""Miniatures whose scheduler is wrong: LIM, PRG, PRE-1 to PRE-5 and FAIR."""

from __future__ import annotations

from collections.abc import Mapping

from conformance.protocol import CommitResult, Request, Sampled, SequenceKey

from .clean import Miniature, PrefillsFirst
from .jobs import Job, Sequence

# -- limits ----------------------------------------------------------------------------------------------


class CountsRequestsNotSequences(Miniature):
    """Holds max_num_seqs against requests. Modelled on vLLM #1034, groups and sequences added up."""

    breaks = "LIM-1"

    def fits(self, job: Job) -> bool:
        running, self.running = self.running, []
        fits = len(running) < self.config.max_num_seqs and super().fits(job)
        self.running = running
        return fits


class DecodesOutsideBudget(Miniature):
    """Charges the token budget for prefills alone, so that decodes come on top."""

    breaks = "LIM-2"

    def run(self, job: Job, sequence: Sequence) -> bool:
        budget = self.budget
        ran = super().run(job, sequence)
        if sequence.computed > len(job.spec.prompt):
            self.budget = budget
        return ran


class AcceptsAnyPrompt(Miniature):
    """Queues a prompt longer than the model's length and runs it (the limit is checked in the front end only)."""

    breaks = "LIM-3"

    def refusal(self, request: Request) -> str:
        return ""

    def may_run(self, job: Job, sequence: Sequence) -> bool:
        return sequence.computed == 0 or super().may_run(job, sequence)


class DraftsPastTheLength(Miniature):
    """Runs every draft it was given. Modelled on vLLM #53962, a decode padded with drafts past max_model_len."""

    breaks = "LIM-4"

    def add_drafts(self) -> None:
        for _, sequence, row in self.rows:
            more = self.blocks_for(sequence.computed + len(sequence.drafts)) - len(sequence.table)
            if row.num_tokens == 1 and row.samples and more <= self.pool.available:
                sequence.table += [self.pool.take() for _ in range(more)]
                row.block_tables = [list(sequence.table)]
                row.draft_tokens = sequence.drafts
                row.num_tokens += len(sequence.drafts)


# -- progress --------------------------------------------------------------------------------------------


class DecodesFullBatchesOnly(Miniature):
    """Waits for a full batch before it decodes. Modelled on vllm-rbln #179, a batch the pool can never fill."""

    breaks = "PRG-1"

    def go_on(self, job: Job) -> bool:
        return len(self.running) == self.config.max_num_seqs and super().go_on(job)


class NeverUsesLastBlock(Miniature):
    """Refuses what needs every block of the pool. Modelled on tenstorrent/vllm PR 120, an exact fit evicted."""

    breaks = "PRG-2"

    def refusal(self, request: Request) -> str:
        blocks = self.blocks_for(len(request.prompt) + request.max_tokens)
        return "needs a spare block" if blocks >= self.config.num_blocks else super().refusal(request)


class WaitsForSpareBlock(Miniature):
    """Runs a request on only while a block is left over. Modelled on smol-vllm 0.1.2, stalled with an empty pool."""

    breaks = "PRG-2"

    def go_on(self, job: Job) -> bool:
        need = self.need(job)
        return not 0 < need == self.pool.available and super().go_on(job)


class ParksTheImpossible(Miniature):
    """Queues what can never fit the pool, and everybody behind it. Modelled on vLLM #35541."""

    breaks = "PRG-3"

    def refusal(self, request: Request) -> str:
        return ""


class ReadmitsBeforeItRuns(Miniature):
    """Ends the pass at a preemption, and admits the victim again before anybody has used the block it gave.

    Modelled on the cycle of preemption and prefill in aws-neuron/upstreaming-to-vllm PR 17.
    """

    breaks = "PRG-4"

    def go_on(self, job: Job) -> bool:
        need = self.need(job)
        if need <= self.pool.available:
            return super().go_on(job)
        self.preempt(self.running[-1], need, job)
        return False

    def make_plan(self) -> None:
        self.admit()
        if not self.plan.sequences:
            super().make_plan()


class CrossesTokens(Miniature):
    """Gives the tokens back in another order than that of the rows. Modelled on smol-vllm 0.1.2."""

    breaks = "PRG-5"

    def commit(self, step: int, sampled: Mapping[SequenceKey, Sampled]) -> CommitResult:
        answers = list(sampled.values())
        return super().commit(step, dict(zip(sampled, reversed(answers), strict=True)))


class StopsLate(Miniature):
    """Does not look for the stop token before the next step."""

    breaks = "PRG-5"

    def ended(self, job: Job, sequence: Sequence) -> bool:
        stopped = sequence.tokens[-1] == job.spec.stop_token
        return super().ended(job, sequence) and not stopped


class RunsAborted(Miniature):
    """Aborts only what runs: a waiting request stays in the queue and is admitted later."""

    breaks = "PRG-6"

    def abort_request(self, request_id: str) -> None:
        if any(job.rid == request_id for job in self.running):
            super().abort_request(request_id)


class AbortRaises(Miniature):
    """Looks up what an aborted request holds before it knows the request. Modelled on vLLM #18485."""

    breaks = "PRG-6"

    def abort_request(self, request_id: str) -> None:
        self.let_go(self.jobs[request_id])


class AdmitsOnePerStep(Miniature):
    """Admits one request a step, whatever fits."""

    breaks = "PRG-7"

    def fits(self, job: Job) -> bool:
        return not any(row.first == 0 for row in self.plan.sequences) and super().fits(job)


class AssertsFreeBlocks(Miniature):
    """Allocates without asking whether blocks are left. Modelled on vLLM #45856, "cannot get free blocks"."""

    breaks = "PRG-8"

    def go_on(self, job: Job) -> bool:
        need = self.need(job)
        if need > self.pool.available:
            raise RuntimeError(f"cannot get {need} free blocks from the pool")
        return super().go_on(job)


class SpinsWhenFull(Miniature):
    """Looks for a victim for ever when the pool is full. Modelled on vllm-rbln #179, a scheduler that spins."""

    breaks = "PRG-8"

    def victim(self, job: Job) -> Job:
        while self.running:
            self.steps += 0
        return job


class GrowsWhenFull(Miniature):
    """Collects candidates without end when the pool is full."""

    breaks = "PRG-8"

    def victim(self, job: Job) -> Job:
        candidates: list[bytearray] = []
        while self.running:
            candidates.append(bytearray(1 << 20))
        return job


# -- preemption ------------------------------------------------------------------------------------------


class WantsBlockPerSequence(Miniature):
    """Wants a free block for every running request, needed or not. Modelled on vLLM #8007, where it all began."""

    breaks = "PRE-1"

    def need(self, job: Job) -> int:
        return max(1, super().need(job)) if job in self.running else super().need(job)


class PreemptsWithRoomForAll(WantsBlockPerSequence):
    """The same fault: with one block a sequence and a full batch, prompts are prefilled again and again."""

    breaks = "PRE-2"


class PreemptsTheOldest(Miniature):
    """Makes room by taking the blocks of whoever has run longest."""

    breaks = "PRE-3"

    def victim(self, job: Job) -> Job:
        return self.running[0]


class AdmitsBeforeThePreempted(Miniature):
    """Puts the preempted at the end of the queue. Modelled on vLLM #5578, new prompts before swapped groups."""

    breaks = "PRE-4"

    def preempt(self, job: Job, need: int, asked_by: Job) -> None:
        super().preempt(job, need, asked_by)
        self.waiting.remove(job)
        self.waiting.append(job)


class PreemptsForNothing(PrefillsFirst):
    """Preempts whoever is last, its blocks all shared or not. Modelled on vLLM #49674, victims that free nothing."""

    breaks = "PRE-5"

    def victim(self, job: Job) -> Job:
        return self.running[-1]


# -- fairness --------------------------------------------------------------------------------------------


class LastComeFirstServed(Miniature):
    """Admits the latest arrival first."""

    breaks = "FAIR-1"

    def fits(self, job: Job) -> bool:
        self.waiting.sort(key=lambda other: -other.spec.arrival)
        return super().fits(self.waiting[0])


class IgnoresPriority(Miniature):
    """Takes the order of arrival under priority scheduling too."""

    breaks = "FAIR-2"

    def rank(self, job: Job) -> tuple[int, int]:
        return (0, job.spec.arrival)
