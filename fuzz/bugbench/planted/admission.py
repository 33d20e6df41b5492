"""Admissions that leave traces, limits that are missed, budgets that are overdrawn, and units that are mixed up."""

# ruff: noqa: D106 - a fault of several parts is described once, where they are held together

from __future__ import annotations

from fuzz.bugbench.parts import Blocks, Core, Queues
from fuzz.bugbench.registry import VLLM, planted
from reference_engine.engine import RequestError
from reference_engine.request import Request, Sequence
from reference_engine.scheduler import Plan, ScheduledSequence

ROLLBACK = "admission rollback"
LIMITS = "limits"
BUDGET = "budget"
CHUNKS = "chunked prefill"
UNITS = "unit mix-ups"

# ----------------------------------------------------------------------------------------- admission rollback


@planted(ROLLBACK, "ACC-8", "ACC-4", "ACC-1", source=f"{VLLM}11565", needs=("prefix_caching",))
class PostponedAdmissionPinsItsHits(Blocks):
    """The cached blocks of a request are held before it is known whether the others fit, and kept when they do not."""

    __slots__ = ()

    def admission(self, request: Request) -> list[list[int]] | None:
        starts = super().admission(request)
        if starts is None and self.cache is not None:
            hits = self.cache.lookup(request.identity, request.live[0].tokens)
            if self.probe.decide(bool(hits)):
                self.pool.share(hits)
        return starts


@planted(
    ROLLBACK,
    "ACC-8",
    "ACC-4",
    "ACC-1",
    source="https://github.com/sgl-project/sglang/pull/16067",
    needs=("prefix_caching",),
    deep="the blocks must fit and the token budget must not",
)
class LateRefusalPinsItsHits:
    """An admission that fails on the token budget, after the blocks were found, keeps the hits it had taken."""

    class Taking(Blocks):
        __slots__ = ()

        def admission(self, request: Request) -> list[list[int]] | None:
            starts = super().admission(request)
            pinned = [block for hits in starts or () for block in hits]
            self.pool.share(pinned)
            self.probe.memory["pinned"] = pinned
            return starts

    class Entering(Queues):
        __slots__ = ()

        def _admit(self, plan: Plan, *, waiting: bool = True, swapped: bool = True) -> None:
            super()._admit(plan, waiting=waiting, swapped=swapped)
            self.probe.decide(bool(self.probe.memory.pop("pinned", None)))

        def _enter(self, request: Request, plan: Plan, hits: list[list[int]] | None) -> None:
            if hits is not None:
                self.blocks.pool.release(self.probe.memory.pop("pinned"))
            super()._enter(request, plan, hits)


@planted(ROLLBACK, "PRG-1", "PRG-2", "PRG-7", "FAIR-1", "PRE-4", "ACC-10", source=f"{VLLM}18631")
class PostponedRequestIsLost(Queues):
    """A request is taken off the queue before the token budget is looked at, and not put back when that is short."""

    __slots__ = ()

    def _admit(self, plan: Plan, *, waiting: bool = True, swapped: bool = True) -> None:
        super()._admit(plan, waiting=waiting, swapped=swapped)
        head = self._head()
        if head is None or head not in self.waiting or not waiting or head.preempted_in == plan.step:
            return
        places = self.running_sequences + head.width <= self.config.max_num_seqs
        short = plan.num_tokens >= self.config.max_num_batched_tokens
        if places and short and self.probe.decide(self.blocks.admission(head) is not None):
            self.waiting.remove(head)

    def remove(self, request: Request) -> None:
        if request in self.waiting or request in self.running or request in self.swapped:
            super().remove(request)


@planted(ROLLBACK, "PRG-8", "ACC-1", "PRE-1", source="https://github.com/torch-spyre/sendnn-inference/issues/260")
class AdmissionNeverLooksAtThePool(Blocks):
    """Requests are admitted as long as the running set has a place, whatever is free."""

    __slots__ = ()

    def admission(self, request: Request) -> list[list[int]] | None:
        starts = super().admission(request)
        if self.probe.decide(starts is None and self.watermark == 0):
            return [[] for _ in request.live]
        return starts


# ----------------------------------------------------------------------------------------------------- limits


@planted(LIMITS, "LIM-1", source="https://github.com/vllm-project/vllm-ascend/pull/822")
class LimitHoldsForTheStep(Queues):
    """max_num_seqs is held against the sequences of the step instead of the running set."""

    __slots__ = ()

    def _admit(self, plan: Plan, *, waiting: bool = True, swapped: bool = True) -> None:
        running = self.running_sequences
        absent = running - len(plan.sequences)
        self.probe.decide(absent > 0 and self._head() is not None)
        self.running_sequences -= absent
        super()._admit(plan, waiting=waiting, swapped=swapped)
        self.running_sequences += absent


@planted(LIMITS, "LIM-1", "ACC-10", source=f"{VLLM}1068", needs=("fork",))
class WaitingGroupCountsAsOne(Queues):
    """A waiting request counts as the one sequence it is now, not as the n it will be."""

    __slots__ = ()

    def _enter(self, request: Request, plan: Plan, hits: list[list[int]] | None) -> None:
        super()._enter(request, plan, hits)
        if self.probe.decide(not request.forked):
            self.running_sequences -= request.n - 1
            self.probe.memory[request.request_id] = request.n - 1

    def remove(self, request: Request) -> None:
        if request in self.running:
            self.running_sequences += self.probe.memory.pop(request.request_id, 0)
        super().remove(request)

    def end_sequence(self, sequence: Sequence) -> None:
        self.running_sequences += self.probe.memory.pop(sequence.request.request_id, 0)
        super().end_sequence(sequence)


@planted(LIMITS, "LIM-3", "PRG-5", source=f"{VLLM}53962", needs=("length_limit",))
class OneTokenPastTheModelLength(Core):
    """A request whose end is set by max_model_len gets one token more than the model has positions for."""

    def _check_fit(self, request: Request) -> None:
        limit = self.config.max_model_len
        if self.probe.decide(request.prompt_len + request.max_tokens > limit == request.max_len):
            request.max_len += 1
        super()._check_fit(request)


@planted(LIMITS, "PRG-2", source="https://github.com/tenstorrent/vllm/pull/120")
class RefusesWhatFillsThePool(Core):
    """A request that needs every block of the pool, and would have them all to itself, is refused."""

    def _check_fit(self, request: Request) -> None:
        super()._check_fit(request)
        blocks = request.n * self.blocks.blocks_for(request.max_len - 1)
        if self.probe.decide(blocks == self.config.usable_blocks - self.config.watermark_blocks):
            raise RequestError(f"request {request.request_id}: {blocks} blocks are not fewer than there are")


# ----------------------------------------------------------------------------------------------------- budget


@planted(BUDGET, "LIM-2", source="https://github.com/sgl-project/sglang/pull/30743")
class NewcomersGetAFreshBudget(Queues):
    """A request that is admitted may take the whole token budget, though the step has spent some of it."""

    __slots__ = ()

    def _enter(self, request: Request, plan: Plan, hits: list[list[int]] | None) -> None:
        spent, plan.num_tokens = plan.num_tokens, 0
        super()._enter(request, plan, hits)
        plan.num_tokens += spent
        self.probe.decide(plan.num_tokens > self.config.max_num_batched_tokens)


@planted(BUDGET, "LIM-2", source="https://github.com/vllm-project/vllm-ascend/pull/3448", needs=("chunked_prefill",))
class DecodesAreFree(Queues):
    """Tokens of sequences that decode do not count against the budget that prefills are cut to."""

    __slots__ = ()

    def _share_budget(self, sequences: list[Sequence]) -> None:
        super()._share_budget(sequences)
        spent = sum(sequence.grant for sequence in sequences if sequence.remaining == 1)
        for sequence in sequences:
            if self.probe.decide(spent > 0 and 0 < sequence.grant < self._chunk(sequence.remaining)):
                sequence.grant = min(sequence.grant + spent, self._chunk(sequence.remaining))
                break


# -------------------------------------------------------------------------------------------- chunked prefill


@planted(
    CHUNKS, "PRG-5", "KV-6", source="https://github.com/vllm-project/vllm-ascend/pull/822", needs=("chunked_prefill",)
)
class EveryChunkSamples(Queues):
    """A token is expected after every chunk of a prompt, not only after its last."""

    __slots__ = ()

    def _run(self, plan: Plan, sequence: Sequence) -> None:
        super()._run(plan, sequence)
        ran = plan.sequences[-1]
        if self.probe.decide(not ran.samples):
            sequence.pending += 1
            plan.sequences[-1] = ran._replace(samples=True)


@planted(
    CHUNKS, "KV-3", "ID-1", source="https://github.com/PaddlePaddle/FastDeploy/pull/3292", needs=("chunked_prefill",)
)
class ChunkAfterAFullBlockSkipsAToken(Queues):
    """A chunk that begins where a block begins leaves out its first position."""

    __slots__ = ()

    def _run(self, plan: Plan, sequence: Sequence) -> None:
        first, size = sequence.scheduled, self.blocks.block_size
        super()._run(plan, sequence)
        ran = plan.sequences[-1]
        if self.probe.decide(first > 0 and first % size == 0 and ran.num_tokens > 1):
            plan.sequences[-1] = ScheduledSequence(sequence, first + 1, ran.num_tokens - 1, ran.samples)


@planted(
    CHUNKS,
    "KV-3",
    "KV-1",
    "KV-2",
    "KV-6",
    "LIM-3",
    "ID-1",
    source="https://github.com/LMCache/LMCache/issues/2327",
    needs=("chunked_prefill",),
    deep="a victim must be in the middle of its prompt",
)
class PrefillResumesWhereItStopped(Blocks):
    """A request preempted in the middle of its prompt goes on from there, in blocks that hold nothing of it."""

    __slots__ = ()

    def release(self, sequence: Sequence) -> None:
        if not sequence.ended and sequence.remaining > 1:
            self.probe.memory[sequence.request.request_id, sequence.index] = sequence.done
        super().release(sequence)

    def admit(self, starts: list[tuple[Sequence, list[int]]]) -> None:
        super().admit(starts)
        for sequence, _ in starts:
            done = self.probe.memory.pop((sequence.request.request_id, sequence.index), 0)
            if self.probe.decide(done > sequence.done):
                sequence.scheduled = sequence.done = done


# ----------------------------------------------------------------------------------------------- unit mix-ups


@planted(UNITS, "PRG-8", "ACC-5", "ACC-1", source="https://github.com/sgl-project/sglang/issues/4602")
class AdmissionCountsWholeBlocks(Blocks):
    """An admission counts the blocks that its tokens fill, not the one more in which the rest of them lies."""

    __slots__ = ()

    def admission(self, request: Request) -> list[list[int]] | None:
        starts = super().admission(request)
        if starts is not None or self.cache is not None:
            return starts
        need = sum(len(sequence.tokens) // self.block_size for sequence in request.live)
        fits = self.probe.decide(need <= self.pool.available - self.watermark)
        return [[] for _ in request.live] if fits else None


@planted(
    UNITS,
    "PRG-8",
    "ACC-1",
    source="https://github.com/predibase/lorax/pull/545",
    needs=("fork",),
    deep="a request with several sequences must come back from a recompute at the brim of the pool",
)
class TokensAreAddedBeforeRounding(Blocks):
    """The tokens of all sequences of a request are added up and then divided into blocks that no two can share."""

    __slots__ = ()

    def admission(self, request: Request) -> list[list[int]] | None:
        starts = super().admission(request)
        if starts is not None or self.cache is not None:
            return starts
        need = self.blocks_for(sum(len(sequence.tokens) for sequence in request.live))
        fits = self.probe.decide(need <= self.pool.available - self.watermark)
        return [[] for _ in request.live] if fits else None


@planted(UNITS, "PRG-3", "PRG-1", source=f"{VLLM}787", needs=("fork",))
class FitIsCheckedForOneSequence(Core):
    """Whether a request can ever fit is checked for one of its n sequences."""

    def _check_fit(self, request: Request) -> None:
        n, request.n = request.n, 1
        super()._check_fit(request)
        request.n = n
        usable = self.config.usable_blocks - self.config.watermark_blocks
        self.probe.decide(n * self.blocks.blocks_for(request.max_len - 1) > usable)
