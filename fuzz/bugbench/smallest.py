"""The smallest trace known for each planted fault: what shrunk traces are measured against, and a quick gate.

``smallest.json`` beside this file holds them. A bench that found smaller ones puts them there::

    python -m fuzz.bugbench.smallest --update BENCH.jsonl
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Final

import msgspec

from conformance.execute import Execution, execute
from conformance.operations import Operation
from conformance.protocol import EngineConfig, EngineFactory
from conformance.requirements import load as load_requirements
from fuzz.bugbench.assertions import without_assertions
from fuzz.bugbench.fuzzers import watchdog_for
from fuzz.bugbench.registry import PlantedFault, load
from fuzz.bugbench.results import read

FILE: Final = Path(__file__).with_name("smallest.json")


class Smallest(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A trace that shows the fault, and the requirement it breaks first on an engine without assertions."""

    breaks: str
    operations: list[Operation]
    config: EngineConfig


@functools.cache
def smallest() -> dict[str, Smallest]:
    """Fault -> its smallest known trace."""
    return msgspec.json.decode(FILE.read_bytes(), type=dict[str, Smallest]) if FILE.exists() else {}


def shown(fault: PlantedFault, trace: Smallest, factory: EngineFactory | None = None) -> Execution:
    """Run the trace on the faulty engine, or on another one, with everything judged."""
    watchdog = watchdog_for(fault)
    try:
        return execute(
            factory or fault.factory(),
            trace.config,
            trace.operations,
            judge=frozenset(load_requirements()),
            watchdog=watchdog,
        )
    finally:
        if watchdog is not None:
            watchdog.stop()


def update(results: Path) -> list[str]:
    """Take over the traces of a bench that are smaller than those known. Returns the faults whose trace is new.

    Raises `fuzz.bugbench.results.ResultsError` and OSError.
    """
    records, known = load(), {fault: trace for fault, trace in smallest().items() if fault in load()}
    changed = []
    _, cells, _ = read(results)
    for cell in sorted(cells, key=lambda cell: cell.key):
        if cell.shrunk is None or cell.shrunk.stable < 3 or cell.fault not in records:
            continue
        trace = Smallest(breaks=cell.seen_as, operations=cell.shrunk.operations, config=cell.shrunk.config)
        before = known.get(cell.fault)
        if before is not None and _size(before) <= _size(trace):
            continue
        seen = shown(records[cell.fault], trace).violations  # where everything is judged, another may come first
        if seen:
            trace.breaks = seen[0].requirement
            known[cell.fault] = trace
            changed.append(cell.fault)
    rows = [
        f"{msgspec.json.encode(fault).decode()}: {msgspec.json.encode(known[fault]).decode()}"
        for fault in sorted(known)
    ]
    FILE.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")
    smallest.cache_clear()
    return sorted(set(changed))


def _size(trace: Smallest) -> tuple[int, int]:
    return len(trace.operations), len(msgspec.json.encode((trace.operations, trace.config)))


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] != "--update":
        sys.exit("usage: python -m fuzz.bugbench.smallest --update BENCH.jsonl")
    without_assertions()
    names = update(Path(sys.argv[2]))
    sys.stdout.write(f"{len(names)} new: {', '.join(names) or 'none'}\n")
