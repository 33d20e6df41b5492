"""What the harness knows of each request, of each of its sequences, and of one step: the entries of the ledger."""

from __future__ import annotations

from enum import Enum

from conformance.protocol import BlockId, Preemption, Request, SequenceKey, SequencePlan, StepPlan, Usage
from conformance.shadow_kv import Reader


class RequestState(Enum):
    """Where a request is, as far as plans tell."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    SWAPPED = "swapped"
    LOADING = "loading"
    """Waits for KV from elsewhere, or has it and waits for its turn: it holds blocks and does not run."""
    BETWEEN = "between inputs"
    """Has answered one input and waits for the next, or for its turn to run that: it holds blocks and does not run."""
    FINISHED = "finished"
    ABORTED = "aborted"
    REFUSED = "refused"
    FAILED = "failed"


class SequenceRecord:
    """One sequence: its tokens, the node of each, how many positions are computed, and its block tables."""

    __slots__ = (
        "computed",
        "done_at_step",
        "drafts",
        "final_len",
        "high_water",
        "key",
        "len_min",
        "nodes",
        "readers",
        "rejected",
        "request",
        "rewound",
        "set_aside_step",
        "settled",
        "tables",
        "tokens",
    )

    def __init__(self, request: RequestRecord, seq: int, tokens: list[int], nodes: list[int]) -> None:
        self.request = request
        self.key: SequenceKey = (request.spec.request_id, seq)
        self.tokens = tokens
        self.nodes = nodes
        self.computed = 0
        self.high_water = 0
        """The most positions ever computed: progress, as opposed to recompute."""
        self.tables: list[list[BlockId]] = []
        self.readers: list[Reader] = []
        self.drafts: list[int] = []
        """What the model proposed after the last token it sampled."""
        self.rejected: dict[int, int] = {}
        """Step in flight -> drafts of it that were rejected, which the engine has not been told."""
        self.final_len: int | None = None
        """Length at which the sequence ended, once its last token is sampled."""
        self.done_at_step: int | None = None
        self.set_aside_step: int | None = None
        """The step before which it was last preempted without the request's other sequences."""
        self.settled = False
        """Its end was committed: from then on it holds nothing and is not counted."""
        self.rewound = False
        """Its last step was for nothing: the engine may start over from where it likes."""
        self.len_min = len(tokens)
        """Tokens the engine has certainly taken; less than len(tokens) only for steps in flight at a preemption."""

    @property
    def seq(self) -> int:
        return self.key[1]

    @property
    def done(self) -> bool:
        return self.final_len is not None

    def forget(self, length: int) -> None:
        """Drop the tokens from ``length`` on: a preemption lost them, and they will be sampled again."""
        del self.tokens[length:]
        del self.nodes[length:]
        self.computed = min(self.computed, length - 1)
        self.final_len = self.done_at_step = None

    def __repr__(self) -> str:
        return f"<{self.name} {self.computed}/{len(self.tokens)}>"

    @property
    def name(self) -> str:
        """``r3``, or ``r3/1`` for the second sequence of a request with n > 1."""
        rid, seq = self.key
        return rid if self.request.spec.n == 1 else f"{rid}/{seq}"


class RequestRecord:
    """One request: what was asked, where it is, and how often it was started and preempted."""

    __slots__ = (
        "aborted_steps",
        "admitted_step",
        "arrived_step",
        "first_token_step",
        "full_len",
        "inputs_run",
        "load_failed",
        "loads",
        "preempted_step",
        "preemptions",
        "prefills",
        "sequences",
        "spec",
        "state",
        "stop_after",
    )

    def __init__(self, spec: Request, stop_after: int | None, full_len: int, step: int) -> None:
        self.spec = spec
        self.stop_after = stop_after
        self.full_len = full_len
        """Tokens of one sequence when it has run to its end (stop token aside), after the model length cap."""
        self.state = RequestState.WAITING
        self.sequences: list[SequenceRecord] = []
        self.arrived_step = step
        self.admitted_step: int | None = None
        self.preempted_step: int | None = None
        self.first_token_step: int | None = None
        self.preemptions = 0
        self.prefills = 0
        self.inputs_run = 0
        """Streamed inputs that it went on with."""
        self.loads = 0
        """Loads of its KV that were begun, and inputs that followed: it may be passed over for one, and enter the
        running set out of turn."""
        self.aborted_steps = 0
        """Steps in which it may still be planned, once it is aborted."""
        self.load_failed = False
        """It needs KV that did not come, and has not been run anew yet."""

    @property
    def live(self) -> bool:
        return self.state not in _ENDED

    @property
    def is_new(self) -> bool:
        """Whether the engine may not have taken a token of it yet."""
        return self.sequences[0].len_min <= len(self.spec.prompt) + 1

    @property
    def forked(self) -> bool:
        return len(self.sequences) == self.spec.n

    def unfinished(self) -> list[SequenceRecord]:
        """The sequences that still have tokens to produce; before the fork, sequence 0 alone."""
        return [record for record in self.sequences if record.final_len is None]

    def rank(self, policy: str) -> tuple[int, int]:
        """Smaller goes first under the scheduling policy."""
        return (self.spec.priority if policy == "priority" else 0, self.spec.arrival)


HOLDING = (RequestState.LOADING, RequestState.BETWEEN)
"""States in which a request may hold blocks that nobody can take from it."""
_ENDED = (RequestState.FINISHED, RequestState.ABORTED, RequestState.REFUSED, RequestState.FAILED)


class Row:
    """One `SequencePlan` next to what the ledger knew before it."""

    __slots__ = ("added", "admitted", "end", "plan", "previous", "record", "resumed", "spoilt", "tables")

    def __init__(self, record: SequenceRecord, plan: SequencePlan, *, admitted: bool, resumed: bool) -> None:
        self.record = record
        self.plan = plan
        self.tables = plan.block_tables
        self.previous = record.tables
        self.admitted = admitted
        """The request runs for the first time."""
        self.resumed = resumed
        """The request comes back from a preemption."""
        self.spoilt = False
        """It reads blocks whose load failed, of which the engine has not been told: nothing it computes counts."""
        self.end = plan.first + plan.num_tokens
        self.added: list[BlockId] = []
        """Blocks of the new tables that the previous ones did not have at the same place, null block aside."""


class StepFacts:
    """Everything an oracle may want to know of one step. ``free_before`` is the harness's own count."""

    __slots__ = (
        "aborted",
        "free_before",
        "in_flight",
        "plan",
        "preempted",
        "rows",
        "running_before",
        "usage_after",
        "usage_before",
    )

    def __init__(
        self, plan: StepPlan, running_before: list[RequestRecord], free_before: int, usage_before: Usage
    ) -> None:
        self.plan = plan
        self.rows: list[Row] = []
        self.aborted: list[tuple[SequenceRecord, SequencePlan]] = []
        """What is run once more for requests that were aborted while they ran, as the engine declares."""
        self.preempted: list[tuple[RequestRecord, Preemption]] = []
        self.running_before = running_before
        self.free_before = free_before
        self.in_flight = 0
        """Steps scheduled before this one and not yet committed."""
        self.usage_before = usage_before
        self.usage_after = usage_before
