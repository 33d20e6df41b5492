"""What the swarm draws: short and crowded runs, requests that fit, and now and then the next turn of a chat."""

from __future__ import annotations

from random import Random

import pytest

from conformance.adapters.reference import make
from conformance.operations import Add, Step
from conformance.protocol import Capabilities, EngineConfig
from fuzz.driver import IDLE_STEPS_MAX, STEPS_PER_RUN, Driver, Run
from fuzz.source import OperationSource
from fuzz.swarm import draw_config, draw_swarm, longest

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


def test_no_drawn_configuration_is_refused_for_an_option_that_its_own_draws_make_idle(runs: list[Run]) -> None:
    assert sum(run.refusals for run in runs) < len(runs) // 8


def test_a_prompt_is_extended_as_soon_as_it_is_computed(runs: list[Run]) -> None:
    """A whole block, a step, the same prompt and more, and steps for both; the first one is as patient as any."""
    chases = 0
    for run in runs:
        for leader, step, follower in zip(run.operations, run.operations[1:], run.operations[2:], strict=False):
            if not run.swarm.extending or not isinstance(leader, Add) or not isinstance(follower, Add):
                continue
            if step != Step() or leader.shared_len != leader.prompt_len or follower.continues is not None:
                continue
            whole = follower.shared_len == follower.prompt_len > leader.prompt_len
            chases += whole and (follower.family, follower.salt) == (leader.family, leader.salt)
    assert chases > 20


def test_an_engine_without_the_features_is_drawn_for_as_ever() -> None:
    """What is drawn for prefix caching, priorities and recompute does not move the draws of others."""
    plain = Capabilities(engine="plain", version="1", features=frozenset({"snapshot", "stop_token", "swap", "usage"}))
    rng = Random(7)
    config = draw_config(rng, plain, {})
    swarm = draw_swarm(rng, plain, config)
    source = OperationSource(rng, swarm)
    drawn = [source.draw() for _ in range(6)]
    assert (config.num_blocks, config.block_size, config.max_num_seqs, config.max_model_len) == (3, 23, 4, 23)
    adds = [Add(prompt_len=prompt, max_tokens=outputs) for prompt, outputs in ((10, 13), (8, 12), (2, 17))]
    assert drawn == [*adds, Step(), Step(), Step()]


def test_the_pool_is_at_its_brim_often_enough(runs: list[Run]) -> None:
    preempting = sum("preempted" in run.behaviours for run in runs)
    assert preempting >= len(runs) // 7
    assert sum(
        operation.continues is not None for run in runs for operation in run.operations if isinstance(operation, Add)
    )
