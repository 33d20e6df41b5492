"""A Neuron device under continuous batching, as a runner sees it. Standard library only.

A device has N *lines*. Each holds the KV of one sequence, at positions ``0 .. P - 1`` of the largest token bucket P.
Shapes are compiled ahead: a prefill runs the smallest context bucket that holds the prompt, one prompt after another;
a decode runs all N lines on the smallest token bucket that holds the largest position. Lines that a decode call does
not name run as well: token 0 at position 0, which **overwrites position 0 of that line**.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, TypeAlias

Route: TypeAlias = Literal["prefill", "decode"]

Rows: TypeAlias = list[list[float]]
"""One row for each line of a call, in the order of the call: the logits of its last token, ``[vocabulary]``.
With `DeviceConfig.sample_on_device` a row is the sampled token alone."""

TP_DEGREES = (1, 2, 4, 8, 24, 32)
"""Tensor parallel degrees documented for Inf2 (24) and Trn1 (32), in NeuronCores."""


class DeviceError(RuntimeError):
    """The device, or the package that drives it, failed a call; the message says which call and what it said."""


class DeviceUnavailableError(RuntimeError):
    """There is no device, or what should drive it is not the real package; the message is one sentence."""


@dataclass(frozen=True, kw_only=True)
class DeviceConfig:
    """What is compiled. Buckets in tokens, ascending; ``tp_degree`` in NeuronCores; ``amp`` as the package names it.

    ``sample_on_device``: the device samples with top_k = 1 and returns tokens in place of logits.
    ``compile_workers``: graphs compiled at a time; an inf2.xlarge has 16 GiB of host memory.

    Raises ValueError for a value out of range.
    """

    model_path: str
    lines: int
    context_buckets: tuple[int, ...]
    token_buckets: tuple[int, ...]
    tp_degree: int = 2
    amp: Literal["f32", "bf16", "f16"] = "f32"
    sample_on_device: bool = False
    compile_workers: int = 1

    def __post_init__(self) -> None:
        if self.lines < 1:
            raise ValueError(f"lines = {self.lines}: must be at least 1")
        if self.tp_degree not in TP_DEGREES:
            raise ValueError(f"tp_degree = {self.tp_degree}: must be one of {', '.join(map(str, TP_DEGREES))}")
        for name in ("context_buckets", "token_buckets"):
            buckets: tuple[int, ...] = getattr(self, name)
            if not buckets or buckets[0] < 1 or list(buckets) != sorted(set(buckets)):
                raise ValueError(f"{name} = {buckets}: must be positive, ascending and at least one")
        if self.prompt_max > self.positions:
            raise ValueError(
                f"context_buckets = {self.context_buckets}: the largest must not exceed the largest token bucket "
                f"({self.positions})"
            )

    @property
    def prompt_max(self) -> int:
        """Tokens of the longest prompt: the largest context bucket."""
        return self.context_buckets[-1]

    @property
    def positions(self) -> int:
        """Positions of a line: the largest token bucket."""
        return self.token_buckets[-1]

    @property
    def graphs(self) -> int:
        """Graphs compiled: one for each context bucket (a prefill has batch 1) and one for each token bucket."""
        return len(self.context_buckets) + len(self.token_buckets)


class DeviceCall(NamedTuple):
    """One call as it was handed to the device, and how long it took in seconds (0 where that means nothing)."""

    route: Route
    lines: tuple[int, ...]
    positions: tuple[int, ...]
    """Of each line, the position of the last token: prompt length - 1, or the position decoded."""
    width: int
    """Tokens in a row, padding included, before the device pads to a bucket."""
    seconds: float = 0.0


@dataclass
class DeviceStats:
    """What was asked of a device since it was built, or since `clear`."""

    calls: list[DeviceCall] = field(default_factory=list)

    @property
    def prefills(self) -> int:
        """Prompts handed to the prefill route."""
        return sum(len(call.lines) for call in self.calls if call.route == "prefill")

    @property
    def decodes(self) -> list[DeviceCall]:
        """The decode calls."""
        return [call for call in self.calls if call.route == "decode"]

    def clear(self) -> None:
        """Forget all calls."""
        self.calls.clear()


class Device(Protocol):
    """A device. Calls raise `DeviceError` for what it cannot do; lines and lengths are the caller's to check."""

    @property
    def config(self) -> DeviceConfig: ...

    @property
    def stats(self) -> DeviceStats: ...

    def build(self) -> None:
        """Load the weights and compile every graph. Raises `DeviceUnavailableError`, `DeviceError`."""

    def prefill(self, lines: Sequence[int], prompts: Sequence[Sequence[int]], width: int | None = None) -> Rows:
        """Run ``prompts`` on ``lines``, each padded to ``width`` tokens (None: the longest of them).

        A call of width 1 is not a prefill to the device: it takes the decode route and overwrites position 0 of
        every line it does not name.
        """

    def decode(self, lines: Sequence[int], tokens: Sequence[int], positions: Sequence[int]) -> Rows:
        """Run one token on each of ``lines``, at ``positions``; every other line loses its position 0."""

    def reset(self) -> None:
        """Zero the cache of every line."""

    def close(self) -> None:
        """Give the device up. The cores stay with the process until it ends."""


def best_token(row: Sequence[float]) -> int:
    """The token of the largest logit, the first one of equals."""
    return max(range(len(row)), key=row.__getitem__)
