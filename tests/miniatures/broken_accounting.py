"""Miniatures whose books are wrong: one for each ACC requirement, and ENC-1."""

from __future__ import annotations

from collections.abc import Sequence

from conformance.protocol import EncoderItem, EngineConfig, Request, Usage

from .clean import Miniature
from .encoder import EncoderCache
from .jobs import Job
from .jobs import Sequence as JobSequence
from .pool import Pool


class UncountedPool(Pool):
    """Counts one holder, whoever hits."""

    def share(self, block: int) -> int:
        self.cached.pop(block, None)
        self.references[block] = 1
        return block

    def release(self, block: int) -> None:
        if block in self.references:
            super().release(block)


class LosesBlockOfAborted(Miniature):
    """Forgets the last block of an aborted request. Modelled on sglang #15840, a slot no list knows any more."""

    breaks = "ACC-1"

    def abort_request(self, request_id: str) -> None:
        job = self.jobs.get(request_id)
        if job is not None and job.sequences[0].table:
            del self.pool.references[job.sequences[0].table.pop()]
        super().abort_request(request_id)


class HandsOutBlockPastThePool(Miniature):
    """Counts its blocks from 1 in a pool that begins at 0. Modelled on vllm-metal #526, ids never allocated."""

    breaks = "ACC-2"

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.pool = Pool(1, config.num_blocks)


class HandsOutNullBlock(Miniature):
    """Declares block 0 as padding and serves requests from it, as no Gaudi or vLLM V1 pool may."""

    breaks = "ACC-2"

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.pool = Pool(0, config.num_blocks - 1)


class WritesSharedBlock(Miniature):
    """Never copies on write. Modelled on smol-vllm 0.1.2, whose forks append to the block they share."""

    breaks = "ACC-3"

    def copies(self, sequence: JobSequence) -> bool:
        return False


class SharesWithoutCounting(Miniature):
    """A prefix hit on a block in use does not raise its reference count. Modelled on ATOM PR 902."""

    breaks = "ACC-4"
    pool_kind = UncountedPool


class ForgetfulEncoderCache(EncoderCache):
    """Holds items for nobody."""

    def use(self, rid: str, seq: int, items: Sequence[EncoderItem], first: int, end: int) -> None:
        super().use(rid, seq, items, first, end)
        self.users.clear()


class TableOneShort(Miniature):
    """Grows a table one token too late. Modelled on nano-vllm, whose growth test is ``length % block_size == 1``."""

    breaks = "ACC-5"

    def table_length(self, end: int) -> int:
        return max(1, self.blocks_for(end - 1))


class TableTooLong(Miniature):
    """Allocates two blocks ahead without declaring it. Modelled on vLLM #10730, undeclared pre-allocation."""

    breaks = "ACC-5"

    def table_length(self, end: int) -> int:
        return super().table_length(end) + 2


class KeepsBlockOfFinished(Miniature):
    """Sets a block of a finished request aside for good. Modelled on vLLM #46502, a pool never empty when idle."""

    breaks = "ACC-6"

    def let_go(self, job: Job) -> None:
        super().let_go(job)
        if self.pool.free:
            self.reserved.append(self.pool.free.pop())


class ResetLeavesCached(Miniature):
    """Says that the prefix cache is reset and keeps the blocks cached, where nobody can hit or free them."""

    breaks = "ACC-6"

    def reset_prefix_cache(self) -> bool:
        self.pool.keys.clear()
        self.pool.blocks.clear()
        return not self.jobs


class PreemptedKeepsBlock(Miniature):
    """Recompute preemption leaves the victim its first block. Modelled on xinfer PR 12, preempt without free."""

    breaks = "ACC-7"

    def free_table(self, job: Job, sequence: JobSequence) -> None:
        kept = sequence.table[:1] if job in self.waiting and len(sequence.table) > 1 else []
        sequence.table = sequence.table[len(kept) :]
        super().free_table(job, sequence)
        sequence.table = kept


class PinsHitsBeforeCheck(Miniature):
    """Takes the hits of the queue's head before it knows whether the rest fits. Modelled on vLLM #11565."""

    breaks = "ACC-8"

    def fits(self, job: Job) -> bool:
        fits = super().fits(job)
        if not fits:
            for block in self.hits(job, job.sequences[0]):
                self.pool.share(block)
        return fits


class MovesBlockSilently(Miniature):
    """Gives a running request another block in the place of a full one, and names no copy (a defragmenter)."""

    breaks = "ACC-9"

    def run(self, job: Job, sequence: JobSequence) -> bool:
        if len(sequence.table) == 2 and self.pool.available > 2:
            block = self.pool.take()
            self.pool.release(sequence.table[0])
            sequence.table[0] = block
        return super().run(job, sequence)


class CountsNullBlockAsFree(Miniature):
    """Reports the null block as free. Modelled on vLLM 0.10.0, whose usage figure counted it as well."""

    breaks = "ACC-10"

    def usage(self) -> Usage:
        usage = super().usage()
        usage.free_blocks = self.pool.available + len(self.reserved)
        return usage


class CountsPreemptionTwice(Miniature):
    """Its preemption counter also counts the swap: the metric is not what happened."""

    breaks = "ACC-10"

    def preempt(self, job: Job, need: int, asked_by: Job) -> None:
        super().preempt(job, need, asked_by)
        self.preemptions += 1


class EvictsNeededItem(Miniature):
    """Forgets who needs an encoder item once it is encoded. Modelled on vLLM #54284, a dropped reference."""

    breaks = "ENC-1"
    encoder_kind = ForgetfulEncoderCache


class AcceptsOversizedItem(Miniature):
    """Queues a request whose encoder item can never be cached. Modelled on vLLM #33110."""

    breaks = "ENC-1"

    def refusal(self, request: Request) -> str:
        return "" if request.encoder_items else super().refusal(request)
