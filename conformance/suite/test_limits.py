"""LIM-*: the bounds an engine was configured with."""

from __future__ import annotations

import pytest

from conformance.suite.under_test import CaseUnderTest


@pytest.mark.requirement("LIM-1")
def test_the_running_set_stays_within_max_num_seqs(case: CaseUnderTest) -> None:
    case.holds()


@pytest.mark.requirement("LIM-2")
def test_a_step_stays_within_the_token_budget(case: CaseUnderTest) -> None:
    case.holds()


@pytest.mark.requirement("LIM-3")
def test_a_sequence_stays_within_max_model_len(case: CaseUnderTest) -> None:
    case.holds()


@pytest.mark.requirement("LIM-4")
def test_planning_ahead_stays_within_its_limits(case: CaseUnderTest) -> None:
    case.holds()
