"""The same operations give the same digest, whatever the process: no clock, no hash order, no global state."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import pytest

from conformance.adapters.reference import make
from conformance.execute import execute
from conformance.operations import Abort, Add, Drain, Operation, ResetPrefixCache, Step
from conformance.protocol import EngineConfig

CONFIG = EngineConfig(num_blocks=9, block_size=4, enable_prefix_caching=True, enable_chunked_prefill=True)
OPERATIONS: list[Operation] = [
    *[Add(7, 12, family=number % 2, shared_len=6, salt=number % 3) for number in range(5)],
    Step(3),
    Abort(1),
    Add(9, 4, n=2, stop_after=2),
    Step(5),
    ResetPrefixCache(),
    Drain(),
]
SCRIPT = """
import msgspec, sys
from conformance.adapters.reference import make
from conformance.execute import execute
from conformance.operations import Operation
from conformance.protocol import EngineConfig
config = msgspec.json.decode(sys.argv[1], type=EngineConfig)
operations = msgspec.json.decode(sys.argv[2], type=list[Operation])
print(execute(make, config, operations, record=True).digest)
"""


def digest() -> str:
    return execute(make, CONFIG, OPERATIONS, record=True).digest


def test_the_same_operations_give_the_same_digest() -> None:
    assert digest() == digest()


def test_other_operations_give_another_digest() -> None:
    other = execute(make, CONFIG, [Add(7, 12), *OPERATIONS], record=True).digest
    assert other != digest()


@pytest.mark.parametrize("seed", ["0", "1"])
def test_the_order_of_hashes_does_not_reach_a_trace(seed: str) -> None:

    arguments = [msgspec.json.encode(CONFIG).decode(), msgspec.json.encode(OPERATIONS).decode()]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.strip() == digest()
