"""Shadow KV against a naive model that stores every slot and looks at every position each time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.shadow_kv import EMPTY, Reader, ShadowKV

SIZE = 3
BLOCKS = 4


class Naive:
    """Every slot of both pools, by (block, offset)."""

    def __init__(self) -> None:
        self.device: dict[tuple[int, int], int] = {}
        self.host: dict[tuple[int, int], int] = {}

    def block(self, pool: dict[tuple[int, int], int], block: int) -> list[int]:
        return [pool.get((block, offset), EMPTY) for offset in range(SIZE)]

    def put(self, pool: dict[tuple[int, int], int], block: int, nodes: list[int]) -> None:
        pool.update({(block, offset): node for offset, node in enumerate(nodes)})

    def first_wrong(self, table: list[int], nodes: list[int], start: int, end: int) -> int | None:
        for position in range(start, end):
            if self.device.get((table[position // SIZE], position % SIZE), EMPTY) != nodes[position]:
                return position
        return None


BLOCK = st.integers(0, BLOCKS - 1)
TABLE = st.lists(BLOCK, min_size=2, max_size=3, unique=True)
NODES = st.lists(st.integers(1, 4), min_size=6, max_size=6)
ACTION = st.one_of(
    st.tuples(st.just("write"), TABLE, st.integers(0, 5), NODES),
    st.tuples(st.just("copy"), BLOCK, BLOCK),
    st.tuples(st.just("swap_out"), BLOCK, BLOCK),
    st.tuples(st.just("swap_in"), BLOCK, BLOCK),
    st.tuples(st.just("zero"), BLOCK),
    st.tuples(st.just("own"), st.integers(0, 2), st.integers(0, 5), st.integers(0, 6)),
    st.tuples(st.just("verify"), st.integers(0, 2), st.sampled_from((0, 0, 0, 1, 3)), st.integers(0, 6)),
)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    actions=st.lists(ACTION, max_size=40),
    tables=st.lists(TABLE, min_size=3, max_size=3),
    expected=st.lists(NODES, min_size=3, max_size=3),
)
def test_readers_see_what_the_naive_model_sees(
    actions: list[tuple[object, ...]], tables: list[list[int]], expected: list[list[int]]
) -> None:
    shadow, naive = ShadowKV(SIZE), Naive()
    readers = [Reader() for _ in tables]
    for action in actions:
        match action:
            case ("write", list(table), int(first), list(nodes)):
                count = min(len(nodes), len(table) * SIZE) - first
                shadow.write(table, first, nodes[:count])
                for number in range(max(0, count)):
                    position = first + number
                    naive.device[table[position // SIZE], position % SIZE] = nodes[number]
            case ("own", int(number), int(first), int(end)):  # what the reader expects
                table, nodes = tables[number], expected[number]
                end = min(end, len(table) * SIZE)
                shadow.write(table, first, nodes[first:end])
                for position in range(first, end):
                    naive.device[table[position // SIZE], position % SIZE] = nodes[position]
            case ("copy", int(src), int(dst)):
                shadow.copy(src, dst)
                naive.put(naive.device, dst, naive.block(naive.device, src))
            case ("swap_out", int(src), int(dst)):
                shadow.swap_out(src, dst)
                naive.put(naive.host, dst, naive.block(naive.device, src))
            case ("swap_in", int(src), int(dst)):
                shadow.swap_in(src, dst)
                naive.put(naive.device, dst, naive.block(naive.host, src))
            case ("zero", int(block)):
                shadow.zero(block)
                naive.put(naive.device, block, [EMPTY] * SIZE)
            case ("verify", int(number), int(start), int(end)):
                table, nodes = tables[number], expected[number]
                end = min(end, len(table) * SIZE)
                mismatch = shadow.verify(readers[number], table, nodes, start, end)
                wrong = naive.first_wrong(table, nodes, start, end)
                assert (None if mismatch is None else mismatch.position) == wrong
            case _:
                raise AssertionError(action)
    for block in range(BLOCKS):
        assert shadow.content(block) == naive.block(naive.device, block)


def test_an_append_leaves_what_others_verified_valid() -> None:
    shadow, reader = ShadowKV(2), Reader()
    shadow.write([5], 0, [11, 12])
    assert shadow.verify(reader, [5], [11, 12], 0, 2) is None
    shadow.write([6], 0, [13])
    shadow.write([6], 1, [14])
    assert shadow.verify(reader, [5, 6], [11, 12, 13, 14], 0, 4) is None


def test_an_overwrite_is_seen_by_who_had_verified_the_block() -> None:
    shadow, reader = ShadowKV(2), Reader()
    shadow.write([5], 0, [11, 12])
    assert shadow.verify(reader, [5], [11, 12], 0, 2) is None
    shadow.write([5], 1, [99])
    mismatch = shadow.verify(reader, [5], [11, 12], 0, 2)
    assert mismatch is not None
    assert (mismatch.position, mismatch.block, mismatch.expected, mismatch.found) == (1, 5, 12, 99)


def test_another_block_in_the_table_is_looked_at_although_nothing_was_written() -> None:
    shadow, reader = ShadowKV(2), Reader()
    shadow.write([5, 6], 0, [11, 12, 13, 14])
    shadow.write([7], 0, [99, 99])
    assert shadow.verify(reader, [5, 6], [11, 12, 13, 14], 0, 4) is None
    mismatch = shadow.verify(reader, [7, 6], [11, 12, 13, 14], 0, 4)
    assert mismatch is not None
    assert (mismatch.position, mismatch.block) == (0, 7)


@pytest.mark.parametrize(("overwritten", "start", "end"), [(5, 2, 4), (6, 0, 2)])
def test_an_overwrite_out_of_reach_is_seen_once_it_is_in_reach(overwritten: int, start: int, end: int) -> None:
    shadow, reader = ShadowKV(2), Reader()
    shadow.write([5, 6], 0, [11, 12, 13, 14])
    assert shadow.verify(reader, [5, 6], [11, 12, 13, 14], 0, 4) is None
    shadow.write([overwritten], 0, [99])
    assert shadow.verify(reader, [5, 6], [11, 12, 13, 14], start, end) is None
    mismatch = shadow.verify(reader, [5, 6], [11, 12, 13, 14], 0, 4)
    assert mismatch is not None
    assert mismatch.block == overwritten


def test_memory_follows_what_is_written_not_the_pool() -> None:
    shadow = ShadowKV(2)
    shadow.write([1_000_000], 0, [1])
    assert shadow.is_written(1_000_000)
    assert not shadow.is_written(0)
    assert len(shadow._blocks) == 1
