"""The encoder cache: items that are shared, crowded out, aborted, preempted, and too large."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from conformance.operations import Abort, Drain, Operation, Step
from conformance.records import RequestState
from conformance.scenarios.base import Build, Case, Scenario, Setting
from conformance.scenarios.bench import Bench, Run
from conformance.scenarios.pressure import tight_pool


def pictures(
    size: int,
    *sizes: tuple[int, ...],
    tight: bool = False,
    abort: bool = False,
    budget: int = 0,
    **fields: Any,
) -> Build:
    """Requests with encoder items of ``sizes`` over a cache that holds ``size``."""

    def build(setting: Setting) -> Sequence[Operation]:
        setting.paged()
        # Most engines that have an encoder cache fill it chunk by chunk.
        setting.choose(enable_chunked_prefill=True, max_num_seqs=4)
        setting.need(encoder_cache_size=size, **fields)
        if budget:
            setting.choose(max_num_batched_tokens=max(budget, setting.config.max_num_seqs))
        prompt = max(1, min(setting.config.max_model_len // 2, 16))
        outputs = min(12, setting.config.max_model_len - prompt)
        adds = [
            setting.request(prompt, outputs, family=number % 3, encoder_sizes=items)
            for number, items in enumerate(sizes)
        ]
        if tight:
            tight_pool(setting, adds, 0.6)
        else:
            setting.pool(sum(setting.full_blocks(add) for add in adds))
        operations: list[Operation] = []
        for number, add in enumerate(adds):
            operations += [add, Step()] if number % 2 else [add]
            if abort and number % 2:
                operations.append(Abort(number))
        return [*operations, Step(2), adds[0], Drain()]

    return build


def served_or_refused(bench: Bench, run: Run) -> None:
    """ENC-1: an item larger than the cache is refused; everybody else is served."""
    size = run.config.encoder_cache_size
    for rid, request in run.requests.items():
        largest = max((item.size for item in request.spec.encoder_items), default=0)
        if largest <= size and request.state in {RequestState.FINISHED, RequestState.ABORTED}:
            continue
        if largest > size and request.state is RequestState.REFUSED:
            continue
        run.report(
            "ENC-1",
            f"{rid} with an encoder item of {largest} is {request.state.value} at the end",
            expected="finished" if largest <= size else f"refused: the encoder cache holds {size}",
            got=request.state.value,
        )


_FOUR = ((3,), (4, 2), (3,), (5,))

ENCODER = Scenario(
    "encoder-cache",
    "Requests with encoder items over a small encoder cache",
    ("ENC-1",),
    [
        Case("ample", pictures(64, *_FOUR)),
        Case("crowded", pictures(6, *_FOUR)),
        Case("one-item-at-a-time", pictures(5, (5,), (5,), (4,), (5,))),
        Case("item-as-large-as-the-cache", pictures(8, (8,), (8,), (2,))),
        Case("item-too-large", pictures(6, (3,), (7,), (3,))),
        Case("aborts", pictures(6, *_FOUR, abort=True)),
        Case("preempted", pictures(8, *_FOUR, tight=True)),
        Case("small-chunks", pictures(6, *_FOUR, budget=6)),
        Case("small-chunks-preempted", pictures(8, *_FOUR, budget=6, tight=True)),
        Case("whole-prompts", pictures(6, *_FOUR, enable_chunked_prefill=False)),
        Case("cached", pictures(6, *_FOUR, *_FOUR, enable_prefix_caching=True)),
    ],
    compare=served_or_refused,
)

SCENARIOS = (ENCODER,)
