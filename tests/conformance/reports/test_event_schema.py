"""The published schema of event files is that of the structs, and what the commands write is valid against it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conformance.reports import schema
from conformance.reports.events import read_run
from conformance.schemas import text_of
from kvconform.cli import main

PUBLISHED = Path(__file__).parents[3] / "docs" / "reference" / "event-schema.json"
TOUCHED = "--set=engine_options.append_check=touched"


@pytest.fixture
def validators() -> dict[str, Any]:
    """By place in the file."""
    validator: Any = pytest.importorskip("jsonschema").Draft202012Validator
    published = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    validator.check_schema(published)
    places = ("FirstLine", "Between", "LastLine")
    return {place: validator({**published, "anyOf": [{"$ref": f"#/$defs/{place}"}]}) for place in places}


def written(path: Path, *words: str) -> list[dict[str, Any]]:
    with pytest.raises(SystemExit):
        main([*words, f"--events={path}", f"--out={path.parent}"])
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_the_published_schema_is_up_to_date(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert schema.main(["--check", str(PUBLISHED)]) == 0
    stale = tmp_path / "schema.json"
    stale.write_text(text_of(schema.schema()).replace("FindingKept", "Finding"), encoding="utf-8")
    assert schema.main(["--check", str(stale)]) == 1
    assert f"run python -m conformance.reports.schema --write {stale}" in capsys.readouterr().err
    schema.main(["--write", str(stale)])
    assert stale.read_bytes() == PUBLISHED.read_bytes()


@pytest.mark.parametrize(
    ("words", "kinds"),
    [
        (("check", "reference", "--preset=neuron", TOUCHED, "-r", "PRE-1", "-r", "ENC-1"), {"verdict"}),
        (("fuzz", "reference", TOUCHED, "--steps=500", "-r", "PRE-1"), {"finding"}),
    ],
    ids=["check", "fuzz"],
)
def test_what_a_command_writes_is_valid(
    words: tuple[str, ...], kinds: set[str], validators: dict[str, Any], tmp_path: Path
) -> None:
    first, *between, last = written(tmp_path / "events.jsonl", *words)
    validators["FirstLine"].validate(first)
    validators["LastLine"].validate(last)
    for line in between:
        validators["Between"].validate(line)
    assert {line["kind"] for line in between} == {"column", "closed", *kinds}
    assert not validators["Between"].is_valid(first)
    assert not validators["FirstLine"].is_valid(last)


def test_what_no_reader_takes_is_not_valid(validators: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    lines = written(path, "check", "reference", "-r", "ACC-1")
    verdict = next(line for line in lines if line["kind"] == "verdict")
    for spoilt in ({**verdict, "status": "fine"}, {**verdict, "requirement": 1}, {"kind": "verdict"}):
        assert not validators["Between"].is_valid(spoilt)
    assert read_run(path).columns["reference 1"].verdicts["ACC-1"].status == "pass"


def test_report_refuses_a_file_that_was_cut_off(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    written(path, "check", "reference", "-r", "ACC-1")
    whole = path.read_bytes()
    for cut, said in ((whole[: whole.rindex(b'{"kind":"footer"')], "no footer"), (whole[:-30], "cut off here")):
        path.write_bytes(cut)
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main(["report", str(path)])
        printed = capsys.readouterr()
        assert left.value.code == 2
        assert said in printed.err
        assert str(path) in printed.err
        assert printed.out == ""
