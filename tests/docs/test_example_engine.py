"""The example package, as a third party has it: built as a wheel, installed beside ours, named by its entry point."""

from __future__ import annotations

import os
import subprocess
import venv
from pathlib import Path

import pytest

from conformance.reports.events import read_run

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "my_engine"

pytestmark = pytest.mark.slow


class Installed:
    """An environment with both wheels, and an empty directory to be in."""

    def __init__(self, folder: Path) -> None:
        self.here = folder / "empty"
        self.here.mkdir()
        self._bin = folder / "venv" / "bin"
        # What a shell may have set is not what the packages bring.
        self._environment = {name: text for name, text in os.environ.items() if not name.startswith("PYTHON")}
        self._environment |= {"NO_COLOR": "1", "PYTHONWARNINGS": "error", "PYTEST_ADDOPTS": ""}
        venv.create(folder / "venv", with_pip=True)
        wheels = folder / "wheels"
        for package in (ROOT, EXAMPLE):
            self.runs("pip", "wheel", "--no-deps", "--wheel-dir", wheels, package, warnings="default")
        self.runs("pip", "install", *sorted(wheels.glob("*.whl")), warnings="default")

    def runs(self, command: str, *words: object, warnings: str = "error", code: int = 0) -> str:
        done = subprocess.run(
            [self._bin / command, *map(str, words)],
            cwd=self.here,
            env={**self._environment, "PYTHONWARNINGS": warnings},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code, f"{command} {words}\n{done.stdout}{done.stderr}"
        return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("third-party"))


def test_its_name_is_known_where_it_is_installed(installed: Installed) -> None:
    assert "my-engine 1.0\n    features: abort, length_limit, recompute, " in installed.runs("kvconform", "engines")


def test_it_keeps_the_contract_and_the_fuzzer_finds_nothing(installed: Installed) -> None:
    printed = installed.runs("kvconform", "check", "my-engine")
    assert "my-engine 1.0: the contract holds: 33 pass, 16 unsupported" in printed
    printed = installed.runs("kvconform", "fuzz", "my-engine", "--seed", "1", "--steps", "3000")
    assert "no violation in" in printed
    assert "preempted again" in printed
    assert not list(installed.here.glob("kvconform-findings/*"))


def test_the_suite_runs_on_it_under_pytest(installed: Installed) -> None:
    events = installed.here / "contract.jsonl"
    words = ("--pyargs", "conformance.suite", "--engine", "my-engine", "--kv-events", events, "-p", "no:cacheprovider")
    printed = installed.runs("pytest", *words)
    assert "kvconform: engine my-engine 1.0, contract edition" in printed
    assert "\n33 pass, 16 unsupported\n" in printed
    assert read_run(events).columns["my-engine 1.0"].status == "pass"


def test_what_it_does_not_have_is_refused(installed: Installed) -> None:
    printed = installed.runs("kvconform", "check", "my-engine", "--set", "enable_prefix_caching=true", code=2)
    assert "refused: my-engine does not have: prefix_caching" in printed


def test_the_commands_of_its_tox_file_are_those_that_are_tested() -> None:
    text = (EXAMPLE / "tox.ini").read_text(encoding="utf-8")
    for command in (
        "kvconform check my-engine",
        "pytest --pyargs conformance.suite --engine my-engine",
        "kvconform fuzz",
    ):
        assert command in text
