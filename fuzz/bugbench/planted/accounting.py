"""Blocks that are lost, given back twice, counted wrongly or written while others hold them."""

from __future__ import annotations

from collections.abc import Sequence as Several

from fuzz.bugbench.parts import Blocks, Pool, Queues
from fuzz.bugbench.registry import VLLM, planted
from reference_engine.block_manager import Move
from reference_engine.block_pool import NULL_BLOCK, BlockPool
from reference_engine.request import Request, Sequence
from reference_engine.scheduler import Plan, Preemption

LEAK = "leak"
DOUBLE_FREE = "double free"
COUNTS = "reference counts"
COPY = "copy-on-write"


def _keep(pool: BlockPool, blocks: Several[int]) -> None:
    """One more reference to blocks that are held, which nobody will ever drop."""
    for block in blocks:
        pool.refs[block] += 1


# ------------------------------------------------------------------------------------------------------- leak


@planted(LEAK, "ACC-1", "ACC-4", "ACC-6", "ACC-7", "ACC-8", source="https://github.com/sgl-project/sglang/issues/11970")
class EndKeepsTheLastBlock(Blocks):
    """A sequence that ends gives back all its blocks but the one it wrote last."""

    __slots__ = ()

    def retire(self, sequence: Sequence, *, defer: bool) -> None:
        table = self._device_blocks(sequence.table)
        if self.probe.decide(bool(table)):
            _keep(self.pool, table[-1:])
        super().retire(sequence, defer=defer)


@planted(
    LEAK, "ACC-1", "ACC-4", "ACC-7", "PRE-5", "ACC-8", "PRE-1", source="https://github.com/guoqingbao/xinfer/pull/12"
)
class PreemptionKeepsTheBlocks(Queues):
    """A request preempted by recompute lets go of its table but not of the blocks in it."""

    __slots__ = ()

    def _preempt(self, plan: Plan, preemption: Preemption) -> None:
        victim = preemption.request
        if self.probe.decide(not self._can_swap_out(victim)):
            for sequence in victim.live:
                _keep(self.blocks.pool, [block for block in sequence.table if block != NULL_BLOCK][:1])
        super()._preempt(plan, preemption)


@planted(
    LEAK,
    "ACC-1",
    "ACC-4",
    "ACC-6",
    "ACC-8",
    source="https://github.com/a710128/nanovllm-voxcpm/pull/62",
    deep="a counter that drifts: one block in every two dozen ends",
)
class EveryTwentyFourthEndLeaks(Blocks):
    """Of every two dozen sequences that end, one keeps a block, so the pool shrinks slowly."""

    __slots__ = ()

    def retire(self, sequence: Sequence, *, defer: bool) -> None:
        table = self._device_blocks(sequence.table)
        ends = self.probe.memory.get("ends", 0) + bool(table)
        self.probe.memory["ends"] = ends
        if self.probe.decide(bool(table) and ends % 24 == 0):
            _keep(self.pool, table[:1])
        super().retire(sequence, defer=defer)


@planted(
    LEAK,
    "ACC-1",
    "ACC-4",
    "ACC-6",
    "ACC-7",
    "PRG-1",
    "ACC-8",
    source="https://github.com/vllm-project/vllm-ascend/pull/15674",
    needs=("pipeline", "stop_token"),
    deep="two sequences must end with steps in flight, and the later one be committed first",
)
class DeferredFreesGoInOrder(Blocks):
    """Blocks whose freeing was put off are given back only to the request that was put off first."""

    __slots__ = ()

    def release_deferred(self, sequence: Sequence) -> None:
        if sequence in self.deferred and self.probe.decide(self.deferred[0] is not sequence):
            self.deferred.remove(sequence)
        else:
            super().release_deferred(sequence)


# ------------------------------------------------------------------------------------------------ double free


@planted(DOUBLE_FREE, "ACC-4", "ACC-1", "KV-1", "ACC-3", source=f"{VLLM}42571", needs=("fork",))
class SiblingFreesTwice(Blocks):
    """A sequence that ends drops its reference to a block it shares with its siblings twice."""

    __slots__ = ()

    def retire(self, sequence: Sequence, *, defer: bool) -> None:
        shared = [block for block in self._device_blocks(sequence.table) if self.pool.refs[block] > 1]
        if self.probe.decide(sequence.request.n > 1 and bool(shared)):
            self.pool.release(shared[:1])
        super().retire(sequence, defer=defer)


@planted(
    DOUBLE_FREE,
    "ACC-4",
    "ACC-1",
    "KV-5",
    "KV-1",
    "PRG-8",
    "ACC-3",
    "ACC-7",
    needs=("pipeline",),
    source="https://github.com/PaddlePaddle/FastDeploy/pull/3710",
)
class DeferredBlocksGoTwice(Blocks):
    """Blocks of an ended request with a step in flight are freed at once and, when it is committed, again."""

    __slots__ = ()

    def retire(self, sequence: Sequence, *, defer: bool) -> None:
        super().retire(sequence, defer=defer)
        if self.probe.decide(defer and bool(sequence.table)):
            self.pool.release(self._device_blocks(sequence.table))

    def release(self, sequence: Sequence) -> None:
        if sequence.ended:
            for block in self._device_blocks(sequence.table):
                self.pool.refs[block] += self.pool.refs[block] == 0  # a free list that takes any block
        super().release(sequence)


@planted(DOUBLE_FREE, "ACC-4", "ACC-1", "KV-1", "ACC-3", source=f"{VLLM}6865", needs=("swap", "abort"))
class AbortFreesWhatWasSwapped(Blocks):
    """An aborted request that was swapped out frees the device blocks it had before, whoever has them now."""

    __slots__ = ()

    def swap_out(self, request: Request, moves: list[Move]) -> None:
        for sequence in request.live:
            self.probe.memory[request.request_id, sequence.index] = self._device_blocks(sequence.table)
        super().swap_out(request, moves)

    def retire(self, sequence: Sequence, *, defer: bool) -> None:
        if sequence.host_table:
            before = self.probe.memory[sequence.request.request_id, sequence.index]
            held = [block for block in before if self.pool.refs[block]]
            if self.probe.decide(bool(held)):
                self.pool.release(held)
        super().retire(sequence, defer=defer)


@planted(DOUBLE_FREE, "ACC-1", "ACC-2", "ACC-4", "ACC-10", source=f"{VLLM}1556", needs=("sliding_window",))
class NullBlockIsFreed(Blocks):
    """The null blocks that stand for what left the window go to the free list with the rest of the table."""

    __slots__ = ()

    def release(self, sequence: Sequence) -> None:
        nulls = len(sequence.table) - len(self._device_blocks(sequence.table))
        if self.probe.decide(nulls > 0):
            self.pool.free.append(NULL_BLOCK)
        super().release(sequence)


# ------------------------------------------------------------------------------------------- reference counts


@planted(COUNTS, "ACC-4", "ACC-3", "ACC-1", "KV-1", "PRE-5", source=f"{VLLM}1584", needs=("fork",))
class ForkCountsOneChild(Blocks):
    """However many children a fork makes, the shared blocks are given one reference more."""

    __slots__ = ()

    def fork(self, parent: Sequence, child: Sequence) -> None:
        super().fork(parent, child)
        if self.probe.decide(child.index > 1):
            for block in self._device_blocks(child.table):
                self.pool.refs[block] -= 1


@planted(
    COUNTS,
    "ACC-4",
    "ACC-1",
    "ACC-3",
    "KV-1",
    needs=("prefix_caching",),
    source="https://github.com/Avarok-Cybersecurity/atlas/issues/692",
)
class HitTakesNoReference(Blocks):
    """A prefix hit on a block that somebody holds is not counted: the block is free when the first holder ends."""

    __slots__ = ()

    def admit(self, starts: list[tuple[Sequence, list[int]]]) -> None:
        held = [block for _, hits in starts for block in hits if self.pool.refs[block]]
        super().admit(starts)
        if self.probe.decide(bool(held)):
            for block in held:
                self.pool.refs[block] -= 1


@planted(
    COUNTS,
    "ACC-4",
    "ACC-1",
    "ACC-3",
    "KV-1",
    "PRE-5",
    source="https://github.com/Avarok-Cybersecurity/atlas/pull/373",
    needs=("fork", "swap"),
)
class SwapInCountsSharersOnce(Blocks):
    """Sequences that shared a block when they were swapped out come back with one reference between them."""

    __slots__ = ()

    def swap_in(self, request: Request, moves: list[Move]) -> None:
        super().swap_in(request, moves)
        shared = [block for sequence in request.live for block in self._device_blocks(sequence.table)]
        if self.probe.decide(any(self.pool.refs[block] > 1 for block in shared)):
            for block in shared:
                self.pool.refs[block] = 1


@planted(COUNTS, "ACC-1", "ACC-4", "ACC-10", "KV-1", source=f"{VLLM}5364", needs=("prefix_caching",))
class RevivedBlockStaysEvictable(Pool):
    """A cached block that is hit while nobody holds it stays on the list of what may be evicted."""

    __slots__ = ()

    def share(self, blocks: Several[int]) -> None:
        revived = [block for block in blocks if not self.refs[block]]
        super().share(blocks)
        if self.probe.decide(bool(revived)):
            self.evictable.update(dict.fromkeys(revived))


@planted(
    COUNTS,
    "ACC-4",
    "ACC-1",
    "ACC-3",
    "KV-1",
    source="https://github.com/xLLM-AI/xllm/issues/828",
    deep="four sequences must hold one block at the same time",
)
class CountStopsAtThree(Pool):
    """A reference count does not grow beyond three."""

    __slots__ = ()

    def share(self, blocks: Several[int]) -> None:
        super().share(blocks)
        for block in blocks:
            if self.probe.decide(self.refs[block] > 3):
                self.refs[block] = 3


# ---------------------------------------------------------------------------------------------- copy-on-write


@planted(COPY, "ACC-3", "KV-1", source="https://github.com/Avarok-Cybersecurity/atlas/issues/1193", needs=("fork",))
class SharedBlockIsWritten(Blocks):
    """A sequence writes into the last block it shares with its siblings without copying it first."""

    __slots__ = ()

    def append(self, sequence: Sequence, moves: list[Move], lookahead: int = 0) -> None:
        index = sequence.scheduled // self.block_size
        block = sequence.table[index] if index < len(sequence.table) else NULL_BLOCK
        shared = index < len(sequence.table) and self.pool.refs[block] > 1
        if not self.probe.decide(shared):
            super().append(sequence, moves, lookahead)
            return
        references, self.pool.refs[block] = self.pool.refs[block], 1
        super().append(sequence, moves, lookahead)
        self.pool.refs[block] = references


@planted(COPY, "ACC-9", "KV-1", "KV-4", source="https://github.com/raullenchai/Rapid-MLX/issues/196", needs=("fork",))
class CopyIsNotPlanned(Blocks):
    """The table of a sequence that must copy a shared block names the new block, and nobody is told to copy."""

    __slots__ = ()

    def append(self, sequence: Sequence, moves: list[Move], lookahead: int = 0) -> None:
        unseen: list[Move] = []
        super().append(sequence, unseen, lookahead)
        self.probe.decide(bool(unseen))


@planted(
    COPY,
    "ACC-1",
    "ACC-4",
    "ACC-6",
    "ACC-8",
    "PRG-8",
    source="https://github.com/Avarok-Cybersecurity/atlas/pull/373",
    needs=("fork",),
)
class CopyKeepsItsSource(Blocks):
    """A sequence that has copied a shared block still counts as a holder of the block it copied from."""

    __slots__ = ()

    def append(self, sequence: Sequence, moves: list[Move], lookahead: int = 0) -> None:
        copies: list[Move] = []
        super().append(sequence, copies, lookahead)
        moves += copies
        if self.probe.decide(bool(copies)):
            _keep(self.pool, [move.src for move in copies])


@planted(COPY, "ACC-3", "KV-1", source="https://github.com/xLLM-AI/xllm/pull/135", needs=("fork",))
class SiblingsShareOneCopy(Blocks):
    """Two sequences that must copy the same block in one step are both given the copy that the first one made."""

    __slots__ = ()

    def append(self, sequence: Sequence, moves: list[Move], lookahead: int = 0) -> None:
        made = {move.src: move.dst for move in moves if move.kind == "copy"}
        index = sequence.scheduled // self.block_size
        block = sequence.table[index] if index < len(sequence.table) else NULL_BLOCK
        shared = index < len(sequence.table) and self.pool.refs[block] > 1
        if self.probe.decide(shared and block in made):
            self.pool.share((made[block],))
            self.pool.release((block,))
            sequence.table[index] = made[block]
            references, self.pool.refs[made[block]] = self.pool.refs[made[block]], 1
            super().append(sequence, moves, lookahead)
            self.pool.refs[made[block]] = references
        else:
            super().append(sequence, moves, lookahead)


@planted(COPY, "PRG-8", "ACC-1", "PRE-1", source=f"{VLLM}45856", needs=("fork",))
class LastHolderCopiesToo(Blocks):
    """The last of several sequences to write a block copies it as the others did, although nobody counted that."""

    __slots__ = ()

    def append(self, sequence: Sequence, moves: list[Move], lookahead: int = 0) -> None:
        index = sequence.scheduled // self.block_size
        block = sequence.table[index] if index < len(sequence.table) else NULL_BLOCK
        copied = {move.src for move in moves if move.kind == "copy"}
        if self.probe.decide(index < len(sequence.table) and self.pool.refs[block] == 1 and block in copied):
            (copy,) = self.pool.allocate(1)
            moves.append(Move("copy", block, copy))
            self.pool.release((block,))
            sequence.table[index] = copy
        super().append(sequence, moves, lookahead)
