"""Two runs that must agree: the same thing twice, and the same requests under another schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec

from conformance.operations import Abort, Drain, Operation, Step
from conformance.scenarios.base import HOST_BLOCKS, Case, Compare, Scenario, Setting
from conformance.scenarios.bench import Bench, Run, Script, as_declared
from conformance.scenarios.capacity import SHAPES, Shape
from conformance.trace import StepOutcome

Workload: TypeAlias = Callable[[Setting], Script]

# -------------------------------------------------------------------------------------------------- the same twice


def mixture(shape: Shape, *, held: float, aborts: bool = False, **fields: Any) -> Workload:
    """Requests of several lengths, some with a common prefix, over a pool of ``held`` full sequences."""

    def build(setting: Setting) -> Script:
        shape(setting)
        setting.need(**fields)
        setting.choose(max_num_seqs=4)
        if fields.get("enable_chunked_prefill"):
            setting.choose(max_num_batched_tokens=max(12, setting.config.max_num_seqs))
        if fields.get("preemption_mode") == "swap":
            setting.choose(num_swap_blocks=HOST_BLOCKS)
        length = setting.config.max_model_len
        setting.pool(max(1, int(held * setting.blocks_for(length))))
        setting.require(
            setting.usable >= setting.blocks_for(min(length, 40)),
            "the pool does not hold one request at its full length",
        )
        priorities = setting.config.scheduling_policy == "priority"
        operations: list[Operation] = []
        for number in range(10):
            typical = setting.typical(
                outputs=6 + 5 * (number % 4),
                shared_len=8 if number % 2 else 0,
                priority=number * 5 % 3 if priorities else 0,
            )
            operations += [typical, Step(number % 3)] if number % 3 else [typical]
            if aborts and number % 4 == 3:
                operations.append(Abort(number))
        operations.append(Drain())
        return as_declared(operations)

    return build


def same_again(bench: Bench, run: Run) -> None:
    """DET-1: the same plans, up to renaming of blocks."""
    again = bench.run(run.config, run.operations)
    if again.recorder.digest() == run.recorder.digest():
        return
    one, other = _outcomes(run), _outcomes(again)
    for number, outcome in enumerate(one):
        if number >= len(other) or _shown(outcome) != _shown(other[number]):
            got = _shown(other[number]) if number < len(other) else "no such step"
            run.report(
                "DET-1",
                f"step {outcome.step} differs when the same operations are run again",
                expected=_shown(outcome),
                got=got,
            )
            return
    step, expected, got = _first_other_block(one, other)
    run.report(
        "DET-1",
        f"in step {step} other blocks are handed out when the same operations are run again",
        expected=expected,
        got=got,
    )


def _first_other_block(one: list[StepOutcome], other: list[StepOutcome]) -> tuple[int, str, str]:
    """The step from which no renaming of blocks makes the runs equal, and a table of each there."""
    names: tuple[dict[int, int], dict[int, int]] = ({}, {})
    for here, there in zip(one, other, strict=True):
        for ran, again in zip(here.ran, there.ran, strict=True):
            renamed = [
                [[known.setdefault(block, len(known)) for block in table] for table in tables]
                for known, tables in zip(names, (ran.tables, again.tables), strict=True)
            ]
            if renamed[0] != renamed[1]:
                return here.step, f"{ran.name} through {ran.tables[0]}", f"{again.name} through {again.tables[0]}"
    return one[-1].step, "the same block moves", "others"


def _outcomes(run: Run) -> list[StepOutcome]:
    return [outcome for line in run.recorder.lines for outcome in line.steps]


def _shown(outcome: StepOutcome) -> str:
    """A step in words that do not name blocks."""
    ran = ", ".join(f"{one.name} from {one.first} for {one.tokens}" for one in outcome.ran)
    preempted = ", ".join(verdict.request_id for verdict in outcome.preempted)
    return (f"runs {ran}" if ran else "runs nothing") + (f", preempts {preempted}" if preempted else "")


SAME_AGAIN = Scenario(
    "same-again",
    "The same operations twice",
    ("DET-1",),
    [
        *(Case(name, mixture(shape, held=4)) for name, shape in SHAPES.items()),
        Case("paged-tight", mixture(Setting.paged, held=1.5)),
        Case("paged-tight-swap", mixture(Setting.paged, held=1.5, preemption_mode="swap")),
        Case("paged-aborts", mixture(Setting.paged, held=1.5, aborts=True)),
        Case("paged-cached", mixture(Setting.paged, held=1.5, enable_prefix_caching=True)),
        Case("paged-chunked", mixture(Setting.paged, held=1.5, enable_chunked_prefill=True)),
        Case("paged-priority", mixture(Setting.paged, held=1.5, scheduling_policy="priority")),
        Case("paged-in-flight", mixture(Setting.paged, held=1.5, pipeline_depth=2)),
    ],
    compare=same_again,
)

# ------------------------------------------------------------------------------------------ another schedule


def same_outputs(**fields: Any) -> Compare:
    """DET-2: with ``fields`` set otherwise, every request ends alike and with the same tokens."""

    def compare(bench: Bench, run: Run) -> None:
        other = bench.run(msgspec.structs.replace(run.config, **fields), run.operations)
        changed = ", ".join(f"{name} = {value}" for name, value in fields.items())
        for rid, request in run.requests.items():
            twin = other.requests.get(rid)
            if twin is not None and twin.full_len != request.full_len:
                continue  # the engine declares that it may grow to another length there
            here, there = run.watch.outputs.get(rid), other.watch.outputs.get(rid)
            if here is not None and there is not None and here != there:
                run.report(
                    "DET-2",
                    f"with {changed}, {rid} gets other tokens",
                    expected=f"outputs {here}",
                    got=f"outputs {there}",
                )
                return
            if other.cut_short or request.live or twin is None or twin.live:
                continue
            if twin.state is not request.state:
                run.report(
                    "DET-2",
                    f"with {changed}, {rid} is {twin.state.value}; without, it is {request.state.value}",
                    expected=request.state.value,
                    got=twin.state.value,
                )
                return
        run.completed()
        other.completed()

    return compare


def tighter_pool(bench: Bench, run: Run) -> None:
    """DET-2: a pool in which the requests must take turns changes no token."""
    reserve = run.config.num_blocks - run.ledger.usable_blocks
    longest = max(run.ledger.full_blocks(request) for request in run.requests.values())
    same_outputs(num_blocks=longest + 1 + reserve)(bench, run)


def varied(name: str, *, held: float, shape: Shape = Setting.paged, **fields: Any) -> Case:
    """Run the mixture, then again with ``fields`` set otherwise."""
    build = mixture(shape, held=held)

    def build_unpinned(setting: Setting) -> Script:
        setting.vary(*fields)
        return build(setting)

    return Case(name, build_unpinned, compare=same_outputs(**fields))


def crowded(name: str, shape: Shape) -> Case:
    """Run the mixture in an ample pool, then in one where the requests must take turns."""
    build = mixture(shape, held=4)

    def build_unpinned(setting: Setting) -> Script:
        setting.vary("num_blocks")
        return build(setting)

    return Case(name, build_unpinned, compare=tighter_pool)


OTHER_SCHEDULE = Scenario(
    "other-schedule",
    "The same requests under another schedule",
    ("DET-2",),
    [
        varied("prefix-caching", held=4, enable_prefix_caching=True),
        varied("prefix-caching-tight", held=1.5, enable_prefix_caching=True),
        varied("chunked-prefill", held=4, enable_chunked_prefill=True),
        varied("chunked-prefill-in-small-chunks", held=4, enable_chunked_prefill=True, max_num_batched_tokens=8),
        crowded("tight-pool", Setting.paged),
        crowded("tight-pool-one-token-blocks", Setting.one_token_blocks),
        varied("fewer-places", held=4, max_num_seqs=1),
        varied("in-flight", held=4, pipeline_depth=2),
        varied("in-flight-tight", held=1.5, pipeline_depth=2),
        varied("swap", held=1.5, preemption_mode="swap", num_swap_blocks=HOST_BLOCKS),
    ],
)

SCENARIOS = (SAME_AGAIN, OTHER_SCHEDULE)
