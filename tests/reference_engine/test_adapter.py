"""The reference adapter: configuration, capabilities, and one short run under the harness."""

from __future__ import annotations

from typing import Any

import pytest

from conformance.adapters.reference import FEATURES, OPTIONS, make
from conformance.operations import Abort, Add, Operation, Step
from conformance.protocol import (
    ConfigRefused,
    EncoderItem,
    EngineConfig,
    KVCacheGroup,
    Request,
    RequestRefused,
    Sampled,
)
from conformance.session import Session


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_speculative_tokens": 2}, "num_speculative_tokens = 2"),
        ({"encoder_cache_size": 8}, "encoder_cache_size = 8"),
        ({"kv_cache_groups": (KVCacheGroup("full", 4),)}, "kv_cache_groups"),
        ({"engine_options": {"colour": "red"}}, "no option colour; known: append_check, free_list"),
        ({"engine_options": {"append_check": "some"}}, "append_check = 'some': must be one of exact, touched"),
        ({"engine_options": {"null_block": 3}}, "null_block = 3: must be true or false"),
        ({"num_blocks": 0}, "num_blocks = 0"),
        ({"sliding_window": 4, "engine_options": {"null_block": False}}, "sliding_window = 4: needs null_block"),
    ],
)
def test_a_configuration_it_does_not_take_is_refused_with_the_reason(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigRefused, match=message):
        make(EngineConfig(**fields))


def test_what_it_declares() -> None:
    plain = make(EngineConfig()).capabilities
    assert plain.features == FEATURES
    assert set(plain.options) == set(OPTIONS)
    assert (plain.null_block, plain.reserved_blocks, plain.deferred_free_steps) == (None, 0, 0)
    windowed = make(EngineConfig(sliding_window=4, pipeline_depth=2)).capabilities
    assert (windowed.null_block, windowed.reserved_blocks, windowed.deferred_free_steps) == (0, 1, 2)


def test_tables_in_a_plan_are_copies() -> None:
    engine = make(EngineConfig(block_size=2))
    engine.add_request(Request(request_id="r", prompt=[5, 6], max_tokens=4))
    first = engine.schedule()
    table = list(first.sequences[0].block_tables[0])
    engine.commit(0, {("r", 0): Sampled([7])})
    second = engine.schedule()
    assert first.sequences[0].block_tables[0] == table
    assert len(second.sequences[0].block_tables[0]) == 2
    assert second.sequences[0].token_ids == [7]


def test_what_it_cannot_serve_is_refused() -> None:
    engine = make(EngineConfig())
    with pytest.raises(RequestRefused, match="no room for an output token"):
        engine.add_request(Request(request_id="r", prompt=[1] * 32, max_tokens=1))
    with pytest.raises(RequestRefused, match="no encoder items"):
        engine.add_request(
            Request(request_id="r", prompt=[1], max_tokens=1, encoder_items=(EncoderItem("image", 0, 1),))
        )


def test_more_than_one_token_a_step_is_an_error() -> None:
    engine = make(EngineConfig())
    engine.add_request(Request(request_id="r", prompt=[5, 6], max_tokens=4))
    engine.schedule()
    with pytest.raises(ValueError, match=r"2 tokens for sequence \('r', 0\)"):
        engine.commit(0, {("r", 0): Sampled([7, 8])})


def test_the_snapshot_shows_blocks_kept_for_a_step_in_flight() -> None:
    engine = make(EngineConfig(pipeline_depth=2, num_blocks=4))
    engine.add_request(Request(request_id="r", prompt=[5, 6], max_tokens=4))
    engine.schedule()
    engine.abort_request("r")
    snapshot = engine.snapshot()
    assert snapshot.held == {"r": [[0]]}
    assert snapshot.ref_counts == {0: 1}
    assert sorted(snapshot.free) == [1, 2, 3]
    engine.commit(0, {})
    assert engine.snapshot().held == {}


OPERATIONS: list[Operation] = [
    Add(prompt_len=9, max_tokens=12, shared_len=8),
    Add(prompt_len=9, max_tokens=9, shared_len=8, priority=1),
    Step(2),
    Add(prompt_len=5, max_tokens=8, n=2, stop_after=3),
    Add(prompt_len=12, max_tokens=8, salt=1),
    Step(6),
    Abort(1),
    Add(prompt_len=9, max_tokens=3, shared_len=9),
]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"enable_prefix_caching": True, "enable_chunked_prefill": True, "max_num_batched_tokens": 5},
        {"preemption_mode": "swap", "num_swap_blocks": 5, "scheduling_policy": "priority"},
        {"pipeline_depth": 2, "enable_chunked_prefill": True},
        {"num_lookahead_slots": 3, "watermark": 0.2},
    ],
)
def test_the_harness_finds_nothing(fields: dict[str, Any]) -> None:
    config = EngineConfig(num_blocks=9, block_size=3, max_model_len=24, **fields)
    assert Session(make(config), config).run(OPERATIONS) == []
