"""Every ACC requirement and ENC-1: broken on purpose, and reported for what it is."""

from __future__ import annotations

from conformance.operations import Abort, Add, Drain, ResetPrefixCache, Step
from conformance.protocol import EngineConfig

from . import broken_accounting as broken
from .drive import caught

SMALL = EngineConfig(num_blocks=6, block_size=4, max_num_seqs=2, max_num_batched_tokens=32, max_model_len=16)
CACHING = EngineConfig(
    num_blocks=8,
    block_size=4,
    max_num_seqs=4,
    max_num_batched_tokens=32,
    max_model_len=24,
    enable_prefix_caching=True,
)
ENCODER = EngineConfig(
    num_blocks=16,
    block_size=4,
    max_num_seqs=2,
    max_num_batched_tokens=4,
    max_model_len=32,
    enable_chunked_prefill=True,
    encoder_cache_size=8,
)


def test_a_block_in_no_class_is_reported() -> None:
    found = caught(broken.LosesBlockOfAborted, SMALL, Add(6, 8), Add(3, 8), Step(2), Abort(0), Step())
    assert found.message == "block 1 is in no class"
    assert found.expected == "exactly one of free, held, cached, reserved"
    assert found.got == "none"


def test_a_block_id_past_the_pool_is_reported() -> None:
    found = caught(broken.HandsOutBlockPastThePool, SMALL, Add(12, 4), Add(8, 4), Drain())
    assert found.message == "r0's table names block 6"
    assert found.expected == "block ids 0 to 5"
    assert found.got == "block 6 in table [1, 2, 3, 6]"


def test_a_null_block_that_is_handed_out_is_reported() -> None:
    config = EngineConfig(num_blocks=6, max_model_len=16, engine_options={"null_block": True})
    found = caught(broken.HandsOutNullBlock, config, Add(6, 4), Step())
    assert found.message == "r0 reads or writes through the null block 0"
    assert found.got == "table [0, 1]"


def test_a_write_to_a_shared_block_is_reported() -> None:
    found = caught(broken.WritesSharedBlock, SMALL, Add(6, 6, n=2), Step(2))
    assert found.message == "r0/0 writes position 6 into block 1, which 2 sequences hold"
    assert found.expected == "a block of its own (copy-on-write comes first)"
    assert found.got == "table [0, 1]"
    assert found.step == 1


def test_a_reference_count_below_the_number_of_holders_is_reported() -> None:
    alike = (Add(9, 2, family=1, shared_len=9), Step(), Add(9, 8, family=1, shared_len=9), Step(3))
    found = caught(broken.SharesWithoutCounting, CACHING, *alike)
    assert found.message == "block 0 has reference count 0"
    assert found.expected == "1, the number of tables that name it"
    assert found.got == "0"


def test_a_table_shorter_than_its_tokens_is_reported() -> None:
    found = caught(broken.TableOneShort, SMALL, Add(3, 4), Step(3))
    assert found.message == "r0 computes positions 4 to 4 through a table of 1 blocks"
    assert found.expected == "at least ceil(5 / 4) = 2 blocks"
    assert found.got == "table [0]"


def test_a_table_longer_than_tokens_and_lookahead_is_reported() -> None:
    found = caught(broken.TableTooLong, SMALL, Add(3, 4), Step())
    assert found.message == "r0 with 3 tokens holds 3 blocks"
    assert found.expected == "at most 1 blocks of 4 tokens (lookahead 0, preallocated 0 blocks)"
    assert found.got == "table [0, 1, 2]"


def test_an_idle_pool_that_is_not_empty_is_reported() -> None:
    found = caught(broken.KeepsBlockOfFinished, SMALL, Add(3, 2), Drain())
    assert found.message == "no request is live and the pool is not empty"
    assert found.expected == "6 blocks free or cached"
    assert found.got == "5 free, 0 cached"


def test_a_block_that_stays_cached_after_a_reset_is_reported() -> None:
    found = caught(broken.ResetLeavesCached, CACHING, Add(9, 2), Drain(), ResetPrefixCache(), Step())
    assert found.message == "the prefix cache was reset with no request live and 2 blocks are still cached"
    assert found.expected == "8 blocks free"
    assert found.got == "6 free, cached blocks 0, 1"


def test_a_block_kept_by_a_preempted_request_is_reported() -> None:
    config = EngineConfig(num_blocks=5, block_size=4, max_num_seqs=2, max_model_len=16)
    found = caught(broken.PreemptedKeepsBlock, config, Add(7, 9), Add(7, 9), Drain())
    assert found.message == "r1, which was preempted by recompute, holds blocks"
    assert found.expected == "no block"
    assert found.got == "tables [[2]]"


def test_a_postponed_admission_that_takes_blocks_is_reported() -> None:
    config = EngineConfig(num_blocks=6, block_size=4, max_num_seqs=2, max_model_len=24, enable_prefix_caching=True)
    first, again = Add(9, 1, family=1, shared_len=9), Add(20, 2, family=1, shared_len=9)
    found = caught(broken.PinsHitsBeforeCheck, config, first, Drain(), Add(9, 8), Step(), again, Step())
    assert found.message == "a postponed admission took 2 blocks in step 2"
    assert found.expected == "3 blocks free, as before: 3 blocks are in tables of live requests"
    assert found.got == "1 free"


def test_a_table_that_changes_under_a_running_request_is_reported() -> None:
    found = caught(broken.MovesBlockSilently, SMALL, Add(6, 6), Step(2))
    assert found.message == "r0's table changed under it at logical block 0"
    assert found.expected == "block 0 as before"
    assert found.got == "block 2 with no copy from 0"


def test_a_free_figure_that_counts_the_null_block_is_reported() -> None:
    config = EngineConfig(num_blocks=6, max_model_len=16, engine_options={"null_block": True})
    found = caught(broken.CountsNullBlockAsFree, config, Add(6, 4), Step())
    assert found.message == "the engine's figure of free blocks is not what its own books hold"
    assert found.expected == "3 free + 0 cached"
    assert found.got == "4"


def test_a_preemption_counter_that_is_off_is_reported() -> None:
    config = EngineConfig(num_blocks=5, block_size=4, max_num_seqs=2, max_model_len=16)
    found = caught(broken.CountsPreemptionTwice, config, Add(7, 9), Add(7, 9), Drain())
    assert found.message == "the engine's preemption counter after step 2"
    assert (found.expected, found.got) == ("1", "2")


def test_an_encoder_item_evicted_while_it_is_needed_is_reported() -> None:
    two = (Add(6, 2, family=1, encoder_sizes=(6,)), Add(6, 2, family=2, encoder_sizes=(6,)), Drain())
    found = caught(broken.EvictsNeededItem, ENCODER, *two)
    assert found.message == "encoder item item1.0:6 is evicted while r0 still needs it"
    assert found.expected == "kept until position 5 is computed"
    assert found.got == "4 positions computed"


def test_an_encoder_item_larger_than_the_cache_must_be_refused() -> None:
    found = caught(broken.AcceptsOversizedItem, ENCODER, Add(12, 2, encoder_sizes=(9,)))
    assert found.message == "r0 is accepted with an encoder item of 9"
    assert found.expected == "refused: the encoder cache holds 8"
    assert found.got == "queued"
