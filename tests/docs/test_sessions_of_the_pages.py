"""Every terminal session in the documentation that runs without an engine of its own environment gives what it prints.

A session is an indented block whose first line begins with ``$``. In what is expected, a line ``...`` stands for any
lines and ``...`` within a line for any text; how lines are folded does not matter. The sessions of a page run in
order, in one directory with the Python files that lie beside the page; an indented block that begins with ``# NAME``
is written there as the file NAME.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
README = DOCS.parent / "README.md"
PAGES = [README, *sorted(DOCS.rglob("*.md"))]
NOT_RUN = {
    "pip": "what is installed is the business of the environment",
    "tox": "the tests do not run themselves",
}
NEEDS_ENVIRONMENT = re.compile(r"\b(vllm|lmdeploy|sglang|transformers|nano-vllm|mini-sglang)\b")
"""Engines with an environment of their own; their sessions are the business of `tox run -m engines`."""


class Session(NamedTuple):
    command: str
    expected: list[str]
    line: int


def sessions(page: Path) -> list[Session]:
    found: list[Session] = []
    inside = False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("    $ "):
            found.append(Session(line[6:].partition("   #")[0].strip(), [], number))
            inside = True
        elif inside and (line.startswith("    ") or not line.strip()):
            found[-1].expected.append(line[4:])
        else:
            inside = False
    return found


def files_of(page: Path) -> dict[str, str]:
    """The files that the page shows whole."""
    found: dict[str, str] = {}
    name = ""
    for line in page.read_text(encoding="utf-8").splitlines():
        begins = re.fullmatch(r"    # ([a-z_]+\.(?:toml|py))", line)
        if begins is not None:
            name = begins[1]
            found[name] = ""
        elif name and line.startswith("    ") and not line.startswith("    $ "):
            found[name] += line[4:] + "\n"
        elif line.strip():
            name = ""
    return found


def pattern_of(expected: list[str]) -> re.Pattern[str]:
    """What the output has to match, with all white space as one blank."""
    text = " ".join(" ".join(expected).split())
    return re.compile(re.escape(text).replace(re.escape("..."), ".*?").replace(r"\ ", r"\s*"), re.DOTALL)


def why_not(command: str) -> str:
    for beginning, reason in NOT_RUN.items():
        if command.startswith(beginning):
            return reason
    if NEEDS_ENVIRONMENT.search(command.replace("smol-vllm", "")):
        return "needs an engine with an environment of its own"
    if "smol-vllm" in command and importlib.util.find_spec("smol_vllm") is None:
        return "smol-vllm is not installed here"
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS.parent).as_posix())
def test_the_sessions_of_a_page_give_what_it_prints(page: Path, tmp_path: Path) -> None:
    todo = sessions(page)
    if not any(not why_not(session.command) for session in todo):
        pytest.skip("; ".join(dict.fromkeys(why_not(session.command) for session in todo)) or "it has none")
    for beside in page.parent.glob("*.py"):
        shutil.copy(beside, tmp_path)
    for name, text in files_of(page).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    environment = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1", "PYTHONWARNINGS": "default"}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
    environment.pop("PYTEST_ADDOPTS", None)
    for session in todo:
        if why_not(session.command):
            continue
        words = shlex.split(session.command)
        if words[0] == "kvconform":
            words[:1] = [sys.executable, "-m", "kvconform"]
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        printed = " ".join((done.stdout + done.stderr).split())
        where = f"{page.name}:{session.line}: $ {session.command}"
        assert pattern_of(session.expected).search(printed), f"{where}\n{done.stdout}{done.stderr}"


def test_a_session_that_prints_something_else_is_noticed() -> None:
    assert pattern_of(["a  b", "...", "c ... d"]).search("a b x y c whatever d")
    assert not pattern_of(["a b", "c"]).search("a b x c")


def test_the_tutorials_have_sessions_to_run() -> None:
    for name in ("first-finding", "plug-in-your-engine"):
        assert any(not NOT_RUN.get(one.command.split()[0]) for one in sessions(DOCS / "tutorial" / f"{name}.md"))
