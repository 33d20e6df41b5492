"""DET-*: the same input gives the same answer, another schedule gives the same tokens."""

from __future__ import annotations

import pytest

from conformance.suite.under_test import CaseUnderTest


@pytest.mark.requirement("DET-1")
def test_the_same_operations_give_the_same_plans(case: CaseUnderTest) -> None:
    case.holds()


@pytest.mark.requirement("DET-2")
def test_another_schedule_gives_the_same_tokens(case: CaseUnderTest) -> None:
    case.holds()
