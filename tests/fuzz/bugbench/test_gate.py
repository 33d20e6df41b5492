"""The gate: the canary, the sound engine, the smallest traces; and the command that runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer

from conformance.protocol import ConfigRefused, EngineConfig
from fuzz.bugbench import gate
from fuzz.bugbench.registry import load
from fuzz.bugbench.results import Cell, Results
from fuzz.bugbench.smallest import Smallest
from kvconform.bench_command import bench_command
from kvconform.cli import main

EASY = "end_keeps_the_last_block"


def bench(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(bench_command)
    with pytest.raises((SystemExit, ConfigRefused)) as left:
        app(args=list(words), standalone_mode=True)
    if isinstance(left.value, ConfigRefused):  # which `kvconform.cli.main` makes a sentence and this exit code
        return 2, str(left.value)
    assert isinstance(left.value, SystemExit) and isinstance(left.value.code, int)
    return left.value.code, capsys.readouterr().out


def verdicts(results: Results) -> dict[str, bool]:
    return {check.name: check.passed for check in gate.checks(results, {EASY: load()[EASY]})}


def test_a_gate_passes_when_everything_was_seen(tmp_path: Path) -> None:
    results = Results(gate.results_path(tmp_path), gate.plan({EASY: load()[EASY]}).header())
    results.add(Cell(fault=EASY, fuzzer="swarm", seed=1, steps=9, seen_as="ACC-4"))
    assert len(verdicts(results)) == 5
    assert all(verdicts(results).values())


def test_a_fault_that_is_missed_fails_it(tmp_path: Path) -> None:
    results = Results(gate.results_path(tmp_path), gate.plan({EASY: load()[EASY]}).header())
    results.add(Cell(fault=EASY, fuzzer="swarm", seed=12, steps=50_000))
    assert [name for name, passed in verdicts(results).items() if not passed] == [
        "the swarm sees every fault within 50,000 steps"
    ]


def test_a_smallest_trace_that_shows_nothing_fails_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = Results(gate.results_path(tmp_path), gate.plan({EASY: load()[EASY]}).header())
    harmless = Smallest(breaks="ACC-4", operations=[], config=EngineConfig())
    monkeypatch.setattr(gate, "smallest", lambda: {EASY: harmless})
    failing = [name for name, passed in verdicts(results).items() if not passed]
    assert failing == ["the smallest trace of every fault shows it"]


def test_the_command_runs_the_gate(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, printed = bench(capsys, "leak", "--gate", "--jobs=2", f"--out={tmp_path}")
    assert code == 0, printed
    assert printed.count("PASS") == 5
    assert "the canary fails in every run: reported in 10 of 10 runs" in printed


def test_the_command_fails_when_a_fault_is_not_found(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hunts of one step: nothing that takes two is seen."""
    monkeypatch.setattr(gate, "GATE_BUDGET", 1)
    code, printed = bench(capsys, "abort_keeps_the_line", "--gate", "--jobs=1", f"--out={tmp_path}")
    assert code == 1
    assert "FAIL  the swarm sees every fault within 1 steps: 0 of 2 hunts; not abort_keeps_the_line" in printed
    assert printed.count("PASS") == 4


def test_the_command_measures_and_leaves_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = (
        "null_block_counts_as_free",
        "--seeds=2",
        "--shrink-seeds=1",
        "--fuzzer=swarm",
        "--fuzzer=uniform",
        f"--out={tmp_path}",
    )
    code, printed = bench(capsys, *words)
    assert code == 0, printed
    assert "null_block_counts_as_free" in printed
    assert printed.count("SHOWN") == 4
    assert "swarm against uniform" in printed
    summary = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    assert summary["faults"][0]["fuzzers"]["swarm"]["detected"] == 2
    before = (tmp_path / "bench.jsonl").read_bytes()
    code, _ = bench(capsys, *words)
    assert code == 0
    assert (tmp_path / "bench.jsonl").read_bytes() == before, "nothing was left to do"


def test_the_canary_makes_the_fuzzer_exit_with_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as left:
        main(["fuzz", "fuzz.bugbench:canary", "--steps=20", f"--out={tmp_path}"])
    assert left.value.code == 1
    assert "no violation" not in capsys.readouterr().out
    assert list(tmp_path.glob("*.jsonl"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("no_such_fault",), "no planted fault and no family"),
        (("--fuzzer=dice",), "no such fuzzer; they are swarm, machine, uniform"),
        (("--budget=swarm",), "expected FUZZER=STEPS"),
        (("--budget=swarm=0",), "expected FUZZER=STEPS"),
    ],
)
def test_a_word_that_is_not_understood(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, printed = bench(capsys, *words, f"--out={tmp_path}")
    assert code == 2
    assert said in printed


def test_the_faults_can_be_listed(capsys: pytest.CaptureFixture[str]) -> None:
    code, printed = bench(capsys, "--list")
    assert code == 0
    assert len(printed.splitlines()) == len(load())
