"""Gives each test of the suite the cases that judge its requirement; all else is that of `conformance.check`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from conformance.advice import next_command
from conformance.engines import EngineNotFound
from conformance.expectations import ExpectationsError
from conformance.protocol import ConfigRefused
from conformance.scenarios import cases_of
from conformance.suite.under_test import CaseUnderTest, Engine


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each case that judges the function's requirement."""
    marker = metafunc.definition.get_closest_marker("requirement")
    if marker is not None and "case" in metafunc.fixturenames:
        cases = cases_of(marker.args[0])
        names = [f"{scenario.name}/{case.name}" for scenario, case in cases]
        metafunc.parametrize("case", cases, ids=names, indirect=True)


@pytest.fixture(scope="session")
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """The engine that ``--engine`` names; the smoke test of its adapter has run."""
    try:
        under_test = Engine(request.config)
    except (EngineNotFound, ConfigRefused, ExpectationsError) as error:
        pytest.exit(f"{error}; next: {next_command(error)}", returncode=pytest.ExitCode.USAGE_ERROR)
    yield under_test
    under_test.examiner.close()


@pytest.fixture
def case(request: pytest.FixtureRequest, engine: Engine) -> CaseUnderTest:
    """The case at hand; the test calls ``holds``."""
    engine.must_be_green(request.node)
    scenario, case = request.param
    marker = request.node.get_closest_marker("requirement")
    return CaseUnderTest(request.node, engine, marker.args[0], scenario, case)
