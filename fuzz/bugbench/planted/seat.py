"""Tokens given to the wrong sequence, and figures that do not say what is."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from conformance.protocol import CommitResult, Finished, Sampled, SequenceKey, StepPlan, Usage
from fuzz.bugbench.parts import Core, Queues, Seat
from fuzz.bugbench.registry import VLLM, planted
from reference_engine.engine import FinishedRequest
from reference_engine.scheduler import Plan, Preemption, ScheduledSequence

ROUTING = "token routing"
METRICS = "metrics"

# ---------------------------------------------------------------------------------------------- token routing


class _Misrouted(Seat):
    """Gives the sampled tokens, which come back row by row, to sequences in another order."""

    def twist(self, plan: StepPlan) -> None:
        self.probe.memory[plan.step] = [(row.request_id, row.seq) for row in plan.sequences if row.samples]
        self.probe.memory["tables", plan.step] = [row.block_tables[0] for row in plan.sequences if row.samples]

    def route(self, step: int, sampled: Mapping[SequenceKey, Sampled]) -> Mapping[SequenceKey, Sampled]:
        rows = [key for key in self.probe.memory.pop(step, ()) if key in sampled]
        tables = self.probe.memory.pop(("tables", step), [])
        order = self.order(rows, tables)
        routed = dict(sampled)
        routed.update(zip(order, [sampled[key] for key in rows], strict=False))
        self.probe.decide(routed != sampled)
        return routed

    def order(self, rows: list[SequenceKey], tables: list[list[int]]) -> list[SequenceKey]:
        raise NotImplementedError


@planted(ROUTING, "PRG-5", "KV-6", source=f"{VLLM}18279")
class RowsComeBackInDeviceOrder(_Misrouted):
    """Results come back in the order of the first blocks and are given out in the order of the requests."""

    def order(self, rows: list[SequenceKey], tables: list[list[int]]) -> list[SequenceKey]:
        if len(tables) != len(rows):
            return rows
        return [rows[index] for index in sorted(range(len(rows)), key=lambda index: tables[index])]


@planted(
    ROUTING, "PRG-5", "KV-6", source="https://github.com/sgl-project/sglang/pull/18803", needs=("abort", "pipeline")
)
class RowsOfTheAbortedCloseUp(_Misrouted):
    """Results of a step in flight are given to those of its requests that still live, one row after the other."""

    def order(self, rows: list[SequenceKey], tables: list[list[int]]) -> list[SequenceKey]:
        return [key for key in rows if key[0] in self.engine.requests]


@planted(ROUTING, "PRG-5", "KV-6", source=f"{VLLM}644", needs=("fork",))
class SiblingsSwapFirstTokens(Core):
    """The first tokens of a request with several sequences are given to its sequences in reverse."""

    def commit(self, step: int, tokens: Mapping[tuple[str, int], int]) -> list[FinishedRequest]:
        given = dict(tokens)
        for scheduled in self._in_flight[0].sequences if self._in_flight else ():
            request = scheduled.sequence.request
            if scheduled.samples and not request.forked and not scheduled.sequence.ended:
                keys = [(request.request_id, index) for index in range(request.n)]
                given.update(zip(keys, [tokens[key] for key in reversed(keys)], strict=True))
                self.probe.trigger()
        return super().commit(step, given)


@planted(ROUTING, "KV-6", "PRG-5", source="https://github.com/vllm-project/vllm-ascend/pull/822")
class PreemptionLosesTheLastToken(Queues):
    """A request preempted by recompute comes back without the token it sampled last."""

    __slots__ = ()

    def _preempt(self, plan: Plan, preemption: Preemption) -> None:
        victim = preemption.request
        recomputes = not self._can_swap_out(victim)
        super()._preempt(plan, preemption)
        for sequence in victim.live:
            if self.probe.decide(recomputes and len(sequence.tokens) > victim.prompt_len + 1):
                sequence.tokens.pop()


@planted(ROUTING, "PRG-5", source=f"{VLLM}11898", needs=("fork", "stop_token"))
class SiblingsDoNotStop(Core):
    """The stop token ends the first sequence of a request, and the others run on to their length."""

    def _take(self, scheduled: ScheduledSequence, tokens: Mapping[tuple[str, int], int]) -> None:
        sequence = scheduled.sequence
        request = sequence.request
        stop = request.stop_token
        token = tokens.get((request.request_id, sequence.index))
        if self.probe.decide(sequence.index > 0 and scheduled.samples and stop is not None and token == stop):
            request.stop_token = None
        super()._take(scheduled, tokens)
        request.stop_token = stop


@planted(ROUTING, "PRG-5", source=f"{VLLM}46289", needs=("abort",))
class EndIsReportedTwice(Seat):
    """A request that ends in the same step as another is reported as finished once more in the next."""

    def commit(self, step: int, sampled: Mapping[SequenceKey, Sampled]) -> CommitResult:
        result = super().commit(step, sampled)
        again: list[Finished] = self.probe.memory.pop("again", [])
        if len(result.finished) > 1:
            self.probe.memory["again"] = result.finished[1:]
        self.probe.decide(bool(again))
        return msgspec.structs.replace(result, finished=[*again, *result.finished])


# ---------------------------------------------------------------------------------------------------- metrics


@planted(METRICS, "ACC-10", source=f"{VLLM}58037", needs=("swap",))
class SwapsAreNotCounted(Queues):
    """The counter of preemptions leaves out those by swap."""

    __slots__ = ()

    def _preempt(self, plan: Plan, preemption: Preemption) -> None:
        super()._preempt(plan, preemption)
        if self.probe.decide(plan.preempted[-1].mode == "swap"):
            self.num_preemptions -= 1


@planted(METRICS, "ACC-10", source=f"{VLLM}49984", needs=("fork",))
class PreemptionsCountSequences(Queues):
    """The counter of preemptions goes up by the number of sequences of the victim."""

    __slots__ = ()

    def _preempt(self, plan: Plan, preemption: Preemption) -> None:
        super()._preempt(plan, preemption)
        more = len(preemption.request.live) - 1
        if self.probe.decide(more > 0):
            self.num_preemptions += more


@planted(METRICS, "ACC-10", "ACC-1", source=f"{VLLM}20302", needs=("sliding_window",))
class NullBlockCountsAsFree(Seat):
    """The figure of free blocks includes the null block."""

    def usage(self) -> Usage:
        usage = super().usage()
        null = self.engine.blocks.pool.reserved
        self.probe.decide(bool(null))
        return msgspec.structs.replace(usage, free_blocks=(usage.free_blocks or 0) + null)


@planted(
    METRICS, "ACC-10", "ACC-1", "ACC-8", needs=("prefix_caching",), source="https://github.com/xLLM-AI/xllm/issues/828"
)
class CachedBlocksAreReportedAsUsed(Seat):
    """The figure of free blocks leaves out those that are kept for a prefix hit."""

    def usage(self) -> Usage:
        usage = super().usage()
        cached = len(self.engine.blocks.pool.evictable)
        self.probe.decide(bool(cached))
        return msgspec.structs.replace(usage, free_blocks=(usage.free_blocks or 0) - cached)


@planted(METRICS, "ACC-10", source=f"{VLLM}10949", needs=("fork",))
class RunningCountsRequests(Seat):
    """The figure of running sequences counts requests."""

    def usage(self) -> Usage:
        usage = super().usage()
        requests = len(self.engine.scheduler.running)
        self.probe.decide(requests != usage.running)
        return msgspec.structs.replace(usage, running=requests)


@planted(METRICS, "ACC-10", source=f"{VLLM}22545", needs=("abort",), deep="a counter that drifts with every abort")
class WaitingIsNotLoweredByAborts(Seat):
    """The figure of waiting requests goes down when one is admitted, and not when one is aborted."""

    def abort_request(self, request_id: str) -> None:
        before = len(self.engine.scheduler.waiting)
        super().abort_request(request_id)
        gone = before - len(self.engine.scheduler.waiting)
        if self.probe.decide(gone > 0):
            self.probe.memory["aborted"] = self.probe.memory.get("aborted", 0) + gone

    def usage(self) -> Usage:
        usage = super().usage()
        return msgspec.structs.replace(usage, waiting=(usage.waiting or 0) + self.probe.memory.get("aborted", 0))
