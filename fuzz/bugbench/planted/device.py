"""What reaches a device of fixed batch: lines, rows, widths."""

from __future__ import annotations

from collections.abc import Sequence

from fuzz.bugbench.parts import Runner
from fuzz.bugbench.registry import VLLM, planted
from reference_engine.request import Status
from reference_engine.runners.neuron.device import Rows
from reference_engine.runners.neuron.runner import _Row as Row
from reference_engine.runners.serving import SequenceKey
from reference_engine.scheduler import ScheduledSequence

LINES = "device lines"
DEVICE_SOURCE = "https://github.com/aws-neuron/transformers-neuronx/blob/main/src/transformers_neuronx/base.py"


@planted(LINES, "DEV-1", "PRG-8", source=f"{VLLM}13589", needs=("device",))
class BlockNumberIsTheLine(Runner):
    """A sequence runs on the line with the number of its block, and a larger pool has blocks that no line matches."""

    def _line(self, scheduled: ScheduledSequence) -> int:
        request, block = scheduled.sequence.request, scheduled.sequence.table[0]
        self._holders[request.request_id] = request
        self.lines._held[request.request_id] = block  # noqa: SLF001 - where the line would be kept
        self.probe.decide(block >= self.lines.count)
        return block


@planted(LINES, "DEV-1", "DEV-2", "PRG-8", source="https://github.com/sgl-project/sglang/pull/18803", needs=("device",))
class LineIsGivenAwayTwice(Runner):
    """A prompt is given a line that nobody else of its own call has, and somebody who decodes may have."""

    def _prefill(self, rows: list[Row]) -> dict[SequenceKey, int]:
        taken: set[int] = set()
        moved = []
        for row in rows:
            line = next(number for number in range(self.lines.count) if number not in taken)
            taken.add(line)
            others = {name: self.lines[name] for name in self.lines if name != row.key[0]}
            if self.probe.decide(line in others.values()):
                self.lines._held[row.key[0]] = line  # noqa: SLF001 - a fault is planted from inside
            moved.append(row._replace(line=self.lines[row.key[0]]))
        return super()._prefill(moved)


@planted(LINES, "DEV-2", source=DEVICE_SOURCE, needs=("device",))
class DecodesBucketByBucket(Runner):
    """Sequences are decoded in one call for each bucket, and every call runs over position 0 of the lines left out."""

    def _decode(self, rows: list[Row]) -> dict[SequenceKey, int]:
        buckets = self.device.config.token_buckets
        by_bucket: dict[int, list[Row]] = {}
        for row in rows:
            by_bucket.setdefault(next(size for size in buckets if row.first < size), []).append(row)
        self.probe.decide(len(by_bucket) > 1)
        sampled: dict[SequenceKey, int] = {}
        for some in by_bucket.values():
            sampled |= super()._decode(some)
        return sampled

    def _check_all_live(self, rows: list[Row]) -> None:
        """Leaves out on purpose."""


@planted(LINES, "DEV-3", source="https://github.com/aws-neuron/transformers-neuronx/issues/94", needs=("device",))
class RowsOfAFullBatchComeByLine(Runner):
    """The device gives the rows of a full batch back by line, and they are taken in the order they were handed over."""

    def _order(self, rows: list[Row]) -> list[Row]:
        return rows

    def _sampled(self, rows: list[Row], order: list[Row], given: Rows) -> dict[SequenceKey, int]:
        by_line = sorted(range(len(order)), key=lambda index: order[index].line)
        full = len(order) == self.lines.count
        if self.probe.decide(full and by_line != sorted(by_line)):
            given = [given[index] for index in by_line]
        return super()._sampled(rows, order, given)


@planted(LINES, "DEV-4", source=DEVICE_SOURCE, needs=("device",))
class OneTokenPromptDecodes(Runner):
    """A prompt of one token is handed over one token wide, which the device takes for a decode on all lines."""

    def _width(self, prompts: Sequence[Sequence[int]]) -> int:
        widest = max(map(len, prompts))
        self.probe.decide(widest == 1)
        return widest


@planted(LINES, "DEV-5", source="https://github.com/HabanaAI/vllm-fork/issues/158", needs=("device",))
class WidthIsAPowerOfTwo(Runner):
    """Prompts are padded to the next power of two, which may be more than the largest bucket that was compiled."""

    def _width(self, prompts: Sequence[Sequence[int]]) -> int:
        width = 1 << (super()._width(prompts) - 1).bit_length()
        self.probe.decide(width > self.device.config.prompt_max)
        return width


@planted(LINES, "PRG-8", "DEV-2", source="https://github.com/sgl-project/sglang/pull/16067", needs=("abort", "device"))
class AbortKeepsTheLine(Runner):
    """The line of an aborted request is never given back, until there is none for the next prompt."""

    def _release_ended(self) -> None:
        for name, request in list(self._holders.items()):
            if self.probe.decide(request.status is Status.ABORTED):
                del self._holders[name]
        super()._release_ended()
