"""Engines in other processes, as the user of the command line meets them; and traces that name such engines."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.trace import read_trace
from kvconform.cli import main

ELSEWHERE = f"reference@{sys.executable}"
TOUCHED = "--set=engine_options.append_check=touched"
NOT_TAKEN = "no command or module is taken from a file"


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        main(list(words))
    captured = capsys.readouterr()
    assert isinstance(left.value.code, int)
    return left.value.code, captured.out, captured.err


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes find kvconform where this one found it."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))


@pytest.mark.usefixtures("path")
def test_check_of_a_served_engine_is_that_of_the_engine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    command = shlex.join([sys.executable, "-m", "kvconform", "serve", "--validate-wire", "reference"])
    words = ["-V", "--requirement=PRE-2", f"--out={tmp_path}"]
    code, printed, _ = run(capsys, "check", f"exec:{command}", *words)
    assert code == 0
    assert "PASS        PRE-2" in printed
    assert f"exec:{command} 1: the contract holds: 1 pass" in printed


def test_what_is_found_elsewhere_is_replayed_shrunk_and_explained_there(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = (TOUCHED, "--steps=300", "--requirement=PRE-1", f"--out={tmp_path}", "-V")
    code, printed, _ = run(capsys, "fuzz", ELSEWHERE, *words)
    assert code == 1
    (trace,) = tmp_path.glob("*.jsonl")
    assert read_trace(trace).header.engine == ELSEWHERE
    commands = [line.split("kvconform ", 1)[1] for line in printed.splitlines() if "  kvconform " in line]
    replay, explain = (shlex.split(command) for command in commands)
    assert replay == ["replay", str(trace), "--engine", ELSEWHERE]
    code, printed, _ = run(capsys, *replay)
    assert (code, "FAILED" in printed, "the same plans as recorded" in printed) == (1, True, True)
    assert run(capsys, *explain)[0] == 0
    shrunk = ["shrink", str(trace), "--engine", ELSEWHERE, f"--out={tmp_path / 'small'}", "--executions=5"]
    assert run(capsys, *shrunk)[0] == 1
    for command in (["replay", str(trace)], ["shrink", str(trace), f"--out={tmp_path}"]):
        code, printed, complained = run(capsys, *command)
        assert (code, printed) == (2, "")
        assert NOT_TAKEN in complained
        assert f"add --engine {ELSEWHERE}" in complained
    code, printed, _ = run(capsys, "replay", str(trace), "--engine=reference")
    assert code == 1


def test_the_ready_test_of_a_finding_runs_the_same_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run(capsys, "fuzz", ELSEWHERE, TOUCHED, "--steps=300", "--requirement=PRE-1", f"--out={tmp_path}")
    (ready,) = tmp_path.glob("test_*.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(ready)],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout
    assert "r0 is preempted in step" in done.stdout


def test_a_command_with_quotes_is_a_string_in_the_ready_test(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    server = shlex.join([sys.executable, "-m", "conformance.serve", "reference"])
    command = f'exec:env \'A="""\' PYTHONPATH={shlex.quote(os.pathsep.join(sys.path))} {server}'
    run(capsys, "fuzz", command, TOUCHED, "--steps=300", "--requirement=PRE-1", f"--out={tmp_path}")
    (ready,) = tmp_path.glob("test_*.py")
    source = ready.read_text(encoding="utf-8")
    compile(source, str(ready), "exec")
    assert f"load({json.dumps(command)})" in source
    assert len(ready.name) < 100


def test_record_runs_an_engine_elsewhere(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    there, here = tmp_path / "there.jsonl", tmp_path / "here.jsonl"
    for engine, out in ((ELSEWHERE, there), ("reference", here)):
        code, printed, _ = run(capsys, "record", engine, "4x10+30", "--preset=neuron", TOUCHED, f"--out={out}")
        assert code == 1
        assert "59 steps, 29 preemptions, 33 prefills" in printed
    assert read_trace(there).footer == read_trace(here).footer


def test_a_module_that_a_trace_names_is_not_imported(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "trap_of_a_trace.py").write_text(
        "open('sprung', 'w').close()\nfrom conformance.adapters.reference import make"
    )
    run(capsys, "record", "reference", "1+1", "--out=trace.jsonl")
    text = Path("trace.jsonl").read_text(encoding="utf-8")
    for name in ("trap_of_a_trace:make", "exec:touch sprung", "reference@/bin/touch"):
        Path("trace.jsonl").write_text(text.replace('"engine":"reference"', f'"engine":"{name}"'), encoding="utf-8")
        for command in ("replay", "shrink"):
            code, _, complained = run(capsys, command, "trace.jsonl")
            assert (code, NOT_TAKEN in complained) == (2, True)
    assert not Path("sprung").exists()
    assert run(capsys, "replay", "trace.jsonl", "--engine=trap_of_a_trace:make")[0] == 0
    assert Path("sprung").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["serve", "nonesuch"], "no engine 'nonesuch'"),
        (["check", "exec:nothing-of-this-name"], "there is no command nothing-of-this-name"),
        (["fuzz", "exec:false"], "engine 'exec:false': it ended with exit code 1 before it answered hello"),
        (["record", "exec:echo usage", "1+1"], "it prints 'usage', which does not answer hello"),
        (["fuzz", "reference@/nothing/python"], "there is no command /nothing/python"),
    ],
)
def test_what_cannot_be_run_is_a_mistake_of_usage(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, printed, complained = run(capsys, *words)
    assert code == 2
    assert said in complained
    assert "Traceback" not in printed + complained
    assert not list(tmp_path.iterdir())


def test_replay_on_an_engine_that_is_not_there_is_no_verdict(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    run(capsys, "record", "reference", "4x10+30", "--preset=neuron", TOUCHED, f"--out={trace}")
    for engine in ("no_such_module:make", "exec:false"):
        code, printed, complained = run(capsys, "replay", str(trace), f"--engine={engine}")
        assert (code, printed) == (2, "")
        assert engine in complained


def test_check_says_of_a_command_that_is_no_engine_that_it_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    code, printed, _ = run(capsys, "check", "exec:echo usage", "--requirement=ACC-1")
    assert code == 3
    assert "ERROR smoke test: import: engine 'exec:echo usage': it prints 'usage'" in printed


@pytest.mark.usefixtures("path")
def test_serve_speaks_json_lines_and_ends_with_its_input() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvconform", "serve", "reference"],
        input='{"call":"hello","id":0,"protocol":1}\n', capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == {
        "answer": "hello", "id": 0, "protocol": 1, "engine": "reference", "version": "",
    }  # fmt: skip


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("suite", ["conformance.suite", "fuzz"])
def test_pytest_takes_the_same_names(suite: str, tmp_path: Path) -> None:
    case = "test_limits and LIM-1" if suite == "conformance.suite" else "test_campaign and plain"
    points = importlib.metadata.entry_points(group="pytest11")
    plugin = [] if any(point.value == "conformance.plugin" for point in points) else ["-p", "conformance.plugin"]
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *plugin, "--pyargs", suite,
            f"--engine={ELSEWHERE}", "--kv-validate-wire", "-k", case,
        ],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"kvconform: engine {ELSEWHERE}" in done.stdout
    assert " passed" in done.stdout
