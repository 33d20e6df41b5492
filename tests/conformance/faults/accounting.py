"""Faults in the books and in what attention reads: ACC-*, KV-*, ID-1."""

from __future__ import annotations

import msgspec

from conformance.protocol import (
    BlockMove,
    EngineConfig,
    Request,
    Snapshot,
    StepPlan,
    Usage,
)
from reference_engine.block_manager import BlockManager
from reference_engine.request import Sequence

from .base import Faulty

# ------------------------------------------------------------------------------------------------- accounting


class LosesBlock(Faulty):
    breaks = "ACC-1"

    def snapshot(self) -> Snapshot:
        snapshot = self.inner.snapshot()
        if self.steps > 8 and snapshot.free:
            snapshot.free.pop()
        return snapshot


class NamesBlockPastThePool(Faulty):
    breaks = "ACC-2"

    def twist(self, plan: StepPlan) -> None:
        for sequence in plan.sequences[1:]:
            sequence.block_tables[0][0] += self.config.num_blocks


class ForgetsCopyOnWrite(Faulty):
    breaks = "ACC-3"

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.instead: dict[int, int] = {}

    def twist(self, plan: StepPlan) -> None:
        self.instead.update({move.dst: move.src for move in plan.moves if move.kind == "copy"})
        plan.moves = [move for move in plan.moves if move.kind != "copy"]
        for sequence in plan.sequences:
            sequence.block_tables[0] = [self.instead.get(block, block) for block in sequence.block_tables[0]]


class CountsTooHigh(Faulty):
    breaks = "ACC-4"

    def snapshot(self) -> Snapshot:
        snapshot = self.inner.snapshot()
        if snapshot.ref_counts and self.steps > 8:
            snapshot.ref_counts[min(snapshot.ref_counts)] += 1
        return snapshot


class ShortTable(Faulty):
    breaks = "ACC-5"

    def twist(self, plan: StepPlan) -> None:
        for sequence in plan.sequences:
            if len(sequence.block_tables[0]) > 2:
                del sequence.block_tables[0][-1]


class SetsBlockAside(Faulty):
    breaks = "ACC-6"

    def snapshot(self) -> Snapshot:
        snapshot = self.inner.snapshot()
        if self.steps > 8 and not self.live and snapshot.free:
            snapshot.reserved.append(snapshot.free.pop())
        return snapshot


class KeepsBlockOfFinished(Faulty):
    breaks = "ACC-7"

    def snapshot(self) -> Snapshot:
        snapshot = self.inner.snapshot()
        if self.steps > 8 and "r0" not in self.live and snapshot.free:
            snapshot.held["r0"] = [[snapshot.free.pop()]]
        return snapshot


class TakesBlockWhileWaiting(Faulty):
    breaks = "ACC-8"

    def usage(self) -> Usage:
        usage = self.inner.usage()
        if usage.waiting and usage.free_blocks:
            usage.free_blocks -= 1
        return usage


class ShufflesTable(Faulty):
    breaks = "ACC-9"

    def twist(self, plan: StepPlan) -> None:
        for sequence in plan.sequences:
            table = sequence.block_tables[0]
            if self.steps % 5 == 4 and len(table) > 1:
                table[0], table[1] = table[1], table[0]


class CountsPreemptionsTwice(Faulty):
    breaks = "ACC-10"

    def usage(self) -> Usage:
        usage = self.inner.usage()
        usage.preemptions = 2 * (usage.preemptions or 0)
        return usage


# ---------------------------------------------------------------------------------------------------- content


class ZeroesLiveBlock(Faulty):
    breaks = "KV-1"

    def twist(self, plan: StepPlan) -> None:
        if self.steps > 4 and plan.sequences and plan.sequences[0].first:
            plan.moves.append(BlockMove("zero", 0, plan.sequences[0].block_tables[0][0]))


class ClaimsHits(Faulty):
    breaks = "KV-2"

    def twist(self, plan: StepPlan) -> None:
        size = self.config.block_size
        for sequence in plan.sequences:
            if self.config.enable_prefix_caching and sequence.num_tokens > size + 1:
                sequence.first += size
                sequence.num_tokens -= size
                sequence.token_ids = None


class SkipsPosition(Faulty):
    breaks = "KV-3"

    def twist(self, plan: StepPlan) -> None:
        for sequence in plan.sequences:
            if self.steps > 8 and sequence.num_tokens > 1:
                sequence.first += 1
                sequence.num_tokens -= 1
                sequence.token_ids = None


class SwapsInFromElsewhere(Faulty):
    breaks = "KV-4"

    def twist(self, plan: StepPlan) -> None:
        plan.moves = [
            BlockMove("swap_in", self.config.num_swap_blocks - 1, move.dst) if move.kind == "swap_in" else move
            for move in plan.moves
        ]


class EagerBlockManager(BlockManager):
    """Defers nothing."""

    __slots__ = ()

    def retire(self, sequence: Sequence, *, defer: bool) -> None:
        super().retire(sequence, defer=False)


class FreesAtOnce(Faulty):
    """Blocks of a request that ends are free at once, whatever is in flight."""

    breaks = "KV-5"

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.inner.engine.blocks.__class__ = EagerBlockManager


class ResumesWithOtherTokens(Faulty):
    breaks = "KV-6"

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.out: set[str] = set()

    def twist(self, plan: StepPlan) -> None:
        for sequence in plan.sequences:
            if sequence.request_id in self.out and sequence.token_ids:
                sequence.token_ids[-1] += 1
        self.out |= {preemption.request_id for preemption in plan.preempted}


class IgnoresIdentity(Faulty):
    breaks = "ID-1"

    def add_request(self, request: Request) -> None:
        super().add_request(msgspec.structs.replace(request, cache_salt="", adapter=""))
