"""How a faulty engine is put together: all of the sound one, but for what is replaced."""

from __future__ import annotations

import pytest

from conformance.adapters.reference import make
from conformance.engines import EngineNotFound, load
from conformance.execute import execute
from conformance.protocol import Engine, EngineConfig
from conformance.requirements import load as load_requirements
from fuzz.bugbench.parts import Pool, Seat, build
from fuzz.bugbench.probe import Counters, Probe
from fuzz.bugbench.registry import planted
from fuzz.driver import Driver

CAPABILITIES = make(EngineConfig()).capabilities


def nothing_planted(config: EngineConfig) -> Engine:
    return build({}, config, Counters(), "reference")


def test_with_nothing_planted_it_is_the_sound_engine() -> None:
    driver = Driver(make, CAPABILITIES, seed=17)
    for index in range(40):
        run = driver.run(index)
        sound, moved = (
            execute(factory, run.swarm.config, run.operations, record=True) for factory in (make, nothing_planted)
        )
        assert moved.digest == sound.digest
        assert not moved.violations


def test_a_replaced_part_runs_on_the_state_of_the_engine() -> None:
    class Lending(Pool):
        __slots__ = ()

        def allocate(self, count: int) -> list[int]:
            self.probe.trigger()
            return super().allocate(count)

    counters = Counters()
    seat = build({Pool: Lending}, EngineConfig(num_blocks=7, enable_prefix_caching=True), counters, "lending")
    assert seat.capabilities.engine == "lending"
    assert seat.engine.blocks.pool.available == 7
    assert seat.engine.scheduler.blocks is seat.engine.blocks
    assert seat.engine.blocks.pool.allocate(2) == [0, 1]
    assert (counters.reached, counters.triggered) == (1, 1)
    assert counters.triggered_at == 0


def test_steps_are_calls_of_schedule() -> None:
    counters = Counters()
    seat = build({}, EngineConfig(), counters, "counted")
    for _ in range(3):
        seat.schedule()
    assert counters.steps == 3


def test_a_probe_notes_the_first_time_and_counts_the_others() -> None:
    counters = Counters()
    probe = Probe(counters)
    counters.steps = 4
    probe.reach()
    counters.steps = 9
    assert probe.decide(wrong=True)
    assert not probe.decide(wrong=False)
    assert (counters.reached, counters.reached_at) == (3, 4)
    assert (counters.triggered, counters.triggered_at) == (1, 9)


def test_a_fault_is_an_engine_that_can_be_named() -> None:
    engine = load("fuzz.bugbench:end_keeps_the_last_block").factory(EngineConfig())
    assert isinstance(engine, Seat)
    assert engine.capabilities.engine == "end_keeps_the_last_block"
    with pytest.raises(EngineNotFound, match="no factory 'no_such_fault'"):
        load("fuzz.bugbench:no_such_fault").factory(EngineConfig())


def test_a_class_that_replaces_nothing_is_no_fault() -> None:
    with pytest.raises(AssertionError, match="replaces no part"):

        @planted("leak", "ACC-1", source="")
        class Harmless:
            """Does nothing."""


def test_the_canary_fails_in_every_run_whatever_the_configuration() -> None:
    driver = Driver(load("fuzz.bugbench:canary").factory, CAPABILITIES, seed=3)
    for index in range(60):
        run = driver.run(index, judge=frozenset(load_requirements()))
        assert [violation.requirement for violation in run.violations] == ["PRG-8"]
