"""The reference engine, made wrong in one respect at a time; each class breaks the requirement it names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from conformance.adapters.reference import ReferenceAdapter, make
from conformance.protocol import (
    BlockMove,
    Capabilities,
    CommitResult,
    EngineConfig,
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
from reference_engine.block_manager import BlockManager
from reference_engine.request import Sequence


class Faulty:
    """Passes everything on to a reference engine; a fault overrides one method, or ``inner_config``."""

    breaks: ClassVar[str] = ""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        inner = make(self.inner_config(config))
        assert isinstance(inner, ReferenceAdapter)
        self.inner = inner
        self.capabilities: Capabilities = self.inner.capabilities
        self.live: list[str] = []
        self.steps = 0

    def inner_config(self, config: EngineConfig) -> EngineConfig:
        return config

    def add_request(self, request: Request) -> None:
        self.inner.add_request(request)
        self.live.append(request.request_id)

    def abort_request(self, request_id: str) -> None:
        self.inner.abort_request(request_id)
        if request_id in self.live:
            self.live.remove(request_id)

    def schedule(self) -> StepPlan:
        plan = self.inner.schedule()
        self.steps += 1
        self.twist(plan)
        return plan

    def twist(self, plan: StepPlan) -> None:
        """Where a fault changes the plan."""

    def commit(self, step: int, sampled: Mapping[SequenceKey, Sampled]) -> CommitResult:
        result = self.inner.commit(step, sampled)
        for report in result.finished:
            if report.request_id in self.live:
                self.live.remove(report.request_id)
        return result

    def reset_prefix_cache(self) -> bool:
        return self.inner.reset_prefix_cache()

    def usage(self) -> Usage:
        return self.inner.usage()

    def snapshot(self) -> Snapshot:
        return self.inner.snapshot()

    def close(self) -> None:
        self.inner.close()


def changed(config: EngineConfig, **fields: Any) -> EngineConfig:
    return msgspec.structs.replace(config, **fields)


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


# ----------------------------------------------------------------------------------------------------- limits


class OneSequenceMore(Faulty):
    breaks = "LIM-1"

    def inner_config(self, config: EngineConfig) -> EngineConfig:
        return changed(config, max_num_seqs=config.max_num_seqs + 1)


class TwiceTheBudget(Faulty):
    breaks = "LIM-2"

    def inner_config(self, config: EngineConfig) -> EngineConfig:
        return changed(config, max_num_batched_tokens=2 * config.max_num_batched_tokens)


class OneTokenLonger(Faulty):
    breaks = "LIM-3"

    def inner_config(self, config: EngineConfig) -> EngineConfig:
        length = config.max_model_len + 1
        return changed(config, max_model_len=length, max_num_batched_tokens=max(length, config.max_num_batched_tokens))


class DraftsUnasked(Faulty):
    breaks = "LIM-4"

    def twist(self, plan: StepPlan) -> None:
        for sequence in plan.sequences:
            if self.config.num_lookahead_slots and sequence.first and self.steps > 8:
                sequence.draft_tokens = [5]
                sequence.num_tokens += 1


# --------------------------------------------------------------------------------------------------- progress


class StallsWhenTwoWait(Faulty):
    breaks = "PRG-1"

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.offset = 0

    def schedule(self) -> StepPlan:
        if len(self.live) > 2:
            self.offset += 1
            return StepPlan(step=self.steps + self.offset - 1)
        plan = super().schedule()
        plan.step += self.offset
        return plan

    def commit(self, step: int, sampled: Mapping[SequenceKey, Sampled]) -> CommitResult:
        if len(self.live) > 2:
            return CommitResult()
        return super().commit(step - self.offset, sampled)


class RefusesWhatFillsThePool(Faulty):
    breaks = "PRG-2"

    def add_request(self, request: Request) -> None:
        total = len(request.prompt) + request.max_tokens
        if total > (self.config.num_blocks - 1) * self.config.block_size:
            raise RequestRefused("one block must stay free")
        super().add_request(request)


class ParksTheImpossible(Faulty):
    breaks = "PRG-3"

    def add_request(self, request: Request) -> None:
        try:
            super().add_request(request)
        except RequestRefused:
            self.live.append(request.request_id)


class StartsOverForever(Faulty):
    """With two requests live it computes one position of the first and throws it out again, for ever."""

    breaks = "PRG-4"

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.fake = 0

    def schedule(self) -> StepPlan:
        if len(self.live) < 2:
            return super().schedule()
        plan = StepPlan(step=self.steps)
        self.steps += 1
        self.fake += 1
        if self.fake % 2:
            plan.sequences = [
                SequencePlan(request_id=self.live[0], first=0, num_tokens=1, block_tables=[[0]], samples=False)
            ]
        else:
            plan.preempted = [Preemption(request_id=self.live[0], mode="recompute")]
        return plan

    def commit(self, step: int, sampled: Mapping[SequenceKey, Sampled]) -> CommitResult:
        return CommitResult() if self.fake else super().commit(step, sampled)

    def usage(self) -> Usage:
        return Usage(swapped=0)


class MixesUpTokens(Faulty):
    breaks = "PRG-5"

    def commit(self, step: int, sampled: Mapping[SequenceKey, Sampled]) -> CommitResult:
        return super().commit(step, dict(zip(sampled, reversed(list(sampled.values())), strict=True)))


class CannotAbortWhatWaits(Faulty):
    breaks = "PRG-6"

    def abort_request(self, request_id: str) -> None:
        if self.usage().waiting:
            raise KeyError(request_id)
        super().abort_request(request_id)


class LetsThemWait(Faulty):
    """Requests reach the scheduler some steps late."""

    breaks = "PRG-7"
    steps_late = 3

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.late: list[tuple[int, Request]] = []

    def is_late(self, request: Request) -> bool:
        return True

    def add_request(self, request: Request) -> None:
        if self.is_late(request):
            self.late.append((self.steps + self.steps_late, request))
        else:
            super().add_request(request)

    def schedule(self) -> StepPlan:
        while self.late and self.late[0][0] <= self.steps:
            super().add_request(self.late.pop(0)[1])
        return super().schedule()


class DividesByZero(Faulty):
    breaks = "PRG-8"

    def schedule(self) -> StepPlan:
        if len(self.live) > 3:
            raise ZeroDivisionError("no share of nothing")
        return super().schedule()


# ------------------------------------------------------------------------------------- preemption and fairness


class CountsOneBlockEach(Faulty):
    """What block managers did when they asked for one free block for every sequence."""

    breaks = "PRE-1"

    def inner_config(self, config: EngineConfig) -> EngineConfig:
        return changed(config, engine_options={"append_check": "touched"} if not config.num_lookahead_slots else {})


class RecomputesFullBatches(CountsOneBlockEach):
    breaks = "PRE-2"


class CollapsesAtTheBrim(CountsOneBlockEach):
    breaks = "PRE-7"


class LastComeFirstServed(Faulty):
    """Under fcfs, whoever came last goes first."""

    breaks = "FAIR-1"

    def inner_config(self, config: EngineConfig) -> EngineConfig:
        return changed(config, scheduling_policy="priority")

    def add_request(self, request: Request) -> None:
        if self.config.scheduling_policy == "fcfs":
            request = msgspec.structs.replace(request, priority=-request.arrival)
        super().add_request(request)


class ThrowsOutTheOldest(LastComeFirstServed):
    breaks = "PRE-3"


class AdmitsNewcomersFirst(LastComeFirstServed):
    breaks = "PRE-4"


class PreemptsTwice(Faulty):
    breaks = "PRE-5"

    def twist(self, plan: StepPlan) -> None:
        plan.preempted += plan.preempted[:1]


class KeepsOneBlockSpare(Faulty):
    breaks = "PRE-6"

    def inner_config(self, config: EngineConfig) -> EngineConfig:
        return changed(config, num_blocks=max(1, config.num_blocks - 1))


class IgnoresPriority(Faulty):
    breaks = "FAIR-2"

    def inner_config(self, config: EngineConfig) -> EngineConfig:
        return changed(config, scheduling_policy="fcfs")


# ---------------------------------------------------------------------------------------- caching, determinism


class NeverHits(Faulty):
    breaks = "CCH-1"

    def inner_config(self, config: EngineConfig) -> EngineConfig:
        return changed(config, enable_prefix_caching=False)


class WaitsForTheCache(LetsThemWait):
    breaks = "CCH-2"

    def is_late(self, request: Request) -> bool:
        return self.config.enable_prefix_caching and request.arrival > 1


class CannotReset(Faulty):
    breaks = "CCH-3"

    def reset_prefix_cache(self) -> bool:
        self.inner.reset_prefix_cache()
        return False


class EverySecondIsSlow(LetsThemWait):
    """Engines differ from one another, as when something process-wide counts."""

    breaks = "DET-1"
    built = 0

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        type(self).built += 1
        self.slow = bool(self.built % 2)

    def is_late(self, request: Request) -> bool:
        return self.slow


class OtherTokensWhenCached(Faulty):
    breaks = "DET-2"

    def commit(self, step: int, sampled: Mapping[SequenceKey, Sampled]) -> CommitResult:
        result = super().commit(step, sampled)
        if self.config.enable_prefix_caching:
            result.finished = [
                Finished(request_id=report.request_id, outputs=[[0, *outputs[1:]] for outputs in report.outputs])
                if report.request_id != "r0"
                else report
                for report in result.finished
            ]
        return result


class EncodesNothing(Faulty):
    breaks = "ENC-1"

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.capabilities = msgspec.structs.replace(
            self.capabilities, features=self.capabilities.features | {"encoder_cache"}
        )

    def inner_config(self, config: EngineConfig) -> EngineConfig:
        return changed(config, encoder_cache_size=0)

    def add_request(self, request: Request) -> None:
        super().add_request(msgspec.structs.replace(request, encoder_items=()))


def _all(of: type[Faulty]) -> list[type[Faulty]]:
    return [fault for direct in of.__subclasses__() for fault in (direct, *_all(direct))]


FAULTS: dict[str, type[Faulty]] = {fault.breaks: fault for fault in _all(Faulty)}
"""Requirement -> the engine that breaks it."""
