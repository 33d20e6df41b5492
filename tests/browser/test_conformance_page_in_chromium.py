"""The conformance page in a real browser: filters, and what a cell opens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conformance.reports.conformance_page import write_conformance_page
from conformance.reports.events import Column, ColumnClosed, ColumnOpened, Run, RunHeader, Verdict
from conformance.results import Status
from conformance.trace import write_trace
from samples import FINDING, FINDING_CONFIG, recorded

pytest_plugins = ("chromium",)

Visit = Callable[..., Any]

CELLS: dict[str, dict[str, Status]] = {
    "alpha 1": {"ACC-1": "pass", "PRE-1": "fail", "PRE-6": "pass"},
    "beta 2": {"ACC-1": "pass", "PRE-1": "pass", "PRE-6": "known"},
}


@pytest.fixture
def page(visit: Visit, tmp_path: Path) -> Any:
    columns = {
        name: Column(
            opened=ColumnOpened(column=name, engine=name),
            verdicts={
                rid: Verdict(
                    column=name,
                    requirement=rid,
                    level="SHOULD" if rid == "PRE-6" else "MUST",
                    title="T",
                    status=status,
                    reason="why <b>",
                )
                for rid, status in cells.items()
            },
            closed=ColumnClosed(column=name, status="pass"),
        )
        for name, cells in CELLS.items()
    }
    write_conformance_page(Run(header=RunHeader(command="matrix"), columns=columns), tmp_path / "index.html")
    return visit(tmp_path / "index.html")


def shown(page: Any) -> list[str]:
    rows = page.locator("tbody tr:visible th b").all_inner_texts()
    return [str(row) for row in rows]


def test_filters_by_level_difference_failure_and_words(page: Any) -> None:
    assert shown(page) == ["ACC-1", "PRE-1", "PRE-6"]
    page.uncheck("#should")
    assert shown(page) == ["ACC-1", "PRE-1"]
    page.check("#should")
    page.check("#differ")
    assert shown(page) == ["PRE-1", "PRE-6"]
    page.uncheck("#differ")
    page.check("#red")
    assert shown(page) == ["PRE-1", "PRE-6"]
    page.fill("#words", "alpha")
    assert shown(page) == ["PRE-1"]
    assert page.locator("thead th:visible").count() == 2
    page.uncheck("#red")
    page.fill("#words", "acc")
    assert shown(page) == ["ACC-1"]


def test_a_cell_opens_its_requirement_and_the_reason(page: Any) -> None:
    page.click("button[data-row='PRE-1'][data-column='0']")
    text = page.locator("#detail").inner_text()
    assert "PRE-1 No needless preemption: fail on alpha 1" in text
    assert "why <b>" in text
    page.keyboard.press("Escape")
    assert not page.locator("#detail").is_visible()


def test_the_track_record_is_searched_and_its_traces_open(visit: Visit, tmp_path: Path) -> None:
    trace = tmp_path / "1-needless.jsonl"
    write_trace(trace, recorded(FINDING, FINDING_CONFIG))
    run = Run(header=RunHeader(command="matrix"), columns={})
    write_conformance_page(run, tmp_path / "index.html", track_record=[trace])
    page = visit(tmp_path / "index.html")
    page.click("text=Track record")
    page.wait_for_function("window.kvconform !== undefined")
    assert page.locator("#status").inner_text() == "1 trace"
    page.fill("#words", "reference pre-1")
    assert page.locator("#status").inner_text() == "1 of 1"
    page.fill("#words", "kv-9")
    assert page.locator("tbody tr:visible").count() == 0
    page.fill("#words", "")
    page.click("text=trace >> nth=-1")
    assert page.locator("h1").inner_text() == "PRE-1 on reference 1"
