"""A clean engine is never blamed: random operations over random configurations, under several legal policies."""

from __future__ import annotations

from collections import Counter

import pytest

from .clean import Miniature, PrefillsFirst
from .drive import random_session
from .jobs import Job

SEEDS = 120


class PreemptsInFlight(Miniature):
    """Does not wait for the blocks of steps in flight: with few of them left it preempts."""

    def go_on(self, job: Job) -> bool:
        deferred, self.deferred = self.deferred, []
        try:
            return super().go_on(job)
        finally:
            self.deferred = deferred + self.deferred


@pytest.mark.parametrize("kind", [Miniature, PrefillsFirst, PreemptsInFlight], ids=lambda kind: kind.__name__)
def test_a_clean_engine_is_never_blamed(kind: type[Miniature]) -> None:
    seen: Counter[str] = Counter()
    for seed in range(SEEDS):
        session = random_session(kind, seed)
        if session is not None:
            assert session.violations == [], f"seed {seed}"
            seen.update(session.ledger.behaviours)
    assert sum(seen.values()) > 1000
    reached = {"preempted", "recomputed", "swapped in", "prefix hit", "draft accepted", "prefill in chunks"}
    reached |= {"preempted mid-prefill", "preempted with several sequences", "prefix hit after preemption"}
    assert reached <= seen.keys()
