"""The conformance page: its table, what a cell opens, the pages of its traces."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec

from conformance.adapters.reference import make
from conformance.execute import execute, trace_of
from conformance.operations import Add, Drain
from conformance.protocol import EngineConfig
from conformance.reports.conformance_page import absolute, write_conformance_page
from conformance.reports.events import Column, ColumnClosed, ColumnOpened, FindingKept, Run, RunHeader, Verdict
from conformance.results import Status
from conformance.trace import write_trace


def verdict(requirement: str, status: Status, level: str = "MUST", trace: str = "") -> Verdict:
    return Verdict(
        column="e 1", requirement=requirement, level=level, title="T", status=status, reason="one | <two>", trace=trace
    )


def page_of(tmp_path: Path, *verdicts: Verdict, findings: tuple[FindingKept, ...] = ()) -> tuple[str, dict[str, Any]]:
    column = Column(
        opened=ColumnOpened(column="e 1", engine="e", version="1", reimplements=("the <loop>",)),
        verdicts={one.requirement: one for one in verdicts},
        findings=list(findings),
        closed=ColumnClosed(column="e 1", status="fail"),
    )
    run = Run(header=RunHeader(command="matrix", edition="1"), columns={"e 1": column})
    write_conformance_page(absolute(run, tmp_path), tmp_path / "site" / "index.html")
    page = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    found = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return page, data


def test_must_and_should_stand_apart_and_failures_are_counted(tmp_path: Path) -> None:
    page, _ = page_of(tmp_path, verdict("PRE-1", "fail"), verdict("KV-1", "known"), verdict("PRE-6", "fail", "SHOULD"))
    must, should = re.findall(r'<table data-level="(\w+)">', page)
    assert (must, should) == ("MUST", "SHOULD")
    assert "<b>2</b> MUST fail, 1 known to" in page
    assert "%" not in re.sub(r"<style>.*?</style>|<script.*?</script>", "", page, flags=re.DOTALL)


def test_a_cell_holds_what_the_contract_says_and_what_happened(tmp_path: Path) -> None:
    page, data = page_of(tmp_path, verdict("PRE-1", "fail"))
    assert data["requirements"]["PRE-1"]["rationale"]
    assert data["cells"]["PRE-1"][0]["reasons"] == ["one", "<two>"]
    assert "<two>" not in page
    assert "the &lt;loop&gt;" in page


def test_a_trace_that_is_there_has_a_page_and_one_that_is_not_has_none(tmp_path: Path) -> None:
    config = EngineConfig(num_blocks=2, block_size=32, max_num_seqs=2, engine_options={"append_check": "touched"})
    execution = execute(make, config, [Add(10, 3), Add(10, 3), Drain()], stop_at_first=False, record=True)
    write_trace(tmp_path / "t.jsonl", trace_of("reference", config, execution))
    kept = FindingKept(column="e 1", requirement="KV-1", level="MUST", message="m", trace="gone.jsonl")
    _, data = page_of(tmp_path, verdict("PRE-1", "fail", trace="t.jsonl"), findings=(kept,))
    page = data["cells"]["PRE-1"][0]["page"]
    assert (tmp_path / "site" / page).read_text(encoding="utf-8").startswith("<!doctype html>")
    assert data["cells"]["KV-1"][0]["findings"][0]["page"] == ""
    assert data["cells"]["KV-1"][0]["findings"][0]["trace"] == "gone.jsonl"


def test_a_track_record_stands_beside_the_table_with_a_page_for_each_trace(tmp_path: Path) -> None:
    config = EngineConfig(num_blocks=2, block_size=32, max_num_seqs=2, engine_options={"append_check": "touched"})
    execution = execute(make, config, [Add(10, 3), Add(10, 3), Drain()], stop_at_first=False, record=True)
    trace = trace_of("reference", config, execution)
    trace.header = msgspec.structs.replace(trace.header, note="<b>, see https://example.org/1, fixed")
    write_trace(tmp_path / "1-spare.jsonl", trace)
    run = Run(header=RunHeader(command="matrix", edition="1"), columns={})
    write_conformance_page(run, tmp_path / "site" / "index.html", track_record=[tmp_path / "1-spare.jsonl"])
    table = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert '<a href="track-record.html">Track record</a>' in table
    record = (tmp_path / "site" / "track-record.html").read_text(encoding="utf-8")
    assert '&lt;b&gt;, see <a href="https://example.org/1">https://example.org/1</a>, fixed' in record
    page = re.search(r'href="(track-record/[^"]+)"', record)
    assert page is not None
    assert (tmp_path / "site" / page[1]).read_text(encoding="utf-8").startswith("<!doctype html>")


def test_without_a_track_record_there_is_no_link_to_one(tmp_path: Path) -> None:
    page, _ = page_of(tmp_path, verdict("PRE-1", "fail"))
    assert "track-record" not in page
    assert not (tmp_path / "site" / "track-record.html").exists()
