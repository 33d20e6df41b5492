"""CCH-* and ENC-1: what the caches are worth, and what they may not cost."""

from __future__ import annotations

import pytest

from conformance.suite.under_test import CaseUnderTest


@pytest.mark.requirement("CCH-1")
def test_a_repeated_prompt_hits_all_its_full_blocks(case: CaseUnderTest) -> None:
    case.holds()


@pytest.mark.requirement("CCH-2")
def test_cached_blocks_are_available(case: CaseUnderTest) -> None:
    case.holds()


@pytest.mark.requirement("CCH-3")
def test_a_reset_forgets_and_harms_nobody(case: CaseUnderTest) -> None:
    case.holds()


@pytest.mark.requirement("ENC-1")
def test_the_encoder_cache_keeps_its_books(case: CaseUnderTest) -> None:
    case.holds()
