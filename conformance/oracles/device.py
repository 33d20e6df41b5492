"""DEV-*: what an engine hands to a device of fixed batch, and to whom the device's work comes back.

The device of the contract is that of transformers-neuronx with continuous batching (its ``decoder`` and
``attention_utils`` modules): a call runs all lines of the compiled batch, and those it does not name compute token 0
at position 0, over what they hold. Kept here is what every line holds; harm is reported where a damaged line is used.

An engine with a model of its own also says which tokens it took. A wrong one is DEV-3 when another row of the call
was to get it, DEV-4 when some length was odd since the sequence's last right one, and PRG-5 when nothing explains it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from conformance.ledger import Ledger
from conformance.oracles.base import Oracle, Report
from conformance.protocol import (
    Capabilities,
    DeviceCall,
    DeviceShape,
    EngineConfig,
    Sampled,
    SequenceKey,
    Taken,
)
from conformance.records import RequestRecord, StepFacts


class _Harm(NamedTuple):
    """Why position 0 of a line is lost."""

    requirement: str
    cause: str


class _Line:
    """What a line of the device's cache holds: positions ``[0, length)`` of a sequence, or what is left of them."""

    __slots__ = ("harm", "key", "length")

    def __init__(self, key: SequenceKey, length: int) -> None:
        self.key = key
        self.length = length
        self.harm: _Harm | None = None


class DeviceOracle(Oracle):
    """DEV-1 to DEV-5, and PRG-5 of the tokens that an engine takes from a model of its own. O(lines of the batch)."""

    requirements = ("DEV-1", "DEV-2", "DEV-3", "DEV-4", "DEV-5")

    @classmethod
    def concerns(cls, config: EngineConfig, capabilities: Capabilities) -> bool:  # noqa: ARG003 - asked alike of all
        return capabilities.device is not None or capabilities.own_model

    def __init__(self, ledger: Ledger, report: Report) -> None:
        super().__init__(ledger, report)
        self._shape: DeviceShape | None = ledger.capabilities.device
        self._lines: dict[int, _Line] = {}
        """By number, every line that somebody live was last prefilled on."""
        self._used: set[int] = set()
        self._calls: dict[int, list[DeviceCall]] = {}
        """Of the steps that are not committed yet."""
        self._made = 0
        """Calls made so far."""
        self._odd: tuple[int, str] = (0, "")
        """The last call with an odd length: its number, from 1, and what was odd."""
        self._right: dict[SequenceKey, int] = {}
        """Calls made when all that a sequence has was last known to be right."""
        self._bucket: int | None = None
        """Of the last decode call, by its place among the buckets."""

    # -- the calls of a step -----------------------------------------------------------------------------

    def on_step(self, facts: StepFacts) -> None:
        if self._shape is None:
            return
        step = facts.plan.step
        self._calls[step] = facts.plan.device_calls
        for call in facts.plan.device_calls:
            self._made += 1
            self._check_shape(call, step, self._shape)
            self._note_odd(call, self._shape)
            if not self._check_lines(call, step, self._shape.batch):
                return  # what such a call overwrites depends on the device
            if call.route == "decode":
                self._decode(call, step)
                self._note_order(call, facts, self._shape)
            else:
                for key, line, position in zip(call.rows, call.lines, call.positions, strict=True):
                    self._write(key, line, position)
            self._check_returned(call, step)

    def _check_shape(self, call: DeviceCall, step: int, shape: DeviceShape) -> None:
        """DEV-5: no graph is compiled, and none is asked for that was not."""
        needed, most = call.width, shape.context_buckets[-1]
        if call.route == "decode":
            needed, most = 1 + max(call.positions), shape.token_buckets[-1]
        if call.compiled or needed > most:
            self.report(
                "DEV-5",
                f"in step {step} the {call.route} of {self._names(call.rows)} "
                + ("makes the device compile" if call.compiled else f"needs a bucket of {needed} tokens"),
                expected="no graph after start-up" if call.compiled else f"at most {most}, the largest there is",
                got=f"{call.compiled} compiled for width {call.width}, last positions {call.positions}",
            )

    def _check_lines(self, call: DeviceCall, step: int, batch: int) -> bool:
        """DEV-1: lines exist, and differ within the call."""
        if len(set(call.lines)) == len(call.lines) and min(call.lines) >= 0 and max(call.lines) < batch:
            return True
        line = next((one for one in call.lines if not 0 <= one < batch or call.lines.count(one) > 1), 0)
        who = self._names(key for key, one in zip(call.rows, call.lines, strict=True) if one == line)
        self.report(
            "DEV-1",
            f"in step {step} a {call.route} runs {who} on line {line}"
            + ("" if 0 <= line < batch else ", which the device does not have"),
            expected=f"lines 0 to {batch - 1}, each once in a call",
            got=f"lines {call.lines} for {self._names(call.rows)}",
        )
        return False

    def _write(self, key: SequenceKey, line: int, position: int) -> None:
        """The line is written from position 0 on: whatever it held does not matter any more."""
        if line in self._used:
            self.ledger.saw("device: line used again")
        self._used.add(line)
        self._lines[line] = _Line(key, position + 1)
        self._right[key] = self._made - 1  # what came before this call is overwritten

    def _decode(self, call: DeviceCall, step: int) -> None:
        """A decode reads its lines up to their position; all lines that it leaves out lose position 0."""
        for key, line, position in zip(call.rows, call.lines, call.positions, strict=True):
            if position == 0:
                self._write(key, line, position)
                continue
            self._check_read(key, line, position, step)
            self._lines[line] = _Line(key, position + 1)
        named = set(call.lines)
        left_out = [held for line, held in self._lines.items() if line not in named and held.harm is None]
        if left_out:
            names = self._names(call.rows)
            harm = _Harm("DEV-2", f"in step {step}, when a decode of {names} left it out")
            if not any(call.positions):
                harm = _Harm("DEV-4", f"in step {step}, when the one-token prompt of {names} ran as a decode")
            for held in left_out:
                held.harm = harm

    def _check_read(self, key: SequenceKey, line: int, position: int, step: int) -> None:
        """DEV-2, and DEV-4 where a one-token prompt is to blame: the line holds all that the sequence reads."""
        held, requirement = self._lines.get(line), "DEV-2"
        if held is None:
            state = "which holds nothing of anybody live"
        elif held.key != key:
            state = f"which holds the KV of {self.ledger.name_of(held.key)}"
        elif held.harm is not None:
            requirement = held.harm.requirement
            state = f"whose position 0 was overwritten {held.harm.cause}"
        elif held.length < position:
            state = f"which holds positions 0 to {held.length - 1}"
        else:
            return
        self.report(
            requirement,
            f"in step {step} {self.ledger.name_of(key)} decodes at position {position} on line {line}, {state}",
            expected="in every decode since its prefill, or prefilled again first",
            got="used as it is",
        )

    def _check_returned(self, call: DeviceCall, step: int) -> None:
        """DEV-3, where the engine shows to whom it gives what."""
        if call.returned is None or call.returned == call.rows:
            return
        name = self.ledger.name_of
        pairs = zip(call.rows, call.returned, strict=False)  # there may be fewer
        lost = next((f"{name(key)}'s row to {name(to)}" for key, to in pairs if key != to), "not as many rows back")
        self.report(
            "DEV-3",
            f"in step {step} the {call.route} gives {lost}",
            expected=f"rows for {self._names(call.rows)}",
            got=f"{self._names(call.returned)}, on lines {call.lines}",
        )

    def on_end(self, request: RequestRecord) -> None:
        """Nobody reads its lines again."""
        rid = request.spec.request_id
        self._lines = {line: held for line, held in self._lines.items() if held.key[0] != rid}

    # -- what is odd -------------------------------------------------------------------------------------

    def _note_odd(self, call: DeviceCall, shape: DeviceShape) -> None:
        """Lengths at which an input changes its route or its graph."""
        saw = self.ledger.saw
        for key, position in zip(call.rows, call.positions, strict=True):
            if position == 0:
                saw("device: one-token prompt")
                self._odd = self._made, f"the one-token prompt of {self.ledger.name_of(key)}"
            elif call.route == "prefill" and position + 1 in shape.context_buckets:
                saw("device: prompt fills its bucket")
                self._odd = self._made, f"the prompt of {self.ledger.name_of(key)}, exactly as long as a bucket"
        if call.route == "decode":
            bucket = bisect_left(shape.token_buckets, 1 + max(call.positions))
            if self._bucket not in {None, bucket}:
                saw("device: decode in another bucket")
                self._odd = self._made, "the decode in another bucket"
            self._bucket = bucket

    def _note_order(self, call: DeviceCall, facts: StepFacts, shape: DeviceShape) -> None:
        """Rows are mixed up where the lines of a full batch are in another order than its requests."""
        if len(call.rows) < shape.batch:
            return
        line_of = dict(zip(call.rows, call.lines, strict=True))
        lines = [line_of[row.record.key] for row in facts.rows if row.record.key in line_of]
        if lines != sorted(lines):
            self.ledger.saw("device: full batch, lines out of order")

    # -- tokens of the engine's own ----------------------------------------------------------------------

    def on_taken(self, step: int, taken: list[Taken], sampled: Mapping[SequenceKey, Sampled]) -> None:
        for one in taken:
            key = (one.request_id, one.seq)
            if key not in sampled or not self.ledger.requests[key[0]].live:
                continue
            if one.tokens != sampled[key].tokens:
                self._report_wrong(step, key, one.tokens, sampled)
                return
            self._right[key] = self._made

    def on_commit(self, step: int, finished: object, ended: object) -> None:
        self._calls.pop(step, None)

    def _report_wrong(
        self, step: int, key: SequenceKey, tokens: list[int], sampled: Mapping[SequenceKey, Sampled]
    ) -> None:
        """The engine took another token than the right one: say why, as far as its calls tell."""
        requirement, why = "PRG-5", "which no call explains"
        beside = [row for call in self._calls.get(step, ()) if key in call.rows for row in call.rows if row != key]
        meant = next((row for row in beside if row in sampled and sampled[row].tokens == tokens), None)
        number, odd = self._odd
        if meant is not None:
            requirement, why = "DEV-3", f"which the same call computed for {self.ledger.name_of(meant)}"
        elif number > self._right.get(key, 0):
            requirement, why = "DEV-4", f"after {odd}"
        self.report(
            requirement,
            f"in step {step} {self.ledger.name_of(key)} takes a token that is not its own, {why}",
            expected=f"tokens {sampled[key].tokens}",
            got=f"tokens {tokens}",
        )

    # -- words -------------------------------------------------------------------------------------------

    def _names(self, keys: Iterable[SequenceKey]) -> str:
        return ", ".join(map(self.ledger.name_of, keys)) or "nobody"
