"""What exec:COMMAND and NAME@PYTHON mean, what is said of those that mean nothing, and what a trace may name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from conformance.engines import EngineNotFound, ProcessSource, load, load_recorded, option_for
from conformance.protocol import EngineConfig
from conformance.wire import elsewhere, peer

HELLO = '{"answer":"hello","id":0,"protocol":99,"engine":"future","version":"7","more":[]}'


def test_a_command_is_split_as_a_shell_splits_it_and_run_without_one() -> None:
    source = load("exec:sh -c 'echo $HOME' \"two words\" | cat")
    assert isinstance(source, ProcessSource)
    assert source.words[0].endswith("/sh")
    assert source.words[1:] == ("-c", "echo $HOME", "two words", "|", "cat")


def test_a_relative_command_is_found_in_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "engine").write_text("#!/bin/sh\n", encoding="utf-8")
    (tmp_path / "engine").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    source = load("exec:./engine")
    assert isinstance(source, ProcessSource)
    assert source.words == (str(tmp_path / "engine"),)


def test_a_python_is_an_interpreter_or_the_folder_of_an_environment(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    for python in (tmp_path, tmp_path / "bin" / "python"):
        source = load(f"my.module:make@{python}", validate_wire=True)
        assert isinstance(source, ProcessSource)
        # The link is not followed: it is what makes an environment of an interpreter.
        assert source.words == (
            str(tmp_path / "bin" / "python"),
            elsewhere.__file__,
            "--validate-wire",
            "my.module:make",
        )


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("exec:", "expected exec:COMMAND"),
        ("exec:'", "No closing quotation"),
        ("exec:nothing-of-this-name", "there is no command nothing-of-this-name .looked on PATH"),
        ("exec:./nothing", "there is no command ./nothing .looked in /"),
        ("exec:./file", "./file is not executable: chmod .x ./file"),
        ("exec:.", r"\. is a folder; expected a command"),
        ("reference@nothing-of-this-name", "there is no command nothing-of-this-name"),
        ("reference@./file", "/file is not executable"),
        ("reference@.", "is a folder without bin/python"),
        ("@python", "expected a built-in name"),
        ("reference@", "expected a built-in name"),
    ],
)
def test_a_name_that_cannot_be_run_is_told_why(
    name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no program", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(EngineNotFound, match=said):
        load(name)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("false", r"it ended with exit code 1 before it answered hello \(docs/reference/wire-protocol.md\)"),
        ("sh -c 'echo no GPU >&2; exit 7'", "it ended with exit code 7 .* last on its standard error: no GPU"),
        ("sh -c 'kill -9 $$'", r"it ended by signal 9 \(SIGKILL\)"),
        ("sh -c 'printf usage'", "it ended with exit code 0 and printed 'usage' before it answered hello"),
        ("echo usage: engine FILE", "it prints 'usage: engine FILE', which does not answer hello"),
        ("cat", "which does not answer hello .Object missing required field `answer`"),
        ("sleep 60", "no answer in 0.2 seconds before it answered hello"),
        (f"echo '{HELLO}'", "future 7 speaks wire protocol 99, .* speaks 1: use a newer release of kvconform"),
        (f"echo '{HELLO.replace('99', '0')}'", "future 7 speaks wire protocol 0, .* use a newer release of the engine"),
        ('echo \'{"answer":"unable","id":0,"message":"no licence"}\'', "it answers hello with: no licence"),
    ],
)
def test_a_command_that_is_no_engine_is_told_why(command: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "HELLO_SECONDS_MAX", 0.2 if command.startswith("sleep") else 30.0)
    with pytest.raises(EngineNotFound, match=said):
        load(f"exec:{command}").resolve()


def test_a_script_without_a_first_line_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_bytes(b"\x00\x01not a program")
    script.chmod(0o755)
    with pytest.raises(EngineNotFound, match="cannot be run: Exec format error; a script begins with a line such as"):
        load(f"exec:{script}").resolve()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nonesuch", "no engine 'nonesuch': expected a built-in name"),
        ("no_such_module:make", "there is no module 'no_such_module'"),
    ],
)
def test_an_engine_that_is_not_there_is_told_by_the_other_interpreter(name: str, said: str) -> None:
    with pytest.raises(Exception, match=said):
        load(f"{name}@{sys.executable}").factory(EngineConfig())


def test_an_interpreter_without_msgspec_is_told_what_to_install(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n', encoding="utf-8")  # -S: no site-packages
    python.chmod(0o755)
    with pytest.raises(EngineNotFound, match=r"msgspec is not installed there: run .* -m pip install 'msgspec>=0\.19'"):
        load(f"reference@{python}").resolve()


def test_an_interpreter_that_is_too_old_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 18))
    assert "is too old; kvconform needs 3.10 or newer" in elsewhere._missing()


@pytest.mark.parametrize("name", ["exec:rm -r .", "os:abort", "reference@/bin/sh"])
def test_a_trace_names_no_command_and_no_module_to_be_run(name: str) -> None:
    with pytest.raises(EngineNotFound, match="no command or module is taken from a file") as refused:
        load_recorded(name)
    option = option_for(name)
    assert option.startswith(" --engine ")
    assert str(refused.value).endswith(f"if it is to be run, add{option}")


def test_a_trace_may_name_what_is_installed_and_a_user_may_name_anything() -> None:
    assert load_recorded("reference").name == "reference"
    assert option_for("reference") == ""
    assert load_recorded("exec:rm -r .", "reference").name == "reference"
    assert load_recorded("reference", "exec:cat").name == "exec:cat"
