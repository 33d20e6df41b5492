"""DEV-*: what an engine owes a device of fixed batch."""

from __future__ import annotations

import pytest

from conformance.suite.under_test import CaseUnderTest


@pytest.mark.requirement("DEV-1")
def test_lines_exist_and_differ(case: CaseUnderTest) -> None:
    case.holds()


@pytest.mark.requirement("DEV-2")
def test_a_live_line_is_in_every_decode(case: CaseUnderTest) -> None:
    case.holds()


@pytest.mark.requirement("DEV-3")
def test_rows_find_their_requests(case: CaseUnderTest) -> None:
    case.holds()


@pytest.mark.requirement("DEV-4")
def test_odd_lengths_disturb_nobody(case: CaseUnderTest) -> None:
    case.holds()


@pytest.mark.requirement("DEV-5")
def test_nothing_is_compiled_after_start_up(case: CaseUnderTest) -> None:
    case.holds()
