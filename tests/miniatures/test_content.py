"""Every KV requirement, ID-1 and CCH-3: broken on purpose, and reported for what it is."""

from __future__ import annotations

import msgspec

from conformance.operations import Abort, Add, Drain, ResetPrefixCache, Step
from conformance.protocol import EngineConfig

from . import broken_content as broken
from .drive import caught

TIGHT = EngineConfig(num_blocks=5, block_size=4, max_num_seqs=3, max_num_batched_tokens=32, max_model_len=16)
SWAPPING = msgspec.structs.replace(TIGHT, preemption_mode="swap", num_swap_blocks=8)
CHUNKED = msgspec.structs.replace(TIGHT, enable_chunked_prefill=True, max_num_batched_tokens=4)
CACHING = msgspec.structs.replace(TIGHT, enable_prefix_caching=True)


def test_swapped_blocks_that_are_never_brought_back_are_reported() -> None:
    found = caught(broken.ForgetsSwapIn, SWAPPING, Add(7, 9), Add(7, 9), Drain())
    assert found.message == "position 4 of r1 reads block 3, which holds r0's token 4 of position 12"
    assert found.expected.endswith("of position 4")
    assert found.got == "r0's token 4 of position 12"


def test_a_prefix_hit_on_a_block_with_other_content_is_reported() -> None:
    first = Add(9, 1, family=1, shared_len=9)
    config = msgspec.structs.replace(CACHING, num_blocks=4)
    found = caught(broken.HitsReusedBlock, config, first, Drain(), Add(12, 1), Drain(), first, Step())
    assert found.message.startswith("position 4 of r2 reads block 1, which holds r1's token")
    assert found.message.endswith("of position 8 (a prefix-cache hit)")
    assert found.expected.endswith("of position 4")


def test_a_position_skipped_between_chunks_is_reported() -> None:
    found = caught(broken.SkipsAfterChunk, CHUNKED, Add(10, 4), Step(2))
    assert found.message == "r0 runs from position 5: positions 4 to 4 are skipped"
    assert (found.expected, found.got) == ("first position 4", "5")


def test_a_position_skipped_that_is_not_in_the_cache_either_is_reported() -> None:
    config = msgspec.structs.replace(CHUNKED, enable_prefix_caching=True)
    found = caught(broken.SkipsAfterChunk, config, Add(10, 4), Step(2))
    assert found.message == (
        "r0 skips positions 4 to 4: position 4 of r0 reads block 1, which holds nothing (never written)"
    )


def test_a_position_computed_twice_is_reported() -> None:
    found = caught(broken.RepeatsAfterChunk, CHUNKED, Add(10, 4), Step(2))
    assert found.message == "r0 runs from position 3: positions 3 to 3 are computed twice"
    assert (found.expected, found.got) == ("first position 4", "3")


def test_a_zero_that_wipes_what_a_sequence_needs_is_reported() -> None:
    found = caught(broken.ZeroesOneStepLate, TIGHT, Add(6, 3), Step(2))
    assert found.message == "step 1: zero 0 wipes what r0 needs at position 0"
    assert found.expected.endswith("of position 0")
    assert found.got == "nothing (never written)"


def test_a_swap_in_from_a_host_block_that_was_overwritten_is_reported() -> None:
    config = msgspec.structs.replace(SWAPPING, num_blocks=6)
    found = caught(broken.SwapsOverHostBlock, config, Add(7, 9), Add(7, 9), Add(7, 9), Drain())
    assert found.message.startswith("step ")
    assert "swap_in 0 -> " in found.message
    assert found.message.endswith("does not bring what r2 needs at position 0")
    assert found.got.startswith("r1's token")


def test_a_block_reused_while_a_step_in_flight_uses_it_is_reported() -> None:
    config = msgspec.structs.replace(TIGHT, pipeline_depth=2, num_blocks=4)
    operations = (Add(7, 9), Step(3), Abort(0), Add(9, 4), Step())
    found = caught(broken.FreesInFlight, config, *operations)
    assert found.message.startswith("r1 writes block ")
    assert found.message.endswith("while step 2, in flight, still uses it for r0")
    assert found.expected.endswith("is not handed out before step 2 is committed")


def test_a_token_lost_at_preemption_is_reported() -> None:
    found = caught(broken.LosesTokenAtPreemption, TIGHT, Add(7, 9), Add(7, 9), Drain())
    assert found.message == "r1 has 9 tokens (prompt and outputs) and is run up to 8, expecting a token"
    assert found.expected == "a token is sampled after position 8 and only there"


def test_a_hit_across_adapters_is_reported() -> None:
    alike = (Add(9, 2, family=1, shared_len=9), Drain(), Add(9, 2, family=1, shared_len=9, adapter=1), Step())
    found = caught(broken.CachesAcrossAdapters, CACHING, *alike)
    assert found.message == "r1 reads KV of another identity in block 0"
    assert found.expected == "KV under its own cache salt, adapter and multimodal content"
    assert found.got.startswith("r0's token")


def test_a_hit_across_cache_salts_is_reported() -> None:
    alike = (Add(9, 2, family=1, shared_len=9), Drain(), Add(9, 2, family=1, shared_len=9, salt=1), Step())
    found = caught(broken.CachesAcrossAdapters, CACHING, *alike)
    assert found.message == "r1 reads KV of another identity in block 0"


def test_a_hit_on_what_was_cached_before_a_reset_is_reported() -> None:
    alike = Add(9, 2, family=1, shared_len=9)
    found = caught(broken.HitsAfterReset, CACHING, alike, Drain(), ResetPrefixCache(), alike, Step())
    assert found.message == "r1 hits block 0, cached before the prefix cache was reset"
    assert found.got == "8 positions taken from the cache"


def test_a_reset_that_fails_on_an_idle_engine_is_reported() -> None:
    alike = Add(9, 2, family=1, shared_len=9)
    found = caught(broken.RefusesIdleReset, CACHING, alike, Drain(), ResetPrefixCache())
    assert found.message == "reset_prefix_cache fails with no request live"
    assert (found.expected, found.got) == ("the cache is emptied", "refused")
