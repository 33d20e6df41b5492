"""The pytest plugin: options, markers, a header, and the table of requirements at the end.

It is loaded into every pytest session of everyone who has kvconform installed, so it imports nothing of kvconform
until the suite is used.
"""

from __future__ import annotations

import shlex
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

if TYPE_CHECKING:
    from conformance.results import CheckResult
    from conformance.verdicts import Verdict

DEFAULT_ENGINE = "reference"
DEFAULT_SEED = 1
_INI: dict[str, tuple[str, Literal["string", "linelist", "bool"]]] = {
    "engine": ("kv_engine", "string"),
    "kv_preset": ("kv_preset", "string"),
    "kv_set": ("kv_set", "linelist"),
    "kv_expectations": ("kv_expectations", "string"),
    "kv_events": ("kv_events", "string"),
    "kv_seed": ("kv_seed", "string"),
    "kv_validate_wire": ("kv_validate_wire", "bool"),
}
"""Option -> what it is called in an ini file, and how it is read. Files are named from the folder of the ini file."""
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
    """Options of the suite, the fuzzer and the hardware tests, and what an ini file may say in their stead."""
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
        "--kv-events",
        metavar="FILE",
        default=None,
        help="write everything the suite finds to this event file, for `kvconform report`, and traces beside it",
    )
    group.addoption(
        "--kv-seed", metavar="N", type=int, default=None, help=f"seed of the campaigns (default: {DEFAULT_SEED})"
    )
    group.addoption(
        "--kv-validate-wire",
        action="store_true",
        help="hold every line to and from an engine in another process to the wire protocol",
    )
    group.addoption(
        "--neuron-destructive",
        action="store_true",
        help="with neuron_tests -m neuron: run what may wedge a NeuronCore as well, last",
    )
    group.addoption(
        "--neuron-report", metavar="FILE", default=None, help="with neuron_tests: write what was found to FILE, as JSON"
    )
    for option, (name, kind) in _INI.items():
        parser.addini(name, f"the same as --{option.replace('_', '-')}, which wins", type=kind, default=None)


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers, so that --strict-markers works for users too, and settle the options."""
    for marker in _MARKERS:
        config.addinivalue_line("markers", marker)
    if config.getoption("numprocesses", None) and any("neuron_tests" in word for word in config.args):
        marks = config.getoption("markexpr", "")
        if "neuron" in marks and "not neuron" not in marks:
            raise pytest.UsageError("the cores of a Neuron device belong to one process: run its suite without -n")
        if config.getoption("neuron_report"):
            raise pytest.UsageError("--neuron-report is written by one process: run without -n")
    if not hasattr(config, "workerinput"):  # workers are told what the controller made of it
        _settle(config)
    config.pluginmanager.register(_Collector(config), "kvconform-collector")


def _settle(config: pytest.Config) -> None:
    """Give options that were not on the command line the values of the ini file. Raises `pytest.UsageError`."""
    for option, (name, kind) in _INI.items():
        value: Any = config.getini(name)
        if not value:
            continue
        if option == "kv_seed" and not value.isdigit():
            raise pytest.UsageError(f"{config.inipath}: {name} = {value}: expected a whole number, such as {name} = 7")
        if option in {"kv_expectations", "kv_events"}:
            value = str((config.inipath or config.rootpath).parent / value)
        given = config.getoption(option)
        if kind == "linelist":
            setattr(config.option, option, [*value, *given])
        elif not given and given != 0:
            setattr(config.option, option, int(value) if option == "kv_seed" else value)
    if config.option.kv_seed is None:
        config.option.kv_seed = DEFAULT_SEED
    if config.option.kv_events is not None:
        config.option.kv_events = str((config.invocation_params.dir / config.option.kv_events).resolve())
        path = Path(config.option.kv_events)
        try:  # now, and not after all the work
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("ab").close()
        except OSError as error:
            raise pytest.UsageError(
                f"--kv-events {path}: cannot be written: {error.strerror}; expected a file in a folder that can be "
                "written to: name another one"
            ) from None


def engine_name(config: pytest.Config) -> str:
    """The engine of this session."""
    name: str | None = config.getoption("engine")
    return name or DEFAULT_ENGINE


def pytest_report_header(config: pytest.Config) -> list[str]:
    """The engine, its version and what it declares, when one was asked for; seed and settings."""
    if config.getoption("engine") is None:
        return []
    from conformance.advice import next_command
    from conformance.engines import EngineNotFound, load
    from conformance.execute import probe
    from conformance.protocol import ConfigRefused
    from conformance.requirements import load_contract
    from conformance.settings import parse_settings

    name = engine_name(config)
    try:
        source = load(name, validate_wire=config.getoption("kv_validate_wire"))
        base, pinned = parse_settings(config.getoption("kv_preset"), config.getoption("kv_set"))
    except (EngineNotFound, ConfigRefused) as error:
        raise pytest.UsageError(f"{error}; next: {next_command(error)}") from None
    version = source.installed_version
    try:
        capabilities = probe(source.factory, base, pinned)
    except EngineNotFound as error:
        raise pytest.UsageError(f"{error}; next: {next_command(error)}") from None
    except Exception as error:  # noqa: BLE001 - a red test will say more, and there may be none
        declares = f"nothing, it cannot be built: {type(error).__name__}: {error}"
    else:
        version = capabilities.version
        declares = ", ".join(sorted(capabilities.features)) or "no features"
    settings = [*config.getoption("kv_set")]
    if config.getoption("kv_preset"):
        settings.insert(0, f"preset {config.getoption('kv_preset')}")
    return [
        f"kvconform: engine {name} {version}".rstrip()
        + f", contract edition {load_contract().edition}, seed {config.getoption('kv_seed')}"
        + (f", with {', '.join(settings)}" if settings else ""),
        f"kvconform: it declares {declares}",
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
    if verdict is not None and call.when in {"setup", "call"}:
        setattr(report, _REPORT_ATTRIBUTE, verdict.encode())
    return report


class _Collector:
    """Gathers the verdicts of a session, and shows the table."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._encoded: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        encoded = getattr(report, _REPORT_ATTRIBUTE, None)
        if encoded is None:
            return
        path = self._config.getoption("kv_events")
        if path is not None and not self._encoded and not self._is_worker():
            Path(path).write_bytes(b"")  # a session that is killed must not leave an earlier one's answer
        self._encoded.append(encoded)

    def _is_worker(self) -> bool:
        return hasattr(self._config, "workerinput")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """An expected failure that did not happen fails the session, though every test may have passed."""
        if self._is_worker():
            return
        if self._encoded and any(row.status == "stale" for row in self._results()):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        path = self._config.getoption("kv_events")
        if path is not None and self._encoded:
            from conformance.verdicts import write_events

            whole = session.exitstatus in {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED}
            cut_off = not whole or bool(session.shouldfail or session.shouldstop)
            write_events(Path(path), self._encoded, cut_off=cut_off)

    def _results(self) -> list[CheckResult]:
        from conformance.verdicts import combine

        return combine(self._encoded)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """The verdict on each requirement that was judged, in the order of the contract."""
        if not self._encoded:
            return
        from conformance.verdicts import engine_line

        results = self._results()
        if not results:
            return
        terminalreporter.section("contract")
        terminalreporter.line(engine_line(self._encoded[0]))
        for row in results:
            colour = _COLOURS.get(row.status, "cyan")
            terminalreporter.write(f"{row.status:<11} ", **{colour: True})
            terminalreporter.write(f"{row.requirement:<7} {row.level:<6} {row.title}")
            terminalreporter.line(f": {row.reason}" if row.reason else "")
        counts = {status: sum(row.status == status for row in results) for status in _in_order(results)}
        terminalreporter.line(", ".join(f"{count} {status}" for status, count in counts.items()))
        if self._config.getoption("kv_events") is not None:
            terminalreporter.line(f"kvconform report {shlex.quote(self._config.getoption('kv_events'))}")


def _in_order(results: list[CheckResult]) -> list[str]:
    from conformance.results import SEVERITY

    present = {row.status for row in results}
    return [status for status in reversed(SEVERITY) if status in present]
