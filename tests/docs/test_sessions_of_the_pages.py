"""Every terminal session in the documentation that runs without an engine of its own environment gives what it prints.

A session is an indented block whose first line begins with ``$``. In what is expected, a line ``...`` stands for any
lines and ``...`` within a line for any text; how lines are folded does not matter. The sessions of a page run in
order, in one directory with the Python files and traces that lie beside the page. An indented block that begins with
``# NAME`` is written there as the file NAME, and one that begins with ``--- NAME`` is a change to that file; where a
page changes files of the package ``conformance``, a copy of it lies in the directory, as in a checkout.
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

import conformance

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


class Block(NamedTuple):
    """An indented block that is about a file: the file whole (``# NAME``) or a change to it (``--- NAME``)."""

    kind: str
    file: str
    lines: list[str]
    line: int


def blocks_of(page: Path) -> list[Block]:
    found: list[Block] = []
    inside = False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        begins = re.fullmatch(r"    (#|---) ([a-z_/]+\.(?:toml|py))", line)
        if begins is not None:
            found.append(Block(begins[1], begins[2], [], number))
            inside = True
        elif inside and line.startswith("    ") and not line.startswith("    $ "):
            found[-1].lines.append(line[4:])
        elif inside and not line.strip():
            found[-1].lines.append("")
        else:
            inside = False
    for block in found:
        while block.lines and not block.lines[-1]:
            block.lines.pop()
    return found


def write(block: Block, folder: Path) -> None:
    """Do what a block shows."""
    if block.kind == "#":
        (folder / block.file).write_text("\n".join(block.lines) + "\n", encoding="utf-8")
    else:
        change(block, folder)


def change(block: Block, folder: Path) -> None:
    """Make the change that a block shows: lines with ``-`` go, those with ``+`` come, others say where."""
    path = folder / block.file
    text = path.read_text(encoding="utf-8")
    old = "\n".join(line[1:] for line in block.lines if not line.startswith("+"))
    new = "\n".join(line[1:] for line in block.lines if not line.startswith("-"))
    assert text.count(old) == 1, f"line {block.line}: {path.name} has this {text.count(old)} times: {old}"
    path.write_text(text.replace(old, new), encoding="utf-8")


def pattern_of(expected: list[str]) -> re.Pattern[str]:
    """What the output has to match, with all white space as one blank."""
    text = " ".join(" ".join(expected).split())
    return re.compile(re.escape(text).replace(re.escape("..."), ".*?").replace(r"\ ", r"\s*"), re.DOTALL)


def expanded(word: str, folder: Path) -> list[str]:
    """The files that a word with a ``*`` stands for, as a shell has it."""
    return sorted(str(path.relative_to(folder)) for path in folder.glob(word)) if "*" in word else []


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
    for beside in [*page.parent.glob("*.py"), *page.parent.glob("*.jsonl")]:
        shutil.copy(beside, tmp_path)
    blocks = blocks_of(page)
    if any(block.file.startswith("conformance/") for block in blocks):  # the page works in a checkout
        shutil.copytree(Path(conformance.__file__).parent, tmp_path / "conformance")
    environment = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1", "PYTHONWARNINGS": "default"}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
    environment.pop("PYTEST_ADDOPTS", None)
    for session in todo:
        while blocks and blocks[0].line < session.line:
            write(blocks.pop(0), tmp_path)
        if why_not(session.command):
            continue
        words = [name for word in shlex.split(session.command) for name in (expanded(word, tmp_path) or [word])]
        if words[0] in {"kvconform", "pytest"}:
            words[:1] = [sys.executable, "-m", words[0]]
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        printed = " ".join((done.stdout + done.stderr).split())
        where = f"{page.name}:{session.line}: $ {session.command}"
        assert pattern_of(session.expected).search(printed), f"{where}\n{done.stdout}{done.stderr}"


def test_a_session_that_prints_something_else_is_noticed() -> None:
    assert pattern_of(["a  b", "...", "c ... d"]).search("a b x y c whatever d")
    assert not pattern_of(["a b", "c"]).search("a b x c")


def test_the_tutorials_have_sessions_to_run() -> None:
    for name in ("first-finding", "new-requirement", "plug-in-your-engine"):
        assert any(not NOT_RUN.get(one.command.split()[0]) for one in sessions(DOCS / "tutorial" / f"{name}.md"))
