"""Every requirement of the contract can be seen broken: for each there is an engine that fails it."""

from __future__ import annotations

import functools

import pytest

from conformance.check import check, rejudge
from conformance.engines import EngineSource, load
from conformance.protocol import Engine, EngineConfig
from conformance.requirements import load as load_requirements
from conformance.results import CheckResult

from .engines import FAULTS, Faulty

REQUIREMENTS = list(load_requirements())


class FaultySource(EngineSource):
    """Builds a class instead of importing one."""

    __slots__ = ("_fault",)

    def __init__(self, fault: type[Faulty]) -> None:
        super().__init__(fault.__name__, "faults:engines")
        self._fault = fault

    def resolve(self) -> type[Faulty]:
        return self._fault

    def factory(self, config: EngineConfig) -> Engine:
        return self._fault(config)


@functools.cache
def verdict(requirement: str) -> CheckResult:
    """Of the engine that breaks ``requirement``."""
    report = check(FaultySource(FAULTS[requirement]), requirements=[requirement])
    assert report.smoke.status == "ok", report.smoke.reason
    return report.results[0]


def test_there_is_an_engine_for_every_requirement() -> None:
    assert sorted(FAULTS) == sorted(REQUIREMENTS)


@pytest.mark.parametrize("requirement", REQUIREMENTS)
def test_an_engine_that_breaks_it_fails(requirement: str) -> None:
    result = verdict(requirement)
    assert result.status == "fail", result.reason
    assert result.trace is not None
    assert [finding.requirement for finding in result.trace.footer.violations] == [requirement]


@pytest.mark.parametrize("requirement", REQUIREMENTS)
def test_the_trace_of_a_failure_fails_again_and_holds_on_a_right_engine(requirement: str) -> None:
    source = FaultySource(FAULTS[requirement])
    trace = verdict(requirement).trace
    assert trace is not None
    again = rejudge(source.factory, trace)
    assert again.status == "FAILED", again.reason
    if requirement != "ENC-1":  # the reference engine has no encoder cache
        assert rejudge(load("reference").factory, trace).status == "FIXED"


@pytest.mark.parametrize("requirement", ["ACC-10", "CCH-1", "CCH-2", "FAIR-1", "LIM-1", "LIM-2", "PRE-6", "PRG-7"])
def test_a_fault_that_corrupts_nothing_is_blamed_on_few(requirement: str) -> None:
    """What follows from the fault may fail as well; accounting and content may not."""
    report = check(FaultySource(FAULTS[requirement]))
    failing = {result.requirement for result in report.results if result.status == "fail"}
    assert requirement in failing
    assert not {one for one in failing if one.startswith(("KV-", "ID-", "ENC-"))}
