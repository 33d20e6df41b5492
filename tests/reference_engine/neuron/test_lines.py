"""Lines are handed out once, in the order that was chosen, and come back."""

from __future__ import annotations

from collections import deque
from random import Random

import pytest

from reference_engine.runners.neuron.lines import (
    LineMap,
    LineOrder,
    from_the_middle,
    highest_first,
    lowest_first,
)


@pytest.mark.parametrize(
    ("order", "expected"),
    [(lowest_first, [0, 1, 2, 3]), (highest_first, [3, 2, 1, 0]), (from_the_middle, [2, 1, 3, 0])],
)
def test_lines_are_handed_out_in_order(order: LineOrder, expected: list[int]) -> None:
    lines = LineMap(4, order)
    assert [lines.assign(name) for name in "abcd"] == expected
    assert list(lines) == list("abcd")
    assert lines.free == ()


def test_a_line_comes_back_and_is_the_next_to_go() -> None:
    lines = LineMap(3)
    for name in "abc":
        lines.assign(name)
    lines.release("b")
    assert (lines.free, "b" in lines) == ((1,), False)
    assert lines.assign("d") == 1 == lines["d"]


def test_a_request_has_one_line_at_most() -> None:
    lines = LineMap(2)
    lines.assign("a")
    with pytest.raises(AssertionError, match="a has line 0"):
        lines.assign("a")


def test_who_comes_too_many_is_told_who_has_the_lines() -> None:
    lines = LineMap(2)
    for name in "ab":
        lines.assign(name)
    with pytest.raises(AssertionError, match="c needs a line, and all 2 are held by a, b"):
        lines.assign("c")


@pytest.mark.parametrize("order", [lowest_first, highest_first, from_the_middle])
def test_no_line_is_lost_or_given_twice(order: LineOrder) -> None:
    random, lines, held = Random(7), LineMap(5, order), deque[str]()
    for number in range(500):
        if len(held) == 5 or (held and random.random() < 0.5):
            held.rotate(random.randrange(5))
            lines.release(held.popleft())
        else:
            held.append(f"r{number}")
            lines.assign(held[-1])
        assert sorted([*lines.free, *(lines[name] for name in held)]) == list(range(5))
        assert list(lines.free) == sorted(lines.free)
