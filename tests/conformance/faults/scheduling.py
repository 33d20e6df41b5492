"""Faults in limits, progress, preemption, fairness, caching and determinism."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from conformance.protocol import (
    CommitResult,
    EngineConfig,
    Finished,
    Preemption,
    Request,
    RequestRefused,
    Sampled,
    SequenceKey,
    SequencePlan,
    StepPlan,
    Usage,
)

from .base import Faulty, changed

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
