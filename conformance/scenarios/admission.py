"""Requests that must wait, requests that must not, and requests that can never run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from conformance.operations import Add, Drain, Operation, Step
from conformance.records import RequestState
from conformance.scenarios.base import Build, Case, Scenario, Setting
from conformance.scenarios.bench import Bench, Run, Unjudged
from conformance.scenarios.capacity import Shape

WAITED_STEPS_MIN = 5
"""For how many steps an admission must have been postponed before its having changed nothing means something."""

# ------------------------------------------------------------------------------------------ postponed admissions


def postponed(shape: Shape, *, shared: bool = False, n: int = 1, **fields: Any) -> Build:
    """A request of ``n`` sequences that needs the whole pool waits, asked again every step, while ``n`` others run."""

    def build(setting: Setting) -> Sequence[Operation]:
        shape(setting)
        setting.need(**fields)
        setting.choose(max_num_seqs=2 * n)
        length = setting.config.max_model_len
        setting.pool(n * setting.blocks_for(length))
        running = setting.typical(shared_len=length if shared else 0)
        if n > 1:
            running = setting.request(3 * length // 4, length - 3 * length // 4)
        waiting = setting.request(length - 3, 3, n=n, shared_len=running.prompt_len if shared else 0)
        setting.require(
            setting.blocks_for(waiting.prompt_len) > setting.usable - n * setting.blocks_for(running.prompt_len)
            and setting.full_blocks(waiting) <= setting.usable,
            f"{setting.usable} usable blocks: the case needs a pool that holds the running or the waiting, not both",
        )
        return [*[running] * n, Step(), waiting, Step(running.max_tokens // 2), Drain()]

    return build


def postponed_for_want_of_a_place(setting: Setting) -> Sequence[Operation]:
    """The pool is ample; the batch is full."""
    setting.paged()
    setting.choose(max_num_seqs=1)
    add = setting.typical()
    seqs = setting.config.max_num_seqs
    setting.pool((seqs + 3) * setting.full_blocks(add))
    setting.require(
        seqs * setting.full_blocks(add) <= setting.usable, f"the pinned pool does not hold a batch of {seqs}"
    )
    return [*[add] * seqs, Step(), add, Drain()]


def postponed_on_evictable_hits(setting: Setting) -> Sequence[Operation]:
    """The waiting request's hits are on blocks nobody holds, so that they are no longer free for the rest of it."""
    setting.paged()
    setting.need(enable_prefix_caching=True)
    setting.choose(max_num_seqs=4)
    config = setting.config
    length, size = config.max_model_len, config.block_size
    setting.require(length >= 10 * size, "max_model_len must be at least ten blocks")
    setting.pool(setting.blocks_for(length))
    prefix = 3 * size
    left_behind = setting.request(prefix, 2, family=1, shared_len=prefix)
    running = setting.request(size + 1, min(30, length - size - 1))
    waiting = setting.request(length - 3, 3, family=1, shared_len=prefix)
    setting.require(
        setting.blocks_for(waiting.prompt_len) == setting.usable,
        "the waiting request must need the whole pool",
    )
    return [left_behind, Drain(), running, Step(), waiting, Step(running.max_tokens // 2), Drain()]


def nothing_changed(bench: Bench, run: Run) -> None:
    """ACC-8: until the waiting request is admitted, the others run exactly as they do without it."""
    waiting = max(run.requests.values(), key=lambda request: (request.admitted_step or 0, request.spec.arrival))
    admitted = waiting.admitted_step
    if admitted is None:
        raise Unjudged(f"{waiting.spec.request_id} was never admitted, which PRG-1 to PRG-3 judge")
    if admitted - waiting.arrived_step < WAITED_STEPS_MIN:
        raise Unjudged(
            f"{waiting.spec.request_id} was admitted after {admitted - waiting.arrived_step} steps: "
            "its admission was not postponed"
        )
    last = max(index for index, one in enumerate(run.operations) if isinstance(one, Add))
    without = bench.run(run.config, run.operations[:last] + run.operations[last + 1 :])
    there, here = _rows_before(without, admitted), _rows_before(run, admitted)
    if here != there:
        step = next(step for step in sorted(here.keys() | there.keys()) if here.get(step) != there.get(step))
        run.report(
            "ACC-8",
            f"in step {step} the engine does something else because {waiting.spec.request_id} waits, "
            f"postponed since step {waiting.arrived_step}",
            expected=f"{there.get(step, 'nothing runs')}, as without it",
            got=str(here.get(step, "nothing runs")),
        )


def _rows_before(run: Run, step: int) -> dict[int, list[tuple[str, int, int, int]]]:
    """Per step before ``step``: who ran, from which position, how many tokens, through how many blocks."""
    return {
        outcome.step: [(ran.name, ran.first, ran.tokens, len(ran.tables[0])) for ran in outcome.ran]
        for line in run.recorder.lines
        for outcome in line.steps
        if outcome.step < step and outcome.ran
    }


POSTPONED = Scenario(
    "postponed-admission",
    "A request that does not fit is asked about at every step",
    ("ACC-8",),
    [
        Case("paged", postponed(Setting.paged)),
        Case("sequence-blocks", postponed(Setting.sequence_blocks)),
        Case("one-token-blocks", postponed(Setting.one_token_blocks)),
        Case("want-of-a-place", postponed_for_want_of_a_place),
        Case("chunked", postponed(Setting.paged, enable_chunked_prefill=True)),
        Case("cached", postponed(Setting.paged, enable_prefix_caching=True)),
        Case("cached-shared-prefix", postponed(Setting.paged, shared=True, enable_prefix_caching=True)),
        Case("cached-evictable-hits", postponed_on_evictable_hits),
        Case("two-sequences", postponed(Setting.paged, n=2)),
    ],
    compare=nothing_changed,
)

# ------------------------------------------------------------------------------------------- impossible requests


def impossible(what: str) -> Build:
    """A request that can never run, between two that can."""

    def build(setting: Setting) -> Sequence[Operation]:
        setting.choose(block_size=setting.unit, max_num_seqs=4)
        size = setting.config.block_size
        setting.choose(max_model_len=16 * size)
        length = setting.config.max_model_len
        setting.pool(5 * size if what in {"more-sequences", "longer-than-the-model"} else 5)
        small = setting.request(min(size, 10), min(4, size))
        tokens = setting.usable * size
        needs = f"max_model_len = {length} must exceed what {setting.usable} usable blocks hold"
        apart = what in {"n-over-the-pool", "more-sequences"} and setting.capabilities.sequences_apart
        setting.require(not apart, "the sequences of a request need not run together on this engine")
        match what:
            case "prompt-over-the-pool":
                setting.require(length > tokens + 3, needs)
                never = Add(prompt_len=tokens + 1, max_tokens=2)
            case "outgrows-the-pool":
                setting.require(length > tokens + 3, needs)
                never = Add(prompt_len=max(1, tokens - size), max_tokens=size + 3)
            case "n-over-the-pool":
                setting.declares("fork")
                setting.host_pool()
                # Each of the two needs half the pool and one block more, and a prompt of one token shares none.
                total = (setting.usable // 2) * size + 2
                setting.require(total <= length, needs)
                never = Add(prompt_len=1, max_tokens=total - 1, n=2)
            case "more-sequences":
                never = Add(prompt_len=small.prompt_len, max_tokens=2, n=setting.config.max_num_seqs + 1)
            case _:
                setting.declares("length_limit")
                never = Add(prompt_len=length + 1, max_tokens=2)
        setting.require(2 * setting.full_blocks(small) <= setting.usable, "the pool must hold two small requests")
        return [small, Step(), never, small, Step(4), small, Drain()]

    return build


def blocks_nobody(bench: Bench, run: Run) -> None:
    """PRG-3: the impossible request is refused, and the others are served."""
    for rid, request in run.requests.items():
        impossible_one = rid == "r1"
        if impossible_one and request.state is not RequestState.REFUSED:
            run.report(
                "PRG-3",
                f"{rid} can never finish and is {request.state.value} at the end",
                expected="refused with a reason",
                got=request.state.value,
            )
        elif not impossible_one and request.state is not RequestState.FINISHED:
            run.report(
                "PRG-3",
                f"{rid}, which fits, is {request.state.value} at the end: it is held up by r1, which can never run",
                expected="finished",
                got=request.state.value,
            )


IMPOSSIBLE = Scenario(
    "impossible-request",
    "A request that can never run, between two that can",
    ("PRG-3",),
    [
        Case(what, impossible(what))
        for what in (
            "prompt-over-the-pool",
            "outgrows-the-pool",
            "n-over-the-pool",
            "more-sequences",
            "longer-than-the-model",
        )
    ],
    compare=blocks_nobody,
)

# --------------------------------------------------------------------------------------------- the queue's head


def queue(shape: Shape, sizes: Sequence[int], *, seqs: int, held: int, every: int = 2, **fields: Any) -> Build:
    """Requests of ``sizes`` (in tenths of a sequence) queue for a pool that holds ``held`` full sequences."""

    def build(setting: Setting) -> Sequence[Operation]:
        shape(setting)
        setting.need(**fields)
        setting.choose(max_num_seqs=seqs)
        length = setting.config.max_model_len
        setting.pool(held * setting.blocks_for(length))
        setting.require(setting.usable >= setting.blocks_for(length), "the pool does not hold one full sequence")
        operations: list[Operation] = []
        for number, size in enumerate(sizes):
            outputs = 3 + 2 * (number % 3)
            prompt = max(1, min(length - outputs, setting.span * size // 10))
            operations.append(setting.request(prompt, outputs))
            if number % every == every - 1:
                operations.append(Step())
        return [*operations, Drain()]

    return build


_ALIKE = (3,) * 9
_MIXED = (2, 6, 1, 4, 8, 2, 3, 1, 5)
_LARGE_FIRST = (9, 1, 1, 9, 1, 1, 9, 1, 1)

QUEUE = Scenario(
    "queue",
    "Requests queue for places, blocks and budget as these become free",
    ("PRG-7", "FAIR-1", "PRG-1"),
    [
        Case("alike-for-places", queue(Setting.paged, _ALIKE, seqs=2, held=9)),
        Case("mixed-for-places", queue(Setting.paged, _MIXED, seqs=2, held=9)),
        Case("alike-for-blocks", queue(Setting.paged, _ALIKE, seqs=9, held=1)),
        Case("mixed-for-blocks", queue(Setting.paged, _MIXED, seqs=9, held=2)),
        Case("small-behind-large", queue(Setting.paged, _LARGE_FIRST, seqs=9, held=1)),
        Case("sequence-blocks", queue(Setting.sequence_blocks, _MIXED, seqs=9, held=3)),
        Case("sequence-blocks-one", queue(Setting.sequence_blocks, _MIXED, seqs=9, held=1)),
        Case("one-token-blocks", queue(Setting.one_token_blocks, _MIXED, seqs=9, held=2)),
        Case("one-by-one", queue(Setting.paged, _MIXED, seqs=1, held=1, every=1)),
        Case("chunked", queue(Setting.paged, _MIXED, seqs=9, held=2, enable_chunked_prefill=True)),
        Case("cached", queue(Setting.paged, _MIXED, seqs=9, held=2, enable_prefix_caching=True)),
    ],
)


def priority_queue(priorities: Sequence[int], *, seqs: int, held: int) -> Build:
    """Requests of several priorities queue up behind a full batch."""

    def build(setting: Setting) -> Sequence[Operation]:
        setting.paged()
        setting.need(scheduling_policy="priority")
        setting.choose(max_num_seqs=seqs)
        length = setting.config.max_model_len
        setting.pool(held * setting.blocks_for(length))
        setting.require(setting.usable >= setting.blocks_for(length), "the pool does not hold one full sequence")
        operations: list[Operation] = []
        for number, priority in enumerate(priorities):
            operations.append(setting.typical(outputs=4 + number % 3, priority=priority))
            if number % 3 == 0:
                operations.append(Step())
        return [*operations, Drain()]

    return build


PRIORITY_QUEUE = Scenario(
    "priority-queue",
    "Requests of several priorities queue up",
    ("FAIR-2",),
    [
        Case("for-places", priority_queue((5, 5, 3, 1, 4, 0, 2, 5, 0), seqs=2, held=9)),
        Case("for-blocks", priority_queue((5, 5, 3, 1, 4, 0, 2, 5, 0), seqs=9, held=1)),
        Case("one-by-one", priority_queue((3, 2, 1, 0, 3, 2, 1, 0), seqs=1, held=1)),
        Case("alike", priority_queue((1, 1, 1, 1, 0, 1, 1), seqs=2, held=3)),
    ],
)

SCENARIOS = (POSTPONED, IMPOSSIBLE, QUEUE, PRIORITY_QUEUE)
