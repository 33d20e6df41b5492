"""What has to kill a mutant of the reference engine: its contract, and a short seeded campaign of the fuzzer.

Exits with 1 when something is found, and with 0 when the engine holds. The engine runs without its own assertions,
so that whatever is found is found by the harness. Fails fast: a short campaign, the scenarios of ``kvconform check``
one after the other, then a longer campaign. CPU time is bounded, as a mutant may loop for ever. From the root of a
copy of the tree, which the mutants are written into::

    cosmic-ray init benchmarks/mutation/cosmic-ray.toml SESSION.sqlite
    cr-filter-operators SESSION.sqlite benchmarks/mutation/cosmic-ray.toml
    python benchmarks/mutation/score.py --skip SESSION.sqlite
    cosmic-ray exec benchmarks/mutation/cosmic-ray.toml SESSION.sqlite
    python benchmarks/mutation/score.py SESSION.sqlite
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

sys.dont_write_bytecode = True  # two mutants of one size within one second would share a file of it
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from conformance.adapters.reference import make  # noqa: E402 - found in this very tree
from conformance.check import check  # noqa: E402 - as above
from conformance.engines import load as load_engine  # noqa: E402 - as above
from conformance.protocol import EngineConfig  # noqa: E402 - as above
from conformance.requirements import load  # noqa: E402 - as above
from conformance.scenarios import CaseOutcome  # noqa: E402 - as above
from fuzz.bugbench.assertions import without_assertions  # noqa: E402 - as above
from fuzz.driver import Driver  # noqa: E402 - as above

CPU_SECONDS_MAX = 120
STEPS_FIRST = 1_500
STEPS_MAX = int(os.environ.get("STEPS", "20000"))


def fuzz(seed: int, steps_max: int) -> None:
    """Leave with 1 at the first violation."""
    driver = Driver(make, make(EngineConfig()).capabilities, seed=seed)
    judged, steps, index = frozenset(load()), 0, 0
    while steps < steps_max:
        run = driver.run(index, judge=judged)
        if run.violations:
            sys.exit(f"fuzz: {run.violations[0]}")
        index += 1
        steps += run.steps + 1


def scenarios() -> None:
    """Leave with 1 at the first case that fails, or when no case can be run."""

    def stop_at_failure(outcome: CaseOutcome, *_: int) -> None:
        for result in [*outcome.judged.values(), *outcome.elsewhere]:
            if result.status in {"fail", "error"}:
                sys.exit(f"check: {outcome.case} {result.requirement}: {result.reason}")

    report = check(load_engine("reference"), on_case=stop_at_failure)
    if report.smoke.status != "ok":
        sys.exit(f"smoke test: {report.smoke.reason}")


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS_MAX, CPU_SECONDS_MAX))
    without_assertions()
    fuzz(seed=1, steps_max=STEPS_FIRST)
    scenarios()
    fuzz(seed=2, steps_max=STEPS_MAX)
