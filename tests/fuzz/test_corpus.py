"""The corpus: every trace still shows its fault on the engine and release it was found on."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance.engines import installed, load
from conformance.execute import execute, replay
from conformance.trace import read_trace
from fuzz.corpus import corpus, track_record


@pytest.mark.parametrize("path", corpus(), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_trace_fails_where_it_was_found(path: Path) -> None:
    trace = read_trace(path)
    assert trace.header.engine == path.parent.name
    assert trace.header.note, "the cause, or the link"
    assert len(trace.footer.violations) == 1
    assert len(trace.operations) <= 6
    source = load(trace.header.engine) if trace.header.engine in _installed() else None
    if source is None or not source.installed_version.startswith(trace.header.engine_version):
        pytest.skip(f"{trace.header.engine} {trace.header.engine_version} is not installed here")
    assert replay(source.factory, trace).status == "FAILED"


@pytest.mark.parametrize("path", corpus("smol-vllm"), ids=lambda path: path.stem)
def test_the_reference_engine_keeps_what_others_break(path: Path) -> None:
    trace = read_trace(path)
    execution = execute(load("reference").factory, trace.header.config, trace.operations)
    assert execution.refused is None
    assert not execution.violations


def _installed() -> set[str]:
    return {source.name for source in installed() if source.available}


def test_the_track_record_lists_the_corpus() -> None:
    page = Path(__file__).parents[2] / "docs" / "track-record.md"
    assert page.read_text(encoding="utf-8") == track_record(), "run: python -m fuzz.corpus --write docs/track-record.md"
