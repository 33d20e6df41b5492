"""The lmdeploy adapter on the installed release: what it reports is what the engine did."""

from __future__ import annotations

import importlib.util
import random
from typing import Any

import pytest

from conformance.operations import Add, Operation
from conformance.protocol import (
    AdapterError,
    ConfigRefused,
    EngineConfig,
    OptionValue,
    Request,
    RequestRefused,
    Sampled,
)
from conformance.session import Session

if importlib.util.find_spec("lmdeploy") is None:
    pytest.skip("lmdeploy is not installed", allow_module_level=True)

from by_hand import ADAPTER_FAULTS, broken, extent, request, step
from conformance.adapters.lmdeploy_pytorch import make
from workloads import random_traffic

pytestmark = pytest.mark.filterwarnings("default")  # importing torch and transformers warns


def config_of(options: dict[str, OptionValue] | None = None, **fields: Any) -> EngineConfig:
    given = {"num_blocks": 25, "block_size": 16, "max_num_batched_tokens": 256, "max_model_len": 96} | fields
    return EngineConfig(engine_options=options or {}, **given)


def test_one_request_from_prompt_to_end() -> None:
    engine = make(config_of())
    engine.add_request(request(0, 20, 2))
    (prompt,) = step(engine, token=11).sequences
    assert extent(prompt) == ("r0", 0, 20, 3)  # sixteen tokens are set aside behind the prompt
    assert prompt.token_ids == request(0, 20, 2).prompt
    plan = engine.schedule()
    assert extent(plan.sequences[0]) == ("r0", 20, 1, 3)
    assert plan.sequences[0].token_ids == [11]
    (finished,) = engine.commit(1, {("r0", 0): Sampled([12])}).finished
    assert finished.outputs == [[11, 12]]
    assert sorted(engine.snapshot().free) == list(range(1, 25))


def test_the_loop_sends_the_next_step_before_it_takes_the_tokens_of_the_last() -> None:
    engine = make(config_of(pipeline_depth=2))
    engine.add_request(request(0, 20, 3))
    first, second = engine.schedule(), engine.schedule()
    assert [extent(plan.sequences[0])[1:3] for plan in (first, second)] == [(0, 20), (20, 1)]
    assert second.sequences[0].token_ids is None  # still to be sampled
    assert engine.commit(0, {("r0", 0): Sampled([11])}).finished == []
    assert extent(engine.schedule().sequences[0])[1:3] == (21, 1)
    assert engine.commit(1, {("r0", 0): Sampled([12])}).finished == []
    engine.schedule()  # the engine does not know yet that the third token is the last
    (finished,) = engine.commit(2, {("r0", 0): Sampled([13])}).finished
    assert finished.outputs == [[11, 12, 13]]


def test_a_third_step_ahead_is_a_fault_of_whoever_asks() -> None:
    engine = make(config_of(pipeline_depth=2))
    engine.add_request(request(0, 20, 9))
    engine.schedule()
    engine.schedule()
    with pytest.raises(AdapterError, match="two steps in flight"):
        engine.schedule()
    alone = make(config_of())
    alone.add_request(request(0, 20, 9))
    alone.schedule()
    with pytest.raises(AdapterError, match="pipeline_depth is 1"):
        alone.schedule()


def test_a_stop_token_ends_a_sequence_as_the_model_agent_would() -> None:
    engine = make(config_of())
    engine.add_request(request(0, 5, 9, stop_token=42))
    step(engine, token=7)
    engine.schedule()
    (finished,) = engine.commit(1, {("r0", 0): Sampled([42])}).finished
    assert finished.outputs == [[7, 42]]


def test_a_prompt_over_the_budget_goes_in_chunks() -> None:
    engine = make(config_of(max_num_batched_tokens=32, enable_chunked_prefill=True))
    engine.add_request(request(0, 70, 2))
    chunks = [step(engine).sequences[0] for _ in range(3)]
    assert [(chunk.first, chunk.num_tokens, chunk.samples) for chunk in chunks] == [
        (0, 32, False),
        (32, 32, False),
        (64, 6, True),
    ]


def test_kernel_blocks_are_told_as_the_blocks_they_belong_to() -> None:
    engine = make(config_of({"kernel_block_size": 16}, block_size=64, num_blocks=9, max_model_len=256))
    engine.add_request(request(0, 70, 2))
    (prompt,) = step(engine).sequences
    assert prompt.block_tables == [[1, 2]]
    assert engine.snapshot().held == {"r0": [[1, 2]]}


def test_drafts_run_behind_the_token_they_follow() -> None:
    engine = make(config_of(num_speculative_tokens=2))
    engine.add_request(request(0, 20, 9))
    engine.schedule()
    engine.commit(0, {("r0", 0): Sampled([11], [12, 13])})
    (row,) = engine.schedule().sequences
    assert (row.first, row.num_tokens, row.token_ids, row.draft_tokens) == (20, 3, [11, 12, 13], [12, 13])
    engine.commit(1, {("r0", 0): Sampled([12, 14], [15, 16])})
    (row,) = engine.schedule().sequences
    assert (row.first, row.token_ids) == (22, [14, 15, 16])


# ---------------------------------------------------------------------------------------------- preemption, books


def test_who_is_preempted_keeps_its_blocks_until_they_are_wanted() -> None:
    engine = make(config_of(num_blocks=6))
    for number in range(2):
        engine.add_request(request(number, 10, 60))
    plan = step(engine)
    for _ in range(1, 30):
        plan = step(engine)
        if plan.preempted:
            break
    (victim,) = plan.preempted
    assert (victim.request_id, victim.mode, victim.blocks_counted, victim.blocks_free) == ("r0", "recompute", 1, 0)
    books = engine.snapshot()
    assert (books.waiting, len(books.held["r0"][0])) == (["r0"], 2)
    assert "preempted" in engine.capabilities.keeps_blocks


def test_what_is_cached_is_shown_apart_from_what_is_held() -> None:
    engine = make(config_of(enable_prefix_caching=True))
    engine.add_request(request(0, 40, 1))
    step(engine)
    books = engine.snapshot()
    assert (len(books.cached), len(books.free), books.ref_counts) == (2, 22, {})
    assert engine.usage().free_blocks == 24
    engine.add_request(request(0, 40, 2))
    (hit,) = engine.schedule().sequences
    assert (hit.first, hit.num_tokens) == (32, 8)
    assert engine.snapshot().ref_counts == dict.fromkeys(hit.block_tables[0], 1)


def test_adapters_and_salts_are_kept_apart() -> None:
    engine = make(config_of(enable_prefix_caching=True))
    for number, name in enumerate(("", "a", "b")):
        engine.add_request(
            Request(request_id=f"r{number}", prompt=[3] * 40, max_tokens=1, adapter=name, cache_salt=name and "s")
        )
        assert step(engine).sequences[0].first == 0


def test_the_client_of_a_finished_request_may_end_its_session_a_step_later() -> None:
    engine = make(config_of({"end_session": "next_step"}))
    assert engine.capabilities.deferred_free_steps == 1
    engine.add_request(request(0, 20, 1))
    step(engine)
    assert engine.snapshot().held["r0"] != [[]]
    engine.schedule()
    assert engine.snapshot().held == {}


def test_blocks_behind_the_window_are_shown_as_block_0() -> None:
    engine = make(config_of(sliding_window=16))
    engine.add_request(request(0, 20, 60))
    tables = [step(engine).sequences[0].block_tables[0] for _ in range(40)]
    assert tables[0].count(0) == 0
    assert tables[-1].count(0) > 0
    assert 0 not in tables[-1][tables[-1].count(0) :]


@pytest.mark.parametrize("depth", [1, 2])
def test_abort_reaches_every_state(depth: int) -> None:
    engine = make(config_of(pipeline_depth=depth))
    for number in range(3):
        engine.add_request(request(number, 5, 8))
    engine.abort_request("r2")
    plan = engine.schedule()
    if depth == 2:
        engine.schedule()
    engine.abort_request("r1")
    engine.commit(0, {(one.request_id, 0): Sampled([7]) for one in plan.sequences})
    engine.abort_request("r0")
    engine.abort_request("r0")
    engine.abort_request("never seen")
    assert engine.schedule().sequences == []
    assert engine.usage().free_blocks == 24
    assert engine.snapshot().held == {}


# ---------------------------------------------------------------------------------------------- refusals


def test_what_is_too_long_is_refused_and_outputs_are_cut() -> None:
    engine = make(config_of(num_blocks=5))
    assert engine.capabilities.sequence_tokens_max == 48  # the pool less one block
    with pytest.raises(RequestRefused, match="INPUT_LENGTH_ERROR"):
        engine.add_request(request(0, 48, 1))
    engine.add_request(request(1, 47, 9))
    plan = engine.schedule()
    assert len(engine.commit(0, {(plan.sequences[0].request_id, 0): Sampled([7])}).finished) == 1


def test_refusals_are_in_the_words_of_lmdeploy() -> None:
    with pytest.raises(ConfigRefused, match="kernel_block_size must be >= 16 and a power of 2, but got 4") as refusal:
        make(EngineConfig())
    assert refusal.value.instead is not None
    make(refusal.value.instead).close()
    with pytest.raises(ConfigRefused, match="Sliding window prefix caching is not supported"):
        make(config_of(sliding_window=16, enable_prefix_caching=True))


def test_what_it_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigRefused, match="colour: not known; taken are prefill_interval"):
        make(config_of({"colour": "green"}))
    with pytest.raises(ConfigRefused, match="prefill_interval = 0"):
        make(config_of({"prefill_interval": 0}))
    with pytest.raises(ConfigRefused, match="ttft_policy = 'best': one of size, fifo"):
        make(config_of({"ttft_policy": "best"}))
    with pytest.raises(ConfigRefused, match="priority"):
        make(config_of(scheduling_policy="priority"))
    with pytest.raises(ConfigRefused, match="pipeline_depth = 3"):
        make(config_of(pipeline_depth=3))
    with pytest.raises(ConfigRefused, match="a decode step runs up to 12 tokens"):
        make(config_of(max_num_batched_tokens=11, num_speculative_tokens=2))
    with pytest.raises(RequestRefused, match="n = 2"):
        make(config_of()).add_request(request(0, 5, 2, n=2))
    assert not make(config_of()).reset_prefix_cache()


# ---------------------------------------------------------------------------------------------- workloads


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    "fields",
    [{}, {"enable_prefix_caching": True}, {"enable_chunked_prefill": True, "max_num_batched_tokens": 20}],
    ids=["plain", "cached", "chunked"],
)
@pytest.mark.parametrize("num_blocks", [9, 40])
def test_the_books_add_up_on_random_workloads(depth: int, fields: dict[str, Any], num_blocks: int) -> None:
    config = config_of({"prefill_interval": 1}, num_blocks=num_blocks, pipeline_depth=depth, **fields)
    preemptions = 0
    for seed in range(10):
        session = Session(make(config), config)
        found = session.run(random_traffic(random.Random(seed), range(1, 61), 90))
        assert [violation for violation in found if violation.requirement in ADAPTER_FAULTS] == [], seed
        preemptions += session.preemptions
    assert preemptions or num_blocks == 40


@pytest.mark.parametrize(
    ("config", "operations", "requirement"),
    [
        # Tokens set aside at admission are wanted even where the pool cannot hold them.
        (config_of({"prefill_interval": 64}, num_blocks=4), [Add(17, 1)], "PRG-2"),
        # Drafts run on past the end of the model.
        (config_of(num_speculative_tokens=2, max_model_len=32), [Add(28, 4)], "LIM-4"),
    ],
)
def test_its_known_faults_are_seen(config: EngineConfig, operations: list[Operation], requirement: str) -> None:
    assert requirement in broken(make, config, *operations)
