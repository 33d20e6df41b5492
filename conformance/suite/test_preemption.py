"""PRE-*: who is thrown out, when, and what it costs."""

from __future__ import annotations

import pytest

from conformance.suite.under_test import CaseUnderTest


@pytest.mark.requirement("PRE-1")
def test_nobody_is_preempted_without_need(case: CaseUnderTest) -> None:
    case.holds()


@pytest.mark.requirement("PRE-2")
def test_a_full_batch_that_fits_is_never_recomputed(case: CaseUnderTest) -> None:
    case.holds()


@pytest.mark.requirement("PRE-3")
def test_the_latest_or_least_urgent_goes_first(case: CaseUnderTest) -> None:
    case.holds()


@pytest.mark.requirement("PRE-4")
def test_a_preempted_request_returns_before_newcomers(case: CaseUnderTest) -> None:
    case.holds()


@pytest.mark.requirement("PRE-5")
def test_a_preemption_frees_something(case: CaseUnderTest) -> None:
    case.holds()


@pytest.mark.requirement("PRE-6")
def test_a_pool_of_n_sequences_runs_n_at_once(case: CaseUnderTest) -> None:
    case.holds()


@pytest.mark.requirement("PRE-7")
def test_the_last_place_in_the_batch_costs_next_to_nothing(case: CaseUnderTest) -> None:
    case.holds()
