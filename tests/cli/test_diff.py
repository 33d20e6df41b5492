"""``kvconform diff``: a trace or a seed, two engines or two configurations, and what is said of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvconform.cli import main

TOUCHED = "engine_options.append_check=touched"


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        main(["diff", *words])
    captured = capsys.readouterr()
    assert isinstance(left.value.code, int)
    return left.value.code, captured.out, captured.err


@pytest.fixture
def trace(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> str:
    """The seed of the project: four requests, four blocks, and an engine that asks for one more."""
    path = tmp_path / "seed.jsonl"
    with pytest.raises(SystemExit):
        main(["record", "reference", "4x10+30", "--preset=neuron", f"--set={TOUCHED}", f"--out={path}"])
    capsys.readouterr()
    return str(path)


def test_a_trace_against_what_its_engine_does_now(capsys: pytest.CaptureFixture[str], trace: str) -> None:
    code, printed, _ = run(capsys, trace)
    assert code == 0
    assert "A is reference 1 as recorded" in printed
    assert "the same in all of 59 steps, up to the names of blocks" in printed
    mended = Path(trace).with_name("mended.jsonl")
    mended.write_text(Path(trace).read_text(encoding="utf-8").replace("touched", "exact", 1), encoding="utf-8")
    code, printed, _ = run(capsys, str(mended))
    assert code == 1
    assert "only A preempts r3 by recompute to make way for r0" in printed


def test_a_trace_on_one_engine_under_two_configurations(capsys: pytest.CaptureFixture[str], trace: str) -> None:
    code, printed, _ = run(capsys, trace, "--set-b=engine_options.append_check=exact")
    assert code == 1
    assert (
        "configured apart: engine_options {'append_check': 'touched'} on A, {'append_check': 'exact'} on B" in printed
    )
    assert "    only A preempts r3 by recompute to make way for r0, having counted 1 block as needed" in printed
    assert "B in all: 30 steps, 0 preemptions, 4 prefills" in printed
    code, printed, _ = run(capsys, trace, "--set-b=num_blocks=5")
    assert (code, "num_blocks 4 on A, 5 on B" in printed) == (1, True)


def test_a_trace_on_two_engines(capsys: pytest.CaptureFixture[str], trace: str) -> None:
    code, printed, _ = run(capsys, trace, "--engine=reference", f"--engine=reference@{sys.executable}")
    assert code == 0
    assert f"B is reference@{sys.executable} 1" in printed
    assert "left out" not in printed
    code, printed, _ = run(capsys, trace, "--engine=reference", "--engine=conformance.adapters.reference:make")
    assert code == 0
    assert "left out: append_check, options that are reference's own" in printed


def test_a_seed_finds_where_two_configurations_part_and_shortens_it(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--seed=1", "--engine=reference", f"--set-b={TOUCHED}", "--set=enable_prefix_caching=false")
    code, printed, _ = run(capsys, *words)
    assert code == 1
    assert printed.startswith("seed 1, reference and reference, 20,000 steps\n")
    assert "    1. add prompt" in printed
    assert "    3. " not in printed
    assert "enable_prefix_caching" not in printed
    assert run(capsys, *words)[1] == printed


def test_a_seed_on_two_engines_that_are_one(capsys: pytest.CaptureFixture[str]) -> None:
    code, printed, _ = run(
        capsys, "--seed=1", "--steps=400", "--engine=reference", f"--engine=reference@{sys.executable}", "-V"
    )
    assert code == 0
    assert "the same in " in printed


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "expected a trace, or --seed"),
        (["TRACE", "--seed=1"], "expected a trace, or --seed"),
        (["--seed=1"], "expected --engine twice, or once with --set-a or --set-b"),
        (["--seed=1", "--engine=reference"], "expected --engine twice, or once with --set-a or --set-b"),
        (["--seed=1", *["--engine=reference"] * 3], "--engine: expected two at most, for the two sides, got 3"),
        (["--seed=1", "--engine=nonesuch", "--engine=reference"], "no engine 'nonesuch'"),
        (["--seed=1", "--engine=reference", "--set-b=colour=red"], "colour"),
        (
            ["--seed=1", "--engine=reference", "--set-b=num_speculative_tokens=2"],
            "B, reference: num_speculative_tokens",
        ),
        (["TRACE", "--set-a=num_speculative_tokens=2"], "A, reference: num_speculative_tokens = 2"),
        (["no-such-file.jsonl"], "no-such-file.jsonl"),
    ],
)
def test_bad_words_are_said_to_be_bad(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], trace: str
) -> None:
    code, printed, complained = run(capsys, *(trace if word == "TRACE" else word for word in words))
    assert code == 2
    assert said in complained
    assert "Traceback" not in printed + complained


def test_a_command_that_a_trace_names_is_not_run(capsys: pytest.CaptureFixture[str], trace: str) -> None:
    text = Path(trace).read_text(encoding="utf-8").replace('"engine":"reference"', '"engine":"exec:touch sprung"')
    Path(trace).write_text(text, encoding="utf-8")
    code, _, complained = run(capsys, trace)
    assert (code, "no command or module is taken from a file" in complained) == (2, True)
    assert run(capsys, trace, "--engine=reference")[0] == 1
