"""What a device does with calls that no runner makes. The answers are what source alone could not settle."""

from __future__ import annotations

from collections.abc import Callable

from neuron_tests.rig import prompt
from reference_engine.runners.neuron.device import Device, DeviceError, Rows

ALIASED = "line 0 is overwritten, shifted by one position, and what falls outside the buffer is dropped"
RAISED = "the call fails with status 1006, execution out of bound"

_TOLERANCE = 1e-2
"""Logits are of the order of 10; those of other tokens differ by whole units."""


def row_order(device: Device) -> str:
    """In which order the rows of a full decode come back: as asked (new), by line (old), or neither."""
    lines = list(range(device.config.lines))
    device.prefill(lines, [prompt(f"line {line}", 8) for line in lines])
    by_line = device.decode(lines, [11 + line for line in lines], [8] * len(lines))
    backwards = device.decode(lines[::-1], [11 + line for line in lines[::-1]], [8] * len(lines))
    return "new" if _same(backwards, by_line[::-1]) else "old" if _same(backwards, by_line) else "neither"


def one_token_call_damages(device: Device) -> bool:
    """Whether a prompt of one token that is not widened, on line 1, changes what line 0 answers."""
    return _damages(device, lambda: device.prefill([1], [[77]], width=1))


def omission_damages(device: Device) -> bool:
    """Whether a decode of line 1 alone changes what line 0 answers."""
    return _damages(device, lambda: device.decode([1], [9], [6]))


def _damages(device: Device, disturb: Callable[[], Rows]) -> bool:
    answers: list[Rows] = []
    for disturbed in (False, True):
        device.prefill([0, 1], [prompt("kept", 6), prompt("other", 6)])
        if disturbed:
            disturb()
        answers.append(device.decode([0], [5], [6]))
    return not _same(*answers)


def prefill_on_line_n(device: Device) -> str:
    """What a prefill on line N does, with lines 0 to N - 1, in one sentence. It may leave the device unusable."""
    lines = list(range(device.config.lines))
    answers: list[Rows] = []
    try:
        for disturbed in (False, True):
            device.prefill(lines, [prompt(f"line {line}", 12) for line in lines])
            if disturbed:
                device.prefill([len(lines)], [prompt("line N", 12)])
            answers.append(device.decode(lines, [5] * len(lines), [12] * len(lines)))
    except DeviceError as error:
        return RAISED if "1006" in str(error) else f"the call fails otherwise: {error}"
    before, after = answers
    changed = [line for line in lines if not _same([before[line]], [after[line]])]
    return ALIASED if changed == [0] else f"lines that answer otherwise afterwards: {changed or 'none'}"


def _same(one: Rows, other: Rows) -> bool:
    pairs = zip(one, other, strict=True)
    return all(abs(a - b) < _TOLERANCE for first, second in pairs for a, b in zip(first, second, strict=True))
