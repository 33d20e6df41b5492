"""Append checks and preemption: the arithmetic of vLLM issue 8007, victims, recompute, swap, return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from reference_engine.append_check import APPEND_CHECKS, exact_blocks, one_block_each, touched_blocks
from reference_engine.block_manager import BlockManager
from reference_engine.config import EngineConfig
from reference_engine.request import Request, Status
from reference_engine.scheduler import Plan, Preemption

BRIM = {"block_size": 64, "max_model_len": 64, "max_num_batched_tokens": 256}
"""One block holds a whole sequence, as on a device with a fixed batch."""


def at_the_brim(drive: Callable[..., Any], num_blocks: int, check: str, **fields: Any) -> Any:
    """Four requests of 8 tokens for 20 steps, which none of them finishes."""
    driver = drive(**{**BRIM, "num_blocks": num_blocks, "append_check": check, **fields})
    for number in range(4):
        driver.add(f"r{number}", 8, 50, arrival=number)
    for _ in range(20):
        driver.step()
    return driver


@pytest.mark.parametrize("num_blocks", [4, 5])
def test_the_exact_check_preempts_nobody_at_the_brim(drive: Callable[..., Any], num_blocks: int) -> None:
    driver = at_the_brim(drive, num_blocks, "exact")
    assert (len(driver.preempted), driver.num_tokens) == (0, 108)


@pytest.mark.parametrize("check", ["touched", "per_sequence"])
def test_the_heuristics_preempt_every_other_step_without_a_spare_block(drive: Callable[..., Any], check: str) -> None:
    driver = at_the_brim(drive, 4, check)
    assert (len(driver.preempted), driver.num_tokens) == (10, 179)
    assert set(driver.preempted) == {"r3"}
    spare = at_the_brim(drive, 5, check)
    assert (len(spare.preempted), spare.num_tokens) == (0, 108)
    assert 4 not in {block for table in spare.tables.values() for block in table}


@pytest.mark.parametrize(("num_blocks", "victims"), [(4, {"r2", "r3"}), (5, {"r3"}), (6, set())])
def test_the_strict_check_needs_two_spare_blocks(drive: Callable[..., Any], num_blocks: int, victims: set[str]) -> None:
    assert set(at_the_brim(drive, num_blocks, "strict").preempted) == victims


@pytest.mark.parametrize("check", ["touched", "strict"])
def test_a_victim_does_not_come_back_in_the_same_step(drive: Callable[..., Any], check: str) -> None:
    driver = at_the_brim(drive, 4, check, enable_chunked_prefill=True)
    assert driver.preempted  # the driver sees to it that no plan runs its own victim


def test_with_one_block_every_token_is_a_prefill(drive: Callable[..., Any]) -> None:
    driver = drive(**BRIM, num_blocks=1, max_num_seqs=1, append_check="touched")
    driver.add("alone", 10, 12)
    driver.drain()
    assert len(driver.preempted) == 11
    assert all(s.first == 0 for plan in driver.plans for s in plan.sequences)


@pytest.mark.parametrize(
    ("length", "new", "lookahead", "touched", "real"),
    [
        (10, 1, 0, 1, 0),
        (2047, 1, 0, 1, 0),
        (2048, 1, 0, 1, 1),
        (10, 1, 4, 1, 0),
        (2043, 1, 4, 1, 0),
        (2044, 1, 4, 2, 0),
    ],
)
def test_what_each_check_counts(length: int, new: int, lookahead: int, touched: int, real: int) -> None:
    manager = BlockManager(
        EngineConfig(
            num_blocks=8,
            block_size=2048,
            max_num_seqs=1,
            max_num_batched_tokens=8192,
            max_model_len=8192,
            num_lookahead_slots=lookahead,
        )
    )
    request = Request("r", list(range(length)), 100)
    (sequence,) = request.live
    manager.admit([(sequence, [])])
    sequence.scheduled = length
    sequence.tokens.append(1)
    sequence.grant = new
    assert touched_blocks(manager, [sequence]) == touched
    assert exact_blocks(manager, [sequence]) == real
    assert one_block_each(manager, [sequence]) == 1


def test_a_strict_check_wants_more_than_it_counts() -> None:
    assert APPEND_CHECKS["touched"].passes(2, 2)
    assert not APPEND_CHECKS["strict"].passes(2, 2)
    assert APPEND_CHECKS["strict"].passes(2, 3)


def test_the_latest_arrival_goes_first_and_returns_before_later_ones(drive: Callable[..., Any]) -> None:
    driver = drive(num_blocks=6, max_model_len=20)
    for number, name in enumerate("abc"):
        driver.add(name, 7, 13, arrival=number)
    while not driver.preempted:
        plan = driver.step()
    assert driver.preempted == ["c"]
    assert plan.preempted[0].blocks_counted > plan.preempted[0].blocks_free
    assert plan.preempted[0].asked_by.request_id == "a"
    driver.add("late", 1, 2, arrival=3)
    driver.drain()
    firsts = [s.sequence.request.request_id for plan in driver.plans for s in plan.sequences if s.first == 0]
    assert firsts[-1] == "late"
    assert set(driver.preempted) <= {"b", "c"}
    assert all(len(driver.finished[name].outputs[0]) == 13 for name in "abc")


def test_the_least_urgent_goes_first_under_priority(drive: Callable[..., Any]) -> None:
    driver = drive(num_blocks=6, max_model_len=20, scheduling_policy="priority")
    for number, (name, priority) in enumerate([("low", 2), ("high", 0), ("middle", 1)]):
        driver.add(name, 7, 13, arrival=number, priority=priority)
    while not driver.preempted:
        driver.step()
    assert driver.preempted == ["low"]
    driver.drain()
    assert next(iter(driver.finished)) == "high"


def test_a_request_whose_blocks_are_all_shared_is_passed_over(drive: Callable[..., Any]) -> None:
    driver = drive(
        num_blocks=6,
        max_model_len=24,
        scheduling_policy="priority",
        enable_prefix_caching=True,
        enable_chunked_prefill=True,
    )
    tokens = list(range(7))
    driver.add("low", tokens, 12, priority=2)
    driver.step()
    driver.step()  # eight tokens computed, two full blocks
    sequence = driver.engine.requests["low"].live[0]
    assert len(sequence.tokens) == 9
    driver.add("high", sequence.tokens[:9], 12, priority=0, arrival=1)
    assert not driver.step().preempted
    blocks = driver.engine.blocks
    low, high = driver.engine.requests["low"], driver.engine.requests["high"]
    assert blocks.frees_a_block(low)  # its third block is its own
    blocks.pool.release([sequence.table.pop()])
    assert not blocks.frees_a_block(low)
    assert blocks.frees_a_block(high)
    assert driver.engine.scheduler._victim(high) is high


def test_a_prefill_is_preempted_halfway_and_starts_again(drive: Callable[..., Any]) -> None:
    driver = drive(num_blocks=5, max_model_len=20, max_num_batched_tokens=3, enable_chunked_prefill=True)
    driver.add("old", 3, 12)
    driver.step()
    driver.add("young", 14, 2, arrival=1)
    while not driver.preempted:
        driver.step()
    assert driver.preempted == ["young"]
    young = driver.engine.requests["young"].live[0]
    assert (young.scheduled, young.done, young.table) == (0, 0, [])
    driver.drain()
    assert len(driver.finished["young"].outputs[0]) == 2


def test_a_swapped_request_comes_back_where_it_was(drive: Callable[..., Any]) -> None:
    driver = drive(num_blocks=4, max_model_len=16, preemption_mode="swap", num_swap_blocks=4)
    driver.add("old", 6, 10)
    driver.add("young", 6, 10, arrival=1)
    driver.drain()
    assert [m.kind for plan in driver.plans for m in plan.moves].count("swap_out") == 2
    assert [m.kind for plan in driver.plans for m in plan.moves].count("swap_in") == 2
    assert sum(1 for plan in driver.plans for s in plan.sequences if s.first == 0) == 2  # no second prefill


def test_swap_falls_back_to_recompute_when_the_host_pool_is_full(drive: Callable[..., Any]) -> None:
    driver = drive(num_blocks=4, max_model_len=16, preemption_mode="swap", num_swap_blocks=1)
    driver.add("old", 6, 10)
    driver.add("young", 6, 10, arrival=1)
    driver.drain()
    assert {p.mode for plan in driver.plans for p in plan.preempted} == {"recompute"}
    assert len(driver.finished) == 2


def test_blocks_shared_by_a_fork_are_swapped_once(drive: Callable[..., Any]) -> None:
    driver = drive(num_blocks=6, max_model_len=16, preemption_mode="swap", num_swap_blocks=6)
    driver.add("old", 6, 10)
    driver.add("pair", 9, 4, n=2, arrival=1)
    while not driver.preempted:
        plan = driver.step()
    assert plan.preempted[0].mode == "swap"
    sources = [move.src for move in plan.moves if move.kind == "swap_out"]
    assert len(sources) == len(set(sources)) == 4  # two full blocks of the prompt, one of its own for each
    driver.drain()
    assert len(driver.finished["pair"].outputs) == 2


def test_a_swapped_fork_waits_for_the_copies_it_must_make_at_once(drive: Callable[..., Any]) -> None:
    driver = drive(num_blocks=4, max_model_len=16, preemption_mode="swap", num_swap_blocks=4)
    driver.add("old", 4, 6)
    driver.add("pair", 6, 2, n=2, arrival=1)
    driver.step()
    plan = driver.step()  # the last free block goes to the older one, and the fork has a shared block to copy
    assert [(p.request.request_id, p.mode, p.blocks_counted) for p in plan.preempted] == [("pair", "swap", 1)]
    assert driver.pool.available == 2  # enough for what was swapped out, not for the copy
    driver.drain()
    assert list(driver.finished) == ["old", "pair"]


def test_a_swapped_fork_comes_back_whole(drive: Callable[..., Any]) -> None:
    driver = drive(
        num_blocks=16,
        max_num_batched_tokens=2,
        enable_chunked_prefill=True,
        preemption_mode="swap",
        num_swap_blocks=8,
    )
    driver.add("pair", 2, 6, n=2, arrival=1)
    driver.step()
    driver.step()
    scheduler, pair = driver.engine.scheduler, driver.engine.requests["pair"]
    plan = Plan(99)
    scheduler._preempt(plan, Preemption(pair, "recompute", 0, 0, pair))
    driver._run(plan)
    assert pair.status is Status.SWAPPED
    driver.add("old", 1, 3)
    # The older one leaves one token of the budget, and the fork waits until there are two.
    names = [[s.sequence.request.request_id for s in driver.step().sequences] for _ in range(4)]
    assert names == [["old"], ["old"], ["old"], ["pair", "pair"]]
    driver.drain()


def test_a_preempted_fork_is_prefilled_sequence_by_sequence(drive: Callable[..., Any]) -> None:
    driver = drive(num_blocks=8, max_model_len=16, max_num_batched_tokens=16)
    driver.add("old", 3, 13)
    driver.add("pair", 9, 7, n=2, arrival=1)
    driver.add("third", 9, 7, arrival=2)
    driver.drain()
    assert "pair" in driver.preempted
    starts = [s.sequence.index for plan in driver.plans for s in plan.sequences
              if s.sequence.request.request_id == "pair" and s.first == 0]  # fmt: skip
    assert starts == [0, 0, 1]
    assert [len(output) for output in driver.finished["pair"].outputs] == [7, 7]


def test_sequences_that_have_gone_apart_come_back_without_a_copy(drive: Callable[..., Any]) -> None:
    driver = drive(num_blocks=4, max_num_batched_tokens=8, max_model_len=8, preemption_mode="swap", num_swap_blocks=8)
    request = driver.add("r", 4, 4, n=2)
    for _ in range(3):
        driver.step()
    blocks = driver.engine.blocks
    blocks.swap_out(request, [])
    blocks.pool.allocate(1)
    assert blocks.can_swap_in(request)  # the prompt's block, and one for each sequence
    blocks.pool.allocate(1)
    assert not blocks.can_swap_in(request)
