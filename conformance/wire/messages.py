"""What is on the wire: a call is a line from the harness, an answer the line that the engine sends back.

Every message is an object with ``id``; calls are told apart by ``call``, answers by ``answer``, which is the name
of the call answered or one of `Failure`. What the structs of `conformance.protocol` hold goes over as it is,
with two exceptions, because a JSON object has strings for keys and hides a key that is there twice: tokens by
``(request, sequence)`` are a list of `SampledSequence`, and the books are `Books`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeAlias, TypeVar

import msgspec

from conformance.protocol import (
    BlockId,
    Capabilities,
    CommitResult,
    EngineConfig,
    Request,
    RequestId,
    Sampled,
    SequenceKey,
    Snapshot,
    StepPlan,
    Usage,
)

PROTOCOL: Final = 1
"""Version of the wire protocol. It changes with whatever an engine of the version before would misunderstand."""

NOT_A_MESSAGE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding a line raises when it is no JSON, or not what is expected."""

Key = TypeVar("Key")
Value = TypeVar("Value")


class Call(msgspec.Struct, tag_field="call", forbid_unknown_fields=True, kw_only=True):
    """A line from the harness. ``id`` counts the calls of a process from 0."""

    id: int = 0


class HelloCall(msgspec.Struct, tag="hello", tag_field="call", kw_only=True):
    """The first call. It and its answer stay readable for every version: unknown fields are left unread."""

    id: int = 0
    protocol: int = PROTOCOL
    kvconform: str = ""
    """The version of the harness, for messages."""


class MakeCall(Call, tag="make"):
    """Build an engine; the one before, if it was not closed, is dropped. `Refused` when it will not run so."""

    config: EngineConfig


class AddRequestCall(Call, tag="add_request"):
    """Queue a request. `Refused` when the engine will not serve it."""

    request: Request


class AbortRequestCall(Call, tag="abort_request"):
    """Drop a request in whatever state it is; unknown and finished ids are ignored."""

    request_id: RequestId


class ScheduleCall(Call, tag="schedule"):
    """Decide the next step."""


class SampledSequence(msgspec.Struct, forbid_unknown_fields=True):
    """What the model returned for one sequence: accepted tokens, then drafts proposed for its next step."""

    request_id: RequestId
    seq: int
    tokens: list[int]
    drafts: list[int] = []


class CommitCall(Call, tag="commit"):
    """Take the tokens of a step; steps are committed in the order they were scheduled."""

    step: int
    sampled: list[SampledSequence]


class ResetPrefixCacheCall(Call, tag="reset_prefix_cache"):
    """Forget every cached prefix."""


class UsageCall(Call, tag="usage"):
    """Asked only where an answer left ``usage`` out."""


class SnapshotCall(Call, tag="snapshot"):
    """The whole block accounting."""


class ReferenceTokenCall(Call, tag="reference_token"):
    """Of an engine with a model of its own: the token that follows ``tokens``, computed apart from the engine."""

    tokens: list[int]


class CloseCall(Call, tag="close"):
    """Release the engine. The process stays, for the next ``make``; it ends when its input does."""


class Answer(msgspec.Struct, tag_field="answer", forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """A line from the engine, with the ``id`` of its call."""

    id: int


class HelloAnswer(msgspec.Struct, tag="hello", tag_field="answer", kw_only=True):
    """Which protocol the engine speaks, and what it is called."""

    id: int
    protocol: int
    engine: str = ""
    version: str = ""


class MakeAnswer(Answer, tag="make"):
    """``usage`` here and below: the figures after the call, where the engine declares that it has them."""

    capabilities: Capabilities
    usage: Usage | None = None


class AddRequestAnswer(Answer, tag="add_request"):
    """The request is queued."""

    usage: Usage | None = None


class AbortRequestAnswer(Answer, tag="abort_request"):
    """The request is gone."""

    usage: Usage | None = None


class ScheduleAnswer(Answer, tag="schedule"):
    """The step. ``capabilities``: when they are no longer those told before."""

    plan: StepPlan
    usage: Usage | None = None
    capabilities: Capabilities | None = None


class CommitAnswer(Answer, tag="commit"):
    """Who is finished."""

    result: CommitResult
    usage: Usage | None = None


class ResetPrefixCacheAnswer(Answer, tag="reset_prefix_cache"):
    """Whether it was done."""

    done: bool
    usage: Usage | None = None


class UsageAnswer(Answer, tag="usage"):
    """The engine's own figures."""

    usage: Usage


class Holding(msgspec.Struct, forbid_unknown_fields=True):
    """The device blocks of one request: one table per sequence (per group, when there are several)."""

    request_id: RequestId
    tables: list[list[BlockId]]


class Books(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`conformance.protocol.Snapshot` on the wire. No request and no block is named twice in a list of pairs."""

    free: list[BlockId]
    """As the engine's free list holds them: a block listed twice is reported, not hidden."""
    cached: list[BlockId] = []
    reserved: list[BlockId] = []
    held: list[Holding] = []
    ref_counts: list[tuple[BlockId, int]] | None = None
    """Pairs of block and count."""
    swap_free: list[BlockId] | None = None
    waiting: list[RequestId] = []
    running: list[RequestId] = []
    swapped: list[RequestId] = []


class SnapshotAnswer(Answer, tag="snapshot"):
    """The whole block accounting."""

    snapshot: Books


class ReferenceTokenAnswer(Answer, tag="reference_token"):
    """The token."""

    token: int


class CloseAnswer(Answer, tag="close"):
    """The engine is released."""


class Refused(Answer, tag="refused"):
    """The engine will not run with this configuration, or will not serve this request; why, for its user.

    ``instead``: the nearest configuration that it would run with, whole, if the engine can tell.
    """

    message: str
    instead: EngineConfig | None = None


class Raised(Answer, tag="raised"):
    """The engine failed inside the call: a finding. ``where``: file, line and function, if it can be told."""

    type: str
    message: str = ""
    where: str = ""


class Malformed(Answer, tag="malformed"):
    """The engine's own answer is not what the interface declares, and could not be sent: a finding."""

    problem: str


class Unable(Answer, tag="unable"):
    """The adapter, not the engine, cannot go on."""

    message: str


AnyCall: TypeAlias = (
    HelloCall
    | MakeCall
    | AddRequestCall
    | AbortRequestCall
    | ScheduleCall
    | CommitCall
    | ResetPrefixCacheCall
    | UsageCall
    | SnapshotCall
    | ReferenceTokenCall
    | CloseCall
)
Failure: TypeAlias = Refused | Raised | Malformed | Unable
AnyAnswer: TypeAlias = (
    HelloAnswer
    | MakeAnswer
    | AddRequestAnswer
    | AbortRequestAnswer
    | ScheduleAnswer
    | CommitAnswer
    | ResetPrefixCacheAnswer
    | UsageAnswer
    | SnapshotAnswer
    | ReferenceTokenAnswer
    | CloseAnswer
    | Failure
)


class _Identified(msgspec.Struct):
    id: int = -1


_identified = msgspec.json.Decoder(_Identified)


def id_of(line: bytes) -> int:
    """The id of a message whatever else is wrong with it; -1 when there is none."""
    try:
        return _identified.decode(line).id
    except NOT_A_MESSAGE:
        return -1


def to_pairs(sampled: Mapping[SequenceKey, Sampled]) -> list[SampledSequence]:
    """The tokens of a commit as they go over the wire."""
    return [SampledSequence(rid, seq, sample.tokens, sample.drafts) for (rid, seq), sample in sampled.items()]


def from_pairs(sampled: Iterable[SampledSequence]) -> dict[SequenceKey, Sampled]:
    """The tokens of a commit as the engine takes them. Raises ValueError when a sequence is there twice."""
    return _unique("sampled", (((one.request_id, one.seq), Sampled(one.tokens, one.drafts)) for one in sampled))


def to_books(snapshot: Snapshot) -> Books:
    """A snapshot as it goes over the wire."""
    fields: dict[str, Any] = {name: getattr(snapshot, name) for name in Snapshot.__struct_fields__}
    fields["held"] = [Holding(rid, tables) for rid, tables in snapshot.held.items()]
    fields["ref_counts"] = None if snapshot.ref_counts is None else list(snapshot.ref_counts.items())
    return Books(**fields)


def from_books(books: Books) -> Snapshot:
    """A snapshot as the harness takes it. Raises ValueError when a request or a block is there twice."""
    fields: dict[str, Any] = {name: getattr(books, name) for name in Books.__struct_fields__}
    fields["held"] = _unique("held", ((one.request_id, one.tables) for one in books.held))
    fields["ref_counts"] = None if books.ref_counts is None else _unique("ref_counts", books.ref_counts)
    return Snapshot(**fields)


def _unique(name: str, pairs: Iterable[tuple[Key, Value]]) -> dict[Key, Value]:
    found: dict[Key, Value] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{name} names {key!r} twice")
        found[key] = value
    return found
