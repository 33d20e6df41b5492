"""The page of the documentation that lists the planted faults, made from their records.

python -m fuzz.bugbench.page --write docs/reference/planted-faults.md
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

from conformance.operations import describe
from fuzz.bugbench.registry import PlantedFault, load
from fuzz.bugbench.smallest import smallest

_HEAD = """\
# Planted faults

Faults that the bug bench plants in the reference engine, one at a time, to measure the fuzzer: each is modelled on a
report about a real engine, and sits at the decision that it corrupts.
Every one of them is an engine that can be named: `kvconform fuzz fuzz.bugbench:FAULT`.
How they are used, and what is measured: [How the fuzzer is measured](../explanation/how-the-fuzzer-is-measured.md).
"Breaks" lists the requirements that the fault may be seen to break, the most telling one first; "smallest trace" is
the shortest sequence of operations known to show it.
A star marks faults that are deep on purpose, with the reason.
This page is made from `fuzz/bugbench/planted/`:
`python -m fuzz.bugbench.page --write docs/reference/planted-faults.md`.
"""

_TABLE = "| fault | what is wrong | modelled on | needs | breaks | smallest trace |\n|---|---|---|---|---|---|\n"


def page() -> str:
    """The page: a table for each family."""
    faults = load()
    parts = [_HEAD, f"\n{len(faults)} faults.\n"]
    for family, members in itertools.groupby(faults.values(), key=lambda fault: fault.family):
        parts += [f"\n## {family.capitalize()}\n\n", _TABLE, *map(_row, members)]
    return "".join(parts)


def _row(fault: PlantedFault) -> str:
    known = smallest().get(fault.id)
    trace = "; ".join(describe(operation) for operation in known.operations) if known is not None else ""
    star = f" * {fault.deep[0].upper()}{fault.deep[1:]}." if fault.deep else ""
    owner, _, number = fault.source.removeprefix("https://github.com/").partition("/")
    repository, _, thread = number.partition("/")
    name = f"{repository} {thread.rpartition('/')[2]}" if thread else f"{owner}/{repository}"
    cells = (
        f"`{fault.id}`",
        fault.description + star,
        f"[{name}]({fault.source})",
        ", ".join(feature.replace("_", " ") for feature in fault.needs),
        ", ".join(fault.breaks),
        trace,
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] != "--write":
        sys.exit("usage: python -m fuzz.bugbench.page --write FILE")
    Path(sys.argv[2]).write_text(page(), encoding="utf-8")
