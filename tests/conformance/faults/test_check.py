"""The check: what becomes of engines that are right, wrong, refusing, broken or pinned into a corner."""

from __future__ import annotations

import msgspec
import pytest

from conformance.check import UnknownRequirement, check
from conformance.engines import EngineSource, load
from conformance.execute import replay
from conformance.expectations import Expectation, Expectations
from conformance.protocol import AdapterError, EngineConfig, StepPlan
from conformance.requirements import load as load_requirements
from conformance.results import CheckReport, CheckResult
from conformance.scenarios import CaseOutcome
from conformance.settings import parse_settings
from conformance.watchdog import Watchdog

from .engines import FAULTS, Faulty
from .scheduling import MixesUpTokens
from .test_detection import FaultySource

PER_SEQUENCE = ["engine_options.append_check=touched"]


def pinned(*words: str, requirements: list[str] | None = None) -> CheckReport:
    config, names = parse_settings("neuron", words)
    return check(load("reference"), config, names, requirements)


def result(report: CheckReport, requirement: str) -> CheckResult:
    return next(row for row in report.results if row.requirement == requirement)


def failing(report: CheckReport) -> list[str]:
    return [row.requirement for row in report.results if row.status == "fail"]


@pytest.fixture(scope="module")
def reference() -> CheckReport:
    return check(load("reference"))


@pytest.fixture(scope="module")
def seed() -> CheckReport:
    """The engine of vLLM issue 8007, in its configuration."""
    return pinned(*PER_SEQUENCE)


# ------------------------------------------------------------------------------------------------- a right engine


def test_the_reference_engine_keeps_the_contract(reference: CheckReport) -> None:
    assert reference.ok
    assert reference.counts() == {"pass": 48, "unsupported": 1}


def test_a_feature_it_does_not_declare_is_unsupported_and_no_pass(reference: CheckReport) -> None:
    row = result(reference, "ENC-1")
    assert (row.status, row.reason) == ("unsupported", "the engine does not declare encoder_cache")


def test_no_case_of_the_reference_engine_is_skipped(reference: CheckReport) -> None:
    skipped = [case.case for row in reference.results for case in row.cases if case.status == "skip"]
    assert skipped == []


def test_results_are_in_the_order_of_the_contract(reference: CheckReport) -> None:
    assert [row.requirement for row in reference.results] == list(load_requirements())


def test_a_report_survives_json(reference: CheckReport, seed: CheckReport) -> None:
    for report in (reference, seed):
        assert msgspec.json.decode(msgspec.json.encode(report), type=CheckReport) == report


def test_callbacks_see_every_case_and_every_requirement() -> None:
    cases: list[tuple[str, int, int]] = []
    rows: list[str] = []

    def on_case(outcome: CaseOutcome, number: int, total: int) -> None:
        cases.append((outcome.case, number, total))

    check(
        load("reference"),
        requirements=["PRE-7", "PRE-4"],
        on_case=on_case,
        on_result=lambda row: rows.append(row.requirement),
    )
    assert rows == ["PRE-4", "PRE-7"]
    assert [number for _, number, _ in cases] == list(range(1, len(cases) + 1))
    assert {total for *_, total in cases} == {len(cases)}


# ------------------------------------------------------------------------------------- the engine of vLLM issue 8007


def test_the_seed_fails_for_what_it_is_and_nothing_else(seed: CheckReport) -> None:
    assert failing(seed) == ["PRE-1", "PRE-2", "PRE-7"]


def test_the_seed_is_told_in_figures(seed: CheckReport) -> None:
    assert (
        "4 requests at batch size 4 with 4 blocks: 59 steps, 29 preemptions, 33 prefills; "
        "3 requests: 30 steps, 0 preemptions, 3 prefills"
    ) in result(seed, "PRE-2").reason
    assert "4 requests take 59 steps at batch size 4, 3 take 30" in result(seed, "PRE-7").reason


def test_the_trace_of_a_failure_can_be_replayed(seed: CheckReport) -> None:
    trace = result(seed, "PRE-2").trace
    assert trace is not None
    assert trace.header.note == "full-batch/sequence-blocks-4-seqs"
    assert trace.header.config.block_size == 2048
    again = replay(load("reference").factory, trace)
    assert again.status == "FAILED"
    assert again.execution.violations[0].message == trace.footer.violations[0].message


def test_only_one_trace_is_kept_for_each_requirement(seed: CheckReport) -> None:
    for row in seed.results:
        assert sum(case.trace is not None for case in row.cases) == (row.status == "fail")


def test_one_more_block_hides_it() -> None:
    assert failing(pinned(*PER_SEQUENCE, "num_blocks=5")) == []


def test_cases_that_pinned_fields_make_the_same_are_shown_once(seed: CheckReport) -> None:
    cases = {case.case: case for case in result(seed, "PRE-2").cases}
    spare = cases["full-batch/sequence-blocks-4-seqs-1-spare"]
    assert spare.status == "skip"
    assert spare.reason == "with these fields pinned it is the same as sequence-blocks-4-seqs"


def test_what_cannot_be_forced_with_the_pinned_fields_is_skipped_with_the_reason(seed: CheckReport) -> None:
    row = result(seed, "PRE-3")
    assert row.status == "skip"
    assert "4 usable blocks: this case needs 1 to 3, too few for everybody and enough for each alone" in row.reason


# ------------------------------------------------------------------------------------------------ expected failures


def known(requirement: str, *cases: str) -> Expectations:
    entry = Expectation(requirement=requirement, reason="asks for one block each", link="issue 8007", cases=cases)
    return Expectations(source="here", entries=(entry,))


def test_an_expected_failure_does_not_fail_the_check() -> None:
    fault = FaultySource(FAULTS["PRE-7"])
    report = check(fault, requirements=["PRE-7"], expectations=known("PRE-7"))
    assert (report.status, report.ok) == ("known", True)


def test_an_expected_failure_that_does_not_happen_fails_the_check() -> None:
    report = check(load("reference"), requirements=["PRE-7"], expectations=known("PRE-7", "full-batch/paged-*"))
    assert (report.status, report.ok) == ("stale", False)


# -------------------------------------------------------------------------------------------- broken, and corrupted


def test_a_run_that_is_corrupted_is_no_verdict_on_the_rest() -> None:
    report = check(FaultySource(MixesUpTokens), requirements=["PRE-3", "PRG-5"])
    assert result(report, "PRG-5").status == "fail"
    waiting = result(report, "PRE-3")
    assert waiting.status == "skip"
    assert "cut short in step" in waiting.reason
    assert "PRG-5" in waiting.reason
    assert waiting.cases[0].spoilt_by == ("PRG-5",)


def test_a_corruption_is_shown_wherever_it_is_seen() -> None:
    """PRE-3 alone is asked for: that another requirement is broken on the way must not get lost."""
    report = check(FaultySource(MixesUpTokens), requirements=["PRE-3", "PRG-5"])
    seen = {case.case.partition("/")[0] for case in result(report, "PRG-5").cases if case.status == "fail"}
    assert {"endings", "oversubscribed"} <= seen


class AdapterGivesUp(Faulty):
    def schedule(self) -> StepPlan:
        if len(self.live) > 1:
            raise AdapterError("this release is unknown to me")
        return super().schedule()


class HangsWithCompany(Faulty):
    def schedule(self) -> StepPlan:
        while len(self.live) > 3:
            pass
        return super().schedule()


def test_an_engine_that_hangs_is_a_finding() -> None:
    watchdog = Watchdog(call_seconds_max=0.2)
    row = check(FaultySource(HangsWithCompany), requirements=["PRE-4", "PRG-8"], watchdog=watchdog).results[0]
    assert (row.requirement, row.status) == ("PRG-8", "fail")
    assert "schedule raised EngineHung" in row.reason


def test_an_adapter_at_fault_is_an_error() -> None:
    row = check(FaultySource(AdapterGivesUp), requirements=["PRE-7"]).results[0]
    assert row.status == "error"
    assert "the adapter is at fault: this release is unknown to me" in row.reason


class ForgetsToReport(Faulty):
    def schedule(self) -> StepPlan:
        plan = super().schedule()
        plan.sequences.clear()
        return plan


def test_nothing_is_judged_when_the_smoke_test_is_red() -> None:
    report = check(FaultySource(ForgetsToReport))
    assert (report.status, report.results) == ("error", [])
    assert report.smoke.reason.startswith("one request to its end: ")


def test_nothing_is_judged_when_the_engine_refuses_what_is_pinned() -> None:
    report = check(load("reference"), EngineConfig(num_speculative_tokens=1), {"num_speculative_tokens"})
    assert (report.smoke.status, report.status, report.results) == ("refused", "error", [])


def test_an_engine_that_cannot_be_imported_is_an_error() -> None:
    report = check(EngineSource("gone", "no_such_module:make"))
    assert (report.smoke.status, report.status) == ("red", "error")
    assert "there is no module 'no_such_module'" in report.smoke.reason


# ---------------------------------------------------------------------------------------------------- what is asked


def test_an_unknown_requirement_is_told_the_known_ones() -> None:
    with pytest.raises(UnknownRequirement, match="no requirement 'PRE-9'; expected one of ACC-1, ACC-2"):
        check(load("reference"), requirements=["PRE-9"])


class WithoutDevice(Faulty):
    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        features = self.capabilities.features - {"device"}
        self.capabilities = msgspec.structs.replace(self.capabilities, features=features)


def test_nothing_is_said_of_devices_to_an_engine_that_declares_none() -> None:
    row = check(FaultySource(WithoutDevice), requirements=["DEV-1"]).results[0]
    assert (row.status, row.reason) == ("unsupported", "the engine does not declare device")


def test_the_neuron_preset_puts_an_engine_on_its_device(seed: CheckReport) -> None:
    """Also one that preempts at full batch and prefills again: the lines it comes back to are its own."""
    lines = [result(seed, f"DEV-{number}") for number in range(1, 6)]
    assert [row.status for row in lines] == ["pass"] * 5
    full = next(case for case in lines[1].cases if case.case == "fixed-batch/full-batch")
    assert "0 preemptions" not in full.tally


def test_an_unknown_field_cannot_be_pinned() -> None:
    with pytest.raises(ValueError, match="pinned num_block: no such field of EngineConfig"):
        check(load("reference"), pinned=["num_block"])
