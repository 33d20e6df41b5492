"""The event file: what is written is read back, and a damaged or unfinished file is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conformance.protocol import EngineConfig
from conformance.reports.events import (
    ColumnClosed,
    ColumnOpened,
    Event,
    EventsError,
    FindingKept,
    Verdict,
    combine,
    event_file,
    read_run,
)
from conformance.results import Status


def opened(column: str = "reference 1") -> ColumnOpened:
    return ColumnOpened(column=column, engine="reference", version="1", config=EngineConfig(num_blocks=7))


def verdict(requirement: str = "PRE-1", status: Status = "fail", column: str = "reference 1") -> Verdict:
    return Verdict(
        column=column,
        requirement=requirement,
        level="MUST",
        title="No needless preemption",
        status=status,
        reason="why",
    )


def finding(column: str = "reference 1", known: str = "") -> FindingKept:
    return FindingKept(
        column=column, requirement="KV-1", level="MUST", message="stale", identity="abc", operations=3, known=known
    )


def closed(column: str = "reference 1", status: Status = "fail") -> ColumnClosed:
    return ColumnClosed(column=column, status=status)


def written(path: Path, *events: Event, edition: str = "1") -> Path:
    with event_file(path, "check", edition=edition, seed=7) as writer:
        for event in events:
            writer.add(event)
    return path


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    events: list[Event] = [opened(), verdict(), finding(), closed()]
    run = read_run(written(tmp_path / "run.jsonl", *events))
    assert run.complete
    assert (run.header.command, run.header.edition, run.header.seed) == ("check", "1", 7)
    assert run.columns["reference 1"].events() == events
    assert run.status == "fail"


def test_a_run_left_by_an_exception_has_no_footer_and_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"

    def interrupted() -> None:
        with event_file(path, "check") as writer:
            writer.add(opened())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with pytest.raises(EventsError, match="has no footer: its run was cut off"):
        read_run(path)
    assert not read_run(path, partial=True).complete


def test_a_line_cut_in_the_middle_is_dropped_only_where_a_partial_file_is_welcome(tmp_path: Path) -> None:
    path = written(tmp_path / "run.jsonl", opened(), verdict(), closed())
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.rindex(b'"kind":"closed"') + 5])
    with pytest.raises(EventsError, match=r"run.jsonl:4: not an event"):
        read_run(path)
    run = read_run(path, partial=True)
    assert list(run.columns["reference 1"].verdicts) == ["PRE-1"]
    assert run.columns["reference 1"].closed is None


def test_a_missing_line_in_the_middle_is_noticed(tmp_path: Path) -> None:
    path = written(tmp_path / "run.jsonl", opened(), verdict(), verdict("PRE-2"), closed())
    rows = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(rows[:2] + rows[3:]))
    with pytest.raises(EventsError, match="expected 4 events, as the footer counts, got 3"):
        read_run(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected the header of an event file"),
        ("{}\n", "1: not an event"),
        ("\xff\n", "1: not an event"),
        (
            '{"kind":"header","command":"check","kvconform":"1","format":9}\n',
            "expected 1, which this .* reads, got 9",
        ),
    ],
)
def test_what_is_no_event_file_is_refused_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(EventsError, match=message):
        read_run(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(EventsError, match=r"none.jsonl: cannot be read: No such file"):
        read_run(tmp_path / "none.jsonl")


@pytest.mark.parametrize(
    ("events", "message"),
    [([verdict()], "was never opened"), ([opened(), opened()], "is opened twice")],
)
def test_columns_out_of_order_are_refused(tmp_path: Path, events: list[Event], message: str) -> None:
    with pytest.raises(EventsError, match=message):
        read_run(written(tmp_path / "run.jsonl", *events))


def test_combining_keeps_the_worst_verdict_and_every_column(tmp_path: Path) -> None:
    good = read_run(written(tmp_path / "a.jsonl", opened(), verdict(status="pass"), verdict("PRE-2", "pass"), closed()))
    bad = read_run(written(tmp_path / "b.jsonl", opened(), verdict(status="fail"), finding(), closed()))
    other = read_run(
        written(tmp_path / "c.jsonl", opened("x"), verdict(status="pass", column="x"), closed("x", "pass"))
    )
    for runs in ([good, bad, other], [bad, good, other]):
        run = combine(runs)
        assert {name: one.status for name, one in run.columns["reference 1"].verdicts.items()} == {
            "PRE-1": "fail",
            "PRE-2": "pass",
        }
        assert len(run.columns["reference 1"].findings) == 1
        assert run.columns["x"].status == "pass"
    assert len(good.columns["reference 1"].findings) == 0


def test_runs_of_two_editions_of_the_contract_do_not_stand_in_one_table(tmp_path: Path) -> None:
    one = read_run(written(tmp_path / "a.jsonl", opened(), closed(), edition="1"))
    two = read_run(written(tmp_path / "b.jsonl", opened("x"), closed("x"), edition="2"))
    with pytest.raises(EventsError, match="editions 1, 2"):
        combine([one, two])


def test_a_known_finding_does_not_count_as_a_failure(tmp_path: Path) -> None:
    column = read_run(written(tmp_path / "a.jsonl", opened(), finding(known="reason (link)"), closed())).columns[
        "reference 1"
    ]
    assert column.status == "known"
    assert column.failing("MUST") == []


def test_traces_are_named_from_where_the_file_stands(tmp_path: Path) -> None:
    with event_file(tmp_path / "deep" / "run.jsonl", "check") as writer:
        assert writer.link(tmp_path / "deep" / "traces" / "t.jsonl") == "traces/t.jsonl"
        assert writer.link(tmp_path / "elsewhere" / "t.jsonl") == str(tmp_path / "elsewhere" / "t.jsonl")
        assert writer.link(None) == ""


def test_the_file_is_plain_json_lines_without_a_clock(tmp_path: Path) -> None:
    one = written(tmp_path / "a.jsonl", opened(), verdict(), closed())
    two = written(tmp_path / "b.jsonl", opened(), verdict(), closed())
    assert one.read_bytes() == two.read_bytes()
    kinds = [json.loads(row)["kind"] for row in one.read_text().splitlines()]
    assert kinds == ["header", "column", "verdict", "closed", "footer"]
