"""An engine may raise anything, answer anything, or refuse to be built: each is a finding, none breaks the harness."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import pytest

from conformance.adapters.reference import make
from conformance.execute import execute
from conformance.operations import Add, Operation, ResetPrefixCache, Step
from conformance.protocol import CommitResult, Engine, EngineConfig, SequencePlan, Snapshot, StepPlan, Usage
from conformance.version import as_built
from conformance.watchdog import Watchdog
from fuzz.driver import Driver

OPERATIONS: list[Operation] = [Add(prompt_len=4, max_tokens=4), Step(2), ResetPrefixCache()]


def replaced(call: str, function: Callable[..., Any]) -> Callable[[EngineConfig], Engine]:
    def factory(config: EngineConfig) -> Engine:
        engine = make(config)
        setattr(engine, call, function)
        return engine

    return factory


def raising(error: BaseException) -> Callable[..., Any]:
    def function(*_: object) -> Any:
        raise error

    return function


def answering(value: object) -> Callable[..., Any]:
    return lambda *_: value


def plan(**fields: Any) -> StepPlan:
    return StepPlan(step=0, **fields)


def run_of(**fields: Any) -> SequencePlan:
    return SequencePlan(**{"request_id": "r0", "first": 0, "num_tokens": 4, "block_tables": [[0]], **fields})


CALLS = ("schedule", "commit", "usage", "snapshot", "reset_prefix_cache", "add_request", "close")
ANSWERS: dict[str, tuple[str, object]] = {
    "schedule-none": ("schedule", None),
    "schedule-string": ("schedule", "a plan"),
    "commit-none": ("commit", None),
    "usage-none": ("usage", None),
    "snapshot-none": ("snapshot", None),
    "reset-none": ("reset_prefix_cache", None),
    "usage-string": ("usage", Usage(free_blocks="many")),  # type: ignore[arg-type]
    "commit-string": ("commit", CommitResult(finished="all")),  # type: ignore[arg-type]
    "snapshot-string": ("snapshot", Snapshot(free="all", held={"r0": None})),  # type: ignore[arg-type,dict-item]
    "plan-of-none": ("schedule", plan(sequences=None)),
    "plan-of-moves": ("schedule", plan(moves=["copy 1 to 2"])),
    "row-without-table": ("schedule", plan(sequences=[run_of(block_tables=None)])),
    "row-of-strings": ("schedule", plan(sequences=[run_of(block_tables=[["a"]])])),
    "row-without-start": ("schedule", plan(sequences=[run_of(first=None)])),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "error", [RuntimeError("no"), SystemExit(0), GeneratorExit(), RecursionError("deep")], ids=repr
)
def test_whatever_a_call_raises_is_a_finding(call: str, error: BaseException) -> None:
    config = EngineConfig(enable_prefix_caching=True)
    execution = execute(replaced(call, raising(error)), config, OPERATIONS)
    assert len(execution.violations) == 1
    assert type(error).__name__ in execution.violations[0].message


@pytest.mark.parametrize(("call", "answer"), ANSWERS.values(), ids=ANSWERS)
def test_whatever_a_call_answers_is_a_finding(call: str, answer: object) -> None:
    config = EngineConfig(enable_prefix_caching=True)
    execution = execute(replaced(call, answering(answer)), config, OPERATIONS)
    assert [violation.requirement for violation in execution.violations] == ["PRG-8"]
    assert execution.violations[0].message == f"{call} answers what its interface does not allow"


def test_a_tuple_for_a_list_is_read_and_compiled_it_is_a_finding() -> None:
    rows = plan(sequences=[run_of(block_tables=[(0,)])])
    found = execute(replaced("schedule", answering(rows)), EngineConfig(), OPERATIONS).violations
    wrong = [violation.got for violation in found if violation.requirement == "PRG-8"]
    compiled = as_built().endswith("compiled")
    assert wrong == (["tuple at .sequences[0].block_tables[0] in step 0"] if compiled else [])


def test_a_call_that_cannot_be_made_is_told_without_a_place_in_the_harness() -> None:
    found = execute(replaced("schedule", "abc".index), EngineConfig(), OPERATIONS).violations
    assert [violation.requirement for violation in found] == ["PRG-8"]
    assert "conformance/" not in found[0].message


def test_a_hang_in_a_native_method_is_a_finding() -> None:
    watchdog = Watchdog(call_seconds_max=0.2)
    sleeping = replaced("schedule", functools.partial(time.sleep, 0.8))
    found = execute(sleeping, EngineConfig(), OPERATIONS, watchdog=watchdog).violations
    watchdog.stop()
    assert [violation.requirement for violation in found] == ["PRG-8"]
    assert "EngineHung" in found[0].message


@pytest.mark.parametrize("error", [RuntimeError("no"), SystemExit(0), KeyError("x")], ids=repr)
def test_a_constructor_that_raises_is_a_finding_of_execute_and_of_the_fuzzer(error: BaseException) -> None:
    execution = execute(raising(error), EngineConfig(), OPERATIONS)
    assert [violation.requirement for violation in execution.violations] == ["PRG-8"]
    run = Driver(raising(error), make(EngineConfig()).capabilities, seed=1).run(0)
    assert [violation.requirement for violation in run.violations] == ["PRG-8"]
    assert "the constructor raised" in run.violations[0].message


def test_a_deep_pipeline_is_not_blamed_for_filling_up() -> None:
    config = EngineConfig(pipeline_depth=24)
    assert not execute(make, config, [Add(prompt_len=4, max_tokens=8), Step(40)]).violations
