"""Random requests, aborts and resets on random configurations: the driver's own books must agree throughout."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from reference_engine.config import ConfigError
from reference_engine.engine import RequestError

SEEDS = range(240)


def random_fields(rng: random.Random) -> dict[str, Any]:
    chunked = rng.random() < 0.6
    max_model_len = rng.choice([6, 8, 12, 16])
    return {
        "num_blocks": rng.randint(3, 14),
        "block_size": rng.choice([1, 2, 3, 4, 8]),
        "max_num_seqs": rng.randint(1, 6),
        "max_num_batched_tokens": rng.randint(1, 20) if chunked else max_model_len + rng.randint(0, 16),
        "max_model_len": max_model_len,
        "enable_prefix_caching": rng.random() < 0.5,
        "enable_chunked_prefill": chunked,
        "max_chunk_tokens": rng.choice([0, 0, 3]) if chunked else 0,
        "scheduling_policy": rng.choice(["fcfs", "priority"]),
        "preemption_mode": rng.choice(["recompute", "swap"]),
        "num_swap_blocks": rng.randint(1, 8),
        "sliding_window": rng.choice([None, None, 2, 5]),
        "null_block": True,
        "num_lookahead_slots": rng.choice([0, 0, 1, 5]),
        "watermark": rng.choice([0.0, 0.0, 0.2]),
        "pipeline_depth": rng.choice([1, 1, 2, 3]),
        "append_check": rng.choice(["exact", "exact", "touched", "per_sequence", "strict"]),
        "free_list": rng.choice(["first-in", "last-in", "from-the-end"]),
    }


def drive_at_random(drive: Callable[..., Any], seed: int) -> Any:
    rng = random.Random(seed)
    while True:
        try:
            driver = drive(**random_fields(rng))
            break
        except ConfigError:
            continue
    live: list[str] = []
    for number in range(rng.randint(4, 14)):
        total = rng.randint(2, driver.config.max_model_len)
        prompt_len = rng.randint(1, total - 1)
        prompt: int | list[int] = prompt_len if rng.random() < 0.4 else list(range(100, 100 + prompt_len))
        try:
            driver.add(
                f"r{number}",
                prompt,
                total - prompt_len,
                n=rng.choice([1, 1, 1, 2, 3]),
                priority=rng.randint(0, 2),
                arrival=number,
                stop_token=rng.choice([None, rng.randint(2, 51)]),
                salt=rng.choice(["", "", "pepper"]),
            )
            live.append(f"r{number}")
        except RequestError:
            pass
        for _ in range(rng.randint(0, 4)):
            driver.step()
        if live and rng.random() < 0.2:
            driver.engine.abort_request(rng.choice(live))
        if rng.random() < 0.1:
            driver.engine.reset_prefix_cache()
    if driver.config.append_check != "exact":
        # The heuristics may recompute for ever; their books must be right all the same.
        for _ in range(100):
            driver.step()
        for name in live:
            driver.engine.abort_request(name)
    driver.drain()
    return driver


@pytest.mark.parametrize("seed", SEEDS)
def test_the_books_agree_and_every_request_is_served(drive: Callable[..., Any], seed: int) -> None:
    driver = drive_at_random(drive, seed)
    assert driver.pool.available == driver.config.usable_blocks
    assert all(len(finished.outputs) >= 1 for finished in driver.finished.values())


def test_the_random_driving_reaches_what_it_is_for(drive: Callable[..., Any]) -> None:
    seen: Counter[str] = Counter()
    for seed in SEEDS:
        driver = drive_at_random(drive, seed)
        seen["finished"] += len(driver.finished)
        seen["hit"] += driver.engine.blocks.hit_tokens > 0
        for plan in driver.plans:
            seen.update(preemption.mode for preemption in plan.preempted)
            seen.update(move.kind for move in plan.moves)
    assert all(seen[kind] >= 5 for kind in ("finished", "hit", "recompute", "swap", "copy", "swap_in")), seen


@pytest.mark.parametrize("seed", range(40))
def test_the_same_operations_give_the_same_plans(drive: Callable[..., Any], seed: int) -> None:
    def plans() -> list[Any]:
        return [
            [(s.request.request_id, s.index, first, count) for s, first, count, _ in plan.sequences] + plan.moves
            for plan in drive_at_random(drive, seed).plans
        ]

    assert plans() == plans()
