"""The shrinker: the shortest sequence of requests that still breaks the same requirement the same way.

Passes over operations (delta debugging: Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing
Input", TSE 2002), then over arguments, then over the configuration, again and again until nothing gets
smaller or the number of executions is used up. Operations are total, so every candidate is a legal trace.
What counts as "the same" is the fingerprint: the requirement and its message without numbers and names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from conformance.execute import Execution, execute
from conformance.operations import Add, Operation, Step
from conformance.protocol import EngineConfig, EngineFactory
from conformance.violations import Violation
from conformance.watchdog import Watchdog
from fuzz.plainer import SWITCHES, config_weight, instead_of, plainer, scaled_add, smaller, weight

EXECUTIONS_MAX = 2000
REPLAYS = 3
SEQUENCE_TOKENS_MIN = 2
"""A prompt of one token, and an output."""
PAIRS_MAX = 12
"""Traces up to this many operations are also tried without any two of them, and with two of them in one."""

_NUMBERS = re.compile(r"\br?\d+(/\d+)?\b|-\d+")
_LISTS = re.compile(r"\[[^\]]*\]|(?:#, )+#")
_HOW_IT_WAS_STOPPED = re.compile(r"(raised (?:EngineHung|MemoryExhausted): ).*")
"""The words are those of whoever came first, the watchdog or the wire, and say nothing of the fault."""


def normalised(violation: Violation) -> str:
    """The requirement and the message with every number, name and list replaced: what two findings share."""
    message = _HOW_IT_WAS_STOPPED.sub(r"\1", violation.message)
    return f"{violation.requirement} {_LISTS.sub('#', _NUMBERS.sub('#', message))}"


class Shrunk(msgspec.Struct, kw_only=True):
    """A smaller failing trace. ``stable`` is how many of the final replays failed in the same way."""

    config: EngineConfig
    operations: list[Operation]
    violation: Violation
    executions: int
    stable: int
    before: int
    """Operations before shrinking."""


class Shrinker:
    """Shrinks one failing trace against one engine. Deterministic; bounded in executions, not in time.

    ``failures_max``: of those, how many may fail as the trace does, where that is what takes time, as a hang does.
    """

    def __init__(
        self,
        factory: EngineFactory,
        *,
        executions_max: int = EXECUTIONS_MAX,
        failures_max: int | None = None,
        watchdog: Watchdog | None = None,
        pinned: frozenset[str] = frozenset(),
    ) -> None:
        self._factory = factory
        self._executions_max = executions_max - 1
        """Of the search; one is kept for what is left at its end."""
        self._failures_left = executions_max if failures_max is None else failures_max
        self._watchdog = watchdog
        self._pinned = pinned
        self.executions = 0
        self._target = ""
        self._requirement = ""
        self._config = EngineConfig()
        self._operations: list[Operation] = []
        self._violation: Violation | None = None

    def shrink(self, config: EngineConfig, operations: list[Operation], violation: Violation) -> Shrunk:
        """Shrink a trace that breaks ``violation.requirement``. Returns it unshrunk if it does not fail again."""
        self._target = normalised(violation)
        self._requirement = violation.requirement
        self._config, self._operations, self._violation = config, list(operations), violation
        before = len(operations)
        self._try(config, list(operations[: violation.operation + 1]))
        while not self._spent:
            size = self._size()
            self._delete_operations()
            self._fold_operations()
            self._simplify_operations()
            self._simplify_config()
            self._simplify_together()
            if self._size() == size:
                break
        self._merge_steps()
        stable = sum(self._fails(self._config, self._operations) is not None for _ in range(REPLAYS))
        assert self._violation is not None
        return Shrunk(
            config=self._config,
            operations=self._operations,
            violation=self._violation,
            executions=self.executions,
            stable=stable,
            before=before,
        )

    # -- trying ------------------------------------------------------------------------------------------

    def _fails(self, config: EngineConfig, operations: list[Operation]) -> Violation | None:
        self.executions += 1
        execution: Execution = execute(
            self._factory, config, operations, judge={self._requirement}, watchdog=self._watchdog
        )
        if execution.violations and normalised(execution.violations[0]) == self._target:
            return execution.violations[0]
        return None

    def _try(self, config: EngineConfig, operations: list[Operation]) -> bool:
        """Keep the candidate if it fails in the same way."""
        if self._spent:
            return False
        violation = self._fails(config, operations)
        if violation is None:
            return False
        self._failures_left -= 1
        self._config, self._operations, self._violation = config, operations, violation
        return True

    @property
    def _spent(self) -> bool:
        return self.executions >= self._executions_max or not self._failures_left

    def _size(self) -> tuple[int, int, int]:
        weights = [weight(operation) for operation in self._operations]
        return len(self._operations), sum(weights), config_weight(self._config)

    # -- passes ------------------------------------------------------------------------------------------

    def _delete_operations(self) -> None:
        """Delete runs of operations, long ones first, then any two."""
        chunk = max(1, len(self._operations) // 2)
        while chunk:
            at = 0
            while at < len(self._operations):
                if not self._try(self._config, self._operations[:at] + self._operations[at + chunk :]):
                    at += chunk
            chunk = chunk // 2
        if len(self._operations) <= PAIRS_MAX:
            self._delete_pairs()

    def _delete_pairs(self) -> None:
        first = 0
        while first < len(self._operations):
            for second in range(first + 1, len(self._operations)):
                rest = [op for index, op in enumerate(self._operations) if index not in {first, second}]
                if self._try(self._config, rest):
                    break
            else:
                first += 1

    def _merge_steps(self) -> None:
        """All neighbouring steps at once, where the search has ended before it came to them."""
        merged: list[Operation] = []
        for operation in self._operations:
            if merged and isinstance(operation, Step) and isinstance(merged[-1], Step):
                merged[-1] = Step(count=merged[-1].count + operation.count)
            else:
                merged.append(operation)
        if len(merged) < len(self._operations):
            self._executions_max, self._failures_left = self.executions + 1, 1
            self._try(self._config, merged)

    def _fold_operations(self) -> None:
        """Let one request do what took two operations, again and again."""
        progress = True
        while progress and len(self._operations) <= PAIRS_MAX:
            progress = any(self._try(config, operations) for config, operations in self._folded())

    def _folded(self) -> Iterator[tuple[EngineConfig, list[Operation]]]:
        """Without one request: its seat gone too, a step in its place, another with its tokens; or without an abort."""
        operations = self._operations
        adds = [(at, one) for at, one in enumerate(operations) if isinstance(one, Add)]
        fewer = self._config.max_num_seqs - 1
        if fewer and "max_num_seqs" not in self._pinned:
            for gone, _ in adds:
                yield (
                    msgspec.structs.replace(self._config, max_num_seqs=fewer),
                    operations[:gone] + operations[gone + 1 :],
                )
        for gone, _ in adds:  # all it does may be to let a step pass
            yield self._config, [*operations[:gone], Step(), *operations[gone + 1 :]]
        for gone, operation in enumerate(operations):
            for at, add in adds:
                if at == gone:
                    continue
                for longer in instead_of(operation, add, self._config.pipeline_depth):
                    rest = [*operations[:at], longer, *operations[at + 1 :]]
                    yield self._with_room_for(longer), rest[:gone] + rest[gone + 1 :]

    def _with_room_for(self, add: Add) -> EngineConfig:
        """The configuration with limits that ``add`` alone would not exceed."""
        config, length = self._config, add.prompt_len + add.max_tokens
        least = {"max_model_len": length, "num_blocks": -(-(length - 1) // config.block_size)}
        if not config.enable_chunked_prefill:
            least["max_num_batched_tokens"] = length
        raised = {name: max(getattr(config, name), low) for name, low in least.items() if name not in self._pinned}
        return msgspec.structs.replace(config, **raised)

    def _simplify_operations(self) -> None:
        """Merge neighbouring steps, then make every argument of every operation as plain as it can be."""
        at = 0
        while at + 1 < len(self._operations):
            one, other = self._operations[at], self._operations[at + 1]
            if isinstance(one, Step) and isinstance(other, Step):
                merged: Operation = Step(count=one.count + other.count)
                if self._try(self._config, [*self._operations[:at], merged, *self._operations[at + 2 :]]):
                    continue
            at += 1
        for at in range(len(self._operations)):
            progress = True
            while progress:
                progress = any(
                    self._try(self._config, [*self._operations[:at], simpler, *self._operations[at + 1 :]])
                    for simpler in plainer(self._operations[at])
                )

    def _simplify_config(self) -> None:
        progress = True
        while progress and not self._spent:
            progress = any(self._try(config, self._operations) for config in self._plainer_configs())

    def _simplify_together(self) -> None:
        """Smaller blocks or fewer of them, and requests that are shorter by as much: neither may go alone."""
        progress = True
        while progress and not self._spent:
            progress = any(self._try(config, operations) for config, operations in self._scaled())

    def _scaled(self) -> Iterator[tuple[EngineConfig, list[Operation]]]:
        config, operations = self._config, self._operations
        replace = msgspec.structs.replace
        if not self._pinned & {"block_size", "max_model_len"}:
            old = config.block_size
            for size in smaller(old, 1):
                length = max(1, config.max_model_len * size // old)
                shorter = [scaled_add(one, size, old) if isinstance(one, Add) else one for one in operations]
                yield replace(config, block_size=size, max_model_len=length), shorter
                yield replace(config, block_size=size), shorter
        if "num_blocks" not in self._pinned:
            for blocks in smaller(config.num_blocks, 1):
                less = (config.num_blocks - blocks) * config.block_size
                for at, one in enumerate(operations):
                    if isinstance(one, Add) and one.prompt_len > less:
                        prompt = one.prompt_len - less
                        add = replace(one, prompt_len=prompt, shared_len=min(one.shared_len, prompt))
                        yield replace(config, num_blocks=blocks), [*operations[:at], add, *operations[at + 1 :]]

    def _plainer_configs(self) -> Iterator[EngineConfig]:
        config = self._config
        default = EngineConfig()
        for name in SWITCHES:
            value, plain = getattr(config, name), getattr(default, name)
            if value != plain and name not in self._pinned:
                changes: dict[str, Any] = {name: plain}
                if name == "preemption_mode":
                    changes["num_swap_blocks"] = 0
                yield msgspec.structs.replace(config, **changes)
        for option in config.engine_options:
            if "engine_options" not in self._pinned:
                rest = {name: value for name, value in config.engine_options.items() if name != option}
                yield msgspec.structs.replace(config, engine_options=rest)
        for name in ("pipeline_depth", "num_swap_blocks", "num_lookahead_slots", "num_speculative_tokens"):
            low = 2 if name == "pipeline_depth" else 1
            if name not in self._pinned:
                for value in smaller(getattr(config, name), low):
                    yield msgspec.structs.replace(config, **{name: value})
        for name in ("max_num_seqs", "num_blocks", "block_size", "max_model_len", "max_num_batched_tokens"):
            if name not in self._pinned:
                for value in smaller(getattr(config, name), self._least(name)):
                    yield msgspec.structs.replace(config, **{name: value})

    def _least(self, name: str) -> int:
        """The smallest sensible value: a limit that no request exceeds so far is not made one that they exceed."""
        config = self._config
        if name == "max_num_batched_tokens" and not config.enable_chunked_prefill:
            return min(config.max_num_batched_tokens, config.max_model_len)
        if name == "max_model_len":
            lengths = [add.prompt_len + add.max_tokens for add in self._operations if isinstance(add, Add)]
            longest = max(lengths, default=SEQUENCE_TOKENS_MIN)
            return longest if longest <= config.max_model_len else SEQUENCE_TOKENS_MIN
        return 1
