"""ACC-*: who owns which block, and that the books add up."""

from __future__ import annotations

import pytest

from conformance.suite.under_test import CaseUnderTest


@pytest.mark.requirement("ACC-1")
def test_every_block_is_in_exactly_one_class(case: CaseUnderTest) -> None:
    case.holds()


@pytest.mark.requirement("ACC-2")
def test_block_ids_lie_in_the_pool_and_the_null_block_is_never_used(case: CaseUnderTest) -> None:
    case.holds()


@pytest.mark.requirement("ACC-3")
def test_a_slot_has_one_writer_and_a_written_block_is_not_shared(case: CaseUnderTest) -> None:
    case.holds()


@pytest.mark.requirement("ACC-4")
def test_a_reference_count_is_the_number_of_holders(case: CaseUnderTest) -> None:
    case.holds()


@pytest.mark.requirement("ACC-5")
def test_a_table_covers_the_tokens_and_no_more_than_is_declared(case: CaseUnderTest) -> None:
    case.holds()


@pytest.mark.requirement("ACC-6")
def test_idle_means_empty(case: CaseUnderTest) -> None:
    case.holds()


@pytest.mark.requirement("ACC-7")
def test_ended_and_preempted_requests_hold_nothing(case: CaseUnderTest) -> None:
    case.holds()


@pytest.mark.requirement("ACC-8")
def test_a_postponed_admission_changes_nothing(case: CaseUnderTest) -> None:
    case.holds()


@pytest.mark.requirement("ACC-9")
def test_a_running_request_keeps_its_blocks(case: CaseUnderTest) -> None:
    case.holds()


@pytest.mark.requirement("ACC-10")
def test_reported_figures_are_what_was_counted(case: CaseUnderTest) -> None:
    case.holds()
