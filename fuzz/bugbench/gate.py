"""The gate: fixed seeds of the bench, few enough for every change, and proof that failures are reported at all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from conformance.adapters.reference import make
from conformance.protocol import EngineConfig
from conformance.requirements import load as load_requirements
from fuzz.bugbench.always_failing import canary
from fuzz.bugbench.plan import Plan
from fuzz.bugbench.registry import PlantedFault
from fuzz.bugbench.results import Results
from fuzz.bugbench.smallest import shown, smallest
from fuzz.driver import Driver, campaign

GATE_SEEDS: Final = 2
FIRST_SEED: Final = 12
"""Of the twenty seeds measured, two that see every fault early (within 26,500 steps)."""
GATE_BUDGET: Final = 50_000
CONTROL_STEPS: Final = 20_000


class Check(msgspec.Struct, kw_only=True):
    """One thing that the gate looks at, and what it found."""

    name: str
    passed: bool
    found: str


def plan(records: dict[str, PlantedFault]) -> Plan:
    """The cells of the gate: the swarm alone, with two fixed seeds."""
    return Plan(
        faults=tuple(records),
        fuzzers=("swarm",),
        seeds=GATE_SEEDS,
        first_seed=FIRST_SEED,
        shrink_seeds=0,
        budgets={"swarm": GATE_BUDGET},
    )


def checks(results: Results, records: dict[str, PlantedFault]) -> Iterator[Check]:
    """The canary, the sound engine, the smallest traces, and the cells of `plan`."""
    yield _canary()
    yield _control()
    yield from _smallest(records)
    yield _cells(results)


def _canary() -> Check:
    """An engine that always fails is reported in its first run, or nothing else here means anything."""
    driver = Driver(canary, make(EngineConfig()).capabilities, seed=1)
    runs = [driver.run(index) for index in range(10)]
    silent = [run.index for run in runs if not run.violations]
    return Check(
        name="the canary fails in every run", passed=not silent, found=f"reported in {10 - len(silent)} of 10 runs"
    )


def _control() -> Check:
    """The sound engine, under the same draws, breaks nothing: what the bench sees is due to what was planted."""
    driver = Driver(make, make(EngineConfig()).capabilities, seed=1)
    state = campaign(driver, steps_max=CONTROL_STEPS, judged=frozenset(load_requirements()))
    found = "; ".join(str(item.violation) for item in state.discoveries.values())
    return Check(
        name="the sound engine holds", passed=not state.discoveries, found=found or f"silent for {state.steps:,} steps"
    )


def _smallest(records: dict[str, PlantedFault]) -> Iterator[Check]:
    """The smallest trace of each fault shows it, and shows nothing on the sound engine."""
    known = smallest()
    quiet = [fault for fault in records if fault not in known or not shown(records[fault], known[fault]).violations]
    yield Check(
        name="the smallest trace of every fault shows it",
        passed=not quiet,
        found=f"{len(records) - len(quiet)} of {len(records)}" + (f"; not {', '.join(quiet)}" if quiet else ""),
    )
    noisy = [fault for fault in records if fault in known and shown(records[fault], known[fault], make).violations]
    yield Check(
        name="no smallest trace shows anything on the sound engine",
        passed=not noisy,
        found=", ".join(noisy) or "silent on all",
    )


def _cells(results: Results) -> Check:
    missed = sorted(cell.fault for cell in results.cells.values() if not cell.detected)
    return Check(
        name=f"the swarm sees every fault within {GATE_BUDGET:,} steps",
        passed=not missed,
        found=f"{len(results.cells) - len(missed)} of {len(results.cells)} hunts"
        + (f"; not {', '.join(missed)}" if missed else ""),
    )


def results_path(directory: Path) -> Path:
    """Where the gate keeps its cells."""
    return directory / "gate.jsonl"
