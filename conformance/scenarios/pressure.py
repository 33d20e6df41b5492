"""Pools that are too small for everybody at once: somebody must give way, and must come back whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from conformance.operations import Add, Drain, Operation, Step
from conformance.records import RequestState
from conformance.scenarios.base import HOST_BLOCKS, Build, Case, Scenario, Setting
from conformance.scenarios.bench import Script
from conformance.scenarios.capacity import SHAPES
from conformance.session import Session

STEPS_UNTIL_PREEMPTED_MAX = 200
OUT = (RequestState.PREEMPTED, RequestState.SWAPPED)


def tight_pool(setting: Setting, adds: Sequence[Add], share: float) -> None:
    """A pool of ``share`` of what ``adds`` come to hold, but enough for each of them alone."""
    needs = [setting.full_blocks(add) for add in adds]
    setting.pool(max(*needs, int(share * sum(needs))))
    setting.require(
        max(needs) <= setting.usable < sum(needs),
        f"{setting.usable} usable blocks: this case needs {max(needs)} to {sum(needs) - 1}, "
        "too few for everybody and enough for each alone",
    )


def oversubscribed(shape: str, share: float, *, prompts: Sequence[int] = (4, 4, 4, 4), **fields: Any) -> Build:
    """Four requests that outgrow the pool together; ``prompts`` in quarters of the typical prompt."""

    def build(setting: Setting) -> Sequence[Operation]:
        SHAPES[shape](setting)
        setting.need(**fields)
        setting.choose(max_num_seqs=4)
        if fields.get("preemption_mode") == "swap":
            setting.choose(num_swap_blocks=HOST_BLOCKS)
        if fields.get("enable_chunked_prefill"):
            setting.choose(max_num_batched_tokens=max(8, setting.config.max_num_seqs))
        typical = setting.typical()
        adds = [setting.request(max(1, typical.prompt_len * quarters // 4), typical.max_tokens) for quarters in prompts]
        tight_pool(setting, adds, share)
        return [*adds, Drain()]

    return build


_SWAP: dict[str, Any] = {"preemption_mode": "swap"}
_CHUNKED: dict[str, Any] = {"enable_chunked_prefill": True}
_CACHED: dict[str, Any] = {"enable_prefix_caching": True}

OVERSUBSCRIBED = Scenario(
    "oversubscribed",
    "Requests that outgrow the pool together",
    ("PRE-1", "PRE-3", "PRE-5", "PRG-1", "PRG-4", "KV-6"),
    [
        Case("paged", oversubscribed("paged", 0.6), sees=["preempted"]),
        Case("paged-brim", oversubscribed("paged", 0.95), sees=["preempted"]),
        Case("paged-barely", oversubscribed("paged", 0.0), sees=["preempted"]),
        Case("paged-mixed", oversubscribed("paged", 0.6, prompts=(1, 4, 2, 3)), sees=["preempted"]),
        Case("paged-swap", oversubscribed("paged", 0.6, **_SWAP), sees=["preempted"]),
        Case("paged-chunked", oversubscribed("paged", 0.6, **_CHUNKED), sees=["preempted"]),
        Case("paged-cached", oversubscribed("paged", 0.6, **_CACHED), sees=["preempted"]),
        Case("one-token-blocks", oversubscribed("one-token-blocks", 0.6), sees=["preempted"]),
        Case("one-token-blocks-swap", oversubscribed("one-token-blocks", 0.6, **_SWAP), sees=["preempted"]),
    ],
)


def three_outgrow_six_blocks(setting: Setting) -> Sequence[Operation]:
    """Each of three requests needs the whole pool at its end: they must take turns."""
    setting.choose(block_size=setting.unit, max_num_seqs=4)
    size = setting.config.block_size
    setting.choose(max_model_len=8 * size)
    add = setting.request(size, 5 * size)
    tight_pool(setting, [add] * 3, 0.0)
    return [add, add, add, Drain()]


def more_sequences_than_blocks(num_seqs: int, blocks: int, *, staggered: bool) -> Build:
    """A batch wider than the pool can ever fill, where a block holds a whole sequence."""

    def build(setting: Setting) -> Sequence[Operation]:
        setting.sequence_blocks()
        setting.choose(max_num_seqs=num_seqs)
        setting.pool(blocks)
        setting.require(
            setting.config.max_num_seqs > setting.usable,
            f"max_num_seqs must exceed the {setting.usable} usable blocks",
        )
        operations: list[Operation] = []
        for number in range(min(2 * setting.usable + 1, 12)):
            operations.append(setting.typical(outputs=6 + number % 3))
            if staggered:
                operations.append(Step())
        return [*operations, Drain()]

    return build


def chunks_smaller_than_a_block(setting: Setting) -> Sequence[Operation]:
    """Who gives way computes less than a block at a time, and who wants the block must use it before that."""
    setting.need(enable_chunked_prefill=True)
    setting.choose(block_size=2 * setting.unit, max_num_seqs=4)
    size = setting.config.block_size
    setting.choose(max_model_len=2 * size, max_num_batched_tokens=max(size // 2, setting.config.max_num_seqs))
    grows = setting.request(size // 2, 3 * size // 2)
    other = setting.request(size, size // 2)
    tight_pool(setting, [grows, other], 0.0)
    return [grows, Step(size // 2 + 1), other, Drain()]


TAKING_TURNS = Scenario(
    "taking-turns",
    "More requests than can be there at once, each of which fits alone",
    ("PRG-1", "PRG-4", "PRE-1"),
    [
        Case("three-outgrow-six-blocks", three_outgrow_six_blocks),
        Case("chunks-smaller-than-a-block", chunks_smaller_than_a_block),
        Case("32-seqs-17-blocks", more_sequences_than_blocks(32, 17, staggered=False)),
        Case("8-seqs-4-blocks", more_sequences_than_blocks(8, 4, staggered=True)),
        Case("4-seqs-1-block", more_sequences_than_blocks(4, 1, staggered=False)),
        Case("2-seqs-1-block-staggered", more_sequences_than_blocks(2, 1, staggered=True)),
    ],
)


def newcomers_while_somebody_is_out(*, priority: bool = False, swap: bool = False) -> Build:
    """Small requests arrive while a preempted one waits for its blocks."""

    def build(setting: Setting) -> Script:
        setting.paged()
        setting.need(scheduling_policy="priority" if priority else "fcfs")
        if swap:
            setting.need(preemption_mode="swap")
            setting.choose(num_swap_blocks=HOST_BLOCKS)
        setting.choose(max_num_seqs=6)
        adds = [setting.typical(priority=number if priority else 0) for number in range(3)]
        tight_pool(setting, adds, 0.7)
        newcomer = setting.request(1, 2, priority=1 if priority else 0)

        def script(session: Session) -> Iterator[Operation]:
            yield from adds
            for _ in range(STEPS_UNTIL_PREEMPTED_MAX):
                yield Step()
                if any(request.state in OUT for request in session.ledger.live.values()):
                    break
            for _ in range(3):
                yield newcomer
                yield Step()
            yield Drain()

        return script

    return build


def newcomers_in_the_queue(setting: Setting) -> Sequence[Operation]:
    """Small requests wait for a place; when somebody is thrown out there is one, and blocks for them too."""
    setting.paged()
    setting.choose(max_num_seqs=3)
    adds = [setting.typical() for _ in range(setting.config.max_num_seqs)]
    tight_pool(setting, adds, 0.7)
    return [*adds, *[setting.request(1, 2)] * 3, Drain()]


RETURNING = Scenario(
    "returning-before-newcomers",
    "Requests arrive while a preempted one waits to come back",
    ("PRE-4",),
    [
        Case("fcfs", newcomers_while_somebody_is_out(), sees=["preempted"]),
        Case("in-the-queue", newcomers_in_the_queue, sees=["preempted"]),
        Case("fcfs-swap", newcomers_while_somebody_is_out(swap=True), sees=["preempted"]),
        Case("priority", newcomers_while_somebody_is_out(priority=True), sees=["preempted"]),
    ],
)


def priorities_outgrow(order: Sequence[int], *, late: bool = False) -> Build:
    """Requests of several priorities outgrow the pool; ``order`` is that of their arrival."""

    def build(setting: Setting) -> Sequence[Operation]:
        setting.paged()
        setting.need(scheduling_policy="priority")
        setting.choose(max_num_seqs=4)
        adds = [setting.typical(priority=priority) for priority in order]
        tight_pool(setting, adds, 0.6)
        operations: list[Operation] = []
        for add in adds:
            operations += [add, Step(2)] if late else [add]
        return [*operations, Drain()]

    return build


PRIORITY_VICTIMS = Scenario(
    "priority-victims",
    "Requests of several priorities that outgrow the pool together",
    ("PRE-3", "FAIR-2", "PRG-4"),
    [
        Case("most-urgent-first", priorities_outgrow((0, 1, 2, 3)), sees=["preempted"]),
        Case("most-urgent-last", priorities_outgrow((3, 2, 1, 0)), sees=["preempted"]),
        Case("most-urgent-late", priorities_outgrow((3, 2, 1, 0), late=True), sees=["preempted"]),
        Case("all-alike", priorities_outgrow((1, 1, 1, 1)), sees=["preempted"]),
    ],
)


def victim_shares_all_it_has(setting: Setting) -> Sequence[Operation]:
    """The least urgent request needs a block, none is free, and all of its own are shared with a more urgent one."""
    setting.need(enable_prefix_caching=True, scheduling_policy="priority")
    setting.choose(block_size=setting.unit, max_num_seqs=2)
    size = setting.config.block_size
    setting.choose(max_model_len=4 * size)
    setting.pool(4)
    setting.require(setting.usable == 4, f"{setting.usable} usable blocks, this case needs 4")
    least_urgent = setting.request(2 * size, size, shared_len=2 * size, priority=1)
    urgent = setting.request(4 * size - 2, 2, shared_len=2 * size)
    return [least_urgent, Step(), urgent, Drain()]


SHARED_VICTIM = Scenario(
    "shared-victim",
    "All blocks of whoever would be thrown out are shared",
    ("PRE-5",),
    [Case("least-urgent", victim_shares_all_it_has, sees=["prefix hit"])],
)

SCENARIOS = (OVERSUBSCRIBED, TAKING_TURNS, RETURNING, PRIORITY_VICTIMS, SHARED_VICTIM)
