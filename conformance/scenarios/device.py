"""A device of fixed batch: lengths at its buckets, lines that change hands, and as many requests as it has lines.

The workloads are those of the hardware suite for Neuron (`neuron_tests`) as far as an engine's calls tell their story.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from conformance.operations import Abort, Add, Drain, Operation, Step
from conformance.protocol import DeviceShape
from conformance.scenarios.base import Build, Case, Scenario, Setting
from conformance.scenarios.bench import Script
from conformance.session import Session

LINES = 4
BUCKET_TOKENS_MAX = 512
"""Longer prompts say no more of a bucket than shorter ones, and take a real model long."""

OnShape: TypeAlias = Callable[[Setting, DeviceShape], Iterator[Operation]]
"""A workload for a device of a known shape."""


def on_device(setting: Setting, *, spare_blocks: int = 0) -> None:
    """One block for a sequence and one for each line, and some to spare, which no line goes with."""
    setting.sequence_blocks()
    setting.need(fixed_batch=True)
    setting.choose(max_num_seqs=LINES)
    setting.pool(setting.config.max_num_seqs + spare_blocks)


def requests(*groups: Sequence[tuple[int, int]], abort: int | None = None, spare_blocks: int = 0) -> Build:
    """Requests of (prompt, outputs), a group at a time with three steps in between; then one of them is aborted."""

    def build(setting: Setting) -> Sequence[Operation]:
        on_device(setting, spare_blocks=spare_blocks)
        operations: list[Operation] = []
        for number, group in enumerate(groups):
            operations += [setting.request(*lengths) for lengths in group]
            if abort is not None and number == 0:
                operations += [Step(2), Abort(abort)]
            operations.append(Step(3))
        return [*operations, Drain()]

    return build


def one_after_another(*lengths: tuple[int, int]) -> Build:
    """Requests of (prompt, outputs) that each have the device to themselves, and so the same line, most likely."""

    def build(setting: Setting) -> Sequence[Operation]:
        on_device(setting)
        return [operation for each in lengths for operation in (setting.request(*each), Drain())]

    return build


def for_shape(workload: OnShape) -> Build:
    """A workload that is made when the engine is built, and its device known."""

    def build(setting: Setting) -> Script:
        on_device(setting)

        def script(session: Session) -> Iterator[Operation]:
            shape = session.capabilities.device
            assert shape is not None, "an engine that declares a device and is asked to run on it names it"
            yield from workload(setting, shape)

        return script

    return build


def _in_reach(buckets: Sequence[int], length: int) -> list[int]:
    """The buckets that a prompt one longer and its three outputs fit in ``length``; only the first of long ones."""
    fit = [bucket for bucket in buckets if 2 <= bucket <= length - 4]
    return [bucket for bucket in fit if bucket <= BUCKET_TOKENS_MAX] or fit[:1]


def prompts_at_buckets(setting: Setting, shape: DeviceShape) -> Iterator[Operation]:
    """Beside somebody who decodes: prompts one short of a bucket, as long as it, one longer, and of unlike lengths."""
    length = setting.config.max_model_len
    for bucket in _in_reach(shape.context_buckets, length):
        yield Add(prompt_len=2, max_tokens=min(14, length - 2))
        yield Step(2)
        for prompt in (bucket - 1, bucket, bucket + 1):
            yield Add(prompt_len=prompt, max_tokens=3)
            yield Step(3)
        yield Add(prompt_len=max(1, bucket // 2), max_tokens=3)
        yield Add(prompt_len=bucket, max_tokens=3)
        yield Step(3)
    yield Drain()


def decodes_across_buckets(setting: Setting, shape: DeviceShape) -> Iterator[Operation]:
    """Two requests, one short and one that decodes from two tokens below each bucket to one above."""
    for bucket in _in_reach(shape.token_buckets, setting.config.max_model_len):
        yield Add(prompt_len=2, max_tokens=6)
        yield Add(prompt_len=max(1, bucket - 2), max_tokens=4)
        yield Drain()


def to_the_last_position(setting: Setting, shape: DeviceShape) -> Iterator[Operation]:
    """Requests that end at the model's length, and the longest prompts there are."""
    length = min(setting.config.max_model_len, shape.token_buckets[-1])
    yield setting.request(2, 6)
    for prompt in (length - 3, length - 2, length - 1):
        yield setting.request(prompt, length - prompt)
    yield Drain()


def lines_change_hands(setting: Setting, shape: DeviceShape) -> Iterator[Operation]:
    """The lines of a full batch change hands one by one, so that they are in no order."""
    for number in range(shape.batch):
        yield setting.request(3 + number % 3, 4 + 5 * number % 9)
    for number in range(2 * shape.batch):
        yield Step(1 + number % 2)
        yield setting.request(2 + number % 4, 3 + 7 * number % 5)
    yield Drain()


_FOUR = ((3, 9), (5, 12), (4, 7), (6, 10))

DEVICE = Scenario(
    "fixed-batch",
    "An engine on a device whose batch and shapes were compiled at start-up",
    ("DEV-1", "DEV-2", "DEV-3", "DEV-4", "DEV-5"),
    [
        Case("full-batch", requests(_FOUR)),
        Case("full-batch-1-spare-block", requests(_FOUR, _FOUR, spare_blocks=1)),
        Case("one-more-request", requests((*_FOUR, (5, 6)))),
        Case("lines-out-of-order", for_shape(lines_change_hands), sees=["device: full batch, lines out of order"]),
        Case("one-token-prompt-alone", requests([(1, 6)])),
        Case("one-token-prompt-beside-others", requests(_FOUR[:3], [(1, 6)]), sees=["device: one-token prompt"]),
        Case("one-token-prompts-together", requests(_FOUR[:2], [(1, 6), (1, 4)])),
        Case("one-token-prompt-and-a-longer-one", requests(_FOUR[:2], [(1, 6), (7, 4)])),
        Case("prompts-at-buckets", for_shape(prompts_at_buckets)),
        Case("decodes-across-buckets", for_shape(decodes_across_buckets)),
        Case("last-position", for_shape(to_the_last_position)),
        Case("long-and-short-on-a-line", one_after_another((20, 6), (2, 3), (3, 20), (2, 3), (1, 4))),
        Case("abort-while-decoding", requests(_FOUR, [(5, 6), (2, 4)], abort=1)),
        Case("abort-of-the-first", requests((*_FOUR, (5, 6)), [(1, 4)], abort=0)),
        Case("abort-of-who-waits", requests((*_FOUR, (5, 6)), [(1, 4)], abort=4)),
    ],
)

SCENARIOS = (DEVICE,)
