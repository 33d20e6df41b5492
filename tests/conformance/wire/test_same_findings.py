"""In process or over the wire: the same operations, plans, findings and files, to the byte but for the name."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from conformance.check import check
from conformance.engines import EngineSource, load
from conformance.protocol import EngineConfig
from conformance.requirements import load as load_requirements
from fuzz.hunt import Hunter

TOUCHED: dict[str, Any] = {"engine_options": {"append_check": "touched"}}
ENGINES = [
    pytest.param("reference", TOUCHED, id="reference"),
    pytest.param(
        "smol-vllm",
        {},
        id="smol-vllm",
        marks=pytest.mark.skipif(importlib.util.find_spec("smol_vllm") is None, reason="smol-vllm is not installed"),
    ),
]
STEPS = 700


def hunt(source: EngineSource, pinned: dict[str, Any], folder: Path) -> dict[str, bytes]:
    """The trace files that a hunt leaves, by requirement and identity, without the name of the engine."""
    engine = source.factory(EngineConfig(**pinned))
    capabilities = engine.capabilities
    engine.close()
    judged = frozenset(load_requirements())
    hunter = Hunter(
        source.name, source.factory, capabilities, seed=3, directory=folder, pinned=pinned, judged=judged,
        shrink_executions_max=40,
    )  # fmt: skip
    hunter.run(STEPS)
    name = f'"engine":"{source.name}"'.encode()
    return {kept.requirement + kept.identity: kept.trace.read_bytes().replace(name, b"", 1) for kept in hunter.kept}


@pytest.mark.parametrize(("name", "pinned"), ENGINES)
def test_a_hunt_leaves_the_same_traces(name: str, pinned: dict[str, Any], tmp_path: Path) -> None:
    here = hunt(load(name), pinned, tmp_path / "here")
    there = hunt(load(f"{name}@{sys.executable}"), pinned, tmp_path / "there")
    assert here
    assert there == here


@pytest.mark.parametrize(("name", "pinned"), ENGINES)
def test_a_check_gives_the_same_verdicts(name: str, pinned: dict[str, Any]) -> None:
    wanted = ["ACC-2", "PRE-2", "PRG-5", "LIM-3"]
    base = EngineConfig(**pinned)
    here, there = (
        check(load(engine), base, pinned, requirements=wanted) for engine in (name, f"{name}@{sys.executable}")
    )
    assert [(row.requirement, row.status, row.reason) for row in there.results] == [
        (row.requirement, row.status, row.reason) for row in here.results
    ]
    assert there.engine_version == here.engine_version
