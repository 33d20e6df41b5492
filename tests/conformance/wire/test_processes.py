"""One process serves many engines, one after another; it is ended, and nothing of it stays behind."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.calls import EngineFailed
from conformance.engines import ProcessSource, load
from conformance.execute import execute
from conformance.operations import Add
from conformance.protocol import ConfigRefused, Engine, EngineConfig, Request, RequestRefused
from conformance.wire.fleet import Fleet

CONFIG = EngineConfig()
REFUSED = EngineConfig(num_speculative_tokens=1)


@pytest.fixture(scope="module")
def source() -> ProcessSource:
    made = load(f"reference@{sys.executable}")
    assert isinstance(made, ProcessSource)
    return made


@pytest.fixture
def fleet(source: ProcessSource) -> Fleet:
    made = Fleet(source.words)
    made.start()
    return made


def pid_of(engine: Engine) -> int:
    return engine._peer.process._process.pid  # type: ignore[attr-defined,no-any-return]


def test_many_engines_are_served_by_one_process(fleet: Fleet) -> None:
    for blocks in range(4, 12):
        assert not execute(fleet.make, EngineConfig(num_blocks=blocks), [Add(prompt_len=3, max_tokens=4)]).violations
        assert execute(fleet.make, REFUSED, []).refused
    assert fleet.started == 1
    fleet.close()


def test_engines_in_use_at_once_have_a_process_each(fleet: Fleet) -> None:
    one, other = fleet.make(CONFIG), fleet.make(CONFIG)
    one.add_request(Request(request_id="r0", prompt=[5], max_tokens=2))
    assert (one.usage().waiting, other.usage().waiting) == (1, 0)
    one.close()
    again = fleet.make(CONFIG)
    assert again.usage().waiting == 0
    assert fleet.started == 2
    again.close()
    other.close()
    fleet.close()


def test_an_engine_that_nobody_closes_gives_its_process_back(fleet: Fleet) -> None:
    engine = fleet.make(CONFIG)
    engine.add_request(Request(request_id="r0", prompt=[5], max_tokens=2))
    pid = pid_of(engine)
    del engine
    gc.collect()
    again = fleet.make(CONFIG)
    assert pid_of(again) == pid
    assert again.usage().waiting == 0
    again.close()
    fleet.close()


def test_a_refusal_carries_the_nearest_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "choosy.py").write_text(CHOOSY, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigRefused, match="num_blocks = 16: at most 8") as refused:
        load(f"choosy:make@{sys.executable}").factory(CONFIG)
    assert refused.value.instead == EngineConfig(num_blocks=8)


def test_a_refusal_is_an_answer_and_the_engine_goes_on(fleet: Fleet) -> None:
    with pytest.raises(ConfigRefused, match="num_speculative_tokens = 1: the reference engine does not have this"):
        fleet.make(REFUSED)
    engine = fleet.make(CONFIG)
    with pytest.raises(RequestRefused, match="leaves no room for an output token"):
        engine.add_request(Request(request_id="r0", prompt=[5] * 99, max_tokens=1))
    assert engine.usage().waiting == 0
    engine.close()
    fleet.close()


def test_figures_come_with_the_answers_and_are_not_asked_for(fleet: Fleet) -> None:
    engine = fleet.make(CONFIG)
    before = engine._peer.process.exchanges  # type: ignore[attr-defined]
    for _ in range(5):
        assert engine.usage().free_blocks == 16
    assert engine._peer.process.exchanges == before  # type: ignore[attr-defined]
    engine.close()
    fleet.close()


def test_a_closed_fleet_has_ended_its_processes(fleet: Fleet) -> None:
    idle, engine = fleet.make(CONFIG), fleet.make(CONFIG)
    pids = [pid_of(idle), pid_of(engine)]
    idle.close()
    fleet.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    with pytest.raises(EngineFailed):
        engine.schedule()


CHOOSY = """
from conformance.protocol import ConfigRefused, EngineConfig

def make(config):
    raise ConfigRefused(f"num_blocks = {config.num_blocks}: at most 8", EngineConfig(num_blocks=8))
"""
ABANDONED = """
import sys
from conformance.engines import load
from conformance.protocol import EngineConfig
engine = load(f"reference@{sys.executable}").factory(EngineConfig())
print(engine._peer.process._process.pid)
"""


def test_a_harness_that_ends_takes_its_processes_along() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ABANDONED], capture_output=True, text=True, timeout=120, check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.stderr == ""
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout), 0)


def test_another_directory_is_another_process(
    source: ProcessSource, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here = source.factory(CONFIG)
    monkeypatch.chdir(tmp_path)
    there = load(source.name).factory(CONFIG)
    assert pid_of(here) != pid_of(there)
    here.close()
    there.close()
