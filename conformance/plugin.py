"""The pytest plugin: options, markers, a header, and the table of requirements at the end.

It is loaded into every pytest session of everyone who has kvconform installed, so it imports nothing of kvconform
until the suite is used.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conformance.results import CheckResult
    from conformance.verdicts import Verdict

DEFAULT_ENGINE = "reference"
VERDICT: pytest.StashKey[Verdict] = pytest.StashKey()
"""Where a test of the suite leaves what it found."""
_MARKERS = (
    "assertion(number, only=None): the assertion about Neuron devices that the test shows",
    "requirement(id): the requirement of the contract that the test judges",
    "neuron: needs a Neuron device (inf2, trn1) and its SDK",
    "slow: takes more than about ten seconds",
)
_REPORT_ATTRIBUTE = "kvconform_verdict"
_COLOURS = {"fail": "red", "error": "red", "stale": "red", "known": "yellow", "pass": "green"}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the suite, the fuzzer and the hardware tests."""
    group = parser.getgroup("kvconform", "conformance of LLM serving engines (kvconform)")
    group.addoption(
        "--engine",
        metavar="NAME",
        default=None,
        help="engine to test: a built-in, an entry point of kvconform.engines, package.module:factory, exec:COMMAND, "
        f"or NAME@PYTHON (default: {DEFAULT_ENGINE})",
    )
    group.addoption("--kv-preset", metavar="NAME", default=None, help="pin the fields of a preset, such as neuron")
    group.addoption(
        "--kv-set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="pin a field of the engine's configuration, or set engine_options.NAME; may be repeated",
    )
    group.addoption(
        "--kv-expectations",
        metavar="FILE",
        default=None,
        help="known failures of the engine, instead of those that come with kvconform",
    )
    group.addoption(
        "--neuron-destructive",
        action="store_true",
        help="with neuron_tests -m neuron: run what may wedge a NeuronCore as well, last",
    )
    group.addoption(
        "--neuron-report", metavar="FILE", default=None, help="with neuron_tests: write what was found to FILE, as JSON"
    )
    group.addoption(
        "--kv-validate-wire",
        action="store_true",
        help="hold every line to and from an engine in another process to the wire protocol",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers, so that --strict-markers works for users too."""
    for marker in _MARKERS:
        config.addinivalue_line("markers", marker)
    if config.getoption("numprocesses", None) and any("neuron_tests" in word for word in config.args):
        marks = config.getoption("markexpr", "")
        if "neuron" in marks and "not neuron" not in marks:
            raise pytest.UsageError("the cores of a Neuron device belong to one process: run its suite without -n")
        if config.getoption("neuron_report"):
            raise pytest.UsageError("--neuron-report is written by one process: run without -n")
    config.pluginmanager.register(_Collector(config), "kvconform-collector")


def engine_name(config: pytest.Config) -> str:
    """The engine of this session."""
    name: str | None = config.getoption("engine")
    return name or DEFAULT_ENGINE


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Name the engine, when one was asked for. Its capabilities follow with the table at the end."""
    if config.getoption("engine") is None:
        return []
    from conformance.engines import EngineNotFound, load
    from conformance.requirements import load_contract

    name = engine_name(config)
    try:
        version = load(name).installed_version
    except EngineNotFound as error:
        raise pytest.UsageError(str(error)) from None
    settings = [*config.getoption("kv_set")]
    if config.getoption("kv_preset"):
        settings.insert(0, f"preset {config.getoption('kv_preset')}")
    return [
        f"kvconform: engine {name} {version}".rstrip()
        + f", contract edition {load_contract().edition}"
        + (f", with {', '.join(settings)}" if settings else "")
    ]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Requirement ids become properties of the test, which JUnit files show, and keywords for -k."""
    for item in items:
        for marker in item.iter_markers("requirement"):
            item.user_properties.append(("requirement", marker.args[0]))
            item.extra_keyword_matches.add(marker.args[0])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Put the verdict on the report, from where it reaches the controller of a distributed run."""
    report = yield
    verdict = item.stash.get(VERDICT, None)
    if verdict is not None and call.when == "call":
        setattr(report, _REPORT_ATTRIBUTE, verdict.encode())
    return report


class _Collector:
    """Gathers the verdicts of a session, and shows the table."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._encoded: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        encoded = getattr(report, _REPORT_ATTRIBUTE, None)
        if encoded is not None:
            self._encoded.append(encoded)

    def _is_worker(self) -> bool:
        return hasattr(self._config, "workerinput")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """An expected failure that did not happen fails the session, though every test may have passed."""
        if self._encoded and not self._is_worker() and any(row.status == "stale" for row in self._results()):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _results(self) -> list[CheckResult]:
        from conformance.verdicts import combine

        return combine(self._encoded)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """The verdict on each requirement that was judged, in the order of the contract."""
        if not self._encoded:
            return
        from conformance.verdicts import engine_line

        results = self._results()
        terminalreporter.section("contract")
        terminalreporter.line(engine_line(self._encoded[0]))
        for row in results:
            colour = _COLOURS.get(row.status, "cyan")
            terminalreporter.write(f"{row.status:<11} ", **{colour: True})
            terminalreporter.write(f"{row.requirement:<7} {row.level:<6} {row.title}")
            terminalreporter.line(f": {row.reason}" if row.reason else "")
        counts = {status: sum(row.status == status for row in results) for status in _in_order(results)}
        terminalreporter.line(", ".join(f"{count} {status}" for status, count in counts.items()))


def _in_order(results: list[CheckResult]) -> list[str]:
    from conformance.results import SEVERITY

    present = {row.status for row in results}
    return [status for status in reversed(SEVERITY) if status in present]
