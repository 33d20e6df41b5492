"""Who runs in a step: queues, budgets, admission and preemption."""

from __future__ import annotations

from bisect import bisect_left, insort
from enum import Enum, unique
from typing import Literal, NamedTuple

from .append_check import APPEND_CHECKS
from .block_manager import BlockManager, Move
from .config import EngineConfig
from .request import Request, Sequence, Status, rank_of


class ScheduledSequence(NamedTuple):
    """Positions ``[first, first + num_tokens)`` of a sequence; ``samples``: a token comes out at the end."""

    sequence: Sequence
    first: int
    num_tokens: int
    samples: bool


class Preemption(NamedTuple):
    """A victim, and the blocks counted and available when ``asked_by`` wanted to append."""

    request: Request
    mode: Literal["recompute", "swap"]
    blocks_counted: int
    blocks_free: int
    asked_by: Request


class Plan:
    """What one step does. ``moves`` are in the order in which they must be done."""

    __slots__ = ("moves", "num_tokens", "preempted", "sequences", "step")

    def __init__(self, step: int) -> None:
        self.step = step
        self.sequences: list[ScheduledSequence] = []
        self.moves: list[Move] = []
        self.preempted: list[Preemption] = []
        self.num_tokens = 0


@unique
class _Room(Enum):
    """What came of the search for blocks for one running request."""

    FOUND = "the blocks are there"
    NONE = "no victim would free a block: the request sits this step out"
    LATER = "blocks come free when steps in flight are committed: nobody less urgent may run before that"
    GIVEN_UP = "the request was itself the victim"


class Scheduler:
    """Three queues, each in order of `Request.rank`: waiting (those to be recomputed too), running, swapped.

    With chunked prefill a step serves the running set, decodes before prefills, and then admits. Without it a
    step is either whole prefills or decodes, prefills first.
    """

    __slots__ = (
        "blocks",
        "check",
        "config",
        "num_preemptions",
        "running",
        "running_sequences",
        "starved",
        "swapped",
        "waiting",
    )

    def __init__(self, config: EngineConfig, blocks: BlockManager) -> None:
        self.config = config
        self.blocks = blocks
        self.check = APPEND_CHECKS[config.append_check]
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.swapped: list[Request] = []
        self.running_sequences = 0
        """Places taken in the running set; a request counts n until its sequences end (LIM-1)."""
        self.starved = False
        """The last budget did not reach every sequence: the next begins with those that waited longest."""
        self.num_preemptions = 0

    # -- queues ------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request by its rank, a preempted one before later arrivals (PRE-4, FAIR-1, FAIR-2)."""
        request.status = Status.WAITING
        insort(self.waiting, request, key=rank_of)

    def remove(self, request: Request) -> None:
        """Take a request out of whatever queue it is in (PRG-6). Its blocks are the caller's business."""
        queues = {Status.WAITING: self.waiting, Status.RUNNING: self.running, Status.SWAPPED: self.swapped}
        queue = queues[request.status]
        index = bisect_left(queue, request.rank, key=rank_of)
        assert queue[index] is request, "ranks are unique and queues sorted by them"
        del queue[index]
        if request.status is Status.RUNNING:
            self.running_sequences -= request.width

    def end_sequence(self, sequence: Sequence) -> None:
        """A running sequence has its last token: its place in the running set is free (LIM-1)."""
        request = sequence.request
        assert request.status is Status.RUNNING and request.forked, "only running sequences get tokens"
        request.live.remove(sequence)
        self.running_sequences -= 1
        assert self.running_sequences >= 0

    def _head(self) -> Request | None:
        """The most urgent request that is not running, swapped or not."""
        if not self.swapped:
            return self.waiting[0] if self.waiting else None
        if not self.waiting or self.swapped[0].rank < self.waiting[0].rank:
            return self.swapped[0]
        return self.waiting[0]

    # -- a step ------------------------------------------------------------------------------------------

    def schedule(self, step: int) -> Plan:
        """Decide step ``step``. Upholds LIM-1, LIM-2, PRG-1, PRG-7, PRE-1 to PRE-5, FAIR-1 and FAIR-2."""
        plan = Plan(step)
        decodes, prefills = self._runnable()
        if self.config.enable_chunked_prefill:
            self._share_budget(decodes + prefills)
            if self._append_running(plan):
                self._admit(plan)
        else:
            self._grant_whole_prefills(prefills)
            if self._append_running(plan):
                self._admit(plan, swapped=False)
                if not plan.sequences:
                    self._decode(plan)
        if self.config.num_lookahead_slots and not self.check.counts_lookahead:
            for scheduled in plan.sequences:
                self.blocks.extend_lookahead(scheduled.sequence)
        assert plan.num_tokens <= self.config.max_num_batched_tokens
        assert self.running_sequences <= self.config.max_num_seqs
        return plan

    def _decode(self, plan: Plan) -> None:
        """A step without prefills: decode the running set, then let swapped requests back in."""
        decodes, _ = self._runnable()
        self._share_budget(decodes)
        if self._append_running(plan):
            self._admit(plan, waiting=False)

    def _runnable(self) -> tuple[list[Sequence], list[Sequence]]:
        """The sequences that can be scheduled: those with one position to compute, and those with more.

        With steps in flight, a sequence whose last token is among those to come waits for it, and so does a
        request that has yet to fork (PRG-5).
        """
        decodes: list[Sequence] = []
        prefills: list[Sequence] = []
        for request in self.running:
            max_len = request.max_len
            for sequence in request.live:
                sequence.grant = 0
                total = len(sequence.tokens) + sequence.pending
                if sequence.pending and (total >= max_len or not request.forked):
                    continue
                (decodes if total - sequence.scheduled == 1 else prefills).append(sequence)
        return decodes, prefills

    def _share_budget(self, sequences: list[Sequence]) -> None:
        """Grant tokens in the order given; when some got none last time, to those that waited longest first.

        Under priority scheduling only sequences of one priority take turns. Upholds LIM-2, PRG-1 and PRG-4.
        """
        budget = self.config.max_num_batched_tokens
        if self.starved:
            sequences = sorted(sequences, key=lambda sequence: (sequence.request.rank[0], sequence.last_step))
            self.starved = False
        for sequence in sequences:
            sequence.grant = tokens = min(self._chunk(sequence.remaining), budget)
            budget -= tokens
            if not tokens:
                self.starved = True

    def _chunk(self, remaining: int) -> int:
        limit = self.config.max_chunk_tokens
        return min(remaining, limit) if limit else remaining

    def _grant_whole_prefills(self, prefills: list[Sequence]) -> None:
        """Without chunks: grant whole prefills to running sequences that the budget did not reach yet.

        Only requests with n > 1 have such, after a recompute. Upholds LIM-2.
        """
        budget = self.config.max_num_batched_tokens
        for sequence in prefills:
            if sequence.remaining <= budget:
                sequence.grant = sequence.remaining
                budget -= sequence.remaining

    def _run(self, plan: Plan, sequence: Sequence) -> None:
        """Put the granted tokens of a sequence, whose table covers them, into the plan."""
        first, tokens, remaining = sequence.scheduled, sequence.grant, sequence.remaining
        assert 0 < tokens <= remaining, "the grant lies within what can be computed"
        samples = tokens == remaining
        sequence.scheduled = first + tokens
        sequence.pending += samples
        sequence.in_flight += 1
        sequence.last_step = plan.step
        plan.num_tokens += tokens
        plan.sequences.append(ScheduledSequence(sequence, first, tokens, samples))

    # -- the running set ---------------------------------------------------------------------------------

    def _append_running(self, plan: Plan) -> bool:
        """Run what was granted, the most urgent first; false when the rest must wait for steps in flight.

        Blocks are found in order of rank whatever the order of the grants, so that a victim, taken from the
        other end, has never been put into the plan already (ACC-7, PRE-3).
        """
        running = self.running
        lookahead = self.config.num_lookahead_slots if self.check.counts_lookahead else 0
        index = 0
        while index < len(running):
            request = running[index]
            granted = [sequence for sequence in request.live if sequence.grant]
            room = self._make_room(request, granted, plan) if granted else _Room.NONE
            if room is _Room.LATER:
                return False
            if room is _Room.GIVEN_UP:
                continue
            if room is _Room.FOUND:
                if self.config.sliding_window is not None:
                    for sequence in granted:
                        self.blocks.slide(sequence)
                for sequence in granted:
                    self.blocks.append(sequence, plan.moves, lookahead)
                    self._run(plan, sequence)
            index += 1
        return True

    def _make_room(self, request: Request, granted: list[Sequence], plan: Plan) -> _Room:
        """See that ``granted`` may append, preempting the least urgent for as long as the check says no.

        Nobody is preempted while blocks are about to come free with a step in flight. Upholds PRE-1, PRE-3,
        PRE-5, KV-5 and, as the most urgent request always gets its blocks, PRG-4.
        """
        check, pool = self.check, self.blocks.pool
        while True:
            counted, free = check.blocks(self.blocks, granted), pool.available
            if self.config.sliding_window is not None:
                free += self.blocks.released_by_sliding(granted)
            if check.passes(counted, free):
                return _Room.FOUND
            victim = self._victim(request)
            if victim is None:
                return _Room.NONE
            if self.blocks.deferred or not victim.at_rest:
                return _Room.LATER
            self._preempt(plan, Preemption(victim, "recompute", counted, free, request))
            if victim is request:
                return _Room.GIVEN_UP

    def _victim(self, asking: Request) -> Request | None:
        """The least urgent running request that frees a block, at the last ``asking`` (PRE-3, PRE-5)."""
        candidates = self.running[self.running.index(asking) :]
        return next((request for request in reversed(candidates) if self.blocks.frees_a_block(request)), None)

    def _preempt(self, plan: Plan, preemption: Preemption) -> None:
        """Take the victim off the running set: to the host pool when that holds it, else back to its prompt.

        A sequence amid its prefill has little to save and starts again. Upholds KV-6, PRE-4 and ACC-7.
        """
        victim = preemption.request
        self.remove(victim)
        if self._can_swap_out(victim):
            self.blocks.swap_out(victim, plan.moves)
            victim.status = Status.SWAPPED
            insort(self.swapped, victim, key=rank_of)
            preemption = preemption._replace(mode="swap")
        else:
            for sequence in victim.live:
                self.blocks.release(sequence)
                sequence.restart()
            self.add(victim)
        victim.preempted_in = plan.step
        plan.preempted.append(preemption)
        self.num_preemptions += 1

    def _can_swap_out(self, victim: Request) -> bool:
        """Whether to swap: all sequences return in one step, so the token budget must be enough for them."""
        return (
            self.config.preemption_mode == "swap"
            and not victim.prefilling
            and len(victim.live) <= self.config.max_num_batched_tokens
            and self.blocks.can_swap_out(victim)
        )

    # -- admission ---------------------------------------------------------------------------------------

    def _admit(self, plan: Plan, *, waiting: bool = True, swapped: bool = True) -> None:
        """Let in the head of the queue for as long as it fits; nobody overtakes it.

        ``waiting`` / ``swapped``: whether a head of that kind may enter in this step. A request preempted in
        this step does not come back in it. A head that does not fit leaves everything as it was. Upholds
        FAIR-1, FAIR-2, PRE-4, PRG-7, LIM-1 and ACC-8.
        """
        config, blocks = self.config, self.blocks
        while True:
            head = self._head()
            budget = config.max_num_batched_tokens - plan.num_tokens
            if head is None or head.preempted_in == plan.step or budget <= 0:
                return
            if self.running_sequences + head.width > config.max_num_seqs:
                return
            if head.status is Status.SWAPPED:
                if not swapped or len(head.live) > budget or not blocks.can_swap_in(head):
                    return
                self.remove(head)
                blocks.swap_in(head, plan.moves)
                hits = None
            else:
                hits = blocks.admission(head) if waiting else None
                if hits is None:
                    return
                tokens = len(head.live[0].tokens) - len(hits[0]) * config.block_size
                if not config.enable_chunked_prefill and tokens > budget:
                    return
                self.remove(head)
            self._enter(head, plan, hits)

    def _enter(self, request: Request, plan: Plan, hits: list[list[int]] | None) -> None:
        """Put an admitted request on the running set and run as much of it as the budget allows.

        A sequence that gets no tokens gets no blocks either; it starts in a later step, before anybody new.
        ``hits``: the cached blocks of each live sequence, None when they were swapped in and have theirs.
        """
        request.status = Status.RUNNING
        self.running_sequences += request.width
        insort(self.running, request, key=rank_of)
        budget = self.config.max_num_batched_tokens - plan.num_tokens
        starts: list[tuple[Sequence, list[int]]] = []
        for index, sequence in enumerate(request.live):
            cached = hits[index] if hits else []
            remaining = sequence.remaining - len(cached) * self.config.block_size
            tokens = min(self._chunk(remaining), budget)
            if not self.config.enable_chunked_prefill and tokens < remaining:
                tokens = 0
            if tokens:
                starts.append((sequence, cached))
            else:
                self.starved = True
            sequence.grant = tokens
            budget -= tokens
        if hits is not None:
            self.blocks.admit(starts)
            if request.preempted_in < 0:  # what a request finds again that was preempted is no hit
                self.blocks.count_hits(starts)
        for sequence, _ in starts:
            self.blocks.append(sequence, plan.moves)
            self._run(plan, sequence)
