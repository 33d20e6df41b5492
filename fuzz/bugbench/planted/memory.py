"""Swapped out and in wrongly, slots ahead of the tokens, and blocks that leave a sliding window."""

# ruff: noqa: D106 - a fault of several parts is described once, where they are held together

from __future__ import annotations

import math

from conformance.protocol import StepPlan
from fuzz.bugbench.parts import Blocks, Core, Queues, Seat
from fuzz.bugbench.registry import VLLM, planted
from reference_engine.block_manager import NO_HOST_BLOCK, Move
from reference_engine.block_pool import NULL_BLOCK
from reference_engine.request import Request, Sequence
from reference_engine.scheduler import Plan

SWAP = "swap"
WATERMARK = "watermark"
LOOKAHEAD = "lookahead"
WINDOW = "sliding window"

# ------------------------------------------------------------------------------------------------------- swap


@planted(SWAP, "PRG-8", "ACC-1", source=f"{VLLM}6849", needs=("swap",))
class SwapInLeavesNoRoomToGrow(Blocks):
    """A request is swapped in when its old blocks fit, without the one that its next token needs."""

    __slots__ = ()

    def can_swap_in(self, request: Request) -> bool:
        fits = super().can_swap_in(request)
        distinct = {block for s in request.live for block in s.host_table if block != NO_HOST_BLOCK}
        careless = len(distinct) <= self.pool.available - self.watermark
        return careless if self.probe.decide(careless and not fits) else fits


@planted(SWAP, "KV-1", "PRG-8", source="https://github.com/RBLN-SW/vllm-rbln/pull/1009", needs=("swap",))
class SwapOutLosesThePartialBlock(Blocks):
    """Only full blocks are copied to the host; what the last one held is not there after the return."""

    __slots__ = ()

    def _computed_blocks(self, sequence: Sequence) -> list[int]:
        whole = sequence.table[: sequence.done // self.block_size]
        computed = super()._computed_blocks(sequence)
        self.probe.decide(len(whole) < len(computed))
        return whole


@planted(
    SWAP, "LIM-1", "PRG-7", "ACC-10", source="https://github.com/vllm-project/vllm-ascend/pull/822", needs=("swap",)
)
class SwappedInIsNotCounted(Queues):
    """A request that is swapped in joins the running set without counting against max_num_seqs."""

    __slots__ = ()

    def _enter(self, request: Request, plan: Plan, hits: list[list[int]] | None) -> None:
        super()._enter(request, plan, hits)
        if self.probe.decide(hits is None):
            self.running_sequences -= request.width

    def remove(self, request: Request) -> None:
        super().remove(request)
        self.running_sequences = max(0, self.running_sequences)


@planted(SWAP, "PRG-8", "KV-1", "ACC-6", source=f"{VLLM}787", needs=("fork", "swap"))
class SharedBlocksAreSwappedOneByOne(Blocks):
    """Blocks that sequences of a request share are copied to the host once for each, though counted once for all."""

    __slots__ = ()

    def swap_out(self, request: Request, moves: list[Move]) -> None:
        everybody = request.live
        computed = [block for sequence in everybody for block in self._computed_blocks(sequence)]
        self.probe.decide(len(set(computed)) < len(computed))
        for sequence in everybody:
            request.live = [sequence]
            super().swap_out(request, moves)
        request.live = everybody


@planted(SWAP, "PRE-4", "FAIR-1", "FAIR-2", source=f"{VLLM}5578", needs=("swap",))
class NewcomersPassTheSwapped(Queues):
    """Waiting requests are admitted first, and who was swapped out comes back when nobody waits."""

    __slots__ = ()

    def _head(self) -> Request | None:
        head = super()._head()
        first = self.waiting[0] if self.waiting else head
        self.probe.decide(first is not head)
        return first


@planted(
    SWAP,
    "KV-4",
    "KV-1",
    source="https://github.com/vllm-project/vllm-ascend/pull/13503",
    needs=("fork", "swap"),
    deep="fork, swap and a copy before writing in one step",
)
class CopiesGoBeforeSwaps(Seat):
    """The model runner is told the copies of a step before its swaps, whatever was decided first."""

    def twist(self, plan: StepPlan) -> None:
        ordered = sorted(plan.moves, key=lambda move: move.kind != "copy")
        if self.probe.decide(ordered != plan.moves):
            plan.moves = ordered


@planted(SWAP, "ACC-6", "ACC-7", source=f"{VLLM}6865", needs=("abort", "swap"))
class AbortForgetsTheHostBlocks(Blocks):
    """A request that is aborted while it is swapped out never gives its host blocks back."""

    __slots__ = ()

    def retire(self, sequence: Sequence, *, defer: bool) -> None:
        if self.probe.decide(bool(sequence.host_table)):
            sequence.host_table = []
        super().retire(sequence, defer=defer)


# -------------------------------------------------------------------------------------------------- watermark


@planted(WATERMARK, "PRG-7", "PRG-1", "PRG-2", source=f"{VLLM}8007", needs=("watermark",))
class WatermarkIsRoundedUp:
    """The share of the pool that admissions leave free is rounded up, so that 1 % of a small pool is a whole block."""

    class Admission(Blocks):
        __slots__ = ()

        def admission(self, request: Request) -> list[list[int]] | None:
            starts, exact = super().admission(request), self.watermark
            self.watermark = self.probe.memory["rounded up"]
            stricter = super().admission(request)
            self.watermark = exact
            return stricter if self.probe.decide(starts is not None and stricter is None) else starts

    class Share(Queues):
        __slots__ = ()

        def rig(self) -> None:
            self.probe.memory["rounded up"] = math.ceil(self.config.watermark * self.config.num_blocks)


@planted(WATERMARK, "PRG-1", "PRG-3", "PRG-7", source=f"{VLLM}41069", needs=("watermark",))
class WatermarkIsNoLimitToARequest(Core):
    """A request is accepted that fits the pool but not beside the watermark, and waits for ever."""

    def _check_fit(self, request: Request) -> None:
        blocks = request.n * self.blocks.blocks_for(request.max_len - 1)
        beside = self.config.usable_blocks - self.config.watermark_blocks
        if not self.probe.decide(beside < blocks <= self.config.usable_blocks):
            super()._check_fit(request)


# -------------------------------------------------------------------------------------------------- lookahead


@planted(LOOKAHEAD, "LIM-4", "ACC-5", source=f"{VLLM}10730", needs=("lookahead",))
class LookaheadPassesTheModelLength(Blocks):
    """Slots ahead are allocated past max_model_len, so a table outgrows its row in the runner."""

    __slots__ = ()

    def extend_lookahead(self, sequence: Sequence) -> None:
        super().extend_lookahead(sequence)
        missing = self.blocks_for(sequence.scheduled + self.lookahead) - len(sequence.table)
        at_the_end = sequence.scheduled + self.lookahead > sequence.request.max_len - 1
        if self.probe.decide(sequence.request.forked and at_the_end and 0 < missing <= self.pool.available):
            sequence.table += self.pool.allocate(missing)


@planted(LOOKAHEAD, "ACC-5", "LIM-4", source=f"{VLLM}46066", needs=("lookahead",))
class LookaheadPilesUp(Blocks):
    """Slots ahead are added to those that were added before and are still unused."""

    __slots__ = ()

    def extend_lookahead(self, sequence: Sequence) -> None:
        unused = len(sequence.table) * self.block_size - sequence.scheduled
        super().extend_lookahead(sequence)
        more = self.blocks_for(self.lookahead)
        if self.probe.decide(sequence.request.forked and unused >= self.lookahead and more <= self.pool.available):
            sequence.table += self.pool.allocate(more)


@planted(LOOKAHEAD, "PRG-8", "ACC-1", source=f"{VLLM}41282", needs=("lookahead",))
class LookaheadTakesWhatIsNotThere(Blocks):
    """Slots ahead are allocated without a look at what is left of the pool."""

    __slots__ = ()

    def extend_lookahead(self, sequence: Sequence) -> None:
        if not sequence.request.forked:
            return
        end = min(sequence.scheduled + self.lookahead, sequence.request.max_len - 1)
        missing = self.blocks_for(end) - len(sequence.table)
        if missing > 0:
            self.probe.decide(missing > self.pool.available)
            sequence.table += self.pool.allocate(missing)


# --------------------------------------------------------------------------------------------- sliding window


@planted(WINDOW, "PRG-8", "ACC-1", source=f"{VLLM}7470", needs=("sliding_window",))
class AdmissionCountsTheWindowAlone(Blocks):
    """A prompt longer than the window is admitted when the window fits, and allocated whole."""

    __slots__ = ()

    def admission(self, request: Request) -> list[list[int]] | None:
        starts = super().admission(request)
        if starts is not None or self.window is None:
            return starts
        need = sum(self.blocks_for(min(len(sequence.tokens), self.window)) for sequence in request.live)
        fits = self.probe.decide(need <= self.pool.available - self.watermark)
        return [[] for _ in request.live] if fits else None


@planted(WINDOW, "ACC-2", "ACC-9", "KV-1", source=f"{VLLM}42273", needs=("sliding_window",))
class WindowSlidesOneBlockTooFar(Blocks):
    """The block that the oldest position in reach lies in is given up with those before it."""

    __slots__ = ()

    def _left_window(self, sequence: Sequence) -> range:
        right = super()._left_window(sequence)
        last = max(right.start, -1) + 1
        if not self.probe.decide(right.start >= 0 and (last + 1) * self.block_size <= sequence.done):
            return right
        return range(last, right.stop, -1)


@planted(WINDOW, "ACC-1", "ACC-4", "ACC-6", source=f"{VLLM}55800", needs=("sliding_window",))
class SlidBlockIsNotFreed(Blocks):
    """The null block takes the place of what left the window, and the block itself is forgotten."""

    __slots__ = ()

    def slide(self, sequence: Sequence) -> None:
        for index in self._left_window(sequence):
            self.probe.trigger()
            sequence.table[index] = NULL_BLOCK


@planted(
    WINDOW,
    "ACC-4",
    "ACC-1",
    "ACC-3",
    "KV-1",
    source=f"{VLLM}20512",
    needs=("fork", "sliding_window"),
    deep="window and fork: a block must leave the window while siblings still share it",
)
class SharedBlockSlidesForAll(Blocks):
    """A block that leaves one sequence's window is freed although its siblings have yet to move past it."""

    __slots__ = ()

    def slide(self, sequence: Sequence) -> None:
        shared = [sequence.table[index] for index in self._left_window(sequence)]
        for block in shared:
            if self.probe.decide(self.pool.refs[block] > 1):
                self.pool.refs[block] = 1
        super().slide(sequence)


@planted(
    WINDOW,
    "KV-1",
    "ACC-2",
    "ACC-5",
    "KV-4",
    source=f"{VLLM}42273",
    needs=("sliding_window", "swap"),
    deep="window and swap: a victim must have blocks out of its window and be swapped out",
)
class SwapForgetsThePlaceOfNullBlocks(Blocks):
    """Null blocks are left out of a swapped table, so what comes back stands too far to the front."""

    __slots__ = ()

    def swap_out(self, request: Request, moves: list[Move]) -> None:
        super().swap_out(request, moves)
        for sequence in request.live:
            if self.probe.decide(NO_HOST_BLOCK in sequence.host_table):
                sequence.host_table = [block for block in sequence.host_table if block != NO_HOST_BLOCK]
