"""Deterministic workloads that can break each requirement, over the configurations that break engines.

A *scenario* is a family of workloads with the requirements it judges; its *cases* are the variants, under stable
names. ``scenario/case`` names one. The session judges a run online; PRE-6, PRE-7, CCH-1, CCH-2, DET-1 and DET-2
need several runs, or a workload of a certain kind, and are judged here.
"""

from __future__ import annotations

from conformance.scenarios import (
    admission,
    books,
    caching,
    capacity,
    device,
    encoder,
    lifecycle,
    limits,
    metamorphic,
    pressure,
)
from conformance.scenarios.base import Case, Scenario, Setting
from conformance.scenarios.bench import ALWAYS_JUDGED, Bench, Run
from conformance.scenarios.judging import CaseOutcome, rerun_case, run_case

SCENARIOS: tuple[Scenario, ...] = (
    *capacity.SCENARIOS,
    *pressure.SCENARIOS,
    *limits.SCENARIOS,
    *admission.SCENARIOS,
    *lifecycle.SCENARIOS,
    *books.SCENARIOS,
    *caching.SCENARIOS,
    *encoder.SCENARIOS,
    *device.SCENARIOS,
    *metamorphic.SCENARIOS,
)


def cases_of(requirement: str) -> list[tuple[Scenario, Case]]:
    """Every case that judges ``requirement``, in order."""
    return [
        (scenario, case) for scenario in SCENARIOS for case in scenario.cases if requirement in scenario.judged_by(case)
    ]


def case_names() -> dict[str, tuple[Scenario, Case]]:
    """Every case by its full name, ``scenario/case``."""
    return {f"{scenario.name}/{case.name}": (scenario, case) for scenario in SCENARIOS for case in scenario.cases}


__all__ = [
    "ALWAYS_JUDGED",
    "SCENARIOS",
    "Bench",
    "Case",
    "CaseOutcome",
    "Run",
    "Scenario",
    "Setting",
    "case_names",
    "cases_of",
    "rerun_case",
    "run_case",
]
