"""The engine: first come, first served, paged KV cache, preemption by recompute. It knows nothing of kvconform."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(eq=False)
class Sequence:
    """A request and its tokens so far; ``table[i]`` is the block of positions ``i * block_size`` onwards."""

    request_id: str
    tokens: list[int]
    length_max: int
    """Tokens at which it ends, prompt included."""
    arrival: int
    stop_token: int | None = None
    prompt_len: int = 0
    computed: int = 0
    table: list[int] = field(default_factory=list)


@dataclass
class Victim:
    """A preempted sequence, and why: blocks that ``asked_by`` lacked, blocks that were free."""

    sequence: Sequence
    asked_by: Sequence
    lacking: int
    free: int


@dataclass
class Step:
    """What the model runner is to run: each sequence with its first position and the number of positions."""

    run: list[tuple[Sequence, int, int]] = field(default_factory=list)
    victims: list[Victim] = field(default_factory=list)


class NoRoom(Exception):  # noqa: N818 - an answer to who asks
    """The request can never be served."""


class Scheduler:
    """Queue, running set and block pool. Sizes in blocks and tokens, as in `kvconform.EngineConfig`."""

    def __init__(
        self, *, num_blocks: int, block_size: int, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.free = list(range(num_blocks))
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemptions = 0
        self._arrivals = 0

    def add(self, request_id: str, prompt: list[int], max_tokens: int, stop_token: int | None) -> None:
        """Queue a request. Raises `NoRoom`."""
        length_max = min(len(prompt) + max_tokens, self.max_model_len)
        if length_max <= len(prompt):
            raise NoRoom(f"a prompt of {len(prompt)} leaves no room for an output under {self.max_model_len}")
        if self._blocks_for(length_max - 1) > self.num_blocks:  # the last token is sampled and never computed
            raise NoRoom(f"{length_max} tokens never fit {self.num_blocks} blocks of {self.block_size}")
        sequence = Sequence(request_id, list(prompt), length_max, self._arrivals, stop_token, len(prompt))
        self._arrivals += 1
        self.waiting.append(sequence)

    def abort(self, request_id: str) -> None:
        """Drop a request wherever it is."""
        self.waiting = [one for one in self.waiting if one.request_id != request_id]
        for sequence in [one for one in self.running if one.request_id == request_id]:
            self._leave(sequence)

    def step(self) -> Step:
        """Decide the next step: one position for everybody who runs, then whole prompts as budget and blocks allow."""
        step = Step()
        for sequence in list(self.running):
            if sequence in self.running and self._make_room(sequence, step):
                self._plan(sequence, step)
        if not step.victims:
            self._admit(step)
        return step

    def take(self, sequence: Sequence, token: int) -> bool:
        """The model's token of a step; true when that was the last one, and the blocks are free again."""
        sequence.tokens.append(token)
        done = len(sequence.tokens) == sequence.length_max or token == sequence.stop_token
        if done:
            self._leave(sequence)
        return done

    # -- inside ------------------------------------------------------------------------------------------

    def _blocks_for(self, positions: int) -> int:
        return -(-positions // self.block_size)

    def _lacking(self, sequence: Sequence) -> int:
        """Blocks that must be new, and no others."""
        return self._blocks_for(len(sequence.tokens)) - len(sequence.table)

    def _make_room(self, sequence: Sequence, step: Step) -> bool:
        """Take blocks from the latest arrivals until ``sequence`` can go on; false when it was the latest itself."""
        while (lacking := self._lacking(sequence)) > len(self.free):
            latest = max(self.running, key=lambda one: one.arrival)
            step.victims.append(Victim(latest, sequence, lacking, len(self.free)))
            self.preemptions += 1
            self._leave(latest)
            latest.computed = 0
            self.waiting.append(latest)
            self.waiting.sort(key=lambda one: one.arrival)
            if latest is sequence:
                return False
        return True

    def _admit(self, step: Step) -> None:
        budget = self.max_num_batched_tokens - len(step.run)
        while self.waiting and len(self.running) < self.max_num_seqs:
            head = self.waiting[0]
            if len(head.tokens) > budget or self._lacking(head) > len(self.free):
                return
            budget -= len(head.tokens)
            self.running.append(self.waiting.pop(0))
            self._plan(head, step)

    def _plan(self, sequence: Sequence, step: Step) -> None:
        sequence.table += [self.free.pop() for _ in range(self._lacking(sequence))]
        step.run.append((sequence, sequence.computed, len(sequence.tokens) - sequence.computed))
        sequence.computed = len(sequence.tokens)

    def _leave(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.free += sequence.table
        sequence.table = []
