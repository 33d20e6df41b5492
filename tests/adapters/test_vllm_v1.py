"""The vLLM V1 adapter on whatever release is installed: what it reports is what the engine did."""

from __future__ import annotations

import importlib.util
import random
from typing import Any

import pytest

from conformance.operations import Abort, AbortEnded, Add, Drain, Operation, ResetPrefixCache, Step
from conformance.protocol import (
    AdapterError,
    ConfigRefused,
    EncoderItem,
    EngineConfig,
    KVCacheGroup,
    OptionValue,
    Request,
    RequestRefused,
    Sampled,
    StepPlan,
)
from conformance.session import Session
from conformance.violations import Violation

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

from conformance.adapters._vllm_v1_release import Release, installed_release
from conformance.adapters.vllm_v1 import VllmV1Engine, make

pytestmark = pytest.mark.filterwarnings("default")  # importing these releases warns


@pytest.fixture(scope="module", autouse=True)
def release() -> Release:
    try:
        found = installed_release()
    except AdapterError as error:
        pytest.skip(str(error))
    if found.is_early:
        pytest.skip("what of vLLM 0.8 is driven is in a module of its own")
    return found


def config_of(options: dict[str, OptionValue] | None = None, **fields: Any) -> EngineConfig:
    given = {"num_blocks": 13, "block_size": 4, "max_num_batched_tokens": 64, "max_model_len": 32} | fields
    return EngineConfig(engine_options=options or {}, **given)


def built(config: EngineConfig) -> VllmV1Engine:
    """An engine, or a skip where the release lacks an option."""
    try:
        return make(config)
    except ConfigRefused as refusal:
        if "not known" in str(refusal):
            pytest.skip(str(refusal))
        raise


def request(number: int, prompt_len: int, max_tokens: int, **fields: Any) -> Request:
    given: dict[str, Any] = {
        "request_id": f"r{number}",
        "prompt": [2 + (number * 13 + position * 5) % 40 for position in range(prompt_len)],
        "max_tokens": max_tokens,
        "arrival": number,
    }
    return Request(**(given | fields))


def step(engine: VllmV1Engine, number: int, token: int = 7) -> StepPlan:
    """Schedule, and commit a token for every sequence that samples."""
    plan = engine.schedule()
    assert plan.step == number
    engine.commit(number, {(one.request_id, 0): Sampled([token]) for one in plan.sequences if one.samples})
    return plan


def violations_of(config: EngineConfig, operations: list[Operation]) -> list[Violation]:
    return Session(built(config), config).run(operations)


WORKLOAD: list[Operation] = [
    *[Add(prompt_len=9, max_tokens=12, family=1, shared_len=8, priority=number % 2) for number in range(5)],
    Step(4),
    Abort(1),
    AbortEnded(0),
    Add(prompt_len=20, max_tokens=5, family=1, shared_len=12, salt=1),
    Add(prompt_len=20, max_tokens=5, family=1, shared_len=12, adapter=1),
    Step(3),
    Abort(0),
    Drain(),
    Add(prompt_len=8, max_tokens=4, family=1, shared_len=8, stop_after=2),
    ResetPrefixCache(),
    Step(2),
]
"""Shares, is preempted, aborts in several states, stops early."""

PLAIN: dict[str, dict[str, Any]] = {
    "plain": {},
    "cached": {"enable_prefix_caching": True},
    "chunked": {"enable_chunked_prefill": True, "max_num_batched_tokens": 6},
    "cached-chunked": {"enable_prefix_caching": True, "enable_chunked_prefill": True, "max_num_batched_tokens": 6},
    "one-token-blocks": {"block_size": 1, "num_blocks": 40, "enable_prefix_caching": True},
    "sequence-blocks": {"block_size": 32, "num_blocks": 4},
    "window": {"sliding_window": 5},
    "cached-window": {"sliding_window": 5, "enable_prefix_caching": True},
}
PIPELINES: dict[str, tuple[int, dict[str, OptionValue]]] = {
    "sync": (1, {}),
    "two-stages": (2, {"async_scheduling": False}),
    "three-stages": (3, {"async_scheduling": False}),
    "async": (2, {"async_scheduling": True}),
}


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("fields", PLAIN)
def test_a_mixed_workload_keeps_the_contract(release: Release, fields: str, pipeline: str, runner: str) -> None:
    if runner == "v2" and not release.has_model_runner_v2:
        pytest.skip(f"vLLM {release.version} has one model runner")
    depth, options = PIPELINES[pipeline]
    chosen: dict[str, OptionValue] = {"model_runner": runner} if release.has_model_runner_v2 else {}
    assert not violations_of(config_of(options | chosen, pipeline_depth=depth, **PLAIN[fields]), WORKLOAD)


DRAFTS: dict[str, tuple[int, dict[str, OptionValue]]] = {
    "ngram": (1, {}),
    "eagle": (1, {"speculative_method": "eagle"}),
    "async-ngram": (2, {"async_scheduling": True}),
    "async-eagle": (2, {"async_scheduling": True, "speculative_method": "eagle"}),
}


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("drafts", DRAFTS)
def test_drafts_are_accepted_and_rejected(release: Release, drafts: str, width: int) -> None:
    depth, options = DRAFTS[drafts]
    if depth > 1 and not release.has_model_runner_v2:
        pytest.skip(f"vLLM {release.version} has no asynchronous drafts of this kind")
    config = config_of(options, num_speculative_tokens=width, pipeline_depth=depth, enable_prefix_caching=True)
    try:
        session = Session(built(config), config)
    except ConfigRefused as refusal:
        if depth == 1:
            raise
        pytest.skip(str(refusal))  # some releases want these on a device
    assert not session.run(WORKLOAD)
    assert session.ledger.behaviours["draft accepted"]
    assert session.preemptions


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    "groups",
    [
        (KVCacheGroup("full", 4), KVCacheGroup("window", 4, 6)),
        (KVCacheGroup("window", 8, 6), KVCacheGroup("full", 4)),
        (KVCacheGroup("full", 4), KVCacheGroup("near", 4, 3), KVCacheGroup("far", 4, 9)),
    ],
    ids=["equal-blocks", "wider-blocks", "two-windows"],
)
def test_groups_of_layers_share_the_pool(groups: tuple[KVCacheGroup, ...], depth: int) -> None:
    config = config_of(kv_cache_groups=groups, num_blocks=40, enable_prefix_caching=True, pipeline_depth=depth)
    try:
        make(config)
    except ConfigRefused as refusal:
        pytest.skip(str(refusal))
    assert not violations_of(config, WORKLOAD)


STATEFUL = (KVCacheGroup("full", 4), KVCacheGroup("state", 4, state=True))


def session_with_states(unit: int) -> Session:
    """On groups of full attention and recurrent state; prefixes are hashed for every ``unit`` tokens."""
    config = config_of({"prefix_match_unit": unit}, kv_cache_groups=STATEFUL, num_blocks=25, enable_prefix_caching=True)
    try:
        return Session(built(config), config)
    except ConfigRefused as refusal:
        pytest.skip(str(refusal))


@pytest.mark.parametrize("unit", [1, 2, 4])
def test_states_are_hit_and_copied_before_they_are_written(unit: int) -> None:
    session = session_with_states(unit)
    assert not session.run(WORKLOAD)
    assert session.ledger.behaviours["prefix hit"]
    assert ("copied on write" in session.ledger.behaviours) == (unit < 4)


def test_a_copy_that_is_left_out_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    session = session_with_states(1)
    scheduler = session.engine._scheduler  # type: ignore[attr-defined]
    schedule = scheduler.schedule

    def forgetful() -> Any:
        output = schedule()
        output.kv_cache_block_copies = None
        return output

    monkeypatch.setattr(scheduler, "schedule", forgetful)
    again: list[Operation] = [Add(prompt_len=7, max_tokens=4, family=1, shared_len=7), Drain()] * 2
    assert "KV-2" in {violation.requirement for violation in session.run(again)}


def test_one_state_serves_a_sequence_without_a_prefix_cache() -> None:
    groups = (KVCacheGroup("full", 4), KVCacheGroup("state", 32, state=True))
    config = config_of(kv_cache_groups=groups, num_blocks=25, enable_chunked_prefill=True, max_num_batched_tokens=6)
    try:
        engine = built(config)
    except ConfigRefused as refusal:
        pytest.skip(str(refusal))
    assert not Session(engine, config).run(WORKLOAD)


def test_encoder_items_are_cached_freed_and_refused() -> None:
    config = config_of(encoder_cache_size=6)
    engine = built(config)
    engine.add_request(request(0, 8, 2, encoder_items=(EncoderItem("a", 0, 4), EncoderItem("b", 4, 4))))
    first = step(engine, 0)
    assert first.encoder_run == [("r0", 0)]
    assert first.sequences[0].num_tokens == 4  # there is no room for the other one yet
    second = step(engine, 1)
    assert (second.encoder_freed, second.encoder_run) == (["a"], [("r0", 1)])
    assert not violations_of(
        config_of(encoder_cache_size=6, enable_chunked_prefill=True, max_num_batched_tokens=6, num_blocks=40),
        [Add(9, 4, encoder_sizes=sizes, family=number % 2) for number, sizes in enumerate([(3,), (4, 2), (), (6,)])],
    )


@pytest.mark.parametrize(
    "option",
    [
        {"long_prefill_token_threshold": 3},
        {"scheduler_reserve_full_isl": False},
        {"max_num_active_seqs": 2},
        {"prefill_schedule_interval": 3},
        {"reset_running_requests": True},
    ],
    ids=lambda option: next(iter(option)),
)
def test_options_keep_the_contract(option: dict[str, OptionValue]) -> None:
    config = config_of(option, enable_prefix_caching=True, enable_chunked_prefill=True, max_num_batched_tokens=8)
    assert not violations_of(config, [*WORKLOAD[:8], ResetPrefixCache(), *WORKLOAD[8:]])


def test_the_watermark_keeps_blocks_free_for_those_who_run(release: Release) -> None:
    config = config_of(watermark=0.5, num_blocks=20, max_num_seqs=8)
    try:
        engine = make(config)
    except ConfigRefused:
        pytest.skip(f"vLLM {release.version} has no watermark")
    for number in range(4):
        engine.add_request(request(number, 16, 8))
    assert len(step(engine, 0).sequences) == 2
    assert engine.usage().waiting == 2


def test_a_token_that_arrives_after_its_preemption_is_kept_through_a_reset() -> None:
    options: dict[str, OptionValue] = {
        "async_scheduling": True,
        "long_prefill_token_threshold": 3,
        "prefill_schedule_interval": 3,
        "reset_running_requests": True,
    }
    sizes = {"num_blocks": 4, "block_size": 3, "max_num_seqs": 2, "max_num_batched_tokens": 8, "max_model_len": 8}
    config = config_of(options, enable_prefix_caching=True, pipeline_depth=2, **sizes)
    operations: list[Operation] = [
        Add(prompt_len=1, max_tokens=7, stop_after=6),
        Add(prompt_len=1, max_tokens=1),
        Add(prompt_len=2, max_tokens=6),
        Step(9),
        Add(prompt_len=1, max_tokens=2),
        Step(2),
        ResetPrefixCache(),
    ]
    assert not violations_of(config, operations)


# -- what is reported ------------------------------------------------------------------------------------------


def test_one_block_of_the_pool_is_the_null_block() -> None:
    engine = make(config_of())
    capabilities, books = engine.capabilities, engine.snapshot()
    assert (capabilities.null_block, capabilities.reserved_blocks) == (0, 1)
    assert books.reserved == [0]
    assert sorted(books.free) == list(range(1, 13))
    assert engine.usage().free_blocks == 12


def test_the_victim_and_who_asked_for_its_blocks_are_named() -> None:
    engine = make(config_of(num_blocks=9))
    for number in range(2):
        engine.add_request(request(number, 15, 10))
    step(engine, 0)
    assert not step(engine, 1).preempted
    (victim,) = step(engine, 2).preempted
    assert (victim.request_id, victim.mode, victim.asked_by, victim.blocks_free) == ("r1", "recompute", "r0", 0)
    assert "r1" not in engine.snapshot().held
    assert engine.usage().waiting == 1


def test_a_prefix_is_hit_under_its_own_identity_only() -> None:
    engine = make(config_of(enable_prefix_caching=True, num_blocks=40))
    prompt = list(range(2, 12))
    identities: list[dict[str, Any]] = [
        {},
        {"cache_salt": "s"},
        {"adapter": "a"},
        {},
        {"cache_salt": "s"},
        {"adapter": "a"},
    ]
    firsts = []
    for number, identity in enumerate(identities):
        engine.add_request(request(number, 10, 1, prompt=prompt, **identity))
        (plan,) = step(engine, number).sequences
        firsts.append(plan.first)
    assert firsts == [0, 0, 0, 8, 8, 8]


def test_outputs_are_those_the_client_would_get() -> None:
    engine = make(config_of())
    engine.add_request(request(0, 3, 3, stop_token=1))
    reported = []
    for number, token in enumerate((7, 1)):
        plan = engine.schedule()
        assert len(plan.sequences) == 1
        reported += engine.commit(number, {("r0", 0): Sampled([token])}).finished
    (finished,) = reported
    assert (finished.request_id, finished.outputs) == ("r0", [[7, 1]])
    assert "stop" in finished.reason.lower()


def test_nothing_is_scheduled_when_there_is_nothing_to_do() -> None:
    engine = make(config_of())
    assert not engine.schedule().sequences
    assert not engine.commit(0, {}).finished
    engine.add_request(request(0, 3, 1))
    assert step(engine, 1).sequences


def test_a_batch_is_processed_in_its_turn() -> None:
    engine = built(config_of({"async_scheduling": True}, pipeline_depth=2))
    engine.add_request(request(0, 3, 4))
    engine.schedule()
    assert engine.schedule().sequences[0].first == 3
    with pytest.raises(AdapterError, match="step 0 comes first"):
        engine.commit(1, {})


def test_a_reset_with_somebody_running_is_refused_or_preempts() -> None:
    for preempts in (False, True):
        options: dict[str, OptionValue] = {"reset_running_requests": True} if preempts else {}
        engine = built(config_of(options, enable_prefix_caching=True))
        engine.add_request(request(0, 6, 4))
        step(engine, 0)
        assert engine.capabilities.reset_with_live == ("preempts" if preempts else "refused")
        assert engine.reset_prefix_cache() is preempts
        assert engine.usage().running == (0 if preempts else 1)
        assert step(engine, 1).sequences[0].first == (0 if preempts else 6)


# -- what is refused -------------------------------------------------------------------------------------------


def test_a_prompt_longer_than_the_model_is_refused_in_the_engine_s_words() -> None:
    engine = make(config_of())
    with pytest.raises(RequestRefused, match=r"longer than the maximum model length"):
        engine.add_request(request(0, 33, 1))
    with pytest.raises(RequestRefused, match="n = 2"):
        engine.add_request(request(1, 6, 3, n=2))


@pytest.mark.parametrize(
    ("fields", "options", "words"),
    [
        ({}, {"nonsense": 1}, "nonsense: not known"),
        ({"num_swap_blocks": 4}, {}, "does not have: swap"),
        ({"num_blocks": 7}, {}, "max seq len"),
        ({"max_num_batched_tokens": 16}, {}, "max_num_batched_tokens"),
        ({}, {"async_scheduling": True}, "pipeline_depth = 1"),
        ({"pipeline_depth": 4}, {"async_scheduling": True}, "pipeline_depth = 4"),
    ],
)
def test_what_the_engine_does_not_take_is_refused(
    fields: dict[str, Any], options: dict[str, OptionValue], words: str
) -> None:
    with pytest.raises(ConfigRefused, match=words):
        make(config_of(options, **fields))


# -- what the harness would see ----------------------------------------------------------------------------------


def seen(engine: VllmV1Engine, config: EngineConfig) -> set[str]:
    """Requirements broken by a workload that preempts."""
    operations: list[Operation] = [Add(prompt_len=9, max_tokens=12) for _ in range(5)]
    return {violation.requirement for violation in Session(engine, config).run([*operations, Drain()])}


def test_a_block_freed_too_early_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(num_blocks=16)
    engine = make(config)
    manager = engine._scheduler.kv_cache_manager
    allocate = manager.allocate_slots

    def leaky(request: Any, *rest: Any, **named: Any) -> Any:
        blocks = allocate(request, *rest, **named)
        if blocks is not None and request.num_computed_tokens == 12:
            (group,) = manager.coordinator.single_type_managers
            manager.block_pool.free_blocks([group.req_to_blocks[request.request_id][0]])
        return blocks

    monkeypatch.setattr(manager, "allocate_slots", leaky)
    assert seen(engine, config) & {"ACC-1", "ACC-3", "ACC-4", "KV-1", "PRG-8"}


def test_blocks_that_are_never_freed_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(num_blocks=40)
    engine = make(config)
    monkeypatch.setattr(engine._scheduler.kv_cache_manager, "free", lambda _: None)
    assert seen(engine, config) & {"ACC-1", "ACC-6", "ACC-7"}


def test_a_diff_that_leaves_out_a_block_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of()
    engine = make(config)
    schedule = engine._scheduler.schedule

    def forgetful() -> Any:
        output = schedule()
        cached = output.scheduled_cached_reqs
        cached.new_block_ids = [None] * len(cached.new_block_ids)
        return output

    monkeypatch.setattr(engine._scheduler, "schedule", forgetful)
    assert "ACC-5" in seen(engine, config)


def test_the_same_operations_give_the_same_plans() -> None:
    def plans() -> list[Any]:
        config = config_of(enable_prefix_caching=True, enable_chunked_prefill=True, max_num_batched_tokens=9)
        engine = make(config)
        rng = random.Random(5)
        history = []
        for number in range(40):
            if number < 12:
                engine.add_request(request(number % 5, rng.randint(1, 20), 6, request_id=f"r{number}", arrival=number))
            history.append([(one.request_id, one.first, one.num_tokens) for one in step(engine, number).sequences])
        return history

    assert plans() == plans()
