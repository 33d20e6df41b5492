"""The trace page: what stands in it, and that an engine's words cannot become markup."""

from __future__ import annotations

import json
import re
from typing import Any

from conformance.adapters.reference import make
from conformance.execute import execute, trace_of
from conformance.operations import Add, Drain
from conformance.protocol import EngineConfig
from conformance.reports.trace_page import trace_page
from conformance.trace import Trace

BYTES_MAX = 150_000
"""Of a page beside its data."""


def seed_trace() -> Trace:
    config = EngineConfig(num_blocks=2, block_size=32, max_num_seqs=2, engine_options={"append_check": "touched"})
    execution = execute(make, config, [Add(10, 3), Add(10, 3), Drain()], stop_at_first=False, record=True)
    return trace_of("reference", config, execution)


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def test_the_page_names_requirement_engine_and_command_and_needs_no_network() -> None:
    page = trace_page(seed_trace(), "kvconform replay here.jsonl")
    assert re.search(r"<title>PRE-1.* on reference 1</title>", page)
    assert "kvconform replay here.jsonl" in page
    assert "No needless preemption" in page
    assert not re.search(r"""(src|href)\s*=|https?://|@import|url\(""", page)
    assert len(page) - len(json.dumps(data_of(page))) < BYTES_MAX


def test_the_cells_are_those_of_the_trace() -> None:
    data = data_of(trace_page(seed_trace()))
    assert data["owners"] == [["r0", 0], ["r1", 1]]
    assert data["spans"][0] == [0, 0, 3, 0, [0], 0]
    assert [span for span in data["spans"] if span[0] == 1][:2] == [[1, 0, 0, 0, [1], 0], [1, 1, 1, 2, [1], 0]]
    assert data["violations"][0][0] == 1
    assert data["touched"] == {"1": 1}
    assert len(data["steps"]) == len(data["said"]) == len(data["written"]) == 5


def test_words_of_an_engine_do_not_become_markup() -> None:
    trace = seed_trace()
    trace.footer.violations[0].message = "</script><img src=x onerror=alert(1)> & \u2028"
    trace.header.engine = "<b>bold</b>"
    page = trace_page(trace)
    assert "<img" not in page
    assert "<b>bold" not in page
    assert page.count("</script>") == 2
    assert data_of(page)["violations"][0][1].endswith("onerror=alert(1)> & \u2028")


def test_the_same_trace_gives_the_same_page() -> None:
    assert trace_page(seed_trace()) == trace_page(seed_trace())


def test_a_trace_without_a_step_has_a_page() -> None:
    config = EngineConfig(num_blocks=2)
    trace = trace_of("reference", config, execute(make, config, [Add(500, 3)], record=True))
    trace.lines = trace.lines[:1]
    assert data_of(trace_page(trace))["lanes"][0]["end"] == "refused"
