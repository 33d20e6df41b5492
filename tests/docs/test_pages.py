"""What the pages promise: the index names them all, workflow files are those that are shown, their commands exist."""

from __future__ import annotations

import re
import shlex
import textwrap
from pathlib import Path

import pytest
import typer.main

from kvconform.cli import app

DOCS = Path(__file__).resolve().parents[2] / "docs"
WORKFLOWS = sorted((DOCS / "examples" / "workflows").glob("*.yml"))
CI = DOCS / "how-to" / "ci.md"


def commands(text: str) -> list[list[str]]:
    """The commands of a workflow file, folded scalars as one line."""
    found = []
    lines = text.splitlines()
    for number, line in enumerate(lines):
        begins = re.match(r"( *)(?:- )?run: (.*)", line)
        if begins is None:
            continue
        command = begins[2]
        if command == ">":
            parts = []
            for more in lines[number + 1 :]:
                if len(more) - len(more.lstrip()) <= len(begins[1]):
                    break
                parts.append(more.strip())
            command = " ".join(parts)
        found.append(shlex.split(command.partition(">>")[0].replace("$GITHUB_RUN_NUMBER", "1")))
    return found


def test_the_index_names_every_page() -> None:
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\(([^)#]+\.md)", index))
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")} - {"index.md"}
    assert pages - linked == set()
    assert linked - pages == set()


def test_there_is_a_workflow_for_an_engine_and_one_for_a_plugin() -> None:
    assert [path.stem for path in WORKFLOWS] == ["engine", "hardware-plugin"]


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_is_shown_as_it_is(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert textwrap.indent(text, "    ") in CI.read_text(encoding="utf-8")
    assert "\t" not in text


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda path: path.stem)
def test_the_commands_of_a_workflow_are_understood(file: Path, request: pytest.FixtureRequest) -> None:
    seen = set()
    for first, *words in commands(file.read_text(encoding="utf-8")):
        seen.add(first)
        if first == "kvconform":
            command = typer.main.get_command(app).commands[words[0]]  # type: ignore[attr-defined]
            command.make_context(words[0], words[1:])
        elif first == "pytest":
            chosen, unknown = request.config._parser.parse_known_and_unknown_args(words)
            assert unknown == []
            assert chosen.pyargs
    assert {"kvconform", "pytest", "pip"} == seen


def test_pictures_in_the_pages_are_there() -> None:
    for page in DOCS.rglob("*.md"):
        for target in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).is_file(), f"{page.name}: {target}"
