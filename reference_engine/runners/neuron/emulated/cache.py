"""The KV cache of all lines, addressed by flat rows, and what is known of each row.

Row ``position * lines + line`` is how the device numbers them for its scatter (transformers-neuronx
attention_utils.py); a graph of bucket P sees the first ``P * lines`` rows. In memory the rows of a line lie side by
side, which attention on a CPU needs to be quick.
"""

from __future__ import annotations

import enum
from typing import Any

import torch

from reference_engine.runners.neuron.emulated.behaviour import (
    STATUS_OUT_OF_BOUND,
    Behaviour,
    DeviceError,
    Fault,
    StaleReadError,
)


class Content(enum.IntEnum):
    """What a row holds, as poison mode knows it."""

    NOTHING = 0
    LIVE = 1
    PADDING = 2
    TOKEN_0 = 3
    FOREIGN = 4


_EXPLAIN = {
    Content.NOTHING: "nothing of its sequence was written there",
    Content.PADDING: "its prefill wrote padding there",
    Content.TOKEN_0: "a decode step that did not ask for the line wrote token 0 there",
    Content.FOREIGN: "a prefill on a line that does not exist wrote there",
}


class Cache:
    """Keys and values, ``[layers, lines, kv_heads, positions, head_dim]``, zero at first."""

    def __init__(
        self, layers: int, lines: int, kv_heads: int, positions: int, head_dim: int, dtype: Any, how: Behaviour
    ) -> None:
        self.lines, self.positions, self.behaviour = lines, positions, how
        self._blank = torch.finfo(dtype).max if how.poison else 0.0
        """Of rows without KV. Poison is finite, so that a row of weight 0 adds nothing, and never overlooked."""
        shape = (layers, lines, kv_heads, positions, head_dim)
        self.keys, self.values = torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)
        self.content = torch.zeros(positions, lines, dtype=torch.int8)
        """In poison mode, the `Content` of every row; flat, it is indexed by row number."""
        self.written_by = torch.zeros(positions, lines, dtype=torch.int64)
        """In poison mode, the number of the call that wrote it."""
        self.longest = [0] * lines
        """Rows that each line ever held for a sequence, since the last reset."""
        self._fill()

    def _fill(self) -> None:
        for part in (self.keys, self.values):
            part.fill_(self._blank)

    def reset(self) -> None:
        """Zero everything (in poison mode: poison it)."""
        if self.behaviour.has(Fault.RESET_KEEPS_ROWS):
            return
        self._fill()
        self.content.zero_()
        self.longest = [0] * self.lines

    def line(self, line: int) -> Any:
        """A copy of all rows of one line: keys and values, ``[2, layers, kv_heads, positions, head_dim]``."""
        return torch.stack([self.keys[:, line], self.values[:, line]])

    def _poison(self, line: Any, positions: Any) -> None:
        self.keys[:, line, :, positions] = self.values[:, line, :, positions] = self._blank

    # -- prefill -----------------------------------------------------------------------------------------

    def write_prompt(self, line: int, keys: Any, values: Any, length: int, call: int) -> None:
        """Write a whole bucket, ``[layers, bucket, kv_heads, head_dim]``, of which ``length`` rows are the prompt.

        Rows ``line + p * lines``, by a counter: on a line that does not exist they are other rows, and the last ones
        lie outside. With a single line the cache is replaced and its number is not read.

        Raises DeviceError (status 1006) for rows outside, when they are not dropped; nothing is written then.
        """
        bucket = keys.shape[1]
        line = line if self.lines > 1 else 0
        rows = torch.arange(bucket) * self.lines + line
        inside = (rows >= 0) & (rows < bucket * self.lines)
        if not bool(inside.all()):
            if self.behaviour.out_of_range == "raise":
                raise DeviceError(
                    f"prefill on line {line} of {self.lines} writes outside the rows of bucket {bucket}: "
                    f"execution out of bound",
                    STATUS_OUT_OF_BOUND,
                )
            rows, keys, values = rows[inside], keys[:, inside], values[:, inside]
        exists = 0 <= line < self.lines
        if exists and self.longest[line] and self.behaviour.has(Fault.PREFILL_TRUNCATED):
            kept = self.longest[line]
            rows, keys, values = rows[:kept], keys[:, :kept], values[:, :kept]
        at = (slice(None), rows % self.lines, slice(None), rows // self.lines)
        self.keys[at], self.values[at] = keys.transpose(0, 1), values.transpose(0, 1)
        if self.behaviour.has(Fault.PREFILL_TOUCHES_NEXT_LINE):
            other = (line + 1) % self.lines
            self.keys[:, other, :, 0], self.values[:, other, :, 0] = keys[:, -1], values[:, -1]
        if exists:
            self.longest[line] = max(self.longest[line], length)
        if self.behaviour.poison:
            self._note_prompt(line, rows, bucket, length, call)

    def _note_prompt(self, line: int, rows: Any, bucket: int, length: int, call: int) -> None:
        if not 0 <= line < self.lines:
            self.content.view(-1)[rows] = Content.FOREIGN
            self.written_by.view(-1)[rows] = call
            return
        self.content[:length, line] = Content.LIVE
        self.content[length:bucket, line] = Content.PADDING
        self.content[bucket:, line] = Content.NOTHING  # an earlier sequence's, as far as this one is concerned
        self.written_by[:bucket, line] = call
        self._poison(line, slice(length, None))

    # -- decode ------------------------------------------------------------------------------------------

    def before(self, layer: int, bucket: int) -> tuple[Any, Any]:
        """Keys and values of a layer, as a graph of ``bucket`` positions sees them: [lines * kv_heads, bucket, D]."""
        return self.keys[layer, :, :, :bucket].flatten(0, 1), self.values[layer, :, :, :bucket].flatten(0, 1)

    def write_tokens(self, layer: int, lines: Any, positions: Any, keys: Any, values: Any) -> None:
        """Write one row for each pair of ``lines`` and ``positions``: ``[rows, kv_heads, head_dim]``."""
        self.keys[layer, lines, :, positions], self.values[layer, lines, :, positions] = keys, values

    def note_tokens(self, positions: list[int], lines: list[int], call: int) -> None:
        """After a decode: the lines that were asked for hold one row more, the others lost position 0."""
        for line in lines:
            self.longest[line] = max(self.longest[line], positions[line] + 1)
        if not self.behaviour.poison:
            return
        if not self.behaviour.has(Fault.INACTIVE_LINES_IDLE):
            idle = [line for line in range(self.lines) if line not in set(lines)]
            self.content[0, idle] = Content.TOKEN_0
            self.written_by[0, idle] = call
            self._poison(idle, 0)
        at = [positions[line] for line in lines]
        self.content[at, lines] = Content.LIVE
        self.written_by[at, lines] = call

    def check_read(self, seen: Any, lines: list[int]) -> None:
        """Raise StaleReadError when a line asked for would read a row without live KV of its own.

        ``seen`` is True where a line attends to a position, ``[lines, bucket]``. Of many, the first is named.
        """
        wrong = seen[lines] & (self.content[: seen.shape[1], lines] != Content.LIVE).T
        if not bool(wrong.any()):
            return
        row, position = wrong.nonzero()[0].tolist()
        line = lines[row]
        content = Content(int(self.content[position, line]))
        by = f" (call {int(self.written_by[position, line])})" if content is not Content.NOTHING else ""
        raise StaleReadError(f"line {line} reads position {position}, but {_EXPLAIN[content]}{by}")
