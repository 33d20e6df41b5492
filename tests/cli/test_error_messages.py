"""Every error a person can meet says what happened, where, what was expected and got, and the next command."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from conformance.advice import next_command
from conformance.engines import BUILT_IN, EngineNotFound
from conformance.protocol import AdapterError, ConfigRefused
from kvconform.cli import main


class Provoked(NamedTuple):
    """``words``: the command, where ``{NAME}`` is a file of `files`. The others are parts of the message."""

    name: str
    words: str
    where: str
    expected: str
    got: str
    following: str
    code: int = 2


HELP = r"kvconform \w+ --help"
ENGINES = "kvconform engines"
TRACE = "kvconform record ENGINE 4x10[+]30 --out FILE"
EVENTS = "kvconform check ENGINE --events FILE"
ERRORS = [
    Provoked("unknown engine", "check nonesuch", "engine", "expected a built-in name", "'nonesuch'", ENGINES),
    Provoked("no module", "fuzz no_such:make", "engine 'no_such:make'", "expected one that", "'no_such'", ENGINES),
    Provoked(
        "no factory", "fuzz kvconform:mak", "kvconform has no factory 'mak'", "expected a function", "got", ENGINES
    ),
    Provoked("no interpreter", "check reference@no/python", "reference@no/python", "looked in", "no/python", ENGINES),
    Provoked("no command", "check exec:no-such-command", "exec:no-such-command", "looked on PATH", "no-such", ENGINES),
    Provoked(
        "engine of a trace", "replay {other}", "the trace names", "add --engine", "'mine:make'", "kvconform replay"
    ),
    Provoked("no preset", "check reference --preset tpu", "preset", "expected one of neuron", "'tpu'", HELP),
    Provoked("no equals sign", "check reference --set num_blocks", "num_blocks", "key=value", "'num_blocks'", HELP),
    Provoked("no field", "check reference --set num_block=3", "num_block=3", "expected one of", "num_block", HELP),
    Provoked("no number", "check reference --set num_blocks=x", "num_blocks=x", "Expected `int`", "got x", HELP),
    Provoked("too small", "check reference --set num_blocks=0", "num_blocks=0", "at least 1", "got 0", HELP),
    Provoked(
        "no option",
        "fuzz reference --set engine_options.colour=red",
        "engine_options",
        "known: append_check",
        "colour",
        ENGINES,
    ),
    Provoked(
        "no value of an option",
        "fuzz reference --set engine_options.append_check=fuzzy",
        "append_check",
        "must be one of exact",
        "fuzzy",
        HELP,
    ),
    Provoked(
        "refused by the engine",
        "record reference 1+1 --set encoder_cache_size=4",
        "encoder_cache_size",
        "does not have this",
        "= 4",
        ENGINES,
    ),
    Provoked("no requirement", "check reference -r XYZ-1", "requirement", "expected one of ACC-1", "XYZ-1", HELP),
    Provoked("none to fuzz", "fuzz reference -r XYZ-1", "requirement", "expected one of ACC-1", "XYZ-1", HELP),
    Provoked("requests", "record reference 10", "10", "expected PROMPT", "10:", HELP),
    Provoked("batch sizes", "plan reference --batch 1,x", "x", "expected batch sizes", "'x'", HELP),
    Provoked("kind of picture", "plan reference --plot a.bmp", "--plot a.bmp", "expected a file", "got .bmp", HELP),
    Provoked("no trace", "replay {gone}", "gone", "expected a trace", "No such file", TRACE),
    Provoked("empty trace", "explain {empty}", "empty", "expected a header line", "got nothing", TRACE),
    Provoked("binary trace", "page {binary}", "binary:1", "expected a kvconform trace", "not JSON", TRACE),
    Provoked("not a trace", "replay {json}", "json:1", "expected a kvconform trace header", "got", TRACE),
    Provoked("cut trace", "replay {cut}", "cut:2", "expected a footer", "got line", TRACE),
    Provoked("damaged trace", "replay {damaged}", "damaged:2", "expected one line of JSON", "not a trace line", TRACE),
    Provoked("format of a trace", "replay {future}", "future:1", "expected 1", "got 99", TRACE),
    Provoked("no events", "report {gone}", "gone", "expected an event file", "No such file", EVENTS),
    Provoked("empty events", "report {empty}", "empty:1", "expected the header", "got nothing", EVENTS),
    Provoked("not events", "report {binary}", "binary:1", "expected one line of JSON", "not an event", EVENTS),
    Provoked("cut events", "report {header}", "header:1", "expected a footer", "got header", EVENTS),
    Provoked("no column", "matrix", "no engine", "expected some", "got none", HELP),
    Provoked("same column", "matrix reference reference", "'reference'", "expected columns", "twice", HELP),
    Provoked("file of columns", "matrix --file {gone}", "gone", "expected a TOML file", "No such file", HELP),
    Provoked("nothing to compare", "diff", "nothing to compare", "expected a trace", "got neither", HELP),
    Provoked("out of place", "record reference 1+1 --out {folder}/x/{gone}", "x", "expected", "", HELP),
]
"""What typer itself says (an unknown option, a missing argument) ends with the command for help as well, below."""


@pytest.fixture
def files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """Files of every kind of damage, by name."""
    with pytest.raises(SystemExit):
        main(["record", "reference", "1x2+2", f"--out={tmp_path / 'good'}"])
    capsys.readouterr()
    good = (tmp_path / "good").read_bytes()
    lines = good.splitlines(keepends=True)
    texts = {
        "empty": b"",
        "binary": b"\x80\x04\x95\x00",
        "header": b'{"kind":"header","format":1,"command":"check"}\n',
        "json": b'{"kind":"invoice"}\n',
        "cut": b"".join(lines[:2]),
        "damaged": lines[0] + b'{"kind":"li',
        "future": good.replace(b'{"kind":"header"', b'{"kind":"header","format":99', 1),
        "other": good.replace(b'"engine":"reference"', b'"engine":"mine:make"', 1),
    }
    for name, text in texts.items():
        (tmp_path / name).write_bytes(text)
    (tmp_path / "folder").write_bytes(b"no folder")
    return {name: str(tmp_path / name) for name in (*texts, "gone", "folder")}


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.name)
def test_a_message_is_whole(error: Provoked, files: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([word.format(**files) for word in error.words.split()])
    complained = capsys.readouterr().err
    assert left.value.code == error.code, complained
    assert "Traceback" not in complained
    for part in (error.where, error.expected, error.got):
        assert part in complained, f"{part!r} is not in: {complained}"
    assert re.search(rf"\n +next: .*{error.following}", complained), complained
    assert complained.startswith("kvconform: ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("frobnicate", "No such command"),
        ("check --colour", "No such option"),
        ("replay", "Missing argument"),
        ("fuzz reference --steps 0", "Invalid value for '--steps'"),
        ("report x --format pie", "expected one of terminal"),
        ("check reference reference --label both", "expected one engine"),
    ],
)
def test_what_the_parser_says_ends_with_the_command_for_help(
    words: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as left:
        main(words.split())
    complained = capsys.readouterr().err
    assert left.value.code == 2
    assert said in complained
    assert re.search(r"Try '.*(-h|--help)' for help", complained), complained


@pytest.mark.parametrize("name", [name for name, built_in in BUILT_IN.items() if built_in.distributions])
def test_an_engine_that_is_not_installed_names_what_to_install(name: str) -> None:
    wanted = BUILT_IN[name].distributions[0]
    error = EngineNotFound(f"engine {name!r}: expected it to be installed here, and it is not: pip install {wanted}")
    assert next_command(error, "check") == f"pip install {wanted}"


def test_an_adapter_that_does_not_know_a_release_says_which_to_install() -> None:
    error = AdapterError("transformers 4.53.3 has no ...; expected 5.24: pip install 'transformers>=5.24'")
    assert next_command(error, "fuzz") == "pip install 'transformers>=5.24'"
    assert next_command(ConfigRefused("num_blocks = 1"), "fuzz") == "kvconform fuzz --help"
    assert next_command(ConfigRefused("no"), "") == "kvconform --help"


def test_a_release_that_an_adapter_does_not_know_is_said_to_be_that(tmp_path: Path) -> None:
    (tmp_path / "torch.py").touch()
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").touch()
    described = tmp_path / "transformers-4.53.3.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: transformers\nVersion: 4.53.3\n", encoding="utf-8"
    )
    done = subprocess.run(
        [sys.executable, "-m", "kvconform", "fuzz", "transformers"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr
    assert "the adapter is at fault, not the engine: transformers 4.53.3 has no continuous batching" in done.stderr
    assert "next: pip install 'transformers>=5.24'" in done.stderr
