"""The bounds an engine was configured with, met exactly, and passed by one."""

from __future__ import annotations

from collections.abc import Sequence

from conformance.operations import Add, Drain, Operation, Step
from conformance.records import RequestRecord, RequestState
from conformance.scenarios.base import Build, Case, Scenario, Setting
from conformance.scenarios.bench import Bench, Run
from conformance.scenarios.capacity import SHAPES, Shape

# ------------------------------------------------------------------------------------------- the model's length


def near_model_length(shape: Shape, difference: int, max_tokens: int) -> Build:
    """A prompt of max_model_len + ``difference``, with an ordinary request before and behind it."""

    def build(setting: Setting) -> Sequence[Operation]:
        shape(setting)
        setting.choose(max_num_seqs=4)
        length = setting.config.max_model_len
        setting.pool(4 * setting.blocks_for(length + 1))
        setting.require(
            setting.usable >= setting.blocks_for(length + 1) + 2,
            f"{setting.usable} usable blocks do not hold {length} tokens and two small requests beside them",
        )
        small = setting.typical(outputs=4)
        return [small, Add(prompt_len=length + difference, max_tokens=max_tokens), small, Drain()]

    return build


def stops_at_model_length(shape: Shape, *, chunked: bool = False) -> Build:
    """Outputs that would run past max_model_len."""

    def build(setting: Setting) -> Sequence[Operation]:
        shape(setting)
        setting.choose(max_num_seqs=4)
        length = setting.config.max_model_len
        if chunked:
            setting.need(enable_chunked_prefill=True)
            setting.choose(max_num_batched_tokens=max(8, setting.config.max_num_seqs))
        setting.pool(2 * setting.blocks_for(length + 1))
        setting.require(setting.usable >= setting.blocks_for(length), "the pool does not hold max_model_len tokens")
        prompt = max(1, length - 10)
        return [Add(prompt_len=prompt, max_tokens=length), Add(prompt_len=prompt, max_tokens=11), Drain()]

    return build


def ends_as_documented(bench: Bench, run: Run) -> None:
    """LIM-3: a prompt with room for one output is served; one with none is refused, or serves what its cap allows."""
    length = run.config.max_model_len
    room = length + (run.ledger.capabilities.length_cap == "computed")
    for rid, request in run.requests.items():
        prompt = len(request.spec.prompt)
        served = request.state is RequestState.FINISHED
        if prompt < length and request.state is RequestState.REFUSED:
            _report_length(run, rid, prompt, "served until max_model_len", "refused")
        elif prompt >= room and request.admitted_step is not None:
            _report_length(run, rid, prompt, "refused, for want of room for an output token", "it ran")
        elif served and any(len(tokens) > room for tokens in _tokens(request)):
            got = max(len(tokens) for tokens in _tokens(request))
            _report_length(run, rid, prompt, f"at most {room} tokens", f"{got} tokens")


def _tokens(request: RequestRecord) -> list[list[int]]:
    return [record.tokens[: record.final_len] for record in request.sequences]


def _report_length(run: Run, rid: str, prompt: int, expected: str, got: str) -> None:
    length = run.config.max_model_len
    run.report(
        "LIM-3",
        f"{rid} with a prompt of {prompt} and max_model_len = {length} does not behave as documented",
        expected=expected,
        got=got,
    )


MODEL_LENGTH = Scenario(
    "model-length",
    "Prompts of max_model_len, one less and one more, and outputs that run into it",
    ("LIM-3",),
    [
        *(
            Case(f"{name}-prompt-{word}", near_model_length(shape, difference, 3))
            for name, shape in SHAPES.items()
            for word, difference in (("two-less", -2), ("one-less", -1), ("equal", 0), ("one-more", 1))
        ),
        *(Case(f"{name}-outputs", stops_at_model_length(shape)) for name, shape in SHAPES.items()),
        Case("paged-outputs-chunked", stops_at_model_length(Setting.paged, chunked=True)),
    ],
    compare=ends_as_documented,
)

# ---------------------------------------------------------------------------------------------- the token budget


def budget(factor: float, *, chunked: bool, prefix: bool = False) -> Build:
    """Prompts that do not fit one step's budget together; with chunks not even one by one."""

    def build(setting: Setting) -> Sequence[Operation]:
        setting.paged()
        setting.need(enable_chunked_prefill=chunked)
        if prefix:
            setting.need(enable_prefix_caching=True)
        setting.choose(max_num_seqs=6)
        config = setting.config
        length = config.max_model_len
        tokens = int(length * factor)
        setting.choose(max_num_batched_tokens=max(config.max_num_seqs, tokens))
        setting.pool(6 * setting.blocks_for(length))
        prompt = max(1, length // 2)
        shared = prompt // 2 if prefix else 0
        count = min(6, max(1, setting.usable // setting.blocks_for(length)))
        setting.require(
            count * prompt > setting.config.max_num_batched_tokens,
            f"a budget of {setting.config.max_num_batched_tokens} holds all {count} prompts of {prompt}",
        )
        operations: list[Operation] = []
        for number in range(count):
            operations.append(setting.request(prompt - number % 2, 5, shared_len=shared))
            if number % 3 == 2:
                operations.append(Step(2))
        return [*operations, Drain()]

    return build


TOKEN_BUDGET = Scenario(
    "token-budget",
    "More prompt tokens than a step may compute",
    ("LIM-2",),
    [
        Case("whole-prompts", budget(1.0, chunked=False)),
        Case("one-prompt-and-a-half", budget(1.5, chunked=False)),
        Case("chunks", budget(0.2, chunked=True)),
        Case("chunks-of-one-batch", budget(0.0, chunked=True)),
        Case("chunks-cached", budget(0.3, chunked=True, prefix=True)),
    ],
)

# -------------------------------------------------------------------------------------------- sequences at once


def many_requests(shape: Shape, num_seqs: int, *, n: int = 1, tight: bool = False, chunked: bool = False) -> Build:
    """Three times as many sequences as may run, arriving a few at a time."""

    def build(setting: Setting) -> Sequence[Operation]:
        shape(setting)
        setting.choose(max_num_seqs=num_seqs)
        setting.require(setting.config.max_num_seqs >= n, f"max_num_seqs is below n = {n}")
        if chunked:
            setting.need(enable_chunked_prefill=True)
            setting.choose(max_num_batched_tokens=max(8, setting.config.max_num_seqs))
        add = setting.typical(outputs=8, n=n)
        seqs = setting.config.max_num_seqs
        setting.pool(max(1, (seqs // 2 if tight else 3 * seqs)) * setting.full_blocks(add))
        setting.require(setting.usable >= setting.full_blocks(add), "the pinned pool does not hold one request")
        operations: list[Operation] = []
        for number in range(min(3 * seqs // n + 1, 24)):
            operations.append(add)
            if number % 4 == 3:
                operations.append(Step())
        return [*operations, Drain()]

    return build


SEQUENCES_AT_ONCE = Scenario(
    "sequences-at-once",
    "Three times as many requests as may run",
    ("LIM-1",),
    [
        *(Case(f"{name}-4-seqs", many_requests(shape, 4)) for name, shape in SHAPES.items()),
        Case("paged-1-seq", many_requests(Setting.paged, 1)),
        Case("paged-3-seqs-n-2", many_requests(Setting.paged, 3, n=2)),
        Case("paged-4-seqs-tight", many_requests(Setting.paged, 4, tight=True)),
        Case("paged-4-seqs-chunked", many_requests(Setting.paged, 4, chunked=True)),
    ],
)

# ----------------------------------------------------------------------------------- lookahead and speculation


def ahead_near_the_end(
    shape: Shape, *, lookahead: int = 0, drafts: int = 0, tight: bool = False, short_of_end: int = 6
) -> Build:
    """Sequences that reach max_model_len while the engine plans ahead of them."""

    def build(setting: Setting) -> Sequence[Operation]:
        shape(setting)
        if lookahead:
            setting.need(num_lookahead_slots=lookahead)
        if drafts:
            setting.need(num_speculative_tokens=drafts)
        setting.choose(max_num_seqs=3)
        length = setting.config.max_model_len
        prompt = max(1, length - short_of_end)
        blocks = setting.blocks_for(length + drafts)
        setting.pool(2 * blocks if tight else 4 * blocks)
        setting.require(setting.usable >= blocks, "the pinned pool does not hold one sequence of max_model_len")
        mid = max(1, length // 2)
        return [
            Add(prompt_len=prompt, max_tokens=length),
            setting.request(prompt, length - prompt),
            setting.request(mid, length - mid),
            Drain(),
        ]

    return build


PLANNING_AHEAD = Scenario(
    "planning-ahead",
    "Lookahead and speculative tokens next to the model's length",
    ("LIM-4", "ACC-5"),
    [
        *(Case(f"{name}-lookahead-1", ahead_near_the_end(shape, lookahead=1)) for name, shape in SHAPES.items()),
        *(Case(f"{name}-lookahead-4", ahead_near_the_end(shape, lookahead=4)) for name, shape in SHAPES.items()),
        Case("paged-lookahead-4-tight", ahead_near_the_end(Setting.paged, lookahead=4, tight=True)),
        *(Case(f"{name}-drafts-1", ahead_near_the_end(shape, drafts=1)) for name, shape in SHAPES.items()),
        *(Case(f"{name}-drafts-4", ahead_near_the_end(shape, drafts=4)) for name, shape in SHAPES.items()),
        Case("paged-drafts-4-last-token", ahead_near_the_end(Setting.paged, drafts=4, short_of_end=1)),
        Case("paged-drafts-3-tight", ahead_near_the_end(Setting.paged, drafts=3, tight=True)),
    ],
)

SCENARIOS = (MODEL_LENGTH, TOKEN_BUDGET, SEQUENCES_AT_ONCE, PLANNING_AHEAD)
