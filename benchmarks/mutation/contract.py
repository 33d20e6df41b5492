"""What has to kill a mutant of the reference engine: its contract, and a short seeded campaign of the fuzzer.

Exits with 1 when something is found, and with 0 when the engine holds. The engine runs without its own assertions,
so that whatever is found is found by the harness. Fails fast: a short campaign, the scenarios of ``kvconform check``
one after the other, then a longer campaign, and one in each of a few corners. CPU time is bounded, as a mutant may
loop for ever. From the root of a copy of the tree, which the mutants are written into::

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
from typing import Any

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

CPU_SECONDS_MAX = 240
STEPS_FIRST = 1_500
STEPS_MAX = int(os.environ.get("STEPS", "20000"))
STEPS_CORNER = 3_000
CORNERS: tuple[dict[str, Any], ...] = (
    # The cache is reset while blocks of a request that has ended are still deferred.
    {"pipeline_depth": 2, "block_size": 1, "enable_prefix_caching": True},
    # Later arrivals decode on what the budget has while an earlier one is amid its prefill.
    {
        "scheduling_policy": "fcfs",
        "enable_chunked_prefill": True,
        "max_num_batched_tokens": 3,
        "max_num_seqs": 6,
        "num_blocks": 64,
        "engine_options": {"max_chunk_tokens": 1},
    },
    # A request is swapped out when part of it has left the window.
    {"preemption_mode": "swap", "num_swap_blocks": 20, "sliding_window": 3},
    # The sequences of one request, all but as long as they get, return together.
    {
        "enable_chunked_prefill": False,
        "preemption_mode": "recompute",
        "num_swap_blocks": 0,
        "pipeline_depth": 1,
        "fixed_batch": False,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 6,
        "max_model_len": 6,
        "block_size": 2,
    },
)
"""What a campaign that may draw everything comes to only after some hundred thousand steps."""


def fuzz(seed: int, steps_max: int, pinned: dict[str, Any] | None = None) -> None:
    """Leave with 1 at the first violation."""
    driver = Driver(make, make(EngineConfig()).capabilities, seed=seed, pinned=pinned)
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
    for corner in CORNERS:
        fuzz(seed=3, steps_max=STEPS_CORNER, pinned=corner)
