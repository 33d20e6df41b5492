"""One seed decides everything: the same runs on every machine, in any order, under any hash seed."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable

import msgspec
import pytest

from conformance.adapters.reference import make
from conformance.expectations import FUZZ, Expectation, Expectations
from conformance.operations import Add, Step
from conformance.protocol import AdapterError, ConfigRefused, Engine, EngineConfig
from conformance.requirements import load
from conformance.session import Session
from fuzz.driver import Driver, Run, campaign

JUDGED = frozenset(load())
CAPABILITIES = make(EngineConfig()).capabilities


def fingerprint(run: Run) -> str:
    return hashlib.sha256(msgspec.json.encode(run)).hexdigest()


def test_a_run_does_not_depend_on_the_runs_before_it() -> None:
    fresh = Driver(make, CAPABILITIES, seed=5).run(7)
    used = Driver(make, CAPABILITIES, seed=5)
    for index in range(7):
        used.run(index)
    assert fingerprint(used.run(7)) == fingerprint(fresh)


def test_another_seed_makes_other_runs() -> None:
    assert fingerprint(Driver(make, CAPABILITIES, seed=5).run(0)) != fingerprint(
        Driver(make, CAPABILITIES, seed=6).run(0)
    )


PROGRAM = """
import hashlib, msgspec
from conformance.adapters.reference import make
from conformance.operations import Add, Step
from conformance.protocol import EngineConfig
from conformance.execute import execute
from fuzz.driver import Driver
driver = Driver(make, make(EngineConfig()).capabilities, seed=3)
digest = hashlib.sha256()
for index in range(6):
    run = driver.run(index)
    again = execute(make, run.swarm.config, run.operations, record=True)
    digest.update(msgspec.json.encode(run) + again.digest.encode() + msgspec.json.encode(again.lines))
print(digest.hexdigest())
"""


def test_same_seed_same_trace_ten_times_under_two_hash_seeds() -> None:
    digests = set()
    for hash_seed in ("0", "4242"):
        for _ in range(5):
            done = subprocess.run(
                [sys.executable, "-c", PROGRAM],
                env={**os.environ, "PYTHONHASHSEED": hash_seed},
                capture_output=True,
                text=True,
                check=True,
            )
            digests.add(done.stdout)
    assert len(digests) == 1


def test_pinned_fields_keep_their_values() -> None:
    driver = Driver(make, CAPABILITIES, seed=1, pinned={"block_size": 3, "num_blocks": 9})
    for index in range(20):
        config = driver.run(index).swarm.config
        assert (config.block_size, config.num_blocks) == (3, 9)


def test_an_engine_that_refuses_every_configuration_is_said_to_do_so() -> None:
    def refuse(config: EngineConfig) -> Engine:
        raise ConfigRefused(f"num_blocks = {config.num_blocks}: never enough")

    with pytest.raises(AdapterError, match=r"refused 200 drawn configurations.*never enough"):
        Driver(refuse, CAPABILITIES, seed=1).run(0)


def faulty(check: str) -> Callable[[EngineConfig], Engine]:
    def factory(config: EngineConfig) -> Engine:
        options = {**config.engine_options, "append_check": check}
        return make(msgspec.structs.replace(config, engine_options=options))

    return factory


@pytest.mark.parametrize("check", ["touched", "per_sequence", "strict"])
def test_the_fault_of_the_seed_is_found(check: str) -> None:
    found = campaign(Driver(faulty(check), CAPABILITIES, seed=1), steps_max=3000, judged=JUDGED)
    requirements = {discovery.violation.requirement for discovery in found.discoveries.values()}
    assert {"PRE-1", "PRE-2"} <= requirements


def test_a_loud_fault_does_not_hide_the_others() -> None:
    found = campaign(Driver(faulty("touched"), CAPABILITIES, seed=1), steps_max=6000, judged=JUDGED)
    loud = [item for item in found.discoveries.values() if item.violation.requirement == "PRE-1"]
    assert loud and loud[0].seen >= 3
    assert any(item.violation.requirement != "PRE-1" for item in found.discoveries.values())


def test_a_block_that_another_slides_off_in_the_same_step_comes_free_with_its_last_holder() -> None:
    config = EngineConfig(
        num_blocks=3,
        block_size=5,
        max_num_seqs=2,
        max_model_len=11,
        max_num_batched_tokens=11,
        enable_prefix_caching=True,
        scheduling_policy="priority",
        sliding_window=5,
    )
    session = Session(make(config), config)
    assert session.run([Add(5, 2, shared_len=5, priority=1), Step(1), Add(7, 4, shared_len=5)]) == []
    assert session.preemptions == 1


@pytest.mark.slow
def test_the_reference_engine_holds_over_the_whole_swarm() -> None:
    found = campaign(Driver(make, CAPABILITIES, seed=11), steps_max=150_000, judged=JUDGED)
    assert found.steps >= 150_000
    assert not found.discoveries, next(iter(found.discoveries.values())).violation
    for behaviour in (
        "preempted",
        "preempted mid-prefill",
        "preempted again",
        "preempted with several sequences",
        "prefix hit",
        "prefix hit after preemption",
        "prefill in chunks",
        "swapped in",
        "recomputed",
        "refused",
        "prefix cache reset",
        "aborted while running",
        "aborted while waiting",
        "aborted while preempted",
        "aborted while swapped",
    ):
        assert found.behaviours.get(behaviour), f"never reached: {behaviour}"


def touched(config: EngineConfig) -> Engine:
    """The fault of issue 8007: one free block is asked for each running sequence."""
    return make(msgspec.structs.replace(config, engine_options={"append_check": "touched"}))


def test_a_failure_that_is_known_by_what_is_said_of_it_is_not_reported() -> None:
    entry = Expectation(
        requirement="PRE-1", cases=(FUZZ,), message="* is preempted in step * although *", reason="asks", link="8007"
    )
    judged = frozenset({"PRE-1", "PRE-7"})
    for entries, found in (((), True), ((entry,), False), ((msgspec.structs.replace(entry, message="none"),), True)):
        known = Expectations(source="here", entries=entries)
        driver = Driver(touched, CAPABILITIES, seed=1, pinned={"engine_options": {}}, expectations=known)
        state = campaign(driver, steps_max=1500, judged=judged)
        assert bool(state.discoveries) is found
