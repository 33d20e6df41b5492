"""A finding is a file: written whole or not at all, read back as it was, refused when it is not what it claims."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance.adapters.reference import make
from conformance.execute import execute, trace_of
from conformance.explain import explain
from conformance.operations import Abort, AbortEnded, Add, Drain, Operation, ResetPrefixCache, Step
from conformance.protocol import EngineConfig
from conformance.trace import Trace, TraceError, read_trace, write_trace

OPERATIONS: list[Operation] = [
    Add(prompt_len=9, max_tokens=7, family=1, shared_len=4, n=2, stop_after=3, salt=1, adapter=2),
    Step(count=3),
    Abort(index=1),
    AbortEnded(),
    ResetPrefixCache(),
    Drain(),
]


@pytest.fixture
def trace() -> Trace:
    config = EngineConfig(num_blocks=9, engine_options={"append_check": "touched"})
    return trace_of("reference", config, execute(make, config, OPERATIONS, record=True), seed=7, note="made by a test")


def test_it_reads_back_as_it_was_written(trace: Trace, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "trace.jsonl"
    write_trace(path, trace)
    assert read_trace(path) == trace
    assert [line.operation for line in read_trace(path).lines] == OPERATIONS
    assert list(path.parent.iterdir()) == [path], "nothing half-written stays behind"


@pytest.mark.parametrize(
    ("spoil", "line", "said"),
    [
        (lambda rows: rows[:0], "", "empty"),
        (lambda rows: rows[:-1], ":7", "no footer"),
        (lambda rows: [*rows[:2], rows[2][:9], *rows[3:]], ":3", "not a trace line"),
        (lambda rows: rows[1:], ":1", "header"),
        (lambda rows: [*rows[:3], rows[0], *rows[3:]], ":4", "expected an operation, got header"),
        (lambda rows: [rows[0].replace('"kind":"header"', '"kind":"header","format":2'), *rows[1:]], ":1", "format 2"),
        (lambda rows: [rows[0].replace("max_num_seqs", "max_num_seats"), *rows[1:]], ":1", "max_num_seats"),
        (lambda rows: ["not json", *rows[1:]], ":1", "not JSON"),
    ],
    ids=["empty", "no-footer", "damaged", "no-header", "two-headers", "other-format", "other-field", "no-json"],
)
def test_what_is_wrong_is_said_with_file_and_line(
    spoil: object, line: str, said: str, trace: Trace, tmp_path: Path
) -> None:
    path = tmp_path / "trace.jsonl"
    write_trace(path, trace)
    rows = path.read_text(encoding="utf-8").splitlines()
    assert callable(spoil)
    path.write_text("\n".join(spoil(rows)), encoding="utf-8")
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert f"{path}{line}" in str(caught.value)
    assert said in str(caught.value)


def test_a_file_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path / "nothing.jsonl")


def test_explain_needs_no_engine(trace: Trace) -> None:
    paragraphs = explain(trace)
    assert paragraphs[0].startswith("reference 1: 9 blocks of 4 tokens")
    assert any("Block ids handed out" in paragraph for paragraph in paragraphs)
