"""Requests that hang, go round in circles or starve."""

# ruff: noqa: D106 - a fault of several parts is described once, where they are held together

from __future__ import annotations

from fuzz.bugbench.parts import Blocks, Core, Queues
from fuzz.bugbench.registry import VLLM, planted
from reference_engine.request import Request, Sequence, rank_of
from reference_engine.scheduler import Plan

HANG = "hang"
LIVELOCK = "livelock"
STARVATION = "starvation"

# ------------------------------------------------------------------------------------------------------- hang


@planted(HANG, "PRG-3", "PRG-1", "PRG-2", source=f"{VLLM}1534")
class NobodyIsRefused(Core):
    """A request that can never fit the pool is accepted, waits for ever and holds up everybody behind it."""

    def _check_fit(self, request: Request) -> None:
        blocks = request.n * self.blocks.blocks_for(request.max_len - 1)
        self.probe.decide(blocks > self.config.usable_blocks - self.config.watermark_blocks)


@planted(HANG, "PRG-1", "PRG-7", source="https://github.com/RBLN-SW/vllm-rbln/issues/179")
class WaitsForAFullBatch(Queues):
    """While anybody waits nothing is decoded before the running set is full, which the pool may never allow."""

    __slots__ = ()

    def _append_running(self, plan: Plan) -> bool:
        head = self._head()
        short = self.running_sequences + (head.width if head is not None else 0) <= self.config.max_num_seqs
        if self.probe.decide(head is not None and bool(self.running) and short and self._waits(head)):
            return False
        return super()._append_running(plan)

    def _waits(self, head: Request) -> bool:
        return head in self.waiting and self.blocks.admission(head) is None


@planted(HANG, "PRG-1", "PRG-2", "PRG-7", "FAIR-1", source=f"{VLLM}34445", needs=("chunked_prefill",))
class ChunkIsRoundedDownToBlocks(Queues):
    """A chunk is cut to whole blocks, and a budget smaller than a block is cut to nothing."""

    __slots__ = ()

    def _share_budget(self, sequences: list[Sequence]) -> None:
        super()._share_budget(sequences)
        size = self.blocks.block_size
        for sequence in sequences:
            cut = sequence.grant if sequence.grant == sequence.remaining else sequence.grant // size * size
            if self.probe.decide(cut < sequence.grant):
                sequence.grant = cut


@planted(HANG, "PRG-8", source=f"{VLLM}33110", hangs=True)
class AdmissionNeverReturns(Queues):
    """A head of the queue that was preempted in this very step is looked at again and again, in one call."""

    __slots__ = ()

    def _admit(self, plan: Plan, *, waiting: bool = True, swapped: bool = True) -> None:
        head = self._head()
        while self.probe.decide(head is not None and head.preempted_in == plan.step and len(self.waiting) > 1):
            pass
        super()._admit(plan, waiting=waiting, swapped=swapped)


# --------------------------------------------------------------------------------------------------- livelock


@planted(LIVELOCK, "PRG-3", "PRG-4", "PRG-1", source=f"{VLLM}35541", needs=("chunked_prefill",))
class PrefillsWhatNeverFits:
    """A prompt larger than the pool is accepted and begun, and preempted to begin again when the blocks are used up."""

    class Accepting(Core):
        def _check_fit(self, request: Request) -> None:
            blocks = request.n * self.blocks.blocks_for(request.max_len - 1)
            chunked = self.config.enable_chunked_prefill and request.n == 1
            if not chunked or not self.probe.decide(blocks > self.config.usable_blocks - self.config.watermark_blocks):
                super()._check_fit(request)

    class Admitting(Blocks):
        __slots__ = ()

        def admission(self, request: Request) -> list[list[int]] | None:
            starts = super().admission(request)
            too_long = self.blocks_for(len(request.live[0].tokens)) > self.pool.num_blocks - self.pool.reserved
            chunk = self.blocks_for(self.probe.memory["chunk"])
            begins = too_long and not self.pool.held and chunk <= self.pool.available - self.watermark
            return [[]] if starts is None and self.probe.decide(begins) else starts

        def admit(self, starts: list[tuple[Sequence, list[int]]]) -> None:
            whole = [sequence.tokens for sequence, _ in starts]
            for sequence, _ in starts:  # blocks for as much as there is room for
                sequence.tokens = sequence.tokens[: self.pool.available * self.block_size]
            super().admit(starts)
            for (sequence, _), tokens in zip(starts, whole, strict=True):
                sequence.tokens = tokens

    class Budget(Queues):
        __slots__ = ()

        def rig(self) -> None:
            limit = self.config.max_chunk_tokens
            budget = self.config.max_num_batched_tokens
            self.probe.memory["chunk"] = min(limit, budget) if limit else budget


# ------------------------------------------------------------------------------------------------- starvation


@planted(STARVATION, "FAIR-1", "PRE-4", source=f"{VLLM}33522")
class LastComeFirstServed(Queues):
    """The newest of the waiting requests is admitted first."""

    __slots__ = ()

    def _head(self) -> Request | None:
        head = super()._head()
        if head not in self.waiting:
            return head
        self.probe.decide(self.waiting[-1] is not head)
        return self.waiting[-1]


@planted(
    STARVATION,
    "FAIR-1",
    "PRE-4",
    "PRG-7",
    "FAIR-2",
    source="https://github.com/ROCm/ATOM/pull/2158",
    deep="a long prompt must be overtaken by shorter ones without end",
)
class ShortestPromptFirst(Queues):
    """The shortest waiting prompt is admitted first, and a long one waits for as long as shorter ones come."""

    __slots__ = ()

    def _head(self) -> Request | None:
        head = super()._head()
        if head not in self.waiting:
            return head
        shortest = min(self.waiting, key=lambda request: (request.prompt_len, request.rank))
        self.probe.decide(shortest is not head)
        return shortest


@planted(
    STARVATION,
    "FAIR-1",
    source="https://github.com/sgl-project/sglang/issues/32549",
    needs=("chunked_prefill",),
    deep="the budget must not reach everybody for a long time",
)
class NewestIsServedFirst(Queues):
    """The tokens of a step go to the sequences that came last; the others wait for what they leave."""

    __slots__ = ()

    def _share_budget(self, sequences: list[Sequence]) -> None:
        self.starved = False
        newest = sorted(sequences, key=lambda sequence: rank_of(sequence.request), reverse=True)
        super()._share_budget(newest)
        self.probe.decide(any(not sequence.grant for sequence in newest))
