"""The vLLM V0 adapter on whatever release is installed: what it reports is what the engine did."""

from __future__ import annotations

import importlib.util
import os
import random
from typing import Any

import pytest

from conformance.operations import Abort, AbortEnded, Add, Operation, Step
from conformance.protocol import (
    AdapterError,
    BlockMove,
    ConfigRefused,
    EngineConfig,
    OptionValue,
    Request,
    RequestRefused,
    Sampled,
    StepPlan,
)
from conformance.session import Session
from conformance.trace import Recorder
from conformance.violations import Violation

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

from conformance.adapters._vllm_v0_release import Release, installed_release
from conformance.adapters.vllm_v0 import VllmV0Engine, make

pytestmark = pytest.mark.filterwarnings("default")  # importing these releases warns

ADAPTER_FAULTS = frozenset({"ACC-1", "ACC-2", "ACC-4", "ACC-5", "ACC-10", "LIM-1", "LIM-2", "LIM-3", "PRG-5", "PRG-8"})
"""What an adapter that misreports would be seen by, where the engine is right."""


@pytest.fixture(scope="module")
def release() -> Release:
    try:
        return installed_release()
    except AdapterError as error:
        pytest.skip(str(error))


@pytest.fixture(params=["v1", "v2"])
def manager(request: pytest.FixtureRequest, release: Release) -> str:
    name: str = request.param
    if name == "v1" and not release.two_block_managers:
        pytest.skip(f"vLLM {release.version} has no block manager v1")
    return name


def config_of(manager: str, options: dict[str, OptionValue] | None = None, **fields: Any) -> EngineConfig:
    given = {"num_blocks": 12, "block_size": 4, "max_num_batched_tokens": 64, "max_model_len": 32} | fields
    engine_options: dict[str, OptionValue] = {"block_manager": manager}
    return EngineConfig(engine_options=engine_options | (options or {}), **given)


def request(number: int, prompt_len: int, max_tokens: int, n: int = 1) -> Request:
    prompt = [2 + (number * 13 + position * 5) % 40 for position in range(prompt_len)]
    return Request(request_id=f"r{number}", prompt=prompt, max_tokens=max_tokens, n=n, arrival=number)


def step(engine: VllmV0Engine, number: int, token: int = 7) -> StepPlan:
    """Schedule, and commit a token for every sequence that samples."""
    plan = engine.schedule()
    widths = {request_id: group.sampling_params.n for request_id, group in engine._groups.items()}
    sampled = {}
    for sequence in plan.sequences:
        for index in range(widths[sequence.request_id]) if sequence.first == 0 else [sequence.seq]:
            sampled[sequence.request_id, index] = Sampled([token + index])
    engine.commit(number, sampled)
    return plan


def run(config: EngineConfig, *operations: Operation) -> list[Violation]:
    return Session(make(config), config).run(operations)


@pytest.mark.parametrize("block_size", [64, 2048])
@pytest.mark.parametrize(("num_blocks", "steps", "preemptions"), [(4, 59, 29), (5, 30, 0)])
def test_the_seed(manager: str, block_size: int, num_blocks: int, steps: int, preemptions: int) -> None:
    config = config_of(
        manager,
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=block_size,
        max_num_batched_tokens=2048,
        max_num_seqs=4,
    )
    session = Session(make(config), config)
    found = {violation.requirement for violation in session.run([Add(10, 30)] * 4)}
    assert (session.steps, session.preemptions) == (steps, preemptions)
    assert found == ({"PRE-1", "PRE-2"} if preemptions else set())


def test_the_engine_s_own_arithmetic_is_shown(manager: str) -> None:
    engine = make(config_of(manager, num_blocks=2, max_num_seqs=2))
    engine.add_request(request(0, 1, 5))
    engine.add_request(request(1, 1, 5))
    step(engine, 0)
    (victim,) = step(engine, 1).preempted
    assert (victim.request_id, victim.mode, victim.asked_by) == ("r1", "recompute", "r0")
    assert (victim.blocks_counted, victim.blocks_free) == (1, 0)
    assert engine.usage().preemptions == 1


@pytest.mark.usefixtures("release")
def test_lookahead_is_part_of_the_arithmetic() -> None:
    engine = make(config_of("v2", num_blocks=3, num_lookahead_slots=8))
    assert "fork" not in engine.capabilities.features
    engine.add_request(request(0, 4, 5))
    step(engine, 0)
    (victim,) = engine.schedule().preempted
    assert (victim.blocks_counted, victim.blocks_free) == (3, 2)


def test_a_forked_request_shares_its_prompt_and_copies_before_it_writes(release: Release, manager: str) -> None:
    if not release.forks_in_engine:
        pytest.skip(f"vLLM {release.version} samples in parallel above the engine")
    engine = make(config_of(manager))
    engine.add_request(request(0, 6, 3, n=3))
    (prompt,) = step(engine, 0).sequences
    assert (prompt.seq, prompt.first, prompt.num_tokens) == (0, 0, 6)
    assert engine.usage().running == 3
    plan = step(engine, 1)
    assert [sequence.seq for sequence in plan.sequences] == [0, 1, 2]
    assert [sequence.token_ids for sequence in plan.sequences] == [[7], [8], [9]]
    shared, last = zip(*(sequence.block_tables[0] for sequence in plan.sequences), strict=True)
    assert len(set(shared)) == 1
    assert len(set(last)) == 3
    assert [move.kind for move in plan.moves] == ["copy", "copy"]
    assert {move.dst for move in plan.moves} < set(last)


def test_parallel_sampling_above_the_engine_is_refused(release: Release) -> None:
    if release.forks_in_engine:
        pytest.skip(f"vLLM {release.version} forks in the engine")
    engine = make(config_of("v2"))
    assert "fork" not in engine.capabilities.features
    with pytest.raises(RequestRefused, match="n = 2"):
        engine.add_request(request(0, 6, 3, n=2))


def test_swapped_blocks_are_named_in_both_pools(manager: str) -> None:
    engine = make(config_of(manager, num_blocks=4, preemption_mode="swap", num_swap_blocks=8))
    for number in range(2):
        engine.add_request(request(number, 6, 8))
    plans = [step(engine, number) for number in range(20)]
    (out,) = [plan for plan in plans if plan.preempted][:1]
    (victim,) = out.preempted
    assert victim.mode == "swap"
    assert [move.kind for move in out.moves] == ["swap_out", "swap_out"]
    assert all(0 <= move.src < 4 and 0 <= move.dst < 8 for move in out.moves)
    back = next(plan for plan in plans if any(move.kind == "swap_in" for move in plan.moves))
    swap_in = [move for move in back.moves if move.kind == "swap_in"]
    assert {move.src for move in swap_in} == {move.dst for move in out.moves}
    (returned,) = [plan for plan in back.sequences if plan.request_id == victim.request_id]
    assert {move.dst for move in swap_in} <= set(returned.block_tables[0])
    assert isinstance(swap_in[0], BlockMove)


def test_a_prefix_hit_starts_where_the_model_runner_would(manager: str) -> None:
    engine = make(config_of(manager, enable_prefix_caching=True))
    prompt = list(range(2, 12))
    for number in range(2):
        engine.add_request(Request(request_id=f"r{number}", prompt=prompt, max_tokens=1, arrival=number))
        (plan,) = step(engine, number).sequences
    assert (plan.first, plan.num_tokens, plan.token_ids) == (8, 2, [10, 11])


def test_what_can_never_fit_is_rejected_while_scheduling(manager: str) -> None:
    engine = make(config_of(manager, num_blocks=4))
    engine.add_request(request(0, 17, 2))
    engine.add_request(request(1, 4, 1))
    plan = step(engine, 0)
    (rejection,) = plan.rejected
    assert (rejection.request_id, rejection.reason) == ("r0", "FINISHED_IGNORED: length")
    assert [sequence.request_id for sequence in plan.sequences] == ["r1"]


def test_abort_reaches_every_state(manager: str) -> None:
    engine = make(config_of(manager))
    for number in range(2):
        engine.add_request(request(number, 5, 8))
    engine.abort_request("r1")
    step(engine, 0)
    engine.abort_request("r0")
    engine.abort_request("r0")
    engine.abort_request("never seen")
    assert step(engine, 1).sequences == []
    assert sorted(engine.snapshot().free) == list(range(12))


def test_an_abort_between_the_two_halves_of_a_step(manager: str) -> None:
    engine = make(config_of(manager))
    engine.add_request(request(0, 5, 8))
    engine.schedule()
    engine.abort_request("r0")
    assert engine.commit(0, {}).finished == []
    assert engine.usage().free_blocks == 12


def test_refusals_are_in_the_words_of_vllm(manager: str) -> None:
    with pytest.raises(ConfigRefused, match=r"max_num_batched_tokens \(16\) is smaller than max_model_len \(32\)"):
        make(config_of(manager, max_num_batched_tokens=16))
    with pytest.raises(ConfigRefused, match=r"(?i)prefix caching is not supported with sliding window"):
        make(config_of(manager, enable_prefix_caching=True, sliding_window=8))


def test_what_this_release_does_not_have_is_refused(release: Release, manager: str) -> None:
    with pytest.raises(ConfigRefused, match="engine_options colour: not known; taken are block_manager"):
        make(config_of(manager, {"colour": "green"}))
    with pytest.raises(ConfigRefused, match="block_manager = 'v3'"):
        make(config_of("v3"))
    with pytest.raises(ConfigRefused, match="pipeline"):
        make(config_of(manager, pipeline_depth=2))
    if manager == "v1":
        with pytest.raises(ConfigRefused, match="sliding_window = 8 with enable_chunked_prefill"):
            make(config_of(manager, sliding_window=8, enable_chunked_prefill=True))
    if not release.has_priority:
        with pytest.raises(ConfigRefused, match="priority"):
            make(config_of(manager, scheduling_policy="priority"))


def test_the_watermark_keeps_blocks_from_admission(manager: str) -> None:
    engine = make(config_of(manager, num_blocks=10, watermark=0.3))
    engine.add_request(request(0, 28, 2))
    engine.add_request(request(1, 4, 2))
    assert [sequence.request_id for sequence in step(engine, 0).sequences] == ["r0"]


@pytest.mark.usefixtures("release")
def test_the_null_block_is_declared_once_it_is_taken() -> None:
    engine = make(config_of("v2", sliding_window=8))
    assert (engine.capabilities.null_block, engine.capabilities.reserved_blocks) == (None, 0)
    engine.add_request(request(0, 5, 8))
    step(engine, 0)
    step(engine, 1)
    null = engine.capabilities.null_block
    assert engine.capabilities.reserved_blocks == 1
    assert engine.snapshot().reserved == [null]
    early = make(config_of("v2", {"null_block_at_start": True}, sliding_window=8))
    assert early.capabilities.null_block == early.snapshot().reserved[0]


def test_the_environment_is_left_as_it_was(manager: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V1", "1")
    make(config_of(manager))
    assert os.environ["VLLM_USE_V1"] == "1"
    monkeypatch.delenv("VLLM_USE_V1")
    make(config_of(manager))
    assert "VLLM_USE_V1" not in os.environ


def test_the_two_halves_of_a_step_come_in_turn(manager: str) -> None:
    engine = make(config_of(manager))
    with pytest.raises(AdapterError, match="must be scheduled first"):
        engine.commit(0, {})
    engine.schedule()
    with pytest.raises(AdapterError, match="synchronous"):
        engine.schedule()


def random_operations(rng: random.Random, features: frozenset[str]) -> list[Operation]:
    operations: list[Operation] = []
    for _ in range(rng.randint(5, 30)):
        draw = rng.random()
        if draw < 0.45:
            prompt_len = rng.randint(1, 24)
            shared_len = rng.randint(0, prompt_len) if "prefix" in features else 0
            n = rng.randint(1, 3) if "fork" in features else 1
            operations.append(Add(prompt_len, rng.randint(1, 12), rng.randint(0, 2), shared_len, n=n))
        elif draw < 0.9:
            operations.append(Step(rng.randint(1, 6)))
        else:
            operations.append(Abort(rng.randint(0, 5)) if draw < 0.97 else AbortEnded(0))
    return operations


@pytest.mark.parametrize("features", [(), ("prefix",), ("chunked",), ("fork",), ("lookahead",), ("window",)])
def test_random_workloads_under_an_ample_pool(release: Release, manager: str, features: tuple[str, ...]) -> None:
    if "fork" in features and not release.forks_in_engine:
        pytest.skip(f"vLLM {release.version} samples in parallel above the engine")
    if "lookahead" in features and manager == "v1":
        pytest.skip("block manager v1 has no lookahead slots")
    config = config_of(
        manager,
        {"null_block_at_start": True},
        num_blocks=90,
        max_num_seqs=5,
        enable_prefix_caching="prefix" in features,
        enable_chunked_prefill="chunked" in features,
        max_num_batched_tokens=16 if "chunked" in features else 64,
        num_lookahead_slots=3 if "lookahead" in features else 0,
        sliding_window=8 if "window" in features else None,
    )
    for seed in range(25):
        found = run(config, *random_operations(random.Random(seed), frozenset(features)))
        assert [violation for violation in found if violation.requirement in ADAPTER_FAULTS] == [], seed


def test_the_books_add_up_under_pressure(manager: str) -> None:
    config = config_of(manager, num_blocks=9, max_num_seqs=4)
    preemptions = 0
    for seed in range(25):
        session = Session(make(config), config)
        found = session.run(random_operations(random.Random(seed), frozenset()))
        assert [violation for violation in found if violation.requirement in ADAPTER_FAULTS] == [], seed
        preemptions += session.preemptions
    assert preemptions > 25


def test_the_same_operations_give_the_same_trace(manager: str) -> None:
    config = config_of(manager, num_blocks=9, enable_prefix_caching=True)
    operations = random_operations(random.Random(3), frozenset({"prefix"}))
    digests = set()
    for _ in range(3):
        recorder = Recorder()
        Session(make(config), config, recorder=recorder).run(operations)
        digests.add(recorder.digest())
    assert len(digests) == 1
