"""Pools that are exactly large enough: nobody need be thrown out, nobody need wait, and the last block counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from conformance.operations import Add, Drain, Operation, Step
from conformance.scenarios.base import Build, Case, Scenario, Setting
from conformance.scenarios.bench import Bench, Run

Shape = Callable[[Setting], None]

SHAPES: dict[str, Shape] = {
    "sequence-blocks": Setting.sequence_blocks,
    "paged": Setting.paged,
    "one-token-blocks": Setting.one_token_blocks,
}
"""Block sizes from one end to the other: a block a sequence, the ordinary case, a block a token."""

STEPS_FACTOR_MAX = 1.05
"""PRE-7: how many times the steps of N - 1 requests N requests may take, at batch size N."""


# ------------------------------------------------------------------------------------------- batch at the brim


def full_batch(shape: Shape, num_seqs: int, spare_blocks: int) -> Build:
    """As many equal requests as the batch is wide, and a pool for all of them plus ``spare_blocks``."""

    def build(setting: Setting) -> Sequence[Operation]:
        shape(setting)
        if num_seqs == 1:
            setting.need(max_num_seqs=1)
        setting.choose(max_num_seqs=num_seqs)
        add = setting.typical()
        setting.pool(num_seqs * setting.full_blocks(add) + spare_blocks)
        return [add] * _held_at_full_length(setting, add) + [Drain()]

    return build


def _held_at_full_length(setting: Setting, add: Add) -> int:
    """How many such requests run at once: as many as the batch is wide and the pool holds to their end."""
    count = min(setting.config.max_num_seqs, setting.usable // setting.full_blocks(add))
    setting.require(count >= 1, f"{setting.usable} usable blocks do not hold one request at its full length")
    return count


def compare_with_one_fewer(bench: Bench, run: Run) -> None:
    """PRE-2: every prompt is prefilled once. PRE-7: the last place in the batch costs next to nothing."""
    requests = len(run.requests)
    if run.prefills > requests and not run.preemptions:
        run.report(
            "PRE-2",
            f"{requests} requests are prefilled {run.prefills} times, with no preemption reported",
            expected=f"{requests} prefills",
            got=str(run.prefills),
        )
    if requests == 1:
        return
    fewer = bench.run(run.config, run.operations[1:]).completed()
    run.completed()
    allowed = int(STEPS_FACTOR_MAX * fewer.steps)
    if run.steps > allowed:
        run.report(
            "PRE-7",
            f"{requests} requests take {run.steps} steps at batch size {run.config.max_num_seqs}, "
            f"{requests - 1} take {fewer.steps}",
            expected=f"at most {allowed} steps ({STEPS_FACTOR_MAX} times {fewer.steps})",
            got=f"{run.steps} steps",
        )


def _batches() -> list[Case]:
    cases = []
    for shape_name, shape in SHAPES.items():
        for num_seqs, spare in ((4, 0), (4, 1), (4, 2), (1, 0), (1, 1), (16, 0)):
            name = f"{shape_name}-{num_seqs}-seqs" + (f"-{spare}-spare" if spare else "")
            judges = ("PRE-1", "PRE-2") if num_seqs == 1 else ()
            cases.append(Case(name, full_batch(shape, num_seqs, spare), judges=judges))
    return cases


FULL_BATCH = Scenario(
    "full-batch",
    "As many requests as the batch is wide, in a pool that holds them all to their end",
    ("PRE-1", "PRE-2", "PRE-7"),
    _batches(),
    compare=compare_with_one_fewer,
)


# ---------------------------------------------------------------------------------------- a mixed batch that fits


def mixed_batch(shape: Shape, *, apart_steps: int, chunked: bool = False) -> Build:
    """Requests of several lengths, some steps apart, in a pool that holds each of them to its end."""

    def build(setting: Setting) -> Sequence[Operation]:
        shape(setting)
        setting.choose(max_num_seqs=4)
        if chunked:
            setting.need(enable_chunked_prefill=True)
            setting.choose(max_num_batched_tokens=max(8, setting.config.max_num_seqs))
        length = setting.config.max_model_len
        adds = [
            setting.request(max(1, min(length // 4, 10) * share // 4), max(1, min(length // 2, 24) * share // 4))
            for share in (4, 2, 3, 1)
        ]
        setting.pool(sum(setting.full_blocks(add) for add in adds))
        operations: list[Operation] = []
        free, places = setting.usable, setting.config.max_num_seqs
        for add in adds:
            free -= setting.full_blocks(add)
            places -= 1
            if free >= 0 and places >= 0:
                operations += [add, Step(apart_steps)] if apart_steps else [add]
        setting.require(bool(operations), "the pinned pool does not hold one request at its full length")
        return [*operations, Drain()]

    return build


MIXED_BATCH = Scenario(
    "mixed-batch",
    "Requests of several lengths that fit together from beginning to end",
    ("PRE-1", "PRE-2"),
    [
        *(Case(f"{name}-at-once", mixed_batch(shape, apart_steps=0)) for name, shape in SHAPES.items()),
        *(Case(f"{name}-staggered", mixed_batch(shape, apart_steps=3)) for name, shape in SHAPES.items()),
        Case("paged-chunked", mixed_batch(Setting.paged, apart_steps=3, chunked=True)),
    ],
)


# ------------------------------------------------------------------------------------------ usable concurrency


def full_length_sequences(shape: Shape, num_seqs: int, *, long_prompts: bool) -> Build:
    """N sequences that end at max_model_len and a pool of N times the blocks of such a sequence."""

    def build(setting: Setting) -> Sequence[Operation]:
        shape(setting)
        setting.choose(max_num_seqs=num_seqs)
        length = setting.config.max_model_len
        setting.pool(num_seqs * setting.blocks_for(length))
        count = min(setting.config.max_num_seqs, setting.usable // setting.blocks_for(length))
        setting.require(count >= 1, f"{setting.usable} usable blocks do not hold one sequence of {length} tokens")
        outputs = min(length // 2, count + 4)
        prompt = length - outputs if long_prompts else max(1, min(10, length // 4))
        outputs = length - prompt if long_prompts else min(30, length - prompt)
        return [setting.request(prompt, outputs)] * count + [Drain()]

    return build


def all_ran_at_once(bench: Bench, run: Run) -> None:
    """PRE-6: the running set was as large as the pool is by multiplication."""
    wanted = len(run.requests)
    if run.watch.peak < wanted:
        blocks = run.ledger.blocks_for(run.config.max_model_len)
        run.report(
            "PRE-6",
            f"a pool of {run.ledger.usable_blocks} usable blocks, {blocks} for a sequence of "
            f"{run.config.max_model_len} tokens, never ran more than {run.watch.peak} at once",
            expected=f"{wanted} sequences running at once",
            got=f"{run.watch.peak} at most",
        )


USABLE_CONCURRENCY = Scenario(
    "usable-concurrency",
    "A pool of N times the blocks of a full-length sequence runs N of them",
    ("PRE-6",),
    [
        Case(
            f"{name}-{num_seqs}-seqs-{'long' if long_prompts else 'short'}-prompts",
            full_length_sequences(shape, num_seqs, long_prompts=long_prompts),
        )
        for name, shape in SHAPES.items()
        for num_seqs in (1, 4, 16)
        for long_prompts in (True, False)
    ],
    compare=all_ran_at_once,
)


# ----------------------------------------------------------------------------------------------- alone in the pool


def alone(blocks: int, block_size: int, prompt: int, *, num_seqs: int = 4) -> Build:
    """One request whose prompt and outputs fill a pool of ``blocks`` to its last slot."""

    def build(setting: Setting) -> Sequence[Operation]:
        scale = -(-setting.capabilities.block_size_min // block_size)
        setting.need(block_size=block_size * scale, max_num_seqs=num_seqs)
        total = blocks * block_size * scale
        setting.choose(max_model_len=max(2, total))
        setting.need(num_blocks=blocks + setting.reserve)
        setting.require(setting.usable == blocks, "the pinned watermark withholds part of the pool")
        return [setting.request(prompt * scale, total - prompt * scale), Drain()]

    return build


def alone_as_pinned(setting: Setting) -> Sequence[Operation]:
    """One request that fills whatever pool there is, or the model's length if that is less."""
    setting.paged()
    config = setting.config
    total = min(config.max_model_len, setting.usable * config.block_size)
    setting.require(total >= 2, "the usable pool does not hold a prompt and an output")
    outputs = min(30, total // 2)
    return [setting.request(total - outputs, outputs), Drain()]


ALONE = Scenario(
    "alone-in-the-pool",
    "One request that needs every slot of the pool",
    ("PRG-2",),
    [
        Case("4-blocks-of-4-prompt-9", alone(4, 4, 9)),
        Case("4-blocks-of-4-prompt-8", alone(4, 4, 8)),
        Case("4-blocks-of-4-prompt-15", alone(4, 4, 15)),
        Case("4-blocks-of-4-prompt-1", alone(4, 4, 1)),
        Case("2-blocks-of-16-prompt-16", alone(2, 16, 16)),
        Case("one-block-of-16", alone(1, 16, 5)),
        Case("one-block-of-16-one-seq", alone(1, 16, 5, num_seqs=1)),
        Case("16-blocks-of-1", alone(16, 1, 5)),
        Case("16-blocks-of-1-one-seq", alone(16, 1, 5, num_seqs=1)),
        Case("whatever-pool-there-is", alone_as_pinned),
    ],
)

SCENARIOS = (FULL_BATCH, MIXED_BATCH, USABLE_CONCURRENCY, ALONE)
