"""The smoke test: green for a right adapter, red with the reason for each way an adapter can be wrong."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest

from conformance.adapters.reference import make
from conformance.protocol import (
    CommitResult,
    ConfigRefused,
    Engine,
    EngineConfig,
    Finished,
    RequestRefused,
    Sampled,
    SequenceKey,
    Snapshot,
    StepPlan,
    Usage,
)
from conformance.smoke import find_base, smoke

Twist = Callable[[Engine], None]


class Wrapped:
    """A reference engine some of whose calls are replaced."""

    def __init__(self, inner: Engine, **calls: Any) -> None:
        self._inner = inner
        for name, call in calls.items():
            setattr(self, name, call)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def wrapped(**calls: Callable[..., Any]) -> Callable[[EngineConfig], Engine]:
    """A factory; each call gets the engine it replaces a call of as its first argument."""

    def factory(config: EngineConfig) -> Engine:
        inner = make(config)
        bound = {name: (lambda *given, call=call: call(inner, *given)) for name, call in calls.items()}
        return Wrapped(inner, **bound)

    return factory


def declaring(**fields: Any) -> Callable[[EngineConfig], Engine]:
    def factory(config: EngineConfig) -> Engine:
        inner = make(config)
        return Wrapped(inner, capabilities=msgspec.structs.replace(inner.capabilities, **fields))

    return factory


def planned(change: Callable[[StepPlan], Any]) -> Callable[[EngineConfig], Engine]:
    def schedule(inner: Engine) -> StepPlan:
        plan = inner.schedule()
        change(plan)
        return plan

    return wrapped(schedule=schedule)


def told(change: Callable[[CommitResult], Any]) -> Callable[[EngineConfig], Engine]:
    def commit(inner: Engine, step: int, sampled: Mapping[SequenceKey, Sampled]) -> CommitResult:
        result = inner.commit(step, sampled)
        change(result)
        return result

    return wrapped(commit=commit)


def refuse(*_: object) -> None:
    raise RequestRefused("not today")


def idle_for_ever() -> Callable[[EngineConfig], Engine]:
    steps = itertools.count()
    return wrapped(
        schedule=lambda _: StepPlan(step=next(steps)), commit=lambda *_: CommitResult(), abort_request=lambda *_: None
    )


def first_sequence(name: str, value: Any) -> Callable[[StepPlan], None]:
    def change(plan: StepPlan) -> None:
        for sequence in plan.sequences:
            setattr(sequence, name, value(sequence) if callable(value) else value)

    return change


def tell(**fields: Any) -> Callable[[CommitResult], None]:
    def change(result: CommitResult) -> None:
        for report in result.finished:
            for name, value in fields.items():
                setattr(report, name, value)

    return change


def test_the_reference_engine_is_green() -> None:
    result = smoke(make, EngineConfig())
    assert result.status == "ok", result.reason
    assert result.passed == [
        "build", "capabilities", "books of a new engine", "an idle step", "one request to its end",
        "books when idle", "abort", "reset_prefix_cache", "close",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "fields",
    [
        {"num_blocks": 1, "block_size": 64, "max_num_seqs": 1},
        {"block_size": 1},
        {"enable_prefix_caching": True},
        {"enable_chunked_prefill": True, "max_num_batched_tokens": 4},
        {"pipeline_depth": 2},
        {"sliding_window": 4},
        {"num_lookahead_slots": 3},
        {"max_model_len": 2},
    ],
)
def test_it_is_green_under_any_configuration(fields: dict[str, Any]) -> None:
    result = smoke(make, EngineConfig(**fields))
    assert result.status == "ok", result.reason


WRONG: list[tuple[Callable[[EngineConfig], Engine], str]] = [
    (declaring(engine=""), "capabilities: engine and version must not be empty"),
    (declaring(features=frozenset({"abort", "magic"})), "unknown features magic; known: abort"),
    (declaring(reserved_blocks=16), "reserved_blocks = 16 in a pool of 16"),
    (declaring(null_block=0), "null_block = 0 must lie in the pool and be one of the reserved blocks"),
    (declaring(block_size_min=8, block_size_max=4), "block_size_min = 8 and block_size_max = 4"),
    (declaring(block_size_min=8), "block_size = 4 was accepted; declared are 8"),
    (declaring(deferred_free_steps=-1), "deferred_free_steps = -1 must not be negative"),
    (wrapped(usage=lambda _: Usage()), "usage is declared and every figure is None"),
    (wrapped(usage=lambda _: Usage(free_blocks=0)), "usage: a new engine has no free block"),
    (wrapped(usage=lambda _: 3), "usage() returns int, not a Usage"),
    (wrapped(snapshot=lambda _: Snapshot(free=[])), "snapshot: a new engine has no free block"),
    (wrapped(snapshot=lambda _: Snapshot(free=[0])), "snapshot: r0 runs and holds nothing; held: nobody"),
    (wrapped(schedule=lambda _: None), "an idle step: schedule() returns NoneType, not a StepPlan"),
    (planned(lambda plan: setattr(plan, "step", 7)), "the plan calls itself step 7; schedule() was called 0 times"),
    (wrapped(commit=lambda *_: None), "commit() returns NoneType, not a CommitResult"),
    (wrapped(add_request=refuse), "refuses prompt 3 + 4 tokens in 16 blocks of 4: not today"),
    (idle_for_ever(), "one request to its end: not finished after 64 steps: 3 of 7 tokens"),
    (planned(first_sequence("request_id", "r9")), "runs sequence 0 of r9; there is only 0 of r0"),
    (planned(first_sequence("first", 1)), "runs positions 1 to 3; 0 of 3 are computed"),
    (planned(first_sequence("samples", lambda _: False)), "samples = False at position 2 of 3"),
    (planned(first_sequence("block_tables", lambda _: [])), "0 block tables for 1 groups"),
    (planned(first_sequence("block_tables", lambda _: [[]])), "a table of 0 blocks of 4 for 3 tokens"),
    (planned(first_sequence("block_tables", lambda _: [[16, 17]])), "names block 16 of a pool of 16"),
    (planned(first_sequence("token_ids", lambda _: [0])), "input tokens [0], expected"),
    (told(lambda result: result.finished.clear()), "reported as finished 0 times"),
    (told(lambda result: result.finished.extend(result.finished)), "reported as finished 2 times"),
    (told(tell(outputs=[[]])), "expected outputs [[7, 8, 9, 10]]"),
    (told(lambda result: result.finished.append(Finished(request_id="r0", outputs=[]))), "reported as finished with 1"),
    (wrapped(abort_request=lambda *_: None), "abort: runs"),
    (wrapped(reset_prefix_cache=lambda _: None), "reset_prefix_cache() returns NoneType, not a bool"),
    (wrapped(close=lambda _: 1 / 0), "close: ZeroDivisionError: division by zero"),
]  # fmt: skip


@pytest.mark.parametrize(("factory", "reason"), WRONG, ids=[reason for _, reason in WRONG])
def test_a_wrong_adapter_is_red_and_told_why(factory: Callable[[EngineConfig], Engine], reason: str) -> None:
    result = smoke(factory, EngineConfig())
    assert result.status == "red"
    assert reason in result.reason


def test_a_configuration_that_is_refused_says_nothing_of_the_adapter() -> None:
    result = smoke(make, EngineConfig(num_speculative_tokens=2))
    assert result.status == "refused"
    assert "num_speculative_tokens = 2" in result.reason


def test_an_undeclared_feature_must_not_be_taken() -> None:
    result = smoke(declaring(features=frozenset({"usage"})), EngineConfig(enable_prefix_caching=True))
    assert "was accepted but needs prefix_caching, which is not declared" in result.reason


def only_blocks_of(size: int) -> Callable[[EngineConfig], Engine]:
    def factory(config: EngineConfig) -> Engine:
        if config.block_size != size:
            raise ConfigRefused(f"block_size = {config.block_size}: must be {size}")
        return make(config)

    return factory


def test_another_block_size_is_tried_when_the_usual_one_is_refused() -> None:
    base, result = find_base(only_blocks_of(64), EngineConfig())
    assert result.status == "ok"
    assert (base.block_size, base.max_model_len) == (64, 512)


def test_a_pinned_block_size_is_left_as_it_is() -> None:
    base, result = find_base(only_blocks_of(64), EngineConfig(block_size=8), {"block_size"})
    assert (base.block_size, result.status) == (8, "refused")
    assert result.reason == "block_size = 8: must be 64"


def test_the_smoke_test_has_an_ample_pool_however_small_the_pinned_one_is() -> None:
    """Else an engine at fault in a small pool would pass for an adapter at fault."""

    def only_in_ample_pools(config: EngineConfig) -> Engine:
        assert config.num_blocks >= 16
        return make(config)

    base, result = find_base(only_in_ample_pools, EngineConfig(num_blocks=1), {"num_blocks"})
    assert (base.num_blocks, result.status) == (1, "ok")
