"""LIM, PRG, PRE-1 to PRE-5 and FAIR: broken on purpose, and reported for what they are."""

from __future__ import annotations

import msgspec

from conformance.operations import Abort, AbortEnded, Add, Drain, Operation, Step
from conformance.protocol import EngineConfig
from conformance.session import Session
from conformance.watchdog import Watchdog

from . import broken_scheduling as broken
from .clean import Miniature
from .drive import caught, violations

SMALL = EngineConfig(num_blocks=8, block_size=4, max_num_seqs=2, max_num_batched_tokens=32, max_model_len=16)
TIGHT = msgspec.structs.replace(SMALL, num_blocks=5, max_num_seqs=3)
CHUNKED = msgspec.structs.replace(SMALL, enable_chunked_prefill=True, max_num_batched_tokens=4)


# -- limits ----------------------------------------------------------------------------------------------


def test_more_sequences_than_max_num_seqs_on_the_running_set_are_reported() -> None:
    found = caught(broken.CountsRequestsNotSequences, SMALL, Add(4, 4, n=2), Add(4, 4), Step())
    assert found.message == "the running set holds 3 sequences after step 0"
    assert (found.expected, found.got) == ("at most max_num_seqs = 2", "r0, r1")


def test_more_tokens_than_the_budget_are_reported() -> None:
    found = caught(broken.DecodesOutsideBudget, CHUNKED, Add(4, 4), Step(), Add(8, 4), Step())
    assert found.message == "step 1 schedules 5 tokens"
    assert (found.expected, found.got) == ("at most max_num_batched_tokens = 4", "1 + 4")


def test_a_prompt_past_the_models_length_is_reported() -> None:
    found = caught(broken.AcceptsAnyPrompt, SMALL, Add(17, 2), Step())
    assert found.message == "r0 computes position 16, past the model's length"
    assert (found.expected, found.got) == ("positions below max_model_len = 16", "positions 0 to 16")


def test_drafts_past_the_models_length_are_reported() -> None:
    config = msgspec.structs.replace(SMALL, num_speculative_tokens=3)
    found = caught(broken.DraftsPastTheLength, config, Add(14, 2), Step(2))
    assert found.message == "r0 computes position 17, past the model's length"
    assert (found.expected, found.got) == ("positions below max_model_len = 16", "positions 14 to 17")


# -- progress --------------------------------------------------------------------------------------------


def test_a_stall_is_reported() -> None:
    config = msgspec.structs.replace(SMALL, max_num_seqs=4)
    found = caught(broken.DecodesFullBatchesOnly, config, Add(4, 4), Add(4, 4), Drain())
    assert found.message == "after step 25: 25 steps in a row schedule nothing"
    assert found.expected == "some request runs and gets further"
    assert found.got == "r0 running 4/8, r1 running 4/8; 6 of 8 blocks free"


def test_a_refusal_of_what_fits_exactly_is_reported() -> None:
    config = msgspec.structs.replace(SMALL, num_blocks=4)
    found = caught(broken.NeverUsesLastBlock, config, Add(9, 7))
    assert found.message == "r0 is refused though it fits"
    assert found.expected == "prompt 9 + 7 tokens, n = 1, needs 4 of 4 usable blocks: served"
    assert found.got == "refused: needs a spare block"


def test_a_request_that_is_alone_fits_and_stalls_is_reported() -> None:
    config = msgspec.structs.replace(SMALL, num_blocks=4)
    found = caught(broken.WaitsForSpareBlock, config, Add(9, 7), Drain())
    assert found.message.endswith("steps in a row schedule nothing; r0 is alone and fits")
    assert found.got == "r0 running 12/16; 1 of 4 blocks free"


def test_a_request_that_can_never_fit_and_is_parked_is_reported() -> None:
    config = msgspec.structs.replace(SMALL, num_blocks=3)
    found = caught(broken.ParksTheImpossible, config, Add(14, 2), Add(2, 2), Drain())
    assert "steps in a row schedule nothing; r0 can never finish (outgrows the pool)" in found.message
    assert found.message.endswith("and was not refused")
    assert found.expected == "refused with a reason"
    assert found.got.startswith("r0 waiting 0/16, r1 waiting 0/4")


def test_a_cycle_of_preemption_and_prefill_is_reported() -> None:
    config = EngineConfig(
        num_blocks=2, block_size=8, max_num_batched_tokens=4, max_model_len=16, enable_chunked_prefill=True
    )
    found = caught(broken.ReadmitsBeforeItRuns, config, Add(4, 12), Step(5), Add(8, 4), Drain())
    assert found.message == "r1 is preempted 45 times"
    assert found.expected == "at most 44 times, given the requests it lived with"


def test_tokens_given_to_another_request_are_reported() -> None:
    found = caught(broken.CrossesTokens, SMALL, Add(4, 2), Add(5, 2), Drain())
    assert found.message == "r0 finished with tokens that are not its own"
    assert found.expected != found.got


def test_a_request_run_after_its_stop_token_is_reported() -> None:
    found = caught(broken.StopsLate, SMALL, Add(4, 6, stop_after=2), Drain())
    assert found.message == "r0 has all its tokens after step 1 and is not reported as finished"
    assert found.got == "outputs [2]"


def test_an_aborted_request_that_runs_is_reported() -> None:
    found = caught(broken.RunsAborted, SMALL, Add(4, 6), Abort(0), Step())
    assert found.message == "step 0 runs r0, which was aborted"
    assert (found.expected, found.got) == ("live requests only", "r0/0 positions 0 to 3")


def test_an_abort_of_an_unknown_request_that_raises_is_reported() -> None:
    found = caught(broken.AbortRaises, SMALL, AbortEnded())
    assert found.message.startswith("abort_request raised KeyError: 'r-unknown' at ")
    assert found.got == "KeyError in step 0"


def test_a_head_of_the_queue_left_waiting_with_room_for_it_is_reported() -> None:
    found = caught(broken.AdmitsOnePerStep, SMALL, Add(4, 4), Add(5, 4), Step())
    assert found.message == "r1 heads the queue, fits, and is not admitted in step 0"
    assert found.expected == "admitted: it needs 2 blocks and 5 tokens of the budget"
    assert found.got == "7 blocks free, 1 sequences free, 28 tokens of the budget left"


def test_an_engine_that_raises_is_reported() -> None:
    found = caught(broken.AssertsFreeBlocks, TIGHT, Add(7, 9), Add(7, 9), Drain())
    assert found.message.startswith("schedule raised RuntimeError: cannot get 1 free blocks from the pool at ")
    assert found.message.endswith(" in go_on")
    assert found.expected == "the call returns"


def test_an_engine_that_spins_is_reported() -> None:
    watchdog = Watchdog(call_seconds_max=0.2, growth_bytes_max=0)
    found = Session(broken.SpinsWhenFull(TIGHT), TIGHT, watchdog=watchdog).run([Add(7, 9), Add(7, 9), Drain()])
    watchdog.stop()
    assert found[0].requirement == "PRG-8"
    assert found[0].message == "schedule raised EngineHung: no answer within the bound on a call"
    assert watchdog.stopped_at.endswith(" in victim")


def test_an_engine_that_eats_memory_is_reported() -> None:
    watchdog = Watchdog(call_seconds_max=0, growth_bytes_max=64 << 20)
    found = Session(broken.GrowsWhenFull(TIGHT), TIGHT, watchdog=watchdog).run([Add(7, 9), Add(7, 9), Drain()])
    watchdog.stop()
    assert found[0].requirement == "PRG-8"
    assert found[0].message == "schedule raised MemoryExhausted: the process grew past the bound on its memory"


# -- preemption ------------------------------------------------------------------------------------------

ONE_BLOCK_EACH = EngineConfig(num_blocks=4, block_size=64, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64)
"""The configuration of the first report: a block holds a whole sequence, and there is one for each of the batch."""


def test_a_needless_preemption_is_reported() -> None:
    found = caught(broken.WantsBlockPerSequence, ONE_BLOCK_EACH, *[Add(8, 8)] * 4, Drain())
    assert found.message == "r3 is preempted in step 1 although the running set needs 0 blocks and 0 are free"
    assert found.expected == "no preemption"
    assert found.got == "preemption 1 of r3 by recompute; the engine counted 1"


def test_a_recompute_with_room_for_everybody_at_full_length_is_reported() -> None:
    operations: list[Operation] = [*[Add(8, 8)] * 4, Drain()]
    found = violations(broken.PreemptsWithRoomForAll, ONE_BLOCK_EACH, operations)
    assert [violation.requirement for violation in found] == ["PRE-1", "PRE-2"]
    assert found[1].message == (
        "r3 is recomputed in step 1 although the pool holds all 4 running requests at their full length"
    )
    assert found[1].got == "preemption 1 of r3; 4 of 4 usable blocks would serve everybody to the end"
    alone = Session(broken.PreemptsWithRoomForAll(ONE_BLOCK_EACH), ONE_BLOCK_EACH, judge=["PRE-2"])
    assert [violation.requirement for violation in alone.run(operations)] == ["PRE-2"]
    assert violations(Miniature, ONE_BLOCK_EACH, operations) == []


def test_a_preemption_of_the_oldest_is_reported() -> None:
    found = caught(broken.PreemptsTheOldest, TIGHT, Add(7, 9), Add(7, 9), Drain())
    assert found.message == "r0 is preempted in step 2 while r1, which arrived later, keeps running"
    assert (found.expected, found.got) == ("r1 goes first", "victims r0")


def test_a_newcomer_admitted_before_a_preempted_request_is_reported() -> None:
    found = caught(broken.AdmitsBeforeThePreempted, TIGHT, Add(7, 9), Add(7, 9), Step(2), Add(3, 1), Drain())
    assert found.message == "r2 is admitted in step 3 while r1, preempted in step 2, still waits"
    assert (found.expected, found.got) == ("r1 returns first", "r2 runs")


def test_a_preemption_that_frees_nothing_is_reported() -> None:
    config = EngineConfig(
        num_blocks=4,
        block_size=4,
        max_num_seqs=2,
        max_model_len=16,
        enable_prefix_caching=True,
        scheduling_policy="priority",
    )
    first, urgent = Add(8, 4, family=1, shared_len=8, priority=1), Add(12, 4, family=1, shared_len=8)
    found = caught(broken.PreemptsForNothing, config, first, Step(), urgent, Drain())
    assert found.message == "the preemption of r0 in step 2 frees no block"
    assert found.got == "blocks [0, 1], each held by others too"


# -- fairness --------------------------------------------------------------------------------------------


def test_a_later_arrival_admitted_first_is_reported() -> None:
    config = msgspec.structs.replace(SMALL, max_num_seqs=1)
    found = caught(broken.LastComeFirstServed, config, Add(4, 2), Add(5, 2), Step())
    assert found.message == "r1 is admitted in step 0 before r0, which arrived earlier and asks for no more"
    assert found.got == "r1 (prompt 5, 0 of it cached)"


def test_a_less_urgent_request_admitted_first_is_reported() -> None:
    config = msgspec.structs.replace(SMALL, max_num_seqs=1, scheduling_policy="priority")
    found = caught(broken.IgnoresPriority, config, Add(4, 2, priority=2), Add(4, 2, priority=1), Step())
    assert found.message == "r0 of priority 2 is admitted in step 0 while r1 of priority 1 waits and fits"
    assert (found.expected, found.got) == ("r1 first (smaller is more urgent)", "r0 runs")
