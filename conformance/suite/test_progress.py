"""PRG-* and FAIR-*: what can run runs, in a fair order, and gets its own tokens."""

from __future__ import annotations

import pytest

from conformance.suite.under_test import CaseUnderTest


@pytest.mark.requirement("PRG-1")
def test_what_can_run_runs(case: CaseUnderTest) -> None:
    case.holds()


@pytest.mark.requirement("PRG-2")
def test_a_request_that_fits_is_served(case: CaseUnderTest) -> None:
    case.holds()


@pytest.mark.requirement("PRG-3")
def test_a_request_that_can_never_run_is_refused_and_blocks_nobody(case: CaseUnderTest) -> None:
    case.holds()


@pytest.mark.requirement("PRG-4")
def test_recomputation_is_bounded(case: CaseUnderTest) -> None:
    case.holds()


@pytest.mark.requirement("PRG-5")
def test_each_request_gets_exactly_its_tokens(case: CaseUnderTest) -> None:
    case.holds()


@pytest.mark.requirement("PRG-6")
def test_abort_works_in_every_state(case: CaseUnderTest) -> None:
    case.holds()


@pytest.mark.requirement("PRG-7")
def test_the_head_of_the_queue_is_admitted_when_it_fits(case: CaseUnderTest) -> None:
    case.holds()


@pytest.mark.requirement("PRG-8")
def test_legal_calls_return(case: CaseUnderTest) -> None:
    case.holds()


@pytest.mark.requirement("FAIR-1")
def test_first_come_first_served(case: CaseUnderTest) -> None:
    case.holds()


@pytest.mark.requirement("FAIR-2")
def test_the_more_urgent_request_is_admitted_first(case: CaseUnderTest) -> None:
    case.holds()
