"""How many blocks a batch size needs: the answer, and the reason for each block of it."""

from __future__ import annotations

from typing import Any

import pytest

from conformance.adapters.reference import make
from conformance.planning import BlockPlan, plan_blocks
from conformance.protocol import ConfigRefused, EngineConfig


def planned(batch: int, *, length: int = 64, block: int = 64, **fields: Any) -> BlockPlan:
    config = EngineConfig(
        max_num_seqs=batch,
        block_size=block,
        max_model_len=length,
        max_num_batched_tokens=batch * length,
        **fields,
    )
    return plan_blocks(make, config)


@pytest.mark.parametrize("batch", [1, 2, 4, 16])
@pytest.mark.parametrize(("check", "spare"), [("exact", 0), ("touched", 1), ("per_sequence", 1), ("strict", 2)])
def test_the_spare_blocks_of_each_append_check(batch: int, check: str, spare: int) -> None:
    plan = planned(batch, engine_options={"append_check": check})
    assert plan.needed == batch + spare
    assert len(plan.rule) == (2 if spare else 1)
    if spare:
        assert "the first without need: the running set needs 0 blocks" in plan.rule[1]


def test_paged_blocks_need_no_spare_when_counted_exactly() -> None:
    plan = planned(4, length=64, block=16)
    assert (plan.per_sequence, plan.needed, plan.tokens_need) == (4, 16, 16)


def test_the_null_block_is_named() -> None:
    plan = planned(4, engine_options={"null_block": True})
    assert plan.needed == 5
    assert plan.rule[1] == "+ 1 that never serves a request, block 0 being the null block"


def test_what_a_watermark_keeps_back_is_named() -> None:
    plan = planned(100, watermark=0.01)
    assert plan.needed is not None
    assert plan.needed > 100
    assert "only 99 of 100 run at once: admission keeps blocks back" in plan.rule[-1]


def test_the_curve_shows_the_answer_and_both_its_neighbours() -> None:
    plan = planned(4, engine_options={"append_check": "touched"})
    points = {point.num_blocks: point for point in plan.curve}
    assert {1, 4, 5, 6} <= points.keys()
    assert [points[size].enough for size in (4, 5, 6)] == [False, True, True]
    assert points[4].preemptions > 0
    assert points[4].steps > points[5].steps


def test_an_engine_that_refuses_every_pool_says_why() -> None:
    with pytest.raises(ConfigRefused, match="encoder_cache_size"):
        planned(4, encoder_cache_size=8)


def test_a_search_without_an_answer_ends() -> None:
    plan = planned(2, watermark=0.9)
    assert plan.needed is None
    assert plan.rule[-1].startswith("no pool up to")
