"""A call that does not come back, or eats memory, becomes a finding and not a dead harness."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from conformance.adapters.reference import make
from conformance.execute import execute
from conformance.operations import Add
from conformance.protocol import Engine, EngineConfig, StepPlan
from conformance.watchdog import EXIT_STUCK, Watchdog

CONFIG = EngineConfig()
ONE = [Add(prompt_len=4, max_tokens=4)]


class Wrapped:
    """The reference engine with one call replaced."""

    def __init__(self, config: EngineConfig) -> None:
        self._engine = make(config)

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)


class Endless(Wrapped):
    def schedule(self) -> StepPlan:
        while True:
            pass


class Greedy(Wrapped):
    def schedule(self) -> StepPlan:
        hoard = []
        while True:
            hoard.append(bytearray(1 << 22))


def factory(kind: type[Wrapped]) -> object:
    def build(config: EngineConfig) -> Engine:
        return kind(config)  # type: ignore[return-value]

    return build


@pytest.fixture
def watchdog() -> Iterator[Watchdog]:
    made = Watchdog(call_seconds_max=0.3, growth_bytes_max=1 << 28)
    yield made
    made.stop()


@pytest.mark.parametrize(("kind", "what"), [(Endless, "EngineHung"), (Greedy, "MemoryExhausted")])
def test_it_is_reported_with_the_trace_up_to_there(kind: type[Wrapped], what: str, watchdog: Watchdog) -> None:
    if kind is Greedy:
        watchdog.call_seconds_max = 60.0
    execution = execute(factory(kind), CONFIG, ONE, watchdog=watchdog, record=True)  # type: ignore[arg-type]
    assert [violation.requirement for violation in execution.violations] == ["PRG-8"]
    assert what in execution.violations[0].message
    assert [line.operation for line in execution.lines] == ONE


def test_calls_within_the_bound_are_left_alone(watchdog: Watchdog) -> None:
    execution = execute(make, CONFIG, ONE * 20, watchdog=watchdog)
    assert not execution.violations


STUCK = """
import ctypes, sys
from conformance.adapters.reference import make
from conformance.execute import execute
from conformance.operations import Add
from conformance.protocol import EngineConfig
from conformance.watchdog import Watchdog

def stuck(config):
    engine = make(config)
    engine.schedule = lambda: ctypes.CDLL(None).sleep(600)
    return engine

words = lambda message: print("last words:", message, flush=True)
watchdog = Watchdog(call_seconds_max=0.2, grace_seconds=0.3, last_words=words)
execute(stuck, EngineConfig(), [Add(prompt_len=4, max_tokens=4)], watchdog=watchdog)
print("unreachable")
"""


def test_an_engine_stuck_in_native_code_ends_the_process_after_its_last_words() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STUCK], env=dict(os.environ), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == EXIT_STUCK
    assert "last words: schedule did not return" in done.stdout
    assert "unreachable" not in done.stdout
