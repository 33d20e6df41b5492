"""The plugin and the suite, run as users run them: by another pytest, from another directory."""

from __future__ import annotations

import importlib.metadata
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

import conformance
from conformance.reports.events import EventsError, read_run
from conformance.requirements import load
from conformance.suite import under_test
from conformance.trace import read_trace

pytest_plugins = ["pytester"]

ROOT = Path(conformance.__file__).resolve().parents[1]
SUITE = ["--pyargs", "conformance.suite"]
NEURON = ["--kv-preset", "neuron", "--kv-set", "engine_options.append_check=touched"]

ADAPTER = """
from conformance.adapters.reference import make


def make_red(config):
    engine = make(config)
    engine.schedule = lambda: None
    return engine
"""


class User:
    """Somebody with kvconform installed, in a directory of their own."""

    def __init__(self, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
        self._pytester = pytester
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
        self._plugin = ["-p", "no:cacheprovider"]
        points = importlib.metadata.entry_points(group="pytest11")
        if all(point.value != "conformance.plugin" for point in points):
            self._plugin += ["-p", "conformance.plugin"]

    def runs(self, *words: str) -> pytest.RunResult:
        return self._pytester.runpytest_subprocess(*self._plugin, *words)


@pytest.fixture
def user(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> User:
    return User(pytester, monkeypatch)


def test_the_suite_passes_on_the_reference_engine(user: User) -> None:
    shown = user.runs(*SUITE, "-k", "test_limits or test_determinism", "-W", "error")
    assert shown.ret == pytest.ExitCode.OK
    shown.stdout.fnmatch_lines(
        [
            "*= contract =*",
            "reference 1: abort, chunked_prefill, *",
            "pass        LIM-1   MUST   max_num_seqs",
            "pass        DET-2   MUST   Same tokens whatever the schedule",
            "6 pass",
        ]
    )


def test_it_fails_on_an_engine_that_breaks_the_contract(user: User) -> None:
    shown = user.runs(*SUITE, "-k", "PRE-2 or PRE-7", *NEURON)
    assert shown.ret == pytest.ExitCode.TESTS_FAILED
    shown.stdout.fnmatch_lines(
        [
            "PRE-2 (MUST) Concurrency equal to the batch size causes no recompute*",
            "*59 steps, 29 preemptions, 33 prefills; 3 requests: 30 steps, 0 preemptions, 3 prefills",
            "fail        PRE-2   MUST   No recompute at full batch: full-batch/sequence-blocks-4-seqs: r3 is *",
            "2 fail",
        ]
    )


def test_the_header_names_the_engine_that_was_asked_for(user: User) -> None:
    shown = user.runs(*SUITE, "-k", "LIM-2", "--engine", "conformance.adapters.reference:make", *NEURON)
    shown.stdout.fnmatch_lines(
        [
            "kvconform: engine conformance.adapters.reference:make 1, contract edition 1, seed 1, with preset neuron,*",
            "kvconform: it declares abort, device, identity, *",
        ]
    )


def test_the_header_says_that_an_engine_cannot_be_built(user: User, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(adapter="def make(config):\n    raise OSError('no weights')")
    shown = user.runs(*SUITE, "-k", "LIM-2", "--engine", "adapter:make")
    assert shown.ret == pytest.ExitCode.TESTS_FAILED
    shown.stdout.fnmatch_lines(
        ["kvconform: it declares nothing, it cannot be built: OSError: no weights", "*at fault: build: OSError: *"]
    )


INI = """
[pytest]
kv_engine = reference
kv_preset = neuron
kv_set =
    engine_options.append_check=touched
    num_blocks=5
kv_expectations = known.toml
kv_events = out/contract.jsonl
kv_seed = 7
"""


def test_an_ini_file_says_the_same_and_the_command_line_wins(user: User, pytester: pytest.Pytester) -> None:
    pytester.makeini(INI)
    (pytester.path / "known.toml").write_text(EXPECTATION.format(requirement="PRE-7"), encoding="utf-8")
    (pytester.mkdir("elsewhere") / "conftest.py").touch()
    shown = user.runs(*SUITE, "-k", "PRE-7", "-c", "tox.ini", "--kv-set", "num_blocks=4", "--kv-seed", "8")
    shown.stdout.fnmatch_lines(
        [
            "kvconform: engine reference 1, *, seed 8, with preset neuron, *=touched, num_blocks=5, num_blocks=4",
            "known       PRE-7 *asks for one block each (issue 8007)*",
            "kvconform report *out/contract.jsonl",
        ]
    )
    assert shown.ret == pytest.ExitCode.OK
    assert read_run(pytester.path / "out" / "contract.jsonl").header.command == "pytest"


def test_a_seed_in_an_ini_file_is_a_number(user: User, pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nkv_seed = lucky")
    shown = user.runs()
    assert shown.ret == pytest.ExitCode.USAGE_ERROR
    shown.stderr.fnmatch_lines(["*tox.ini: kv_seed = lucky: expected a whole number, such as kv_seed = 7"])


@pytest.mark.parametrize("workers", [[], ["-n", "2"]], ids=["alone", "distributed"])
@pytest.mark.parametrize("order", [[], ["-p", "no:randomly"]], ids=["as-it-comes", "not-shuffled"])
def test_events_are_the_same_however_the_tests_are_run(
    user: User, pytester: pytest.Pytester, workers: list[str], order: list[str]
) -> None:
    file = pytester.path / "contract.jsonl"
    shown = user.runs(*SUITE, "-k", "PRE-1 or PRE-2 or ENC-1", *NEURON, "--kv-events", file.name, *workers, *order)
    assert shown.ret == pytest.ExitCode.TESTS_FAILED
    run = read_run(file)
    column = run.columns["reference 1"]
    assert {name: row.status for name, row in column.verdicts.items()} == {
        "PRE-1": "fail",
        "PRE-2": "fail",
        "ENC-1": "unsupported",
    }
    assert column.opened.config.num_blocks == 4
    traces = [pytester.path / column.verdicts[name].trace for name in ("PRE-1", "PRE-2")]
    for trace in traces:
        assert trace.parent == pytester.path / "contract-traces"
        assert read_trace(trace).footer.verdict == "violated"
    known = user.runs(*SUITE, "-k", "PRE-1 or PRE-2 or ENC-1", *NEURON, "--kv-events", "again.jsonl", "-n", "1")
    assert known.ret == pytest.ExitCode.TESTS_FAILED
    again = (pytester.path / "again.jsonl").read_bytes().replace(b"again-traces", b"contract-traces")
    assert again == file.read_bytes()


def test_events_of_a_session_that_was_cut_short_are_no_report(user: User, pytester: pytest.Pytester) -> None:
    user.runs(*SUITE, "-k", "PRE-1 or PRE-2", *NEURON, "--kv-events", "contract.jsonl", "-x")
    with pytest.raises(EventsError, match="no footer"):
        read_run(pytester.path / "contract.jsonl")
    assert not read_run(pytester.path / "contract.jsonl", partial=True).complete


def test_a_session_without_the_suite_leaves_the_event_file_alone(user: User, pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nkv_events = contract.jsonl")
    (pytester.path / "contract.jsonl").write_text("what was found before", encoding="utf-8")
    pytester.makepyfile("def test_mine(): pass")
    assert user.runs().ret == pytest.ExitCode.OK
    assert user.runs("--collect-only", *SUITE, "-k", "LIM-1").ret == pytest.ExitCode.OK
    assert (pytester.path / "contract.jsonl").read_text(encoding="utf-8") == "what was found before"


def test_events_of_an_adapter_at_fault_say_so(user: User, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(adapter=ADAPTER)
    user.runs(*SUITE, "-k", "LIM-1", "--engine", "adapter:make_red", "--kv-events", "contract.jsonl")
    run = read_run(pytester.path / "contract.jsonl")
    assert [(column.status, column.verdicts) for column in run.columns.values()] == [("error", {})]


def test_an_event_file_that_cannot_be_written_is_said_before_the_work(user: User, pytester: pytest.Pytester) -> None:
    pytester.mkdir("folder")
    shown = user.runs(*SUITE, "-k", "LIM-1", "--kv-events", "folder")
    assert shown.ret == pytest.ExitCode.USAGE_ERROR
    shown.stderr.fnmatch_lines(["*--kv-events *folder: cannot be written: *name another one"])


def test_a_session_without_the_suite_is_left_alone(user: User, pytester: pytest.Pytester) -> None:
    pytester.makepyfile("import sys\ndef test_light():\n    assert 'conformance.check' not in sys.modules")
    shown = user.runs("--strict-markers")
    assert shown.ret == pytest.ExitCode.OK
    shown.stdout.no_fnmatch_line("*kvconform: engine*")
    shown.stdout.no_fnmatch_line("*= contract =*")


def test_the_markers_are_registered(user: User, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.neuron
        @pytest.mark.slow
        @pytest.mark.requirement("PRE-1")
        def test_mine():
            pass
        """
    )
    assert user.runs("--strict-markers").ret == pytest.ExitCode.OK


def test_an_adapter_in_the_users_directory_is_found(user: User, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(adapter=ADAPTER)
    shown = user.runs(*SUITE, "-k", "LIM-1", "--engine", "adapter:make")
    assert shown.ret == pytest.ExitCode.OK
    shown.stdout.fnmatch_lines(["1 pass"])


def test_a_red_smoke_test_is_said_once_and_nothing_is_judged(user: User, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(adapter=ADAPTER)
    shown = user.runs(*SUITE, "-k", "LIM-1", "--engine", "adapter:make_red")
    assert shown.ret == pytest.ExitCode.TESTS_FAILED
    shown.stdout.fnmatch_lines(
        ["*ERROR: the adapter is at fault: an idle step: schedule() returns NoneType, not a StepPlan"]
    )
    outcomes = shown.parseoutcomes()
    assert outcomes["errors"] == 1
    assert set(outcomes) <= {"errors", "skipped", "deselected"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--engine", "sample-engine"], "no engine 'sample-engine': expected a built-in name"),
        (["--kv-set", "num_block=3"], "num_block=3: no such field"),
        (["--kv-expectations", "none.toml"], "none.toml: cannot be read"),
    ],
)
def test_a_mistake_of_usage_ends_the_session(user: User, words: list[str], said: str) -> None:
    shown = user.runs(*SUITE, "-k", "LIM-1", *words)
    assert shown.ret == pytest.ExitCode.USAGE_ERROR
    assert said in shown.stdout.str() + shown.stderr.str()


def test_what_is_not_declared_is_skipped_as_unsupported(user: User) -> None:
    shown = user.runs(*SUITE, "-k", "ENC-1", "-rs")
    assert shown.ret == pytest.ExitCode.OK
    shown.stdout.fnmatch_lines(
        [
            "unsupported ENC-1   MUST   Encoder books: the engine does not declare encoder_cache",
            "*UNSUPPORTED: the engine does not declare encoder_cache",
        ]
    )


EXPECTATION = """
[[known]]
requirement = "{requirement}"
reason = "asks for one block each"
link = "issue 8007"
"""


def test_an_expected_failure_is_no_failure(user: User, tmp_path: Path) -> None:
    file = tmp_path / "known.toml"
    file.write_text(EXPECTATION.format(requirement="PRE-7"), encoding="utf-8")
    shown = user.runs(*SUITE, "-k", "PRE-7", *NEURON, "--kv-expectations", str(file))
    assert shown.ret == pytest.ExitCode.OK
    assert shown.parseoutcomes()["xfailed"] == 1
    shown.stdout.fnmatch_lines(["known       PRE-7 *asks for one block each (issue 8007)*"])


@pytest.mark.parametrize("workers", [[], ["-n", "1"]], ids=["alone", "distributed"])
def test_an_expected_failure_that_does_not_happen_fails_the_session(
    user: User, tmp_path: Path, workers: list[str]
) -> None:
    file = tmp_path / "known.toml"
    file.write_text(EXPECTATION.format(requirement="LIM-1"), encoding="utf-8")
    shown = user.runs(*SUITE, "-k", "LIM-1", "--kv-expectations", str(file), *workers)
    assert shown.ret == pytest.ExitCode.TESTS_FAILED
    shown.stdout.fnmatch_lines(["stale       LIM-1 *does not: delete the entry", "1 stale"])


def test_junit_files_carry_the_requirement(user: User, tmp_path: Path) -> None:
    file = tmp_path / "junit.xml"
    user.runs(*SUITE, "-k", "PRE-7", *NEURON, f"--junitxml={file}", "-W", "error")
    cases = ET.parse(file).iter("testcase")  # noqa: S314 - our own file
    properties = [{one.get("name"): one.get("value") for one in case.iter("property")} for case in cases]
    assert {one["requirement"] for one in properties} == {"PRE-7"}
    assert {"requirement": "PRE-7", "level": "SHOULD", "status": "fail"} in properties


def test_the_suite_has_one_function_for_each_requirement() -> None:
    folder = Path(under_test.__file__).parent
    named = [
        line.partition('"')[2].partition('"')[0]
        for file in sorted(folder.glob("test_*.py"))
        for line in file.read_text(encoding="utf-8").splitlines()
        if line.startswith("@pytest.mark.requirement(")
    ]
    assert sorted(named) == sorted(load())
