"""The two pages as browsers are shown them: of a real finding, and of real checks."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance.adapters.reference import make
from conformance.execute import execute, trace_of
from conformance.operations import Add, Drain, Operation
from conformance.protocol import EngineConfig
from conformance.reports.trace_page import trace_page
from conformance.trace import Trace
from kvconform.cli import main

FINDING: list[Operation] = [*[Add(10, 6)] * 3, Add(3, 2), Drain()]
FINDING_CONFIG = EngineConfig(num_blocks=6, enable_prefix_caching=True, engine_options={"append_check": "touched"})

REQUIREMENTS = ("ACC-1", "KV-1", "PRE-1", "PRE-2", "PRE-6", "PRE-7", "FAIR-1", "ENC-1")


def recorded(operations: list[Operation], config: EngineConfig) -> Trace:
    """What the reference engine makes of ``operations``, violations and all."""
    return trace_of("reference", config, execute(make, config, operations, stop_at_first=False, record=True))


def trace_page_of_a_finding(folder: Path) -> Path:
    """The page of a needless preemption."""
    path = folder / "finding.html"
    trace = recorded(FINDING, FINDING_CONFIG)
    path.write_text(trace_page(trace, "kvconform replay finding.jsonl"), encoding="utf-8")
    return path


def conformance_page(folder: Path) -> Path:
    """The page of the reference engine with two append checks, side by side, with the pages of their traces."""
    files = []
    for name in ("exact", "touched"):
        files.append(folder / f"{name}.jsonl")
        words = [f"--requirement={one}" for one in REQUIREMENTS]
        words += [f"--set=engine_options.append_check={name}", f"--events={files[-1]}", f"--out={folder}"]
        _run("check", "reference", *words, f"--label=reference 1, append check {name}")
    page = folder / "index.html"
    _run("report", *map(str, files), "--format=html", "--track-record", f"--out={page}")
    return page


def _run(*words: str) -> None:
    with pytest.raises(SystemExit):
        main(list(words))
