"""Run a bench: fault by fuzzer by seed, in several processes, each cell written down as soon as it is done."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path

from fuzz.bugbench.assertions import without_assertions
from fuzz.bugbench.fuzzers import FUZZERS, Sighting, watchdog_for
from fuzz.bugbench.plan import Plan
from fuzz.bugbench.probe import Counters
from fuzz.bugbench.registry import PlantedFault, load
from fuzz.bugbench.results import Cell, Results, ShrunkTrace
from fuzz.hunt import HUNG_FAILURES_MAX
from fuzz.shrink import Shrinker


def run(plan: Plan, path: Path, *, jobs: int = 1, on_cell: Callable[[Cell, int, int], None] | None = None) -> Results:
    """Do the cells of ``plan`` that ``path`` does not hold yet; ``on_cell`` hears of each: it, how many, of how many.

    Raises `ResultsError` for a file that cannot be gone on with. An interrupt loses the cells under way and no other.
    """
    results = Results(path, plan.header())
    cells = list(plan.cells())
    todo = [key for key in cells if key not in results.cells]
    done = len(cells) - len(todo)
    for cell in _work(plan, todo, jobs):
        results.add(cell)
        done += 1
        if on_cell is not None:
            on_cell(cell, done, len(cells))
    return results


def _work(plan: Plan, todo: list[tuple[str, str, int]], jobs: int) -> Iterator[Cell]:
    """The cells as they are done. Each process is a fresh one: it takes the assertions out of its own engine."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, _prepare, (plan.assertions,)) as pool:
        waiting = iter(todo)
        under_way: set[Future[Cell]] = set()
        try:
            while True:
                for key in waiting:
                    under_way.add(pool.submit(measure, *key, plan.budgets[key[1]], shrink=key[2] <= plan.shrink_seeds))
                    if len(under_way) >= 2 * jobs:
                        break
                if not under_way:
                    return
                finished, under_way = wait(under_way, return_when=FIRST_COMPLETED)
                for future in finished:
                    yield future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _prepare(assertions: bool) -> None:  # noqa: FBT001 - an initializer takes its arguments by position
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    if not assertions:
        without_assertions()


def _leave_with_parent() -> None:
    """A bench that is ended from outside cannot end its processes, and they would wait for cells for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def measure(fault_id: str, fuzzer: str, seed: int, budget: int, *, shrink: bool = False) -> Cell:
    """One cell, in this process.

    Depends on its arguments alone, but for CPU time and, where a fault hangs, how often it was reached till stopped.
    """
    fault, counters = load()[fault_id], Counters()
    watchdog = watchdog_for(fault)
    try:
        seen = FUZZERS[fuzzer](fault.factory(counters), counters, seed, budget, watchdog)
    finally:
        if watchdog is not None:
            watchdog.stop()
    return Cell(
        fault=fault_id,
        fuzzer=fuzzer,
        seed=seed,
        steps=counters.steps if seen is None else seen.steps,
        seen_as="" if seen is None else seen.violation.requirement,
        message="" if seen is None else seen.violation.message,
        operations=0 if seen is None else len(seen.operations),
        reached_at=counters.reached_at,
        triggered_at=counters.triggered_at,
        reached=counters.reached,
        triggered=counters.triggered,
        shrunk=_shrunk(fault, seen) if shrink and seen is not None and fuzzer == "swarm" else None,
    )


def _shrunk(fault: PlantedFault, seen: Sighting) -> ShrunkTrace:
    watchdog = watchdog_for(fault)
    begun = time.process_time()
    shrinker = Shrinker(fault.factory(), failures_max=HUNG_FAILURES_MAX if fault.hangs else None, watchdog=watchdog)
    shrunk = shrinker.shrink(seen.config, seen.operations, seen.violation)
    if watchdog is not None:
        watchdog.stop()
    return ShrunkTrace(
        operations=shrunk.operations,
        config=shrunk.config,
        before=shrunk.before,
        executions=shrunk.executions,
        stable=shrunk.stable,
        cpu_seconds=round(time.process_time() - begun, 3),
    )
