"""The accounting under everything that makes it move: growth, churn, sharing, forks, swaps, windows, pipelines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from conformance.operations import Abort, Drain, Operation, Step
from conformance.scenarios.base import HOST_BLOCKS, Build, Case, Scenario, Setting
from conformance.scenarios.bench import Script, as_declared
from conformance.scenarios.capacity import SHAPES, Shape
from conformance.scenarios.pressure import tight_pool

BOOKS = ("ACC-1", "ACC-2", "ACC-4", "ACC-5", "ACC-6", "ACC-7", "ACC-9", "ACC-10")

# ----------------------------------------------------------------------------------------------------- churn


def churn(shape: Shape, *, requests: int = 24, share: float = 0.6, n: int = 1, **fields: Any) -> Build:
    """Requests of many lengths come and go for long enough that every block is used again and again."""

    def build(setting: Setting) -> Script:
        shape(setting)
        setting.need(**fields)
        setting.choose(max_num_seqs=4 * n)
        if fields.get("preemption_mode") == "swap":
            setting.choose(num_swap_blocks=HOST_BLOCKS)
        if fields.get("enable_chunked_prefill"):
            setting.choose(max_num_batched_tokens=max(8, setting.config.max_num_seqs))
        length = setting.config.max_model_len
        need = n * setting.blocks_for(min(length, 40))
        setting.pool(max(need + 1, int(4 * share * need)))
        setting.require(setting.usable >= need, "the pinned pool does not hold one request at its full length")
        operations: list[Operation] = []
        for number in range(requests):
            prompt = max(1, min(length // 4, 10) * (1 + number * 5 % 4) // 4)
            outputs = max(1, min(length - prompt, 30) * (1 + number * 3 % 4) // 4)
            shared = prompt if number % 3 == 0 else 0
            operations.append(setting.request(prompt, outputs, n=n, shared_len=shared))
            operations.append(Step(1 + number % 4))
            if number % 7 == 5:
                operations.append(Abort(number))
        operations.append(Drain())
        return as_declared(operations)

    return build


CHURN = Scenario(
    "churn",
    "Requests of many lengths come and go",
    (*BOOKS, "KV-1", "KV-3"),
    [
        *(Case(name, churn(shape)) for name, shape in SHAPES.items()),
        Case("paged-tight", churn(Setting.paged, share=0.3)),
        Case("paged-tight-cached", churn(Setting.paged, share=0.3, enable_prefix_caching=True)),
        Case("paged-tight-swap", churn(Setting.paged, share=0.3, preemption_mode="swap")),
        Case("paged-ample", churn(Setting.paged, share=2.0)),
        Case("paged-chunked", churn(Setting.paged, enable_chunked_prefill=True)),
        Case("paged-cached", churn(Setting.paged, enable_prefix_caching=True)),
        Case(
            "paged-cached-chunked",
            churn(Setting.paged, enable_prefix_caching=True, enable_chunked_prefill=True),
        ),
        Case("paged-swap", churn(Setting.paged, preemption_mode="swap")),
        Case("paged-priority", churn(Setting.paged, scheduling_policy="priority")),
        Case("paged-lookahead", churn(Setting.paged, num_lookahead_slots=3)),
        Case("paged-watermark", churn(Setting.paged, watermark=0.1)),
        Case("paged-forks", churn(Setting.paged, n=2)),
        Case("paged-in-flight", churn(Setting.paged, pipeline_depth=2)),
        Case("paged-drafts", churn(Setting.paged, num_speculative_tokens=2)),
        Case("one-block", churn(Setting.sequence_blocks, requests=8, share=0.0)),
    ],
)

# ----------------------------------------------------------------------------------------------------- forks


def forks(n: int, prompt_blocks: int, extra: int, *, tight: bool = False, stop: bool = False, **fields: Any) -> Build:
    """Requests of n sequences whose prompt ends at, before or behind a block's boundary."""

    def build(setting: Setting) -> Sequence[Operation]:
        setting.paged()
        setting.need(**fields)
        setting.choose(max_num_seqs=2 * n)
        size, length = setting.config.block_size, setting.config.max_model_len
        setting.require(setting.config.max_num_seqs >= n, f"max_num_seqs is below n = {n}")
        prompt = prompt_blocks * size + extra
        outputs = min(3 * size, 24, length - prompt)
        adds = [setting.request(prompt, outputs, n=n, stop_after=outputs - 2 if stop else None) for _ in range(2)]
        if fields.get("preemption_mode") == "swap":
            setting.choose(num_swap_blocks=HOST_BLOCKS)
        if tight:
            tight_pool(setting, adds, 0.6)
        else:
            setting.pool(sum(setting.full_blocks(add) for add in adds))
            setting.require(setting.usable >= setting.full_blocks(adds[0]), "the pool does not hold one request")
        return [adds[0], Step(), adds[1], Drain()]

    return build


_SHARED = ("ACC-3", "ACC-4", "ACC-9", "KV-1", "KV-4")

FORKS = Scenario(
    "forks",
    "Several sequences of one request share its prompt",
    _SHARED,
    [
        Case("two-at-a-boundary", forks(2, 2, 0)),
        Case("two-behind-a-boundary", forks(2, 2, 1)),
        Case("three-before-a-boundary", forks(3, 2, -1)),
        Case("four-on-one-token", forks(4, 0, 1)),
        Case("two-with-stop-token", forks(2, 2, 1, stop=True)),
        Case("two-cached", forks(2, 2, 1, enable_prefix_caching=True)),
        Case("two-tight", forks(2, 2, 1, tight=True), sees=["preempted"], judges=(*_SHARED, "KV-6")),
        Case(
            "two-tight-swap",
            forks(2, 2, 1, tight=True, preemption_mode="swap"),
            sees=["swapped in"],
            judges=(*_SHARED, "KV-6"),
        ),
    ],
)

# ------------------------------------------------------------------------------------------- shared prefixes


def shared_prefixes(blocks: int, extra: int, *, tight: bool = False, chunked: bool = False) -> Build:
    """Requests with one prefix run side by side and write behind, or into, what they share."""

    def build(setting: Setting) -> Sequence[Operation]:
        setting.paged()
        setting.need(enable_prefix_caching=True, enable_chunked_prefill=chunked)
        setting.choose(max_num_seqs=4)
        size = setting.config.block_size
        prompt = blocks * size + extra
        adds = [setting.request(prompt, 2 * size + 3 * number, shared_len=prompt) for number in range(4)]
        if tight:
            tight_pool(setting, adds, 0.4)
        else:
            setting.pool(sum(setting.full_blocks(add) for add in adds))
        first, *others = adds
        return [first, Step(3), *others, Step(4), first, Drain(), *adds, Drain()]

    return build


SHARED_PREFIXES = Scenario(
    "shared-prefixes",
    "Requests with one prefix run side by side",
    ("ACC-3", "ACC-4", "ACC-9", "KV-1", "KV-2", "KV-4"),
    [
        Case("whole-blocks", shared_prefixes(3, 0), sees=["prefix hit"]),
        Case("one-token-more", shared_prefixes(3, 1), sees=["prefix hit"]),
        Case("one-token-less", shared_prefixes(3, -1), sees=["prefix hit"]),
        Case("whole-blocks-tight", shared_prefixes(3, 0, tight=True), sees=["prefix hit"]),
        Case("chunked", shared_prefixes(3, 1, chunked=True), sees=["prefix hit"]),
    ],
)

# --------------------------------------------------------------------------------- swaps, windows, pipelines


def swapped(*, host_blocks: int, n: int = 1, cached: bool = False) -> Build:
    """Sequences go to the host pool and come back, through a host pool that is ample or next to nothing."""

    def build(setting: Setting) -> Sequence[Operation]:
        setting.paged()
        setting.need(preemption_mode="swap", enable_prefix_caching=cached)
        setting.choose(num_swap_blocks=host_blocks, max_num_seqs=4 * n)
        adds = [setting.typical(n=n, shared_len=6 if cached else 0) for _ in range(4)]
        tight_pool(setting, adds, 0.5)
        return [*adds, Step(12), adds[0], Drain()]

    return build


SWAPS = Scenario(
    "swaps",
    "Sequences are swapped to the host pool and back",
    ("KV-4", "KV-6", "KV-1", "ACC-1"),
    [
        Case("ample-host-pool", swapped(host_blocks=HOST_BLOCKS), sees=["swapped in"]),
        Case("small-host-pool", swapped(host_blocks=10), sees=["swapped in"]),
        Case("two-sequences", swapped(host_blocks=HOST_BLOCKS, n=2), sees=["swapped in"]),
        Case("cached", swapped(host_blocks=HOST_BLOCKS, cached=True), sees=["swapped in"]),
    ],
)


def windowed(blocks: int, extra: int, *, tight: bool = False, **fields: Any) -> Build:
    """Sequences longer than the attention window, so that blocks fall out of it and are used again."""

    def build(setting: Setting) -> Sequence[Operation]:
        setting.paged()
        setting.need(**fields)
        size = setting.config.block_size
        setting.need(sliding_window=blocks * size + extra)
        setting.choose(max_num_seqs=3)
        length = setting.config.max_model_len
        if fields.get("enable_chunked_prefill"):
            setting.choose(max_num_batched_tokens=max(8, setting.config.max_num_seqs))
        adds = [setting.request(prompt, min(30, length - prompt)) for prompt in (1, max(1, length // 4), length // 2)]
        need = max(setting.blocks_for(add.prompt_len) for add in adds) + blocks + 2
        setting.pool(need if tight else 3 * setting.blocks_for(length))
        setting.require(setting.usable >= need, "the pinned pool does not hold one windowed sequence")
        return [*adds, Step(6), adds[0], Drain(), adds[2], Drain()]

    return build


WINDOWS = Scenario(
    "sliding-windows",
    "Sequences outgrow the attention window",
    ("KV-1", "KV-4", "ACC-1", "ACC-2", "ACC-4", "ACC-9"),
    [
        Case("two-blocks", windowed(2, 0)),
        Case("two-blocks-and-one", windowed(2, 1)),
        Case("one-block", windowed(1, 0)),
        Case("two-blocks-tight", windowed(2, 0, tight=True)),
        Case("two-blocks-chunked", windowed(2, 0, enable_chunked_prefill=True)),
        Case("two-blocks-cached", windowed(2, 0, enable_prefix_caching=True)),
    ],
)


def in_flight(depth: int, *, ends: str = "stop", **fields: Any) -> Build:
    """Requests end while a step with their blocks is still running, and others want those very blocks at once.

    ``ends``: by a stop token, which the engine cannot foresee; by length, which it can; or by abort.
    """

    def build(setting: Setting) -> Sequence[Operation]:
        setting.paged()
        setting.need(pipeline_depth=depth, **fields)
        setting.choose(max_num_seqs=4)
        if fields.get("enable_chunked_prefill"):
            setting.choose(max_num_batched_tokens=max(8, setting.config.max_num_seqs))
        prompt = min(2 * setting.config.block_size, 8)
        adds = [
            setting.request(prompt + number % 3, 12, stop_after=2 + number % 4)
            if ends == "stop"
            else setting.request(prompt + number % 3, 2 + number % 4)
            for number in range(12)
        ]
        # What two of them hold: whoever is admitted next gets the blocks of the one that has just ended.
        setting.pool(2 * max(setting.full_blocks(add) for add in adds))
        if ends != "abort":
            return [*adds, Drain()]
        aborts: list[Operation] = [Step(3), Abort(), Step(2), Abort(1), Step(), Abort()]
        return [*adds, *aborts, *aborts, Drain()]

    return build


PIPELINES = Scenario(
    "in-flight",
    "Blocks change hands while earlier steps are in flight",
    ("KV-5", "KV-1", "ACC-7"),
    [
        Case("two-deep-stop-tokens", in_flight(2)),
        Case("two-deep-lengths", in_flight(2, ends="length")),
        Case("two-deep-aborts", in_flight(2, ends="abort")),
        Case("three-deep-stop-tokens", in_flight(3)),
        Case("two-deep-cached", in_flight(2, enable_prefix_caching=True)),
        Case("two-deep-chunked", in_flight(2, enable_chunked_prefill=True)),
    ],
)

SCENARIOS = (CHURN, FORKS, SHARED_PREFIXES, SWAPS, WINDOWS, PIPELINES)
