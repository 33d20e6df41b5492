"""The example in C: it builds without a warning, keeps the contract, and its planted faults are found."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from conformance.check import check
from conformance.engines import EngineSource, load
from conformance.protocol import EngineConfig
from conformance.requirements import load as load_requirements
from fuzz.driver import Driver, campaign

SOURCES = Path(__file__).parents[3] / "docs" / "examples" / "c_engine"
MAKE = shutil.which("make")
pytestmark = pytest.mark.skipif(
    shutil.which("gcc") is None or MAKE is None, reason="needs gcc and make to build the example"
)
Build = Callable[..., EngineSource]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Builds the engine, with a fault if one is named, and gives its source; with sanitizers where asked for."""
    folder = shutil.copytree(SOURCES, tmp_path_factory.mktemp("c") / "engine", ignore=shutil.ignore_patterns("engine*"))

    def made(*words: str, name: str = "engine") -> EngineSource:
        subprocess.run([MAKE or "", "--silent", "CC=gcc", *words], cwd=folder, check=True, capture_output=True)
        return load(f"exec:{folder / name}", validate_wire=True)

    return made


def violations(source: EngineSource, steps: int) -> set[str]:
    engine = source.factory(EngineConfig())
    driver = Driver(source.factory, engine.capabilities, seed=1)
    engine.close()
    state = campaign(driver, steps_max=steps, judged=frozenset(load_requirements()))
    return {discovery.violation.requirement for discovery in state.discoveries.values()}


def test_it_keeps_the_contract(build: Build) -> None:
    report = check(build())
    assert report.engine_version == "1.0"
    failed = [(row.requirement, row.reason) for row in report.results if row.status not in {"pass", "unsupported"}]
    assert failed == []
    passed = {row.requirement for row in report.results if row.status == "pass"}
    assert passed >= {"ACC-1", "KV-1", "KV-6", "LIM-1", "LIM-2", "LIM-3", "PRG-2", "PRG-6", "PRE-1", "PRE-2", "FAIR-1"}


def test_random_requests_find_nothing(build: Build) -> None:
    assert violations(build(), 1500) == set()


def test_it_reads_and_frees_only_what_is_its_own(build: Build) -> None:
    flags = "-O1 -g -std=c11 -Wall -Wextra -Werror -fsanitize=address,undefined -fno-sanitize-recover=all"
    assert violations(build(f"CFLAGS={flags}", "ENGINE=engine-asan", name="engine-asan"), 800) == set()


@pytest.mark.parametrize(
    ("fault", "broken"),
    [("ONE_BLOCK_EACH", "PRE-1"), ("LEAK_ON_ABORT", "ACC-1"), ("CRASH_ON_PREEMPTION", "PRG-8")],
)
def test_a_planted_fault_is_found(fault: str, broken: str, build: Build) -> None:
    assert broken in violations(build(f"BUG={fault}", name=f"engine-{fault}"), 1000)
