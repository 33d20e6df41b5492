"""What other tools read: markdown, JUnit and the badge, made from an event file."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import pytest

from conformance.reports.events import Column, ColumnClosed, ColumnOpened, FindingKept, Run, RunHeader, Verdict
from conformance.reports.formats import MARKS, badge, junit, markdown, status_in, summary
from conformance.results import SEVERITY, SmokeResult, Status


def column(name: str, statuses: dict[str, Status], *, level: str = "MUST", findings: tuple[str, ...] = ()) -> Column:
    return Column(
        opened=ColumnOpened(column=name, engine="e", version="1"),
        verdicts={
            rid: Verdict(column=name, requirement=rid, level=level, title="T", status=status, reason="a | <b>\nc")
            for rid, status in statuses.items()
        },
        findings=[
            FindingKept(
                column=name, requirement=rid, level=level, message="m \x07", identity="i", operations=2, trace="t"
            )
            for rid in findings
        ],
        closed=ColumnClosed(column=name, status="pass"),
    )


def run_of(*columns: Column) -> Run:
    return Run(header=RunHeader(command="matrix", edition="1"), columns={one.name: one for one in columns})


def test_every_status_has_a_sign_of_its_own() -> None:
    assert MARKS.keys() == set(SEVERITY)
    assert len(set(MARKS.values())) == len(SEVERITY)


def test_the_table_has_a_row_for_each_requirement_in_the_order_of_the_contract() -> None:
    text = markdown(run_of(column("one", {"PRE-1": "fail", "ACC-1": "pass"}), column("two", {"KV-1": "unsupported"})))
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| ")]
    assert [row[1].split()[0] for row in rows] == ["requirement", "ACC-1", "KV-1", "PRE-1"]
    assert [[cell.strip() for cell in row[3:5]] for row in rows[1:]] == [["✓", ""], ["", "·"], ["✗", ""]]


def test_text_of_an_engine_cannot_leave_its_cell_or_become_markup() -> None:
    text = markdown(run_of(column("one", {"PRE-1": "fail"})))
    assert "a \\| &lt;b> c" in text


def test_what_the_fuzzer_found_makes_the_cell_fail() -> None:
    one = column("one", {"PRE-1": "pass"}, findings=("PRE-1", "KV-1"))
    assert (status_in(one, "PRE-1"), status_in(one, "KV-1"), status_in(one, "KV-2")) == ("fail", "fail", None)


def test_junit_counts_and_names_its_cases_by_requirement() -> None:
    one = column(
        "one",
        {"PRE-1": "fail", "ACC-1": "pass", "KV-1": "known", "KV-2": "unsupported", "KV-3": "error", "KV-4": "stale"},
        findings=("ACC-2",),
    )
    suite = ET.fromstring(junit(run_of(one)))[0]  # noqa: S314 - our own output
    assert {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped")} == {
        "tests": "7",
        "failures": "3",
        "errors": "1",
        "skipped": "2",
    }
    ids = [one.get("value") for one in suite.iter("property") if one.get("name") == "requirement"]
    assert ids == ["PRE-1", "ACC-1", "KV-1", "KV-2", "KV-3", "KV-4", "ACC-2"]
    assert "\\x07" in junit(run_of(one))


@pytest.mark.parametrize(
    ("columns", "message", "colour"),
    [
        ([column("a", {"PRE-1": "pass", "KV-1": "known"})], "1 hold", "brightgreen"),
        ([column("a", {"PRE-1": "fail"}), column("b", {"PRE-1": "fail"})], "2 MUST fail", "red"),
        ([column("a", {"PRE-6": "fail"}, level="SHOULD")], "1 SHOULD fail", "orange"),
        ([column("a", {"PRE-6": "stale"})], "expectations are stale", "orange"),
        ([column("a", {"PRE-6": "error"})], "the suite broke", "lightgrey"),
        ([column("a", {}, findings=("KV-1",))], "1 MUST fail", "red"),
    ],
)
def test_the_badge_counts_what_must_not_fail(columns: list[Column], message: str, colour: str) -> None:
    data = json.loads(badge(run_of(*columns)))
    assert (data["message"], data["color"], data["schemaVersion"]) == (message, colour, 1)


def test_a_red_smoke_test_is_an_error_and_says_why() -> None:
    one = column("a", {})
    one.opened.smoke = SmokeResult(status="red", reason="import: no vllm")
    assert one.status == "error"
    assert summary(one) == "error: smoke test: import: no vllm"
    suite = ET.fromstring(junit(run_of(one)))[0]  # noqa: S314 - our own output
    assert (suite.get("tests"), suite.get("errors")) == ("1", "1")
