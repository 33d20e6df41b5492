"""How requests end: by length, by stop token, by abort in every state, and under calls in any order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from conformance.operations import Abort, AbortEnded, Add, Drain, Operation, ResetPrefixCache, Step
from conformance.records import RequestRecord, RequestState
from conformance.scenarios.base import HOST_BLOCKS, Build, Case, Scenario, Setting
from conformance.scenarios.bench import Bench, Run, Script, as_declared
from conformance.scenarios.capacity import SHAPES, Shape
from conformance.scenarios.pressure import tight_pool
from conformance.session import Session

STEPS_UNTIL_STATE_MAX = 200

# --------------------------------------------------------------------------------------------------- endings


def endings(shape: Shape, kind: str, *, staggered: bool = False, **fields: Any) -> Build:
    """Requests that end in different ways and steps, together in one batch."""

    def build(setting: Setting) -> Sequence[Operation]:
        shape(setting)
        setting.need(**fields)
        setting.choose(max_num_seqs=4)
        length = setting.config.max_model_len
        setting.pool(4 * setting.blocks_for(length))
        match kind:
            case "lengths":
                adds = [setting.typical(outputs=outputs) for outputs in (1, 2, 7, 3)]
            case "stop-tokens":
                adds = [setting.typical(outputs=8, stop_after=stop) for stop in (1, 4, 8, None)]
            case "one-token-prompts":
                adds = [setting.request(1, outputs) for outputs in (1, 2, 5)]
            case _:
                setting.declares("length_limit")
                adds = [Add(prompt_len=max(1, length - room), max_tokens=length, stop_after=None) for room in (1, 2, 5)]
        operations: list[Operation] = []
        held = setting.usable
        for add in adds:
            held -= setting.full_blocks(add)
            if held >= 0:
                operations += [add, Step(2)] if staggered else [add]
        setting.require(bool(operations), "the pinned pool does not hold one request")
        return [*operations, Drain()]

    return build


ENDINGS = Scenario(
    "endings",
    "Requests that end at max_tokens, at a stop token and at max_model_len",
    ("PRG-5",),
    [
        *(
            Case(f"{name}-{kind}", endings(shape, kind))
            for name, shape in SHAPES.items()
            for kind in ("lengths", "stop-tokens", "model-length")
        ),
        Case("paged-one-token-prompts", endings(Setting.paged, "one-token-prompts")),
        Case("paged-lengths-staggered", endings(Setting.paged, "lengths", staggered=True)),
        Case("paged-stop-tokens-staggered", endings(Setting.paged, "stop-tokens", staggered=True)),
        Case(
            "paged-lengths-chunked",
            endings(Setting.paged, "lengths", staggered=True, enable_chunked_prefill=True),
        ),
        Case("paged-lengths-in-flight", endings(Setting.paged, "lengths", staggered=True, pipeline_depth=2)),
        Case("paged-stop-tokens-in-flight", endings(Setting.paged, "stop-tokens", pipeline_depth=2)),
    ],
)

# ---------------------------------------------------------------------------------------------------- aborts

When = Callable[[RequestRecord], bool]


def is_waiting(request: RequestRecord) -> bool:
    """Never admitted so far."""
    return request.state is RequestState.WAITING


def is_decoding(request: RequestRecord) -> bool:
    """Running, and past its first token."""
    return request.state is RequestState.RUNNING and request.first_token_step is not None


def is_mid_prefill(request: RequestRecord) -> bool:
    """Running, with part of its prompt computed."""
    record = request.sequences[0]
    return request.state is RequestState.RUNNING and 0 < record.computed < len(record.tokens)


def is_preempted(request: RequestRecord) -> bool:
    """Thrown out, to be recomputed."""
    return request.state is RequestState.PREEMPTED


def is_swapped(request: RequestRecord) -> bool:
    """In the host pool."""
    return request.state is RequestState.SWAPPED


def abort_when(when: When, *, tight: bool = False, twice: bool = True, n: int = 1, **fields: Any) -> Build:
    """Abort the first request that ``when`` is true of, ask for it once more, and let the others finish."""

    def build(setting: Setting) -> Script:
        setting.paged()
        setting.need(**fields)
        setting.declares("abort")
        setting.choose(max_num_seqs=3 * n)
        if fields.get("preemption_mode") == "swap":
            setting.choose(num_swap_blocks=HOST_BLOCKS)
        if fields.get("enable_chunked_prefill"):
            setting.choose(max_num_batched_tokens=max(6, setting.config.max_num_seqs))
        adds = [setting.typical(n=n)] * 3
        if tight:
            tight_pool(setting, adds, 0.7)
        else:
            setting.pool(3 * setting.full_blocks(adds[0]))
        if when is is_waiting:
            adds *= 2

        def script(session: Session) -> Iterator[Operation]:
            yield from adds
            for _ in range(STEPS_UNTIL_STATE_MAX):
                yield Step()
                found = [index for index, request in enumerate(session.ledger.live.values()) if when(request)]
                if found:
                    yield Abort(found[0])
                    if twice:
                        yield AbortEnded(len(session.ledger.ended) - 1)
                    break
            yield Step(2)
            yield adds[0]
            yield Drain()

        return script

    return build


def abort_ended(setting: Setting) -> Sequence[Operation]:
    """Abort an unknown id, then one that has finished, then one that was aborted at once."""
    setting.paged()
    setting.declares("abort")
    setting.choose(max_num_seqs=3)
    add = setting.typical(outputs=4)
    setting.pool(3 * setting.full_blocks(add))
    return [
        AbortEnded(),
        add,
        Drain(),
        AbortEnded(),
        add,
        Abort(),
        AbortEnded(1),
        add,
        Step(2),
        AbortEnded(),
        Drain(),
    ]


def abort_everybody(shape: Shape, **fields: Any) -> Build:
    """A full pool is emptied by aborts alone, twice."""

    def build(setting: Setting) -> Sequence[Operation]:
        shape(setting)
        setting.need(**fields)
        setting.declares("abort")
        setting.choose(max_num_seqs=4)
        add = setting.typical(shared_len=8)
        setting.pool(4 * setting.full_blocks(add))
        once: list[Operation] = [add, add, add, add, Step(6), Abort(3), Abort(), Abort(1), Abort(), Step(2)]
        return [*once, *once, add, Drain()]

    return build


_HELD_AFTERWARDS = ("ACC-1", "ACC-4", "ACC-6", "ACC-7")


def frees_and_disturbs_nobody(bench: Bench, run: Run) -> None:
    """PRG-6: what is amiss at the end, in the books or for the others, is not amiss without the aborts."""
    amiss = [violation for violation in run.violations if violation.requirement in _HELD_AFTERWARDS]
    unfinished = [rid for rid, request in run.requests.items() if request.live]
    if not amiss and not unfinished:
        return
    without = bench.run(run.config, [one for one in run.operations if not isinstance(one, Abort | AbortEnded)])
    if unfinished and not without.ledger.live:
        run.report(
            "PRG-6",
            f"{', '.join(unfinished)} never finish after another request's abort",
            expected="finished, as without the abort",
            got=", ".join(f"{rid} {run.state(rid).value}" for rid in unfinished),
        )
    before = {violation.requirement for violation in without.violations}
    for violation in amiss:
        if violation.requirement not in before:
            run.report(
                "PRG-6",
                f"with an abort, and only then: {violation.message}",
                expected=violation.expected,
                got=violation.got,
            )


ABORTS = Scenario(
    "abort",
    "A request is aborted in every state it can be in",
    ("PRG-6", *_HELD_AFTERWARDS),
    [
        Case("waiting", abort_when(is_waiting), sees=["aborted while waiting"]),
        Case("decoding", abort_when(is_decoding), sees=["aborted while running"]),
        Case("decoding-once", abort_when(is_decoding, twice=False), sees=["aborted while running"]),
        Case("several-sequences", abort_when(is_decoding, n=2), sees=["aborted while running"]),
        Case(
            "mid-prefill",
            abort_when(is_mid_prefill, enable_chunked_prefill=True),
            sees=["aborted while running", "prefill in chunks"],
        ),
        Case("preempted", abort_when(is_preempted, tight=True), sees=["aborted while preempted"]),
        Case(
            "swapped",
            abort_when(is_swapped, tight=True, preemption_mode="swap"),
            sees=["aborted while swapped"],
        ),
        Case("in-flight", abort_when(is_decoding, pipeline_depth=2), sees=["aborted while running"]),
        Case("cached", abort_when(is_decoding, enable_prefix_caching=True), sees=["aborted while running"]),
        Case("ended-and-unknown", abort_ended),
        *(Case(f"everybody-{name}", abort_everybody(shape)) for name, shape in SHAPES.items()),
        Case("everybody-cached", abort_everybody(Setting.paged, enable_prefix_caching=True)),
    ],
    compare=frees_and_disturbs_nobody,
)

# ------------------------------------------------------------------------------------------------- any order


def any_order(shape: Shape, **fields: Any) -> Build:
    """Legal calls in an order nobody plans for. Those the engine does not declare are left out."""

    def build(setting: Setting) -> Script:
        shape(setting)
        setting.need(**fields)
        setting.choose(max_num_seqs=3)
        add = setting.typical(outputs=6)
        setting.pool(2 * setting.full_blocks(add) + 1)
        setting.require(setting.usable >= setting.full_blocks(add), "the pool does not hold one request")
        operations: list[Operation] = [
            Step(), Drain(), AbortEnded(), ResetPrefixCache(), add, Abort(), Step(), Drain(),
            add, add, Step(), ResetPrefixCache(), Abort(1), AbortEnded(), add, add, add, Step(3), Abort(),
            Step(), add, Abort(5), ResetPrefixCache(), Drain(), Step(2), ResetPrefixCache(), AbortEnded(2),
            setting.typical(outputs=6, stop_after=1), setting.typical(outputs=1), Step(), Drain(), Drain(),
        ]  # fmt: skip
        return as_declared(operations)

    return build


ANY_ORDER = Scenario(
    "any-order",
    "Legal calls in an order nobody plans for",
    ("PRG-8",),
    [
        *(Case(name, any_order(shape)) for name, shape in SHAPES.items()),
        Case("paged-cached", any_order(Setting.paged, enable_prefix_caching=True)),
        Case("paged-chunked", any_order(Setting.paged, enable_chunked_prefill=True)),
        Case("paged-in-flight", any_order(Setting.paged, pipeline_depth=2)),
    ],
)

SCENARIOS = (ENDINGS, ABORTS, ANY_ORDER)
