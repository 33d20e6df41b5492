"""No fault is found by an assertion inside the reference engine alone: without them the same faults are seen."""

from __future__ import annotations

import json
import subprocess
import sys

from fuzz.bugbench.registry import load
from fuzz.bugbench.smallest import shown, smallest

WITHOUT = """
import json
import reference_engine.block_pool
from fuzz.bugbench.assertions import without_assertions
from fuzz.bugbench.registry import load
from fuzz.bugbench.smallest import shown, smallest
changed = without_assertions()
pool = reference_engine.block_pool.BlockPool(2)
pool.release([1])  # nobody holds it: an assertion says so where there are assertions
faults = load()
seen = {name: [v.requirement for v in shown(faults[name], trace).violations] for name, trace in smallest().items()}
print(json.dumps({"changed": changed, "again": without_assertions(), "seen": seen}))
"""


def test_detection_does_not_rest_on_them() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=True)
    told = json.loads(done.stdout)
    assert told["changed"] >= 15
    assert told["again"] == 0, "they are all gone the first time"
    faults = load()
    for name, trace in smallest().items():
        assert told["seen"][name], f"{name} is found by an assertion of the engine alone"
        assert told["seen"][name] == [trace.breaks]
        with_them = shown(faults[name], trace).violations
        assert with_them, f"{name} is found only where the engine has no assertions"
