"""The harness's end of the wire: an `Engine` whose calls are answered by another process.

What the process does in place of an answer is told as a finding (`conformance.calls.EngineFailed`), with the last
lines of its standard error. Before the handshake is done nothing is a finding yet: `CannotStart`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeVar

import msgspec

from conformance.calls import EngineFailed, malformed, raised
from conformance.protocol import (
    AdapterError,
    Capabilities,
    CommitResult,
    ConfigRefused,
    EngineConfig,
    Request,
    RequestRefused,
    Sampled,
    SequenceKey,
    Snapshot,
    StepPlan,
    Usage,
)
from conformance.version import __version__
from conformance.watchdog import EngineHung, MemoryExhausted
from conformance.wire.lines import ambiguity
from conformance.wire.messages import (
    NOT_A_MESSAGE,
    PROTOCOL,
    AbortRequestAnswer,
    AbortRequestCall,
    AddRequestAnswer,
    AddRequestCall,
    Answer,
    AnyCall,
    CloseAnswer,
    CloseCall,
    CommitAnswer,
    CommitCall,
    Failure,
    HelloAnswer,
    HelloCall,
    MakeAnswer,
    MakeCall,
    Malformed,
    Raised,
    ReferenceTokenAnswer,
    ReferenceTokenCall,
    Refused,
    ResetPrefixCacheAnswer,
    ResetPrefixCacheCall,
    ScheduleAnswer,
    ScheduleCall,
    SnapshotAnswer,
    SnapshotCall,
    Unable,
    UsageAnswer,
    UsageCall,
    from_books,
    id_of,
    to_pairs,
)
from conformance.wire.process import CannotStart, Ended, Process, ProcessFailed, TooSlow

A = TypeVar("A", bound=Answer)

HELLO_SECONDS_MAX: Final = 30.0
"""The handshake comes before the engine imports its framework."""
MAKE_SECONDS_MAX: Final = 120.0
"""Bound on building an engine where no watchdog bounds it; the first one of a process imports its framework."""
PAGE: Final = "docs/reference/wire-protocol.md"
_SHOWN_BYTES: Final = 80

_encoder = msgspec.json.Encoder()
_any_call: msgspec.json.Decoder[AnyCall] = msgspec.json.Decoder(AnyCall)


def _answers(kind: type[A]) -> tuple[type[A], msgspec.json.Decoder[A | Failure]]:
    return kind, msgspec.json.Decoder(kind | Failure)


_hello = msgspec.json.Decoder(HelloAnswer | Unable)  # of one struct alone the tag would not be looked at
MAKE = _answers(MakeAnswer)
ADD_REQUEST = _answers(AddRequestAnswer)
ABORT_REQUEST = _answers(AbortRequestAnswer)
SCHEDULE = _answers(ScheduleAnswer)
COMMIT = _answers(CommitAnswer)
RESET_PREFIX_CACHE = _answers(ResetPrefixCacheAnswer)
USAGE = _answers(UsageAnswer)
SNAPSHOT = _answers(SnapshotAnswer)
REFERENCE_TOKEN = _answers(ReferenceTokenAnswer)
CLOSE = _answers(CloseAnswer)


class Peer:
    """A process that speaks the protocol. Raises `CannotStart` when it does not.

    ``strict``: every line is also held to what `conformance.wire.lines.ambiguity` forbids, and our own to the protocol.
    """

    def __init__(self, words: Sequence[str], *, strict: bool = False) -> None:
        self._strict = strict
        self._calls = 0
        self.process = Process(words)
        self._shake_hands()

    def _shake_hands(self) -> None:
        call = HelloCall(id=self._next(), kvconform=__version__)
        try:
            line = self.process.exchange(self._encoded(call), HELLO_SECONDS_MAX)
        except ProcessFailed as failure:
            raise CannotStart(self._no_hello(failure)) from None
        try:
            answer = _hello.decode(line)
        except NOT_A_MESSAGE as error:
            self.process.kill()
            raise CannotStart(
                f"it prints {_shown(line)}, which does not answer hello ({error}): it is no engine, or it prints to "
                f"its standard output, which is the wire ({PAGE}){self._said()}"
            ) from None
        if isinstance(answer, Unable):
            self.process.kill()
            raise CannotStart(f"it answers hello with: {answer.message}")
        if answer.protocol != PROTOCOL:
            self.process.kill()
            older = "the engine" if answer.protocol < PROTOCOL else "kvconform"
            raise CannotStart(
                f"{answer.engine} {answer.version} speaks wire protocol {answer.protocol}, kvconform {__version__} "
                f"speaks {PROTOCOL}: use a newer release of {older} ({PAGE})"
            )

    def _no_hello(self, failure: ProcessFailed) -> str:
        words = self.process.last_words()
        if words.startswith("kvconform: "):  # its own end of the wire, which says it best
            return words.removeprefix("kvconform: ")
        rest = f" and printed {_shown(failure.rest)}" if isinstance(failure, Ended) and failure.rest else ""
        return f"{failure}{rest} before it answered hello ({PAGE}){self._said()}"

    def ask(
        self,
        call: AnyCall,
        answers: tuple[type[A], msgspec.json.Decoder[A | Failure]],
        refusal: Callable[[Refused], Exception] | None = None,
        seconds_max: float | None = None,
    ) -> A:
        """Make a call. Raises ``refusal``, `EngineFailed`, and `AdapterError` when the other end cannot go on."""
        call.id = self._next()
        kind, decoder = answers
        try:
            line = self.process.exchange(self._encoded(call), seconds_max)
        except (ProcessFailed, EngineHung, MemoryExhausted) as failure:
            raise self._failed(failure) from None
        answer = self._decoded(line, call.id, decoder)
        if isinstance(answer, kind):
            return answer
        match answer:
            case Refused() if refusal is not None:
                raise refusal(answer)
            case Raised():
                raise raised(answer.type, answer.message or "(no message)", answer.where)
            case Malformed():
                raise malformed(answer.problem)
            case Unable():
                raise AdapterError(answer.message)
            case _:
                raise self._not_allowed("it refuses a call that cannot be refused")

    def _next(self) -> int:
        self._calls += 1
        return self._calls - 1

    def _encoded(self, call: AnyCall) -> bytes:
        line = _encoder.encode(call)
        if self._strict:
            try:
                problem = ambiguity(line)
                _any_call.decode(line)
            except NOT_A_MESSAGE as error:
                problem = str(error)
            if problem:
                raise AdapterError(f"kvconform would send what the wire protocol does not allow: {problem}")
        return line + b"\n"

    def _decoded(self, line: bytes, number: int, decoder: msgspec.json.Decoder[A | Failure]) -> A | Failure:
        try:
            answer = decoder.decode(line)
        except NOT_A_MESSAGE as error:
            if id_of(line) != number:
                raise self._not_allowed(f"call {number} is answered by {_shown(line)}: {error}") from None
            raise malformed(str(error)) from None  # and yet the answer to this call: the process can go on
        if answer.id != number:
            raise self._not_allowed(f"call {number} is answered with id {answer.id}; one line answers one call")
        problem = ambiguity(line) if self._strict else ""
        if problem:
            raise malformed(problem)
        return answer

    # -- failures ----------------------------------------------------------------------------------------

    def _failed(self, failure: Exception) -> EngineFailed:
        match failure:
            case Ended() if failure.rest:
                return self._not_allowed(f"{failure} in the middle of the line {_shown(failure.rest)}")
            case Ended():
                return EngineFailed("ends the engine's process", expected="an answer", got=f"{failure}{self._said()}")
            case TooSlow() | EngineHung():
                kind = EngineHung.__name__
            case _:
                kind = MemoryExhausted.__name__
        return EngineFailed(
            f"raised {kind}: {failure}; its process was killed",
            expected="the call returns",
            got=f"{kind}{self._said()}",
        )

    def _not_allowed(self, problem: str) -> EngineFailed:
        self.process.kill()
        return EngineFailed(
            "is answered by what the wire protocol does not allow",
            expected="one line of JSON for one call",
            got=f"{problem}{self._said()}",
            requirement="PRG-8",
        )

    def _said(self) -> str:
        words = self.process.last_words()
        return f"; last on its standard error: {words}" if words else ""


def _shown(line: bytes) -> str:
    text = line[:_SHOWN_BYTES].decode("utf-8", errors="backslashreplace")
    return repr(text) + ("…" if len(line) > _SHOWN_BYTES else "")


def _config_refused(answer: Refused) -> ConfigRefused:
    return ConfigRefused(answer.message, answer.instead)


def _request_refused(answer: Refused) -> RequestRefused:
    return RequestRefused(answer.message)


class WireEngine:
    """One engine in a `Peer`. ``released`` is called when the peer is free for another one."""

    def __init__(self, peer: Peer, config: EngineConfig) -> None:
        made = peer.ask(MakeCall(config=config), MAKE, _config_refused, MAKE_SECONDS_MAX)
        self.released: Callable[[], object] = lambda: None
        self._peer = peer
        self._capabilities = made.capabilities
        self._usage = made.usage

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def add_request(self, request: Request) -> None:
        self._usage = self._peer.ask(AddRequestCall(request=request), ADD_REQUEST, _request_refused).usage

    def abort_request(self, request_id: str) -> None:
        self._usage = self._peer.ask(AbortRequestCall(request_id=request_id), ABORT_REQUEST).usage

    def schedule(self) -> StepPlan:
        answer = self._peer.ask(ScheduleCall(), SCHEDULE)
        self._usage = answer.usage
        if answer.capabilities is not None:
            self._capabilities = answer.capabilities
        return answer.plan

    def commit(self, step: int, sampled: Mapping[SequenceKey, Sampled]) -> CommitResult:
        answer = self._peer.ask(CommitCall(step=step, sampled=to_pairs(sampled)), COMMIT)
        self._usage = answer.usage
        return answer.result

    def reset_prefix_cache(self) -> bool:
        answer = self._peer.ask(ResetPrefixCacheCall(), RESET_PREFIX_CACHE)
        self._usage = answer.usage
        return answer.done

    def usage(self) -> Usage:
        """What came with the last answer; asked for where the engine left it out."""
        return self._usage or self._peer.ask(UsageCall(), USAGE).usage

    def snapshot(self) -> Snapshot:
        books = self._peer.ask(SnapshotCall(), SNAPSHOT).snapshot
        try:
            return from_books(books)
        except ValueError as error:
            raise malformed(str(error)) from None

    def reference_token(self, tokens: list[int]) -> int:
        """See `conformance.protocol.OwnModel`; only called of an engine that declares ``own_model``."""
        return self._peer.ask(ReferenceTokenCall(tokens=tokens), REFERENCE_TOKEN).token

    def close(self) -> None:
        """Close the engine; nothing is left to close when its process has ended."""
        try:
            if self._peer.process.alive:
                self._peer.ask(CloseCall(), CLOSE)
        finally:
            self.released()
