"""KV-* and ID-1: what attention reads through the block tables."""

from __future__ import annotations

import pytest

from conformance.suite.under_test import CaseUnderTest


@pytest.mark.requirement("KV-1")
def test_attention_reads_the_sequences_own_prefix(case: CaseUnderTest) -> None:
    case.holds()


@pytest.mark.requirement("KV-2")
def test_a_prefix_hit_names_the_same_prefix(case: CaseUnderTest) -> None:
    case.holds()


@pytest.mark.requirement("KV-3")
def test_positions_are_computed_once_and_none_is_skipped(case: CaseUnderTest) -> None:
    case.holds()


@pytest.mark.requirement("KV-4")
def test_moves_come_in_time_and_from_intact_sources(case: CaseUnderTest) -> None:
    case.holds()


@pytest.mark.requirement("KV-5")
def test_a_block_is_not_reused_while_a_step_in_flight_needs_it(case: CaseUnderTest) -> None:
    case.holds()


@pytest.mark.requirement("KV-6")
def test_a_preempted_request_resumes_with_all_its_tokens(case: CaseUnderTest) -> None:
    case.holds()


@pytest.mark.requirement("ID-1")
def test_other_identities_never_share_a_block(case: CaseUnderTest) -> None:
    case.holds()
