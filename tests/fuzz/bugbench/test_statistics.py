"""The statistics against published figures, and against counting every case."""

from __future__ import annotations

import itertools
import math

import pytest

from fuzz.bugbench import statistics
from fuzz.bugbench.statistics import Comparison, compare, median, survival


def counted(first: list[float], other: list[float]) -> float:
    """The two-sided p-value by going through all ways to share the values out (no ties)."""
    values = first + other
    centre = len(first) * len(other) / 2

    def distance(chosen: tuple[float, ...]) -> float:
        rest = [value for value in values if value not in chosen]
        return abs(sum(one < two for one in chosen for two in rest) - centre)

    observed = distance(tuple(first))
    ways = [distance(chosen) for chosen in itertools.combinations(values, len(first))]
    return sum(way >= observed for way in ways) / len(ways)


@pytest.mark.parametrize(
    ("first", "other"),
    [
        ([1, 2, 3], [4, 5, 6]),
        ([1, 4, 6, 7], [2, 3, 5]),
        ([10, 2, 31, 14, 5], [6, 17, 8, 29, 3]),
        ([5], [1, 2, 3, 4, 6, 7, 8, 9]),
    ],
)
def test_the_exact_p_value_is_what_counting_all_cases_gives(first: list[float], other: list[float]) -> None:
    assert compare(first, other).p_value == pytest.approx(counted(first, other))


def test_the_example_of_mann_and_whitney_s_tables() -> None:
    """n = 5, m = 5, U = 2: the published two-sided probability is 0.032."""
    result = compare([1, 2, 3, 4, 7], [5, 6, 8, 9, 10])
    assert result.p_value == pytest.approx(0.0317, abs=5e-4)


def test_ties_are_corrected_for() -> None:
    """Worked by hand: U = 2, variance 4 * 4 / 12 * (9 - (2 * (3**3 - 3)) / (8 * 7))."""
    first, other = [1, 2, 2, 3], [2, 3, 3, 4]
    variance = 16 / 12 * (9 - 48 / 56)
    wins = sum((one < two) + 0.5 * (one == two) for one in first for two in other)
    expected = math.erfc((abs(wins - 8) - 0.5) / math.sqrt(2 * variance))
    assert compare(first, other).p_value == pytest.approx(expected)


def test_the_approximation_agrees_with_the_exact_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    first, other = [2.0 * value for value in range(20)], [2.0 * value + 9 for value in range(20)]
    exact = compare(first, other).p_value
    monkeypatch.setattr(statistics, "EXACT_MAX", 0)
    assert compare(first, other).p_value == pytest.approx(exact, abs=0.002)


def test_effect_size_runs_from_never_to_always() -> None:
    assert compare([1, 2], [3, 4]).a12 == 1.0
    assert compare([3, 4], [1, 2]).a12 == 0.0
    assert compare([1, 2], [1, 2]).a12 == 0.5


def test_what_both_censor_is_a_tie() -> None:
    result = compare([math.inf] * 20, [math.inf] * 20)
    assert result == Comparison(0.5, 1.0)


def test_found_against_never_found_is_as_far_as_it_goes() -> None:
    result = compare([float(value) for value in range(20)], [math.inf] * 20)
    assert result.a12 == 1.0
    assert result.p_value < 1e-7
    assert result.magnitude == "large"


@pytest.mark.parametrize(("a12", "word"), [(0.5, "negligible"), (0.57, "small"), (0.36, "medium"), (0.72, "large")])
def test_the_words_for_the_size_of_an_effect(a12: float, word: str) -> None:
    assert Comparison(a12, 1.0).magnitude == word


def test_the_survival_curve_with_censoring() -> None:
    """Two of four seen at 10, one at 30, one cut off: 1, 1/2, 1/4."""
    curve = survival([10, None, 30, 10], budget=100)
    assert [tuple(point) for point in curve] == [(0, 1.0), (10, 0.5), (30, 0.25)]


def test_nothing_seen_is_a_flat_curve() -> None:
    assert survival([None, None], budget=100) == [(0, 1.0)]


def test_the_median_counts_what_was_never_seen() -> None:
    assert median([1, 2, None]) == 2
    assert median([1, None]) == math.inf
    assert median([3, 1, 2, 4]) == 3


def test_nothing_is_not_compared() -> None:
    with pytest.raises(ValueError, match="at least one value"):
        compare([], [1])
    with pytest.raises(ValueError, match="nothing"):
        median([])
