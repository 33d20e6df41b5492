"""Preempted for nothing, in the wrong order, or without effect."""

from __future__ import annotations

from fuzz.bugbench.parts import Core, Queues
from fuzz.bugbench.registry import VLLM, planted
from reference_engine.append_check import AppendCheck
from reference_engine.block_manager import BlockManager
from reference_engine.request import Request, Sequence, rank_of
from reference_engine.scheduler import Plan, Preemption
from reference_engine.scheduler import _Room as Room

SPURIOUS = "spurious preemption"
ORDER = "priority and victim order"

# ---------------------------------------------------------------------------------------- spurious preemption


class _Overcounting(Queues):
    """Counts `surplus` blocks on top of what an append really takes."""

    __slots__ = ()

    def rig(self) -> None:
        self.check = AppendCheck(self._counted)

    def _counted(self, manager: BlockManager, sequences: list[Sequence]) -> int:
        need = manager.real_need(sequences)
        counted = need + self.surplus(manager, sequences, need)
        self.probe.decide(need <= manager.pool.available < counted)
        return counted

    def surplus(self, manager: BlockManager, sequences: list[Sequence], need: int) -> int:
        raise NotImplementedError


@planted(SPURIOUS, "PRE-1", "PRE-2", source=f"{VLLM}8007")
class CountsTheOwnedBlockAgain(_Overcounting):
    """An append inside the last block counts that block as needed, though the sequence owns it."""

    __slots__ = ()

    def surplus(self, manager: BlockManager, sequences: list[Sequence], need: int) -> int:
        return sum(1 for sequence in sequences if sequence.scheduled % manager.block_size and not need)


@planted(SPURIOUS, "PRE-1", "PRE-2", source="https://github.com/RBLN-SW/vllm-rbln/issues/75")
class WantsOneSpareBlock(_Overcounting):
    """A sequence that takes its last block must leave one more free, so the end of the pool cannot be used."""

    __slots__ = ()

    def surplus(self, manager: BlockManager, sequences: list[Sequence], need: int) -> int:
        return 1 if need else 0


@planted(SPURIOUS, "PRE-1", "PRE-2", source=f"{VLLM}44594", needs=("watermark",))
class WatermarkHoldsForAppends(_Overcounting):
    """The watermark, which is there for admissions, is demanded of the running set as well."""

    __slots__ = ()

    def surplus(self, manager: BlockManager, sequences: list[Sequence], need: int) -> int:
        return manager.watermark


@planted(SPURIOUS, "PRE-1", "PRE-2", source="https://github.com/InternLM/lmdeploy/pull/4100", needs=("prefix_caching",))
class CachedBlocksCountAsTaken(_Overcounting):
    """Blocks kept for a prefix hit count as used, so somebody is preempted while they could be evicted."""

    __slots__ = ()

    def surplus(self, manager: BlockManager, sequences: list[Sequence], need: int) -> int:
        return len(manager.pool.evictable) if need else 0


@planted(SPURIOUS, "PRE-1", "PRE-2", source=f"{VLLM}8008", needs=("fork",))
class EveryWriterCopies(_Overcounting):
    """Of sequences that share a block and all write, the last is counted as needing a copy too."""

    __slots__ = ()

    def surplus(self, manager: BlockManager, sequences: list[Sequence], need: int) -> int:
        if len(sequences) < 2:
            return 0
        index = sequences[0].scheduled // manager.block_size
        last = {sequence.table[index] for sequence in sequences if index < len(sequence.table)}
        return sum(1 for block in sorted(last) if manager.pool.refs[block] == len(sequences))


@planted(SPURIOUS, "PRE-1", "PRE-2", source=f"{VLLM}49674")
class PreemptsOneTooMany(Queues):
    """After a victim has made room, the next one is preempted as well before anybody counts again."""

    __slots__ = ()

    def _preempt(self, plan: Plan, preemption: Preemption) -> None:
        super()._preempt(plan, preemption)
        asking = preemption.asked_by
        if asking not in self.running:
            return
        other = self._victim(asking)
        granted = [sequence for sequence in asking.live if sequence.grant]
        enough = self.check.blocks(self.blocks, granted) <= self.blocks.pool.available
        if other not in {None, asking} and other is not None and other.at_rest and not self.blocks.deferred:
            self.probe.decide(enough)
            super()._preempt(plan, preemption._replace(request=other))


# ---------------------------------------------------------------------------------- priority and victim order


@planted(ORDER, "PRE-3", "PRE-1", "PRG-4", source=f"{VLLM}54644")
class PreemptsTheFirstArrival(Queues):
    """The victim is the most urgent request after the asking one, not the least urgent."""

    __slots__ = ()

    def _victim(self, asking: Request) -> Request | None:
        later = self.running[self.running.index(asking) + 1 :]
        chosen = next((request for request in later if self.blocks.frees_a_block(request)), None)
        right = super()._victim(asking)
        self.probe.decide(chosen is not None and chosen is not right)
        return chosen or right


@planted(
    ORDER,
    "PRE-5",
    "PRE-1",
    source=f"{VLLM}49675",
    needs=("prefix_caching", "priority"),
    deep="a less urgent request must own nothing but blocks that a more urgent one hit in the step before, "
    "and no block of the pool be left over",
)
class PreemptsWhoFreesNothing(Queues):
    """The latest request is preempted even when others hold all its blocks too."""

    __slots__ = ()

    def _victim(self, asking: Request) -> Request | None:
        last = self.running[-1]
        self.probe.decide(last is not super()._victim(asking))
        return last


@planted(ORDER, "PRE-4", "FAIR-1", source=f"{VLLM}56843")
class PreemptedGoesToTheBack(Queues):
    """A request preempted by recompute is queued behind everybody who has arrived meanwhile."""

    __slots__ = ()

    def add(self, request: Request) -> None:
        if request.preempted_in >= 0 or request.sequences[0].last_step >= 0:
            priority, _, serial = request.rank
            last = max((other.rank[1] for other in self.waiting), default=request.arrival)
            self.probe.decide(last > request.rank[1])
            request.rank = (priority, max(last, request.rank[1]), serial)
        super().add(request)


@planted(ORDER, "FAIR-2", "PRE-3", source=f"{VLLM}40004", needs=("priority",))
class PriorityIsIgnored(Core):
    """Requests are queued by arrival alone although priority scheduling is on."""

    def _check_request(self, request: Request) -> None:
        super()._check_request(request)
        given = self.probe.memory
        waiting = [given[other.request_id] for other in self.requests.values()]
        self.probe.decide(self.config.scheduling_policy == "priority" and request.priority < max(waiting, default=0))
        given[request.request_id] = request.priority
        request.priority = 0


class Impatient(Queues):
    """Preempts some victims that a step in flight, or this very step, still runs."""

    __slots__ = ()

    def _make_room(self, request: Request, granted: list[Sequence], plan: Plan) -> Room:
        while True:
            counted, free = self.check.blocks(self.blocks, granted), self.blocks.pool.available
            if self.check.passes(counted, free):
                return Room.FOUND
            victim = self._victim(request)
            if victim is None:
                return Room.NONE
            if not victim.at_rest and not self.takes(victim, plan):
                return Room.LATER
            self.probe.decide(not victim.at_rest)
            self._preempt(plan, Preemption(victim, "recompute", counted, free, request))
            if victim is request:
                return Room.GIVEN_UP

    def takes(self, victim: Request, plan: Plan) -> bool:
        """Whether to preempt ``victim`` although it is not at rest."""
        raise NotImplementedError


@planted(ORDER, "ACC-7", "PRG-5", "KV-6", "PRE-1", "ACC-9", source=f"{VLLM}26661", needs=("priority",))
class VictimIsInTheBatch(Impatient):
    """A victim may be in the batch already, as the running set is walked by arrival: it runs on freed blocks."""

    __slots__ = ()

    def _append_running(self, plan: Plan) -> bool:
        self.running.sort(key=lambda request: request.arrival)
        done = super()._append_running(plan)
        self.running.sort(key=rank_of)
        return done

    def _victim(self, asking: Request) -> Request | None:
        by_rank = sorted(self.running, key=rank_of, reverse=True)
        return next((request for request in by_rank if self.blocks.frees_a_block(request)), None)

    def takes(self, victim: Request, plan: Plan) -> bool:
        here = [scheduled.sequence for scheduled in plan.sequences if scheduled.sequence.request is victim]
        return bool(here) and all(sequence.in_flight == 1 for sequence in here)

    def _preempt(self, plan: Plan, preemption: Preemption) -> None:
        self.running.sort(key=rank_of)
        super()._preempt(plan, preemption)
        self.running.sort(key=lambda request: request.arrival)
