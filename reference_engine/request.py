"""Requests and their sequences: what the scheduler queues and what the block manager keeps tables for."""

from __future__ import annotations

from enum import Enum, unique


@unique
class Status(Enum):
    """Where a request is. A preempted request is WAITING (recompute) or SWAPPED."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"
    ABORTED = "aborted"


class Sequence:
    """One sequence of tokens and its block table.

    Positions are counted three times, because with a pipeline they differ: ``scheduled`` were put in some
    step, ``done`` of them in steps that were committed; ``pending`` tokens are to come from steps in flight.
    """

    __slots__ = (
        "done",
        "ended",
        "grant",
        "host_table",
        "in_flight",
        "index",
        "last_step",
        "pending",
        "published",
        "request",
        "scheduled",
        "table",
        "tokens",
    )

    def __init__(self, request: Request, index: int, tokens: list[int]) -> None:
        self.request = request
        self.index = index
        self.tokens = tokens
        self.scheduled = 0
        self.done = 0
        self.pending = 0
        self.in_flight = 0
        self.table: list[int] = []
        self.host_table: list[int] = []
        self.published = 0
        """Full blocks at the front of the table already offered to the prefix cache."""
        self.ended = False
        self.grant = 0
        """Tokens of this step's budget given to the sequence, if it is on the running set."""
        self.last_step = -1

    @property
    def total(self) -> int:
        """Tokens the sequence has, those that steps in flight will sample included."""
        return len(self.tokens) + self.pending

    @property
    def remaining(self) -> int:
        """Positions that can be scheduled: 1 when decoding, more in the middle of a prefill."""
        return len(self.tokens) + self.pending - self.scheduled

    @property
    def output(self) -> list[int]:
        """The tokens generated so far."""
        return self.tokens[self.request.prompt_len :]

    def restart(self) -> None:
        """Forget all computed positions; every token stays, to be prefilled again (KV-6)."""
        assert not self.table and not self.in_flight, "only a sequence without blocks and at rest can restart"
        self.scheduled = self.done = self.pending = self.published = 0


class Request:
    """One request: a prompt, limits, identity, and its sequences.

    A request with n > 1 is prefilled once, as sequence 0, and forks when its first tokens are there.
    """

    __slots__ = (
        "adapter",
        "arrival",
        "forked",
        "live",
        "max_len",
        "max_tokens",
        "n",
        "preempted_in",
        "priority",
        "prompt_len",
        "rank",
        "request_id",
        "salt",
        "sequences",
        "status",
        "stop_token",
    )

    def __init__(
        self,
        request_id: str,
        prompt: list[int],
        max_tokens: int,
        *,
        n: int = 1,
        priority: int = 0,
        arrival: int = 0,
        stop_token: int | None = None,
        salt: str = "",
        adapter: str = "",
    ) -> None:
        self.request_id = request_id
        self.prompt_len = len(prompt)
        self.max_tokens = max_tokens
        self.n = n
        self.priority = priority
        self.arrival = arrival
        self.stop_token = stop_token
        self.salt = salt
        self.adapter = adapter
        self.status = Status.WAITING
        self.forked = n == 1
        self.sequences = [Sequence(self, 0, list(prompt))]
        self.live = list(self.sequences)
        """Sequences that have not ended, in order of their index."""
        self.max_len = 0
        """Length at which a sequence is complete, in tokens; set when the engine takes the request."""
        self.rank: tuple[int, int, int] = (0, 0, 0)
        """Order of service, the smallest first; set when the engine takes the request."""
        self.preempted_in = -1

    @property
    def width(self) -> int:
        """Places the request takes in the running set: all n before it forks, then those not ended."""
        return len(self.live) if self.forked else self.n

    @property
    def identity(self) -> tuple[str, str]:
        """What keeps this request's KV apart from that of others with the same tokens (ID-1)."""
        return (self.salt, self.adapter)

    @property
    def at_rest(self) -> bool:
        """No step in flight runs any of its sequences."""
        return not any(sequence.in_flight for sequence in self.live)

    @property
    def prefilling(self) -> bool:
        """Some sequence still has more than one position to compute."""
        return any(sequence.remaining > 1 for sequence in self.live)

    def fork(self) -> list[Sequence]:
        """Make sequences 1 to n - 1, each with the tokens of sequence 0; their tables are still empty."""
        assert not self.forked and len(self.sequences) == 1
        first = self.sequences[0]
        self.sequences += [Sequence(self, index, list(first.tokens)) for index in range(1, self.n)]
        self.live = list(self.sequences)
        self.forked = True
        return self.sequences[1:]


def rank_of(request: Request) -> tuple[int, int, int]:
    """Sort key of every queue: smaller is served earlier and preempted later."""
    return request.rank
