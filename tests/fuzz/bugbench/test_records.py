"""The records of the planted faults: complete, true to what the faults do, and in step with their page."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import reference_engine
from conformance.adapters.reference import make
from conformance.protocol import EngineConfig
from conformance.requirements import load as load_requirements
from fuzz.bugbench.page import page
from fuzz.bugbench.registry import PlantedFault, load
from fuzz.bugbench.smallest import shown, smallest

ROOT = Path(__file__).parents[3]
FAULTS = load()
FAMILIES = {
    "abort in every state",
    "admission rollback",
    "budget",
    "chunked prefill",
    "copy-on-write",
    "deferred frees and pipeline",
    "device lines",
    "double free",
    "hang",
    "leak",
    "limits",
    "livelock",
    "lookahead",
    "metrics",
    "prefix cache: not invalidated",
    "prefix cache: partial block",
    "prefix cache: wrong eviction",
    "prefix cache: wrong hit",
    "priority and victim order",
    "reference counts",
    "sliding window",
    "spurious preemption",
    "starvation",
    "swap",
    "token routing",
    "unit mix-ups",
    "use after free",
    "watermark",
}


def test_there_are_enough_and_of_every_family() -> None:
    assert len(FAULTS) >= 60
    assert {fault.family for fault in FAULTS.values()} == FAMILIES
    assert sum(bool(fault.deep) for fault in FAULTS.values()) >= 10


@pytest.mark.parametrize("fault", FAULTS.values(), ids=lambda fault: fault.id)
def test_a_record_is_complete(fault: PlantedFault) -> None:
    assert re.fullmatch(
        r"https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+|https://github\.com/\S+\.py", fault.source
    )
    assert fault.description.endswith(".")
    assert fault.breaks
    assert set(fault.breaks) <= set(load_requirements())
    assert list(fault.needs) == sorted(fault.needs)
    assert set(fault.needs) <= make(EngineConfig()).capabilities.features


@pytest.mark.parametrize("fault", FAULTS.values(), ids=lambda fault: fault.id)
def test_the_smallest_trace_shows_the_fault_and_nothing_on_the_sound_engine(fault: PlantedFault) -> None:
    """What it is seen as where the engine has no assertions is in test_assertions."""
    trace = smallest()[fault.id]
    assert trace.breaks in fault.breaks
    assert shown(fault, trace).violations
    assert not shown(fault, trace, make).violations


def test_the_page_lists_them() -> None:
    path = ROOT / "docs" / "reference" / "planted-faults.md"
    assert path.read_text(encoding="utf-8") == page(), f"run: python -m fuzz.bugbench.page --write {path}"


def test_the_sound_engine_knows_nothing_of_faults() -> None:
    for path in Path(reference_engine.__path__[0]).rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert "bugbench" not in text
        imported = {node.module or "" for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)}
        assert not any(name.startswith(("fuzz", "conformance")) for name in imported), path
