"""Requests that are aborted, or end, or are preempted while steps are still in flight."""

from __future__ import annotations

from collections.abc import Mapping

from fuzz.bugbench.parts import Blocks, Core, Queues
from fuzz.bugbench.planted.preemption import Impatient
from fuzz.bugbench.registry import VLLM, planted
from reference_engine.engine import FinishedRequest
from reference_engine.request import Request, Sequence, Status
from reference_engine.scheduler import Plan

ABORT = "abort in every state"
AFTER_FREE = "use after free"
PIPELINE = "deferred frees and pipeline"

# ------------------------------------------------------------------------------------------------------ abort


@planted(ABORT, "PRG-6", source=f"{VLLM}18485", needs=("abort",))
class AbortOfAWaitingRequestRaises(Core):
    """An abort looks up the block table of the request, and one that was never admitted has none."""

    def abort_request(self, request_id: str) -> None:
        request = self.requests.get(request_id)
        if request is not None and self.probe.decide(request.status is Status.WAITING and request.preempted_in < 0):
            raise KeyError(request_id)
        super().abort_request(request_id)


@planted(ABORT, "PRG-6", source=f"{VLLM}46283", needs=("abort",))
class AbortOfAnEndedRequestRaises(Core):
    """An abort that comes after the end, when nobody can know yet, raises."""

    def abort_request(self, request_id: str) -> None:
        if self.probe.decide(request_id not in self.requests and self._next_serial > len(self.requests)):
            raise KeyError(request_id)
        super().abort_request(request_id)


@planted(
    ABORT,
    "ACC-1",
    "ACC-4",
    "ACC-7",
    "ACC-8",
    source="https://github.com/sgl-project/sglang/pull/38355",
    needs=("abort", "chunked_prefill"),
)
class AbortAmidThePromptLeaks(Core):
    """A request aborted between two chunks of its prompt keeps the blocks that are not computed yet."""

    def abort_request(self, request_id: str) -> None:
        request = self.requests.get(request_id)
        for sequence in request.live if request is not None else ():
            if self.probe.decide(sequence.remaining > 1 and bool(sequence.table)):
                self.blocks.pool.refs[sequence.table[-1]] += 1
        super().abort_request(request_id)


@planted(
    ABORT, "PRG-6", "PRG-5", "ACC-10", source="https://github.com/PaddlePaddle/FastDeploy/pull/3292", needs=("abort",)
)
class AbortedWhilePreemptedRunsAgain(Core):
    """A request aborted after a preemption stays in the queue and is run again."""

    def abort_request(self, request_id: str) -> None:
        request = self.requests.get(request_id)
        zombie = request is not None and request.status is Status.WAITING and request.preempted_in >= 0
        if not self.probe.decide(zombie):
            super().abort_request(request_id)


@planted(
    ABORT,
    "PRG-7",
    "PRG-1",
    "PRG-2",
    "FAIR-1",
    "ACC-10",
    source=f"{VLLM}53130",
    needs=("abort",),
    deep="a counter that drifts: places of the running set are lost one abort at a time",
)
class AbortKeepsThePlace(Core):
    """A running request that is aborted still counts against max_num_seqs."""

    def abort_request(self, request_id: str) -> None:
        request = self.requests.get(request_id)
        if request is not None and self.probe.decide(request.status is Status.RUNNING):
            self.scheduler.running_sequences += request.width
        super().abort_request(request_id)


@planted(ABORT, "ACC-1", "ACC-4", "ACC-6", "ACC-7", "ACC-8", source=f"{VLLM}10013", needs=("abort", "fork"))
class AbortFreesOneSequence(Core):
    """An abort of a request with several sequences frees the blocks of the first of them."""

    def abort_request(self, request_id: str) -> None:
        request = self.requests.get(request_id)
        for sequence in request.live[1:] if request is not None else ():
            if self.probe.decide(bool(sequence.table)):
                self.blocks.pool.refs[sequence.table[-1]] += 1
        super().abort_request(request_id)


# --------------------------------------------------------------------------------- deferred frees and pipeline


@planted(
    AFTER_FREE,
    "KV-5",
    "KV-1",
    "ACC-3",
    source="https://github.com/vllm-project/vllm-ascend/issues/14055",
    needs=("pipeline", "stop_token"),
)
class EndFreesAtOnce(Core):
    """Blocks of a request that ends are free at once, though a step in flight still writes to them."""

    def _retire(self, sequence: Sequence) -> None:
        ends = sequence.request.status is Status.RUNNING and not self.probe.memory.get("aborting")
        if self.probe.decide(ends and sequence.in_flight > 0 and self.config.pipeline_depth > 1):
            sequence.ended, sequence.grant = True, 0
            self.blocks.retire(sequence, defer=False)
        else:
            super()._retire(sequence)

    def abort_request(self, request_id: str) -> None:
        self.probe.memory["aborting"] = True
        super().abort_request(request_id)
        self.probe.memory["aborting"] = False


@planted(PIPELINE, "KV-5", "KV-1", "ACC-3", source=f"{VLLM}32255", needs=("abort", "pipeline"))
class AbortFreesAtOnce(Core):
    """Blocks of a request that is aborted are free at once, though a step in flight still writes to them."""

    def abort_request(self, request_id: str) -> None:
        request = self.requests.get(request_id)
        moving = [s for s in request.live if s.in_flight] if request is not None else []
        counts = [sequence.in_flight for sequence in moving]
        for sequence in moving:
            sequence.in_flight = 0
        self.probe.decide(bool(moving) and self.config.pipeline_depth > 1)
        super().abort_request(request_id)
        for sequence, count in zip(moving, counts, strict=True):
            sequence.in_flight = count


@planted(
    PIPELINE,
    "KV-5",
    "KV-1",
    "ACC-3",
    source=f"{VLLM}29870",
    needs=("pipeline",),
    deep="three steps deep: an end must leave two steps in flight and somebody must want the blocks",
)
class DeferredFreeComesOneStepEarly(Core):
    """Blocks whose freeing was put off are given back when one more step of the request is still in flight."""

    def commit(self, step: int, tokens: Mapping[tuple[str, int], int]) -> list[FinishedRequest]:
        for scheduled in self._in_flight[0].sequences if self._in_flight else ():
            sequence = scheduled.sequence
            if self.probe.decide(sequence.ended and sequence.in_flight == 2):
                self.blocks.release_deferred(sequence)
        return super().commit(step, tokens)


@planted(AFTER_FREE, "KV-6", "PRG-5", "KV-5", "KV-1", "KV-3", "PRG-8", source=f"{VLLM}46066", needs=("pipeline",))
class PreemptsWhatIsInFlight(Impatient):
    """A victim is preempted with a step in flight; the late token is counted against slots it no longer has."""

    __slots__ = ()

    def takes(self, victim: Request, plan: Plan) -> bool:
        return all(scheduled.sequence.request is not victim for scheduled in plan.sequences)


@planted(
    AFTER_FREE,
    "KV-5",
    "KV-1",
    "ACC-2",
    "ACC-9",
    source=f"{VLLM}47728",
    needs=("pipeline", "sliding_window"),
    deep="window and pipeline, and somebody who takes the block at once",
)
class WindowSlidesWithWhatIsScheduled(Blocks):
    """Blocks leave the window by what is scheduled, while a step in flight may still read them."""

    __slots__ = ()

    def _left_window(self, sequence: Sequence) -> range:
        right = super()._left_window(sequence)
        done, sequence.done = sequence.done, sequence.scheduled
        early = super()._left_window(sequence)
        sequence.done = done
        self.probe.decide(early != right)
        return early


@planted(
    PIPELINE,
    "PRG-5",
    "KV-1",
    "KV-3",
    "ACC-3",
    "KV-6",
    source=f"{VLLM}1101",
    needs=("fork", "pipeline"),
    deep="fork and pipeline: sequence 0 must be scheduled again before its siblings exist",
)
class RunsOnBeforeTheFork(Queues):
    """A request that is about to fork is scheduled once more while its first token is in flight."""

    __slots__ = ()

    def _runnable(self) -> tuple[list[Sequence], list[Sequence]]:
        decodes, prefills = super()._runnable()
        for request in self.running:
            first = request.live[0]
            if not request.forked and self.probe.decide(first.pending > 0 and first.total < request.max_len):
                (decodes if first.remaining == 1 else prefills).append(first)
        return decodes, prefills
