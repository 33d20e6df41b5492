"""What the emulated device does where devices differ, and the faults that can be planted in it.

The default `Behaviour` is a healthy device of SDK 2.21 or later. Everything else is switched on by name, so that a
test can say which property of the device it depends on. Standard library only.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

RowOrder: TypeAlias = Literal["new", "old"]
OutOfRange: TypeAlias = Literal["drop", "raise"]

STATUS_OUT_OF_BOUND = 1006
"""The Neuron runtime's status for an execution that addressed memory out of bound (nrt-troubleshoot)."""


class DeviceError(RuntimeError):
    """The device failed a call. ``status`` is the runtime's number for it."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(f"{message} (status {status})")
        self.status = status


class InterfaceError(ValueError):
    """A call that the real interface does not document: what was passed, where, and what is expected."""


class StaleReadError(RuntimeError):
    """In poison mode: attention of a line that was called would read a row which does not hold its KV."""


class NewGraphError(RuntimeError):
    """A call needs a graph that `to_neuron` did not compile."""


class Fault(enum.Enum):
    """A device that is broken in one way. After each: what it does, and the test of the suite that must notice.

    The numbers are those of the assertions of the hardware suite.
    """

    LINES_LEAK = "lines-leak"
    """A decode attends to the next line's rows: wrong tokens in a full batch (4)."""
    STALE_ROWS_VISIBLE = "stale-rows-visible"
    """A decode sees all rows that its line ever held since a reset: a short request after a long one (5)."""
    PREFILL_TRUNCATED = "prefill-truncated"
    """A prefill writes no more rows than its line ever held: a long request after a short one (6)."""
    PREFILL_TOUCHES_NEXT_LINE = "prefill-touches-next-line"
    """A prefill overwrites position 0 of the next line as well: others change (4, 9)."""
    PARTIAL_ROWS_PACKED = "partial-rows-packed"
    """A decode of n of N lines returns the first n rows, whichever lines were asked for (8, 17, 24)."""
    INACTIVE_LINES_IDLE = "inactive-lines-idle"
    """A line that is left out of a decode writes nothing: the damage that is documented is missing (11)."""
    FULL_BUCKET_OFF_BY_ONE = "full-bucket-off-by-one"
    """A prompt exactly as long as its bucket is answered from the row before its last one (12)."""
    FULL_BUCKET_SHARED_END = "full-bucket-shared-end"
    """When the longest prompt fills the bucket, the shorter ones are answered from the last column too (12)."""
    TOKEN_BUCKET_LOSES_CACHE = "token-bucket-loses-cache"  # noqa: S105 - not a password
    """The first decode on another token bucket finds an empty cache (13)."""
    LATE_COMPILE = "late-compile"
    """A prompt narrower than its bucket gets a graph of its own width, compiled in mid-service (21)."""
    NONDETERMINISTIC = "nondeterministic"
    """Now and then the two best tokens change places, on another call in every run (23)."""
    SAMPLES_SECOND_BEST = "samples-second-best"
    """Sampling on the device returns the second-best token (30)."""
    RESET_KEEPS_ROWS = "reset-keeps-rows"
    """`reset` clears nothing (31; seen when a row is read that nobody wrote since)."""


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Cost in units of no dimension: a counter, never a clock.

    A prefill costs ``prefill_per_position`` times its bucket, for each prompt. A decode step costs ``decode``
    whatever the number of lines called; ``decode_per_line`` adds to it for each of them, as no real device does.
    """

    prefill_per_position: int = 1
    decode: int = 16
    decode_per_line: int = 0


@dataclass(frozen=True, kw_only=True)
class Behaviour:
    """One device. The default is healthy, faithful and silent.

    row_order: "old" is the host code of SDK 2.19: the rows of a decode of all N lines come back in line order,
        whatever the order asked for (transformers-neuronx issue 94), and a line number out of range is an IndexError.
    out_of_range: what becomes of rows outside the buffer, which a prefill on a line that does not exist addresses:
        "drop" as XLA defines scatter, "raise" a `DeviceError` with status 1006. Which of them hardware does is open.
    poison: rows that hold no live KV are filled with a huge number, and a call that would read one raises
        `StaleReadError` with line and position. A device is silent, so this is not faithful; it is for finding faults.
    strict_interface: every argument of every call is checked against the documented interface; `InterfaceError`.
    forbid_new_graphs: a call for which no graph was compiled raises `NewGraphError`; else it is compiled and counted.
    cost: prices for the counter of the ledger; without, it stays 0.
    calls_kept: how many calls the log of a model keeps, the latest ones; None keeps all.
    sampling_seed: seed of sampling on the device.
    faults: what is broken. Names are taken as well as members of `Fault`.
    """

    row_order: RowOrder = "new"
    out_of_range: OutOfRange = "drop"
    poison: bool = False
    strict_interface: bool = False
    forbid_new_graphs: bool = True
    cost: CostModel | None = None
    calls_kept: int | None = None
    sampling_seed: int = 0
    faults: Iterable[Fault | str] = frozenset()

    def __post_init__(self) -> None:
        for name, allowed in (("row_order", get_args(RowOrder)), ("out_of_range", get_args(OutOfRange))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} = {getattr(self, name)!r}: must be one of {', '.join(allowed)}")
        if self.calls_kept is not None and self.calls_kept < 0:
            raise ValueError(f"calls_kept = {self.calls_kept}: must be at least 0, or None for all")
        if isinstance(self.faults, str):
            raise TypeError(f"faults = {self.faults!r}: must be several names or members of Fault, not one string")
        object.__setattr__(self, "faults", frozenset(map(Fault, self.faults)))

    def has(self, fault: Fault) -> bool:
        """Whether this device is broken in this way."""
        return fault in self.faults
