"""What the bench says of two fuzzers: survival with censoring, effect size, and how likely chance alone is.

Kept to a hundred lines in place of a dependency: samples are small, censored at one budget and full of ties.
Sources: Kaplan and Meier (JASA 1958); Mann and Whitney (Ann. Math. Stat. 1947), with the correction for ties of
Hollander and Wolfe (1999, section 4.1); Vargha and Delaney (J. Educ. Behav. Stat. 2000), as Arcuri and Briand
recommend them for randomised algorithms (STVR 2014).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

EXACT_MAX = 400
"""Product of the sample sizes up to which the p-value is exact, when there are no ties."""


class Comparison(NamedTuple):
    """One sample against another, smaller being better. ``a12``: how often the first is, ties counting half."""

    a12: float
    p_value: float

    @property
    def magnitude(self) -> str:
        """The words of Vargha and Delaney for the size of the effect."""
        distance = abs(self.a12 - 0.5)
        for bound, word in ((0.21, "large"), (0.14, "medium"), (0.06, "small")):
            if distance >= bound:
                return word
        return "negligible"


def compare(first: Sequence[float], other: Sequence[float]) -> Comparison:
    """Mann-Whitney and A12 of two samples in which smaller is better; censored values are infinite.

    Raises ValueError for an empty sample.
    """
    if not first or not other:
        raise ValueError("two samples of at least one value each are compared")
    better = sum((one < two) + 0.5 * (one == two) for one in first for two in other)
    pairs = len(first) * len(other)
    ties = [count for count in Counter([*first, *other]).values() if count > 1]
    exact = not ties and pairs <= EXACT_MAX
    p_value = _exact_p(better, len(first), len(other)) if exact else _normal_p(better, len(first), len(other), ties)
    return Comparison(better / pairs, p_value)


def _exact_p(u: float, size: int, other: int) -> float:
    """Two-sided p-value of the statistic ``u`` without ties, from the number of ways to get each value."""
    ways = _ways(size, other)
    low = int(min(u, size * other - u))
    return min(1.0, 2 * sum(ways[: low + 1]) / sum(ways))


def _ways(size: int, other: int) -> list[int]:
    """How many orders of ``size`` and ``other`` distinct values have each U: the coefficients of a q-binomial."""
    ways = [1] + [0] * (size * other)
    for index in range(1, size + 1):
        for at in range(len(ways) - 1, other + index - 1, -1):  # times (1 - q^(other + index))
            ways[at] -= ways[at - other - index]
        for at in range(index, len(ways)):  # divided by (1 - q^index)
            ways[at] += ways[at - index]
    return ways


def _normal_p(u: float, size: int, other: int, ties: Sequence[int]) -> float:
    """Two-sided p-value by the normal approximation, corrected for ties and for continuity."""
    total = size + other
    tied = sum(count**3 - count for count in ties)
    variance = size * other / 12 * (total + 1 - tied / (total * (total - 1)))
    if variance <= 0:
        return 1.0  # every value is the same
    distance = max(0.0, abs(u - size * other / 2) - 0.5)
    return math.erfc(distance / math.sqrt(2 * variance))


class Survivors(NamedTuple):
    """From ``steps`` on, the share of hunts in which the fault is still unseen."""

    steps: float
    share: float


def survival(steps: Sequence[float | None], budget: float) -> list[Survivors]:
    """The Kaplan-Meier curve of hunts that ended after ``steps``, None for those cut off at ``budget``.

    Begins with everybody at 0 and falls at each step in which a fault was seen.
    """
    curve = [Survivors(0, 1.0)]
    seen = Counter(value for value in steps if value is not None and value <= budget)
    at_risk, share = len(steps), 1.0
    for value in sorted(seen):
        share *= 1 - seen[value] / at_risk
        at_risk -= seen[value]
        curve.append(Survivors(value, share))
    return curve


def median(values: Sequence[float | None]) -> float:
    """The median, None counting as infinite: of an even number the upper middle, so that half were seen by then.

    Raises ValueError for an empty sample.
    """
    if not values:
        raise ValueError("the median of nothing")
    ordered = sorted(math.inf if value is None else value for value in values)
    return ordered[len(ordered) // 2]
