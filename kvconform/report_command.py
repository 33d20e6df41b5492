"""``kvconform report``: stored runs shown again, combined, or turned into what other tools read."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Literal, TypeAlias

from rich.console import Console
from rich.text import Text

from conformance.reports import formats
from conformance.reports.events import Run
from conformance.results import Status
from kvconform.check_command import STYLES
from kvconform.console import INDENT, wrapped

Format: TypeAlias = Literal["terminal", "markdown", "junit", "badge", "html"]


def render(run: Run, form: Format) -> str:
    """The run in one of the formats that are plain text."""
    match form:
        case "markdown":
            return formats.markdown(run)
        case "junit":
            return formats.junit(run)
        case "badge":
            return formats.badge(run)
        case "terminal" | "html":
            raise ValueError(f"{form} is no text: see print_run and write_conformance_page")


def print_run(console: Console, run: Run) -> None:
    """The matrix at 80 columns: engines by letter, one sign a cell, then each engine in a line."""
    columns = list(run.columns.values())
    letters = [_letter(number) for number in range(len(columns))]
    width = max(map(len, letters), default=1) + 1
    title_width = max(12, console.width - 17 - width * len(columns)) if console.is_terminal else 40
    head = Text(" " * (15 + title_width + 1))
    for letter in letters:
        head.append(letter.rjust(width))
    console.print(head, no_wrap=True)
    for row in formats.rows_of(run):
        title = row.title if len(row.title) <= title_width else row.title[: title_width - 1] + "."
        line = Text(f"{row.id:<8}{row.level:<7}{title:<{title_width + 1}}")
        for column in columns:
            status = formats.status_in(column, row.id)
            line.append(("" if status is None else formats.MARKS[status]).rjust(width), style=_style(status))
        console.print(line, no_wrap=True)
    console.print()
    wrapped(console, formats.LEGEND)
    console.print()
    for letter, column in zip(letters, columns, strict=True):
        wrapped(console, f"{letter}  {column.name}: {formats.summary(column)}")


def print_reasons(console: Console, run: Run, statuses: frozenset[Status]) -> None:
    """Why each cell of ``statuses`` is what it is, engine by engine."""
    for column in run.columns.values():
        shown = [verdict for verdict in column.verdicts.values() if verdict.status in statuses]
        findings = column.findings if "fail" in statuses else []
        if not shown and not findings:
            continue
        console.print()
        wrapped(console, column.name)
        for verdict in shown:
            wrapped(
                console, f"{verdict.status.upper():<7} {verdict.requirement} {verdict.level}: {verdict.reason}", "  "
            )
            if verdict.trace:
                wrapped(console, f"trace {verdict.trace}", INDENT * 2)
        for finding in findings:
            wrapped(console, f"FAIL    {finding.requirement} {finding.level} (fuzzer): {finding.message}", "  ")
            wrapped(console, f"trace {finding.trace}", INDENT * 2)


def _letter(number: int) -> str:
    """Z is followed by AA, AB, as in a spreadsheet."""
    rest, last = divmod(number, 26)
    return (_letter(rest - 1) if rest else "") + string.ascii_uppercase[last]


def _style(status: Status | None) -> str:
    return "" if status is None else STYLES[status]


def written(text: str, path: Path | None) -> None:
    """Write ``text`` to a file, or to standard output."""
    if path is None:
        print(text, end="")  # noqa: T201 - the text is the answer, and goes where it is piped
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
