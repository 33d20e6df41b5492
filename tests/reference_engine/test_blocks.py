"""The block pool and the prefix cache, each alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from reference_engine.block_pool import BlockPool
from reference_engine.config import FreeListOrder
from reference_engine.prefix_cache import PrefixCache

NOBODY = ("", "")


@pytest.mark.parametrize(
    ("order", "first", "again"),
    [("first-in", [0, 1], [2, 3, 1]), ("last-in", [0, 1], [0, 1, 2]), ("from-the-end", [3, 2], [3, 2, 1])],
)
def test_the_free_list_hands_out_blocks_in_its_order(order: FreeListOrder, first: list[int], again: list[int]) -> None:
    pool = BlockPool(4, order)
    assert pool.allocate(2) == first
    pool.release(list(reversed(first)))
    assert pool.allocate(3) == again


def test_the_null_block_is_never_handed_out() -> None:
    pool = BlockPool(4, null_block=True)
    assert pool.available == 3
    assert 0 not in pool.allocate(3)
    with pytest.raises(AssertionError, match="1 blocks asked, 0 available"):
        pool.allocate(1)


def test_a_block_goes_back_with_its_last_reference_and_not_twice() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.share([block])
    pool.release([block])
    assert pool.available == 1
    pool.release([block])
    assert pool.available == 2
    with pytest.raises(AssertionError, match=f"block {block} is released and not held"):
        pool.release([block])
    with pytest.raises(AssertionError, match="it cannot be shared"):
        pool.share([block])


def test_a_block_named_twice_in_one_release_is_freed_once() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.share([block])
    pool.release([block, block])
    assert sorted(pool.free) == [0, 1]


def cached_pool(num_blocks: int) -> tuple[BlockPool, PrefixCache]:
    pool = BlockPool(num_blocks)
    return pool, PrefixCache(pool, 2)


def test_a_hit_leaves_one_token_to_compute() -> None:
    pool, cache = cached_pool(4)
    table = pool.allocate(2)
    cache.publish(NOBODY, [1, 2, 3, 4], table, 2)
    assert cache.lookup(NOBODY, [1, 2, 3, 4]) == table[:1]
    assert cache.lookup(NOBODY, [1, 2, 3, 4, 5]) == table
    assert cache.lookup(NOBODY, [1, 2]) == []
    assert cache.lookup(NOBODY, [1, 2, 9, 4, 5]) == table[:1]


@pytest.mark.parametrize("identity", [("salt", ""), ("", "adapter"), ("adapter", "")])
def test_identities_never_hit_each_other(identity: tuple[str, str]) -> None:
    pool, cache = cached_pool(4)
    cache.publish(("", "adapter") if identity != ("", "adapter") else NOBODY, [1, 2], pool.allocate(1), 1)
    assert cache.lookup(identity, [1, 2, 3]) == []


def test_a_second_block_of_the_same_content_stays_ordinary() -> None:
    pool, cache = cached_pool(4)
    one, other = pool.allocate(1), pool.allocate(1)
    cache.publish(NOBODY, [1, 2], one, 1)
    cache.publish(NOBODY, [1, 2], other, 1)
    pool.release(other)
    assert other[0] in pool.free
    assert cache.lookup(NOBODY, [1, 2, 3]) == one


def test_eviction_takes_the_least_recently_used_and_the_tail_first(drive: Callable[..., Any]) -> None:
    driver = drive(num_blocks=5, block_size=2, max_model_len=8, enable_prefix_caching=True)
    for name, prompt in (("a", [1, 2, 3, 4]), ("b", [5, 6])):
        driver.add(name, prompt, 1)
        driver.drain()
    head, tail = driver.tables["a", 0]
    (other,) = driver.tables["b", 0]
    assert list(driver.pool.evictable) == [tail, head, other]
    driver.add("c", [1, 2, 9], 1)  # hits the head, which becomes the most recently used
    driver.drain()
    assert list(driver.pool.evictable) == [tail, other, head]


def test_children_of_an_evicted_block_are_hit_again_when_it_is_published_again() -> None:
    pool, cache = cached_pool(3)
    parent, child = pool.allocate(2)
    cache.publish(NOBODY, [1, 2, 3, 4], [parent, child], 2)
    pool.release([parent])  # a window slid over it
    pool.allocate(2)  # the free block, then the evictable one
    assert cache.lookup(NOBODY, [1, 2, 3, 4, 5]) == []
    pool.release([parent])
    (again,) = pool.allocate(1)
    cache.publish(NOBODY, [1, 2], [again], 1)
    assert cache.lookup(NOBODY, [1, 2, 3, 4, 5]) == [again, child]


def test_nothing_is_remembered_of_what_was_evicted() -> None:
    pool, cache = cached_pool(2)
    table = pool.allocate(2)
    cache.publish(("salt", ""), [1, 2, 3, 4], table, 2)
    pool.release(table)
    pool.allocate(2)
    assert not cache._root.children
    assert not cache._nodes


def test_a_reset_frees_every_cached_block(drive: Callable[..., Any]) -> None:
    driver = drive(enable_prefix_caching=True)
    prompt = list(range(9))
    driver.add("a", prompt, 2)
    driver.step()
    assert not driver.engine.reset_prefix_cache()  # a live request would publish its blocks again
    driver.drain()
    assert driver.pool.evictable
    assert driver.engine.reset_prefix_cache()
    assert len(driver.pool.free) == driver.config.num_blocks
    driver.add("again", prompt, 1)
    assert driver.step().sequences[0].first == 0


def test_a_repeated_prompt_hits_every_full_block_but_what_must_be_recomputed(drive: Callable[..., Any]) -> None:
    driver = drive(enable_prefix_caching=True)
    for name, prompt_len, hit in (("a", 12, 0), ("b", 12, 8), ("c", 13, 12)):
        driver.add(name, list(range(prompt_len)), 1)
        assert driver.step().sequences[0].first == hit
        driver.drain()


def test_cached_blocks_count_as_available(drive: Callable[..., Any]) -> None:
    driver = drive(num_blocks=4, max_model_len=16, enable_prefix_caching=True)
    driver.add("a", 15, 1)
    driver.drain()
    assert len(driver.pool.evictable) == 3
    driver.add("b", 15, 1)
    assert [s.sequence.request.request_id for s in driver.step().sequences] == ["b"]


def test_a_postponed_admission_changes_nothing(drive: Callable[..., Any]) -> None:
    driver = drive(num_blocks=6, max_model_len=24, enable_prefix_caching=True, enable_chunked_prefill=True)
    driver.add("cached", list(range(8)), 1)
    driver.drain()
    driver.add("old", 13, 8)
    driver.step()
    blocks = driver.engine.blocks
    before = (list(driver.pool.evictable), list(driver.pool.refs), blocks.hit_tokens, blocks.queried_tokens)
    driver.add("young", list(range(13)), 1)  # hits two evictable blocks and needs two more, of none
    driver.step()
    assert [r.request_id for r in driver.engine.scheduler.waiting] == ["young"]
    assert (list(driver.pool.evictable), list(driver.pool.refs), blocks.hit_tokens, blocks.queried_tokens) == before
