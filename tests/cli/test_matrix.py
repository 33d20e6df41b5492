"""`kvconform matrix` and `report`: engines side by side, taken up again, shown again."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from conformance.protocol import ConfigRefused
from conformance.reports.events import read_run
from kvconform.cli import main
from kvconform.matrix_command import Plan, entries_of

ONLY = ("--requirement=PRE-1", "--requirement=ACC-1")


@pytest.fixture(autouse=True)
def importable_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children are started in the user's directory; they find what this process finds."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")]))


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        main(list(words))
    captured = capsys.readouterr()
    assert isinstance(left.value.code, int)
    return left.value.code, captured.out, captured.err


def test_two_configurations_side_by_side(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "m"
    words = ("matrix", "reference", "reference[append_check=touched]", f"--out={out}", *ONLY)
    code, printed, _ = run(capsys, *words)
    assert code == 1
    assert "PRE-1   MUST   No needless preemption                    ✓ ✗" in printed
    assert "1 MUST fails" in printed
    events = read_run(out / "events.jsonl")
    assert list(events.columns) == ["reference", "reference[append_check=touched]"]
    trace = events.columns["reference[append_check=touched]"].verdicts["PRE-1"].trace
    assert (out / trace).is_file()
    assert (out / "matrix.md").read_text(encoding="utf-8").startswith("| requirement")
    # Once more: everything is there already.
    again, printed, _ = run(capsys, *words)
    assert again == 1
    assert printed.count(": check kept: ") == 2
    # Shown again, for other tools.
    code, printed, _ = run(capsys, "report", str(out / "events.jsonl"), "--format=badge")
    assert code == 1
    assert json.loads(printed)["message"] == "1 MUST fail"


def test_a_cut_off_part_is_run_again(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "m"
    words = ("matrix", "reference", f"--out={out}", *ONLY)
    assert run(capsys, *words)[0] == 0
    (part,) = (out / "parts").iterdir()
    whole = part.read_bytes()
    part.write_bytes(whole[:-30])
    code, printed, _ = run(capsys, *words)
    assert code == 0
    assert ": check done: pass" in printed
    assert part.read_bytes() == whole


def test_an_engine_that_is_not_there_is_a_column_that_says_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, printed, _ = run(capsys, "matrix", "reference", "nobody.here:make", f"--out={tmp_path / 'm'}", *ONLY)
    assert code == 3
    assert "there is no module 'nobody'" in printed
    column = read_run(tmp_path / "m" / "events.jsonl").columns["nobody.here:make"]
    assert column.status == "error"


def test_fuzzing_adds_what_it_found_to_the_column(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "m"
    words = ("matrix", "reference[append_check=touched]", f"--out={out}", "--fuzz-steps=1500", *ONLY)
    assert run(capsys, *words)[0] == 1
    (column,) = read_run(out / "events.jsonl").columns.values()
    assert [finding.requirement for finding in column.findings] == ["PRE-1"]
    assert column.closed is not None
    assert (out / column.findings[0].trace).is_file()


def test_the_same_words_have_the_same_file_and_others_another() -> None:
    plan = Plan(folder=Path("m"))
    one, two, three = entries_of(["reference", "reference[num_blocks=5]", "reference[null_block=true]"], None)
    assert plan.stem(one) == Plan(folder=Path("m")).stem(one)
    assert len({plan.stem(one), plan.stem(two), plan.stem(three), Plan(folder=Path("m"), seed=2).stem(one)}) == 4
    assert two.settings == ("num_blocks=5",)
    assert three.settings == ("engine_options.null_block=true",)


def test_columns_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "matrix.toml"
    file.write_text('[[column]]\nengine = "reference"\nlabel = "tight"\nset = ["num_blocks=5"]\nenv = {A = "1"}\n')
    (entry,) = entries_of([], file)
    assert (entry.column, entry.settings, entry.env) == ("tight", ("num_blocks=5",), {"A": "1"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected \\[\\[column\\]\\] tables"),
        ("a = 1\n", "got 'a'"),
        ("[[column\n", "not valid TOML"),
        (
            '[[column]]\nengine = "reference"\nbatch = 1\n',
            "column 1: .*unknown field `batch`; expected keys",
        ),
        ('[[column]]\nengine = "reference"\nset = ["num_blocks=0"]\n', "num_blocks=0: expected at least 1"),
        ('[[column]]\nengine = "reference"\n[[column]]\nengine = "reference"\n', "'reference' is there twice"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "matrix.toml"
    file.write_text(text)
    with pytest.raises(ConfigRefused, match=message):
        entries_of([], file)


@pytest.mark.parametrize("word", ["", "[a=1]", "reference[a=1", "reference[num_blocks=none of it]"])
def test_a_wrong_word_is_refused(word: str) -> None:
    with pytest.raises(ConfigRefused):
        entries_of([word], None)


def test_no_engine_at_all_is_refused_with_an_example() -> None:
    with pytest.raises(ConfigRefused, match="kvconform matrix reference smol-vllm"):
        entries_of([], None)


def test_the_help_shows_what_stands_in_brackets(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    with pytest.raises(SystemExit):
        main(["matrix", "--help"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "'ENGINE[key=value,...]'" in printed
    assert "[[column]]" in printed
