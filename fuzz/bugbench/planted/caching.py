"""The prefix cache hits what it must not, keeps what is gone, or evicts what is in use."""

# ruff: noqa: D106 - a fault of several parts is described once, where they are held together

from __future__ import annotations

from collections.abc import Sequence as Several

from fuzz.bugbench.parts import Blocks, Cache, Core, Pool, Queues
from fuzz.bugbench.registry import VLLM, planted
from reference_engine.block_pool import NULL_BLOCK
from reference_engine.request import Request, Sequence
from reference_engine.scheduler import Plan

HIT = "prefix cache: wrong hit"
EVICTION = "prefix cache: wrong eviction"
STALE = "prefix cache: not invalidated"
PARTIAL = "prefix cache: partial block"

_Identity = tuple[str, str]

# -------------------------------------------------------------------------------------------------- wrong hit


@planted(HIT, "KV-2", "ID-1", source=f"{VLLM}11186", needs=("prefix_caching",))
class PrefixIsNotInTheKey(Cache):
    """A block is looked up by its own tokens, whatever stands before them."""

    __slots__ = ()

    def lookup(self, identity: _Identity, tokens: list[int]) -> list[int]:
        hits = super().lookup(identity, tokens)
        size, known = self.block_size, self.probe.memory
        for start in range(len(hits) * size, (len(tokens) - 1) // size * size, size):
            block = known.get((identity, *tokens[start : start + size]))
            if block is None or not self._pool.cached[block]:
                break
            self.probe.trigger()
            hits.append(block)
        return hits

    def publish(self, identity: _Identity, tokens: list[int], table: list[int], num_full: int) -> None:
        super().publish(identity, tokens, table, num_full)
        size = self.block_size
        for index, block in enumerate(table[:num_full]):
            if block in self._nodes:
                key = (identity, *tokens[index * size : (index + 1) * size])
                self.probe.memory[key] = block

    def _evicted(self, block: int) -> None:
        super()._evicted(block)
        for key in [key for key, known in self.probe.memory.items() if known == block]:
            del self.probe.memory[key]


@planted(HIT, "ID-1", "KV-2", source=f"{VLLM}8240", needs=("prefix_caching", "identity"))
class AdapterIsNotInTheKey(Cache):
    """Requests for different adapters hit each other's blocks."""

    __slots__ = ()

    def lookup(self, identity: _Identity, tokens: list[int]) -> list[int]:
        hits = super().lookup((identity[0], ""), tokens)
        self.probe.decide(bool(identity[1]) and bool(hits))
        return hits

    def publish(self, identity: _Identity, tokens: list[int], table: list[int], num_full: int) -> None:
        super().publish((identity[0], ""), tokens, table, num_full)


@planted(HIT, "ID-1", "KV-2", source=f"{VLLM}51640", needs=("prefix_caching", "identity"))
class SaltIsNotInTheKey(Cache):
    """Requests with different cache salts hit each other's blocks."""

    __slots__ = ()

    def lookup(self, identity: _Identity, tokens: list[int]) -> list[int]:
        hits = super().lookup(("", identity[1]), tokens)
        self.probe.decide(bool(identity[0]) and bool(hits))
        return hits

    def publish(self, identity: _Identity, tokens: list[int], table: list[int], num_full: int) -> None:
        super().publish(("", identity[1]), tokens, table, num_full)


@planted(HIT, "PRG-1", "PRG-2", "PRG-7", "PRG-4", "ACC-10", "PRE-4", source=f"{VLLM}3193", needs=("prefix_caching",))
class FullHitLeavesNothingToCompute:
    """A prompt that is cached as a whole is taken as computed as a whole, and then there is nothing left to run."""

    class Lookup(Cache):
        __slots__ = ()

        def lookup(self, identity: _Identity, tokens: list[int]) -> list[int]:
            return super().lookup(identity, [*tokens, -1])

    class Admission(Queues):
        __slots__ = ()

        def _enter(self, request: Request, plan: Plan, hits: list[list[int]] | None) -> None:
            size = self.blocks.block_size
            full = [s for s, cached in zip(request.live, hits or (), strict=False) if len(cached) * size == s.remaining]
            if self.probe.decide(bool(full)) and hits is not None:
                self.blocks.admit(list(zip(request.live, hits, strict=True)))
                hits = None
            super()._enter(request, plan, hits)


# --------------------------------------------------------------------------------------------- wrong eviction


@planted(
    EVICTION,
    "KV-2",
    "KV-1",
    "ACC-3",
    "PRG-8",
    "ACC-4",
    needs=("prefix_caching",),
    source="https://github.com/ROCm/ATOM/pull/902",
)
class HitIsNotPinned(Blocks):
    """The blocks of a hit are taken after the fresh ones, so one of them may have been evicted for the same request."""

    __slots__ = ()

    def admit(self, starts: list[tuple[Sequence, list[int]]]) -> None:
        for sequence, hits in starts:
            fresh = self.pool.allocate(self.blocks_for(len(sequence.tokens)) - len(hits))
            self.probe.decide(bool(set(fresh) & set(hits)))
            self.pool.share(hits)
            sequence.table = hits + fresh
            sequence.scheduled = sequence.done = len(hits) * self.block_size
            sequence.published = len(hits)


@planted(
    EVICTION,
    "KV-1",
    "ACC-4",
    "ACC-1",
    "ACC-3",
    needs=("prefix_caching",),
    source="https://github.com/NVIDIA/TensorRT-LLM/issues/12542",
)
class BlockInUseIsEvictable(Pool):
    """A cached block counts as unused as soon as the first of its holders has gone."""

    __slots__ = ()

    def release(self, blocks: Several[int]) -> None:
        super().release(blocks)
        for block in blocks:
            if self.probe.decide(self.refs[block] > 0 and bool(self.cached[block])):
                self.evictable[block] = None


@planted(
    EVICTION,
    "PRG-7",
    "PRG-1",
    "PRG-2",
    "CCH-2",
    needs=("prefix_caching",),
    source="https://github.com/InternLM/lmdeploy/pull/4100",
)
class CachedBlocksAreNotAvailable(Blocks):
    """An admission waits for blocks that are free although cached ones could be evicted for it."""

    __slots__ = ()

    def admission(self, request: Request) -> list[list[int]] | None:
        starts = super().admission(request)
        if starts is None:
            return None
        fresh = sum(self.blocks_for(len(s.tokens)) - len(hits) for s, hits in zip(request.live, starts, strict=True))
        return None if self.probe.decide(fresh > len(self.pool.free)) else starts


@planted(EVICTION, "PRG-8", "ACC-1", "ACC-5", needs=("prefix_caching",), source="https://github.com/ROCm/ATOM/pull/902")
class HitOnAnEvictableBlockCostsNothing(Blocks):
    """An admission is not charged for the unheld blocks it hits, which are no longer available once it holds them."""

    __slots__ = ()

    def admission(self, request: Request) -> list[list[int]] | None:
        starts = super().admission(request)
        if starts is not None or self.cache is None:
            return starts
        hits = [self.cache.lookup(request.identity, sequence.tokens) for sequence in request.live]
        need = sum(self.blocks_for(len(sequence.tokens)) for sequence in request.live) - sum(map(len, hits))
        return hits if self.probe.decide(need <= self.pool.available - self.watermark) else None


# -------------------------------------------------------------------------------------------- not invalidated


@planted(
    STALE,
    "KV-2",
    "ID-1",
    "ACC-4",
    "PRG-8",
    "ACC-3",
    needs=("prefix_caching",),
    source="https://github.com/GeeeekExplorer/nano-vllm/issues/163",
)
class EvictedBlockIsStillHit(Cache):
    """The entry of an evicted block stays: the block is hit again when it is held for other content."""

    __slots__ = ()

    def _evicted(self, block: int) -> None:
        self.probe.reach()
        del self._nodes[block]

    def lookup(self, identity: _Identity, tokens: list[int]) -> list[int]:
        hits = super().lookup(identity, tokens)
        node, size = self._root.children.get(identity), self.block_size
        for index, block in enumerate(hits):
            assert node is not None, "the hits were found on this path"
            node = node.children[tuple(tokens[index * size : (index + 1) * size])]
            if not self._pool.refs[block] and not self._pool.cached[block]:
                return hits[:index]  # on the free list: nobody could take it from there
            if self._nodes.get(block) is not node:
                self.probe.trigger()
        return hits


@planted(
    STALE,
    "CCH-3",
    "ACC-6",
    source="https://github.com/vllm-project/vllm-omni/issues/6739",
    needs=("prefix_caching", "reset_prefix_cache"),
)
class ResetForgetsNothing(Core):
    """A reset of the prefix cache says it was done and leaves every entry where it was."""

    def reset_prefix_cache(self) -> bool:
        if self.requests or self.blocks.cache is None:
            return super().reset_prefix_cache()
        self.probe.decide(bool(self.blocks.pool.evictable))
        return True


@planted(STALE, "CCH-3", "KV-2", source=f"{VLLM}12284", needs=("prefix_caching", "reset_prefix_cache"))
class ResetWhileRequestsAreLive(Core):
    """A reset with requests running is carried out, though what they have computed is published again afterwards."""

    def reset_prefix_cache(self) -> bool:
        if not self.requests:
            return super().reset_prefix_cache()
        self.probe.trigger()
        return True


# ---------------------------------------------------------------------------------------------- partial block


@planted(
    PARTIAL,
    "KV-2",
    "KV-1",
    "ID-1",
    "CCH-3",
    needs=("prefix_caching", "chunked_prefill"),
    source="https://github.com/sgl-project/sglang/pull/38355",
)
class UncomputedBlocksArePublished(Blocks):
    """All blocks of a prompt can be hit from its admission on, though later chunks have yet to fill them."""

    __slots__ = ()

    def admit(self, starts: list[tuple[Sequence, list[int]]]) -> None:
        super().admit(starts)
        if self.cache is None:
            return
        for sequence, hits in starts:
            full = len(sequence.tokens) // self.block_size
            if self.probe.decide(full > len(hits)):
                self.cache.publish(sequence.request.identity, sequence.tokens, sequence.table, full)


@planted(
    PARTIAL,
    "KV-2",
    "KV-1",
    "ID-1",
    "CCH-3",
    source=f"{VLLM}45477",
    needs=("prefix_caching",),
    deep="a prompt must go on exactly where an ended request stopped, its last sampled token included",
)
class LastTokenIsPublishedUncomputed(Blocks):
    """A sequence that ends on a block boundary publishes its last block, whose last slot was never written."""

    __slots__ = ()

    def publish(self, sequence: Sequence) -> None:
        full = len(sequence.tokens) // self.block_size
        reaches = sequence.done // self.block_size < full <= len(sequence.table)
        if self.cache is not None and sequence.ended and self.probe.decide(reaches):
            self.cache.publish(sequence.request.identity, sequence.tokens, sequence.table, full)
        else:
            super().publish(sequence)


@planted(
    PARTIAL,
    "KV-2",
    "ACC-2",
    "KV-1",
    "CCH-3",
    source=f"{VLLM}19031",
    needs=("prefix_caching", "sliding_window"),
    deep="window and cache: a prompt must be repeated after its first blocks have left the window",
)
class NullBlockIsPublished:
    """Blocks that left the window are published as the null block and hit as if it held their tokens."""

    class Publishing(Cache):
        __slots__ = ()

        def lookup(self, identity: _Identity, tokens: list[int]) -> list[int]:
            hits = super().lookup(identity, tokens)
            known, size = self.probe.memory, self.block_size
            while (identity, *tokens[: (len(hits) + 1) * size]) in known and (len(hits) + 1) * size < len(tokens):
                self.probe.trigger()
                hits.append(NULL_BLOCK)
            return hits

        def publish(self, identity: _Identity, tokens: list[int], table: list[int], num_full: int) -> None:
            for index, block in enumerate(table[:num_full]):
                if block == NULL_BLOCK and self._pool.reserved:
                    key = (identity, *tokens[: (index + 1) * self.block_size])
                    self.probe.memory[key] = NULL_BLOCK
            super().publish(identity, tokens, table, num_full)

    class Sharing(Pool):
        __slots__ = ()

        def share(self, blocks: Several[int]) -> None:
            super().share([block for block in blocks if block != NULL_BLOCK or not self.reserved])
