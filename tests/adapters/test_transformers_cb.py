"""The adapter for transformers' continuous batching on the installed release: it reports what the engine did."""

from __future__ import annotations

import importlib.util
import random
from typing import Any

import pytest

from conformance.protocol import (
    AdapterError,
    ConfigRefused,
    EngineConfig,
    EngineFault,
    OptionValue,
    Sampled,
)
from conformance.session import Session

if importlib.util.find_spec("transformers") is None or not (
    importlib.util.find_spec("transformers.generation.continuous_batching")
):
    pytest.skip("a transformers with continuous batching is not installed", allow_module_level=True)

from by_hand import extent, request, sampled, step
from conformance.adapters.transformers_cb import make
from workloads import random_traffic

pytestmark = pytest.mark.filterwarnings("default")  # importing torch and transformers warns

ADAPTER_FAULTS = frozenset({"ACC-1", "ACC-2", "ACC-4", "ACC-5", "ACC-9", "ACC-10", "KV-1", "KV-2", "KV-3", "KV-6"})
"""What an adapter that misreports would be seen by, where the engine is right."""


def config_of(options: dict[str, OptionValue] | None = None, **fields: Any) -> EngineConfig:
    given = {"num_blocks": 34, "block_size": 4, "max_num_batched_tokens": 64, "max_model_len": 96} | fields
    return EngineConfig(engine_options=options or {}, **given)


def test_one_request_from_prompt_to_end() -> None:
    engine = make(config_of())
    engine.add_request(request(0, 6, 2))
    (prompt,) = step(engine, token=11).sequences
    assert extent(prompt) == ("r0", 0, 6, 2)
    assert prompt.token_ids == request(0, 6, 2).prompt
    plan = engine.schedule()
    assert extent(plan.sequences[0]) == ("r0", 6, 1, 2)
    assert plan.sequences[0].token_ids == [11]
    (finished,) = engine.commit(1, {("r0", 0): Sampled([12])}).finished
    assert finished.outputs == [[11, 12]]
    assert sorted(engine.snapshot().free) == list(range(2, 34))  # two are for padding


def test_the_next_batch_is_prepared_before_the_tokens_of_the_last_are_taken() -> None:
    engine = make(config_of(pipeline_depth=2))
    engine.add_request(request(0, 6, 3))
    first, second = engine.schedule(), engine.schedule()
    assert [extent(plan.sequences[0])[1:3] for plan in (first, second)] == [(0, 6), (6, 1)]
    assert second.sequences[0].token_ids is None  # carried over on the device
    assert engine.commit(0, {("r0", 0): Sampled([11])}).finished == []
    assert extent(engine.schedule().sequences[0])[1:3] == (7, 1)
    assert engine.commit(1, {("r0", 0): Sampled([12])}).finished == []
    (finished,) = engine.commit(2, {("r0", 0): Sampled([13])}).finished
    assert finished.outputs == [[11, 12, 13]]


def test_a_third_batch_ahead_is_a_fault_of_whoever_asks() -> None:
    engine = make(config_of(pipeline_depth=2))
    engine.add_request(request(0, 6, 9))
    engine.schedule()
    engine.schedule()
    with pytest.raises(AdapterError, match="with 2 steps in flight"):
        engine.schedule()


def test_a_stop_token_ends_a_sequence() -> None:
    engine = make(config_of())
    engine.add_request(request(0, 5, 9, stop_token=42))
    step(engine)
    plan = engine.schedule()
    (finished,) = engine.commit(1, sampled(plan, 42)).finished
    assert finished.outputs == [[7, 42]]


def test_a_prompt_over_the_budget_goes_in_chunks() -> None:
    engine = make(config_of(max_num_batched_tokens=16))
    engine.add_request(request(0, 36, 2))
    chunks = [step(engine).sequences[0] for _ in range(3)]
    assert [(chunk.first, chunk.num_tokens, chunk.samples) for chunk in chunks] == [
        (0, 16, False),
        (16, 16, False),
        (32, 4, True),
    ]


def test_a_table_read_off_indices_is_the_one_kernels_would_be_given() -> None:
    tables = []
    for blocks in (0, 8):
        engine = make(config_of({"max_blocks_per_request": blocks}))
        for number in range(3):
            engine.add_request(request(number, 5 + number, 9))
        tables.append([[row.block_tables for row in step(engine).sequences] for _ in range(6)])
    assert tables[0] == tables[1]


def test_behind_a_window_a_table_goes_round_its_ring() -> None:
    engine = make(config_of(sliding_window=8))
    engine.add_request(request(0, 6, 20))
    tables = [step(engine).sequences[0].block_tables[0] for _ in range(12)]
    assert tables[0] == [tables[0][0], tables[0][1]]
    assert tables[-1] == [tables[0][index % 2] for index in range(len(tables[-1]))]
    assert len(engine.snapshot().held["r0"][0]) == 2


# ---------------------------------------------------------------------------------------------- sequences, caching


def test_children_are_forked_from_the_prompt_of_their_parent() -> None:
    engine = make(config_of())
    engine.add_request(request(0, 6, 2, n=3))
    (prompt,) = step(engine).sequences
    assert (extent(prompt), prompt.samples) == (("r0", 0, 5, 2), False)  # the last token waits for the fork
    plan = engine.schedule()
    assert [(row.seq, row.first, row.num_tokens) for row in plan.sequences] == [(0, 5, 1), (1, 5, 1), (2, 5, 1)]
    copies = [move for move in plan.moves if move.kind == "copy"]
    assert [move.src for move in copies] == prompt.block_tables[0] * 2
    engine.commit(1, sampled(plan))
    plan = engine.schedule()
    (finished,) = engine.commit(2, sampled(plan, 8)).finished
    assert finished.outputs == [[7, 8]] * 3


def test_sequences_that_wait_are_not_counted_as_requests() -> None:
    engine = make(config_of(num_blocks=5))
    engine.add_request(request(0, 8, 9))
    engine.add_request(request(1, 8, 9))
    step(engine)
    assert engine.usage().waiting == 1
    engine = make(config_of(num_blocks=5))
    engine.add_request(request(0, 8, 2, n=3))
    step(engine)
    step(engine)
    assert len(engine.snapshot().waiting) == 2
    assert engine.usage().waiting is None


def test_a_prompt_of_one_token_cannot_be_forked() -> None:
    engine = make(config_of())
    engine.add_request(request(0, 1, 2, n=2))
    with pytest.raises(EngineFault, match="a batch of no token"):
        engine.schedule()


def test_what_is_cached_is_shown_apart_from_what_is_held() -> None:
    engine = make(config_of(enable_prefix_caching=True))
    engine.add_request(request(0, 10, 2))
    step(engine)
    step(engine)
    books = engine.snapshot()
    assert (len(books.cached), len(books.free), books.ref_counts) == (2, 30, {})
    assert engine.usage().free_blocks == 32
    engine.add_request(request(0, 10, 2))
    (hit,) = engine.schedule().sequences
    assert (hit.first, hit.num_tokens) == (8, 2)
    assert set(hit.block_tables[0][:2]) == set(books.cached)


# ---------------------------------------------------------------------------------------------- preemption, aborts


@pytest.mark.parametrize(("host", "mode"), [(0, "recompute"), (8, "swap")])
def test_a_victim_goes_to_the_host_where_that_has_room(host: int, mode: str) -> None:
    swapping: dict[str, Any] = {"preemption_mode": "swap", "num_swap_blocks": host} if host else {}
    engine = make(config_of(num_blocks=8, **swapping))
    for number in range(2):
        engine.add_request(request(number, 8, 14))
    victims = []
    moves = []
    for _ in range(40):
        plan = step(engine)
        victims += plan.preempted
        moves += [move.kind for move in plan.moves]
    assert victims
    assert {victim.mode for victim in victims} == {mode}
    assert ("swap_out" in moves, "swap_in" in moves) == (bool(host), bool(host))
    assert moves.count("swap_in") == moves.count("swap_out")
    assert sorted(engine.snapshot().free) == list(range(2, 8))


@pytest.mark.parametrize("depth", [1, 2])
def test_abort_reaches_every_state(depth: int) -> None:
    engine = make(config_of(pipeline_depth=depth))
    for number in range(3):
        engine.add_request(request(number, 5, 8))
    engine.abort_request("r2")
    plan = engine.schedule()
    engine.abort_request("r1")
    engine.commit(0, sampled(plan))
    engine.abort_request("r0")
    engine.abort_request("r0")
    engine.abort_request("never seen")
    assert engine.schedule().sequences == []
    assert engine.usage().free_blocks == 32
    assert engine.snapshot().held == {}


# ---------------------------------------------------------------------------------------------- refusals


def test_refusals_are_in_the_words_of_transformers() -> None:
    with pytest.raises(ConfigRefused, match=r".+") as refusal:
        make(config_of(block_size=1))
    assert refusal.value.instead is not None
    make(refusal.value.instead).close()


def test_a_block_is_a_sector() -> None:
    with pytest.raises(ConfigRefused, match="block_size = 5") as refusal:
        make(config_of(block_size=5))
    assert refusal.value.instead is not None
    assert refusal.value.instead.block_size == 8
    make(config_of(block_size=12)).close()


def test_what_it_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigRefused, match="colour: not known; taken are scheduler_type"):
        make(config_of({"colour": "green"}))
    with pytest.raises(ConfigRefused, match="scheduler_type = 'lifo': one of fifo, prefill_first"):
        make(config_of({"scheduler_type": "lifo"}))
    with pytest.raises(ConfigRefused, match="safety_margin = -1: a number from 0 on"):
        make(config_of({"safety_margin": -1}))
    with pytest.raises(ConfigRefused, match="priority"):
        make(config_of(scheduling_policy="priority"))
    with pytest.raises(ConfigRefused, match="pipeline_depth = 3"):
        make(config_of(pipeline_depth=3))
    with pytest.raises(ConfigRefused, match="sliding_window = 6") as refusal:
        make(config_of(sliding_window=6))
    assert refusal.value.instead is not None
    assert refusal.value.instead.sliding_window == 8
    with pytest.raises(ConfigRefused, match="2 are for padding"):
        make(config_of(num_blocks=2))
    assert not make(config_of()).reset_prefix_cache()


# ---------------------------------------------------------------------------------------------- workloads


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"enable_prefix_caching": True},
        {"sliding_window": 8},
        {"preemption_mode": "swap", "num_swap_blocks": 12},
        {"pipeline_depth": 2},
    ],
    ids=["plain", "cached", "window", "swap", "pipelined"],
)
@pytest.mark.parametrize("num_blocks", [14, 60])
def test_the_books_add_up_on_random_workloads(fields: dict[str, Any], num_blocks: int) -> None:
    config = config_of(num_blocks=num_blocks, **fields)
    # A prefix match alone puts a request on the engine's active set, where there may be no room for the rest of it.
    faults = ADAPTER_FAULTS - {"ACC-10"} if config.enable_prefix_caching else ADAPTER_FAULTS
    preemptions = 0
    for seed in range(10):
        session = Session(make(config), config)
        found = session.run(random_traffic(random.Random(seed), range(2, 21), 20))
        assert [violation for violation in found if violation.requirement in faults] == [], seed
        preemptions += session.preemptions
    assert preemptions or num_blocks == 60 or config.sliding_window
