"""The engine's end of the wire: answers line by line, and a wire that nothing else in the process can reach."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conformance.adapters.reference import make
from conformance.engines import load
from conformance.execute import execute
from conformance.operations import Add, Operation, ResetPrefixCache, Step
from conformance.protocol import AdapterError, Capabilities, ConfigRefused, Engine, EngineConfig, StepPlan, Usage
from conformance.wire.server import Server

MAKE = {"call": "make", "id": 1, "config": {}}
OPERATIONS: list[Operation] = [Add(prompt_len=4, max_tokens=4), Step(2), ResetPrefixCache()]


def changed(**calls: Any) -> Callable[[EngineConfig], Engine]:
    """The reference engine with some of its methods replaced."""

    def factory(config: EngineConfig) -> Engine:
        engine = make(config)
        for name, function in calls.items():
            setattr(engine, name, function)
        return engine

    return factory


def talk(factory: Callable[[EngineConfig], Engine], *calls: dict[str, Any], strict: bool = False) -> list[Any]:
    server = Server(factory, "mine", "3", strict=strict)
    return [json.loads(server.answer(json.dumps(call).encode())) for call in calls]


def raising(error: BaseException) -> Callable[..., Any]:
    def function(*_: object) -> Any:
        raise error

    return function


def test_hello_is_answered_before_an_engine_is_built_whatever_else_it_says() -> None:
    answers = talk(raising(RuntimeError("built")), {"call": "hello", "id": 0, "protocol": 99, "new": 1})
    assert answers == [{"answer": "hello", "id": 0, "protocol": 1, "engine": "mine", "version": "3"}]


def test_an_answer_carries_the_figures_after_the_call() -> None:
    request = {"request_id": "r0", "prompt": [5, 6, 7], "max_tokens": 2}
    made, added, planned = talk(
        make, MAKE, {"call": "add_request", "id": 2, "request": request}, {"call": "schedule", "id": 3}
    )
    assert made["usage"]["free_blocks"] == 16
    assert added["usage"]["waiting"] == 1
    assert planned["usage"] == {
        "free_blocks": 15,
        "running": 1,
        "waiting": 0,
        "swapped": 0,
        "preemptions": 0,
        "queried_tokens": 0,
        "hit_tokens": 0,
    }
    assert planned["plan"]["sequences"][0]["block_tables"] == [[0]]


def test_figures_that_cannot_be_had_are_left_out_and_fail_when_they_are_asked_for() -> None:
    broken = changed(usage=raising(ZeroDivisionError("no pool")))
    made, asked = talk(broken, MAKE, {"call": "usage", "id": 2})
    assert "usage" not in made
    assert (asked["answer"], asked["type"], asked["message"]) == ("raised", "ZeroDivisionError", "no pool")


def test_capabilities_are_told_again_when_they_change() -> None:
    declared = make(EngineConfig()).capabilities

    class Changing:
        step = 0

        def __init__(self, config: EngineConfig) -> None:
            self._engine = make(config)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._engine, name)

        @property
        def capabilities(self) -> Capabilities:
            fields = {name: getattr(declared, name) for name in Capabilities.__struct_fields__}
            return Capabilities(**{**fields, "null_block": 0 if self.step else None})

        def schedule(self) -> StepPlan:
            self.step += 1
            return self._engine.schedule()

    plans = talk(Changing, MAKE, {"call": "schedule", "id": 2}, {"call": "schedule", "id": 3})[1:]
    assert [plan.get("capabilities", {}).get("null_block") for plan in plans] == [0, None]


def test_what_the_engine_raises_and_refuses_is_told_apart() -> None:
    bad, huge = (
        {**MAKE, "config": {"num_speculative_tokens": 2}},
        {"request_id": "r0", "prompt": [1] * 99, "max_tokens": 1},
    )
    refused, _, refused_request = talk(make, bad, MAKE, {"call": "add_request", "id": 3, "request": huge})
    assert (refused["answer"], refused_request["answer"]) == ("refused", "refused")
    nearest = ConfigRefused("num_blocks = 16: at most 8", EngineConfig(num_blocks=8))
    (refused,) = talk(raising(nearest), MAKE)
    assert (refused["message"], refused["instead"]["num_blocks"]) == ("num_blocks = 16: at most 8", 8)
    _, raised = talk(changed(schedule=raising(KeyError("x"))), MAKE, {"call": "schedule", "id": 2})
    assert (raised["answer"], raised["type"]) == ("raised", "KeyError")
    assert raised["where"].startswith("wire/test_server.py:")
    _, unable = talk(changed(schedule=raising(AdapterError("unknown release"))), MAKE, {"call": "schedule", "id": 2})
    assert unable == {"answer": "unable", "id": 2, "message": "unknown release"}
    _, wrong = talk(changed(schedule=lambda: "a plan"), MAKE, {"call": "schedule", "id": 2})
    assert wrong == {"answer": "malformed", "id": 2, "problem": "str, not StepPlan"}
    _, wrong = talk(changed(schedule=lambda: StepPlan(step=object())), MAKE, {"call": "schedule", "id": 2})  # type: ignore[arg-type]
    assert (wrong["answer"], wrong["problem"]) == ("malformed", "Encoding objects of type object is unsupported")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"GET / HTTP/1.1", "JSON is malformed"),
        (b'{"call":"frobnicate","id":7}', "Invalid value 'frobnicate' - at `$.call`"),
        (b'{"call":"commit","id":7,"step":0}', "Object missing required field `sampled`"),
        (b'{"call":"schedule","id":7,"pace":2}', "Object contains unknown field `pace`"),
        (b'{"call":"schedule","id":7}', "schedule before make: there is no engine"),
    ],
)
def test_a_line_that_is_no_call_is_answered_and_the_next_one_too(line: bytes, said: str) -> None:
    server = Server(make, "mine", "3")
    answer = json.loads(server.answer(line))
    assert answer["answer"] == "unable"
    assert answer["id"] == (7 if b"7" in line else -1)
    assert said in answer["message"]
    assert json.loads(server.answer(json.dumps(MAKE).encode()))["answer"] == "make"


def test_strictly_ambiguous_lines_are_refused_and_wrong_answers_not_sent() -> None:
    server = Server(changed(usage=lambda: Usage(free_blocks="many")), "mine", "3", strict=True)  # type: ignore[arg-type]
    twice = json.loads(server.answer(b'{"call":"hello","id":1,"id":2}'))
    assert twice["answer"] == "unable"
    assert "the key 'id' is there twice" in twice["message"]
    server.answer(json.dumps(MAKE).encode())
    wrong = json.loads(server.answer(b'{"call":"usage","id":2}'))
    assert (wrong["answer"], wrong["id"]) == ("malformed", 2)
    assert "Expected `int | null`, got `str` - at `$.usage.free_blocks`" in wrong["problem"]


NOISY = """
import os, subprocess, sys
print("imported")
from conformance.adapters.reference import make as clean

def make(config):
    print("made", flush=True)
    os.write(1, b"straight to the descriptor\\n")
    subprocess.run(["echo", "from a child"], check=True)
    assert sys.stdin.read() == ""
    assert os.read(0, 10) == b""
    engine = clean(config)
    schedule = engine.schedule
    def noisy():
        print("scheduling", flush=True)
        return schedule()
    engine.schedule = noisy
    return engine
"""


def test_an_engine_that_prints_and_reads_does_not_reach_the_wire(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "noisy.py").write_text(NOISY, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    execution = execute(load(f"noisy:make@{sys.executable}").factory, EngineConfig(), OPERATIONS)
    assert not execution.violations, execution.violations[0]
    assert execution.steps


def test_the_process_ends_when_its_input_does() -> None:
    calls = '{"call":"hello","id":0,"protocol":1}\n{"call":"make","id":1,"config":{}}\n'
    done = subprocess.run(
        [sys.executable, "-m", "conformance.serve", "reference"],
        input=calls, capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["answer"] for line in done.stdout.splitlines()] == ["hello", "make"]
    assert done.stderr == ""
