"""Miniatures whose KV is wrong: one for each KV requirement, ID-1 and CCH-3."""

from __future__ import annotations

from collections.abc import Mapping

from conformance.protocol import BlockMove, Sampled, SequenceKey, SequencePlan, StepPlan

from .clean import Miniature
from .jobs import Job, Sequence
from .pool import Key, Pool


class UnprunedPool(Pool):
    """Remembers every key a block ever had."""

    def forget(self, block: int) -> None:
        del self.keys[block]


class ForgetsSwapIn(Miniature):
    """Never tells the runner what to swap in. Modelled on lmdeploy #3864, swap maps that are always empty."""

    breaks = "KV-1"

    def swap_in(self) -> None:
        super().swap_in()
        self.plan.moves = [move for move in self.plan.moves if move.kind != "swap_in"]


class HitsReusedBlock(Miniature):
    """Leaves a block in the prefix cache when it is handed out anew. Modelled on nano-vllm #163."""

    breaks = "KV-2"
    pool_kind = UnprunedPool


class UnresetPool(Pool):
    """Empties its list of cached blocks, not the map of keys."""

    def forget_all(self) -> None:
        self.free.extend(self.cached)
        self.cached.clear()

    def share(self, block: int) -> int:
        if block in self.free:
            self.free.remove(block)
        return super().share(block)


class SkipsAfterChunk(Miniature):
    """Counts one position too many when a chunk of a prompt is done. Modelled on FastDeploy PR 3292."""

    breaks = "KV-3"
    off_by = 1

    def take_tokens(
        self, job: Job, sequence: Sequence, row: SequencePlan, sampled: Mapping[SequenceKey, Sampled]
    ) -> None:
        super().take_tokens(job, sequence, row, sampled)
        if not row.samples:
            sequence.computed += self.off_by


class RepeatsAfterChunk(SkipsAfterChunk):
    """Counts one position too few when a chunk of a prompt is done."""

    off_by = -1


class ZeroesOneStepLate(Miniature):
    """Clears the blocks it handed out a step ago. Modelled on vllm-ascend PR 13503, a loaded cache zeroed."""

    breaks = "KV-4"

    def schedule(self) -> StepPlan:
        handed_out = getattr(self, "handed_out", [])
        plan = super().schedule()
        plan.moves[:0] = [BlockMove("zero", block, block) for block in handed_out]
        self.handed_out = [block for row in plan.sequences if row.first == 0 for block in row.block_tables[0]]
        return plan


class SwapsOverHostBlock(Miniature):
    """Gives host blocks back before they are swapped in, so that the next victim is swapped out over them."""

    breaks = "KV-4"

    def preempt(self, job: Job, need: int, asked_by: Job) -> None:
        super().preempt(job, need, asked_by)
        self.host_free = list(range(self.config.num_swap_blocks))


class FreesInFlight(Miniature):
    """Frees at once what a step in flight still writes. Modelled on vllm-ascend #14055, no fence for async steps."""

    breaks = "KV-5"

    def free_block(self, job: Job, block: int) -> None:
        self.pool.release(block)


class LosesTokenAtPreemption(Miniature):
    """A preempted request comes back without its newest token. Modelled on vllm-ascend PR 822."""

    breaks = "KV-6"

    def preempt(self, job: Job, need: int, asked_by: Job) -> None:
        super().preempt(job, need, asked_by)
        job.sequences[0].tokens.pop()


class CachesAcrossAdapters(Miniature):
    """Its cache keys know tokens alone. Modelled on vLLM #8240, an adapter that is not part of the hash."""

    breaks = "ID-1"

    def key(self, job: Job, tokens: list[int]) -> Key:
        return (None, tuple(tokens))


class HitsAfterReset(Miniature):
    """A reset frees the cached blocks and keeps their keys, so that they are hit as if nothing had happened."""

    breaks = "CCH-3"
    pool_kind = UnresetPool


class RefusesIdleReset(Miniature):
    """Refuses to reset the prefix cache when nothing is live, because something is cached."""

    breaks = "CCH-3"

    def reset_prefix_cache(self) -> bool:
        return not self.pool.cached and super().reset_prefix_cache()
