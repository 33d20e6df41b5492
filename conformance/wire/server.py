"""The engine's end of the wire, for engines in Python: lines in, the factory's engine called, lines out.

The wire is the process's standard input and output. Both are taken away from everything else before the engine is
imported: what it prints goes to standard error, and what it reads is empty.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any, Final, NamedTuple, cast

import msgspec

from conformance.calls import ENGINE_RAISES, raised_by
from conformance.protocol import (
    AdapterError,
    Capabilities,
    CommitResult,
    ConfigRefused,
    Engine,
    EngineFactory,
    OwnModel,
    RequestRefused,
    Snapshot,
    StepPlan,
    Usage,
)
from conformance.wire.lines import LineBuffer, ambiguity
from conformance.wire.messages import (
    NOT_A_MESSAGE,
    PROTOCOL,
    AbortRequestAnswer,
    AbortRequestCall,
    AddRequestAnswer,
    AddRequestCall,
    AnyAnswer,
    AnyCall,
    CloseAnswer,
    CloseCall,
    CommitAnswer,
    CommitCall,
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
    from_pairs,
    id_of,
    to_books,
)

_READ_BYTES: Final = 1 << 16
_encoder = msgspec.json.Encoder()
_calls: msgspec.json.Decoder[AnyCall] = msgspec.json.Decoder(AnyCall)
_answers: msgspec.json.Decoder[AnyAnswer] = msgspec.json.Decoder(AnyAnswer)
_REFUSALS: Final[dict[type, type[Exception]]] = {MakeCall: ConfigRefused, AddRequestCall: RequestRefused}


class Wire(NamedTuple):
    """The two ends of the wire in the engine's process, as file descriptors."""

    calls: int
    answers: int


def claim_standard_streams() -> Wire:
    """Make the wire of standard input and output; from now on these are empty, and standard error.

    The wire is not inherited by what the engine starts, so it ends with this process.
    """
    sys.stdout.flush()
    wire = Wire(os.dup(0), os.dup(1))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return wire


class Server:
    """Answers the calls of one harness. ``name`` and ``version`` are told at the handshake.

    ``strict``: every line is also held to what `conformance.wire.lines.ambiguity` forbids, and our own to the protocol.
    """

    def __init__(self, factory: EngineFactory, name: str, version: str, *, strict: bool = False) -> None:
        self._factory = factory
        self._name = name
        self._version = version
        self._strict = strict
        self._engine: Engine | None = None
        self._told: Capabilities | None = None

    def run(self, wire: Wire) -> None:
        """Answer until the input ends, then close the engine."""
        lines = LineBuffer()
        with contextlib.suppress(BrokenPipeError):  # the harness is gone
            while True:
                line = lines.take()
                if line is not None:
                    answer = memoryview(self.answer(line) + b"\n")
                    while answer:
                        answer = answer[os.write(wire.answers, answer) :]
                    continue
                data = os.read(wire.calls, _READ_BYTES)
                if not data:
                    break
                lines.feed(data)
        self._drop()

    def _drop(self) -> None:
        """Close an engine that the harness has left behind; what comes of that concerns nobody any more."""
        engine, self._engine = self._engine, None
        if engine is not None:
            with contextlib.suppress(*ENGINE_RAISES):
                engine.close()

    def answer(self, line: bytes) -> bytes:
        """The line that answers ``line``, both without their ends."""
        try:
            problem = ambiguity(line) if self._strict else ""
            call = _calls.decode(line)
        except NOT_A_MESSAGE as error:
            problem = str(error)
            call = HelloCall(id=id_of(line))
        if problem:
            return _encoder.encode(Unable(id=call.id, message=f"not a call of wire protocol {PROTOCOL}: {problem}"))
        answer = self._outcome(call)
        try:
            encoded = _encoder.encode(answer)
            if self._strict:
                _answers.decode(encoded)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            return _encoder.encode(Malformed(id=call.id, problem=str(error)))
        return encoded

    def _outcome(self, call: AnyCall) -> AnyAnswer:
        try:
            return self._do(call)
        except _Wrong as wrong:
            return Malformed(id=call.id, problem=str(wrong))
        except AdapterError as error:
            return Unable(id=call.id, message=str(error))
        except ENGINE_RAISES as error:
            refusal = _REFUSALS.get(type(call))
            if refusal is not None and isinstance(error, refusal):
                instead = error.instead if isinstance(error, ConfigRefused) else None
                return Refused(id=call.id, message=str(error), instead=instead)
            kind, message, place = raised_by(error, __file__)
            return Raised(id=call.id, type=kind, message=message, where=place)

    def _do(self, call: AnyCall) -> AnyAnswer:
        number = call.id
        if isinstance(call, HelloCall):
            return HelloAnswer(id=number, protocol=PROTOCOL, engine=self._name, version=self._version)
        if isinstance(call, MakeCall):
            return self._make(call)
        engine = self._engine
        if engine is None:
            raise AdapterError(f"{call.__struct_config__.tag} before make: there is no engine")
        answer: AnyAnswer
        match call:
            case ScheduleCall():
                plan = _expect(engine.schedule(), StepPlan)
                usage, declared = self._usage(engine), self._capabilities(engine)
                answer = ScheduleAnswer(id=number, plan=plan, usage=usage, capabilities=declared)
            case CommitCall():
                result = _expect(engine.commit(call.step, from_pairs(call.sampled)), CommitResult)
                answer = CommitAnswer(id=number, result=result, usage=self._usage(engine))
            case AddRequestCall():
                engine.add_request(call.request)
                answer = AddRequestAnswer(id=number, usage=self._usage(engine))
            case AbortRequestCall():
                engine.abort_request(call.request_id)
                answer = AbortRequestAnswer(id=number, usage=self._usage(engine))
            case ResetPrefixCacheCall():
                done = _expect(engine.reset_prefix_cache(), bool)
                answer = ResetPrefixCacheAnswer(id=number, done=done, usage=self._usage(engine))
            case UsageCall():
                answer = UsageAnswer(id=number, usage=_expect(engine.usage(), Usage))
            case SnapshotCall():
                answer = SnapshotAnswer(id=number, snapshot=to_books(_expect(engine.snapshot(), Snapshot)))
            case ReferenceTokenCall():
                token = cast("OwnModel", engine).reference_token(call.tokens)
                answer = ReferenceTokenAnswer(id=number, token=token)
            case CloseCall():
                self._engine = None
                engine.close()
                answer = CloseAnswer(id=number)
        return answer

    def _make(self, call: MakeCall) -> MakeAnswer:
        self._drop()
        engine = self._factory(call.config)
        self._told = _expect(engine.capabilities, Capabilities)
        self._engine = engine
        return MakeAnswer(id=call.id, capabilities=self._told, usage=self._usage(engine))

    def _usage(self, engine: Engine) -> Usage | None:
        """The figures after the call. None where there are none; then they are asked for, and what is wrong is seen."""
        if self._told is None or "usage" not in self._told.features:
            return None
        try:
            usage = _expect(engine.usage(), Usage)
            return msgspec.convert(msgspec.to_builtins(usage), Usage)
        except ENGINE_RAISES:
            return None

    def _capabilities(self, engine: Engine) -> Capabilities | None:
        """What the engine declares, when it is no longer what was told last."""
        declared = engine.capabilities
        if declared is self._told or declared == self._told:
            return None
        self._told = _expect(declared, Capabilities)
        return declared


class _Wrong(Exception):  # noqa: N818 - an answer
    """What the engine answers is of another type."""


def _expect(answer: Any, kind: type) -> Any:
    if not isinstance(answer, kind):
        raise _Wrong(f"{type(answer).__name__}, not {kind.__name__}")
    return answer
