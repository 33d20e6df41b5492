"""What the swarm draws: short and crowded runs, requests that fit, and now and then the next turn of a chat."""

from __future__ import annotations

from random import Random

import pytest

from conformance.adapters.reference import make
from conformance.operations import Add, Step
from conformance.protocol import EngineConfig
from fuzz.driver import IDLE_STEPS_MAX, STEPS_PER_RUN, Driver, Run
from fuzz.swarm import OperationSource, draw_config, draw_swarm, longest

CAPABILITIES = make(EngineConfig()).capabilities


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    driver = Driver(make, CAPABILITIES, seed=41)
    return [driver.run(index) for index in range(200)]


def test_most_runs_are_short_and_some_are_long(runs: list[Run]) -> None:
    steps = sorted(run.steps for run in runs)
    assert steps[len(steps) // 2] < 40
    assert steps[-1] > 100


def test_a_run_adds_no_more_requests_than_were_drawn(runs: list[Run]) -> None:
    for run in runs:
        adds = sum(isinstance(operation, Add) for operation in run.operations)
        assert adds <= run.swarm.requests
        assert len([one for one in run.operations if isinstance(one, Step)]) <= STEPS_PER_RUN


def test_steps_are_not_wasted_on_an_idle_engine() -> None:
    """Runs that begin with steps: all but the first few of them are left out."""
    driver = Driver(make, CAPABILITIES, seed=42)
    leading = []
    for index in range(150):
        operations = driver.run(index).operations
        first = next((at for at, one in enumerate(operations) if isinstance(one, Add)), len(operations))
        leading.append(sum(isinstance(one, Step) for one in operations[:first]))
    assert max(leading) == IDLE_STEPS_MAX


def test_requests_fit_the_pool_unless_they_are_to_be_too_long() -> None:
    for seed in range(60):
        rng = Random(seed)
        config = draw_config(rng, CAPABILITIES, {})
        swarm = draw_swarm(rng, CAPABILITIES, config)
        if swarm.oversize or swarm.blocks < 1:
            continue
        source = OperationSource(rng, swarm)
        for _ in range(swarm.requests):
            add = source.draw_add()
            assert add.prompt_len + add.max_tokens <= max(longest(config, swarm.blocks, add.n), 2)
        assert source.exhausted


def test_the_longest_request_is_bounded_by_pool_and_model() -> None:
    config = EngineConfig(block_size=4, max_model_len=32)
    assert longest(config, blocks=100, n=1) == 32
    assert longest(config, blocks=5, n=1) == 21, "the last token is never computed"
    assert longest(config, blocks=5, n=2) == 9


def test_the_pool_is_at_its_brim_often_enough(runs: list[Run]) -> None:
    preempting = sum("preempted" in run.behaviours for run in runs)
    assert preempting >= len(runs) // 12
    assert sum(
        operation.continues is not None for run in runs for operation in run.operations if isinstance(operation, Add)
    )
