"""Every DEV requirement: broken on purpose, and reported for what it is."""

from __future__ import annotations

import random

import msgspec

from conformance.operations import Abort, Add, Drain, Operation, Step
from conformance.protocol import EngineConfig
from conformance.session import Session
from conformance.violations import Violation

from . import broken_on_device as broken
from . import drive
from .drive import violations
from .on_device import OnDevice

DEVICE = EngineConfig(
    num_blocks=3, block_size=16, max_num_seqs=3, max_num_batched_tokens=48, max_model_len=16, fixed_batch=True
)
PAIR = msgspec.structs.replace(DEVICE, num_blocks=2, max_num_seqs=2)


def caught(kind: type[OnDevice], config: EngineConfig, *operations: Operation) -> Violation:
    assert violations(OnDevice, config, operations) == []
    return drive.caught(kind, config, *operations)


# -- lines -----------------------------------------------------------------------------------------------


def test_a_line_that_the_device_does_not_have_is_reported() -> None:
    found = caught(broken.CountsLinesFromOne, PAIR, Add(3, 4), Add(4, 4), Step())
    assert found.message == "in step 0 a prefill runs r1 on line 2, which the device does not have"
    assert found.expected == "lines 0 to 1, each once in a call"
    assert found.got == "lines [1, 2] for r0, r1"


def test_a_line_given_to_two_is_reported_in_their_first_common_call() -> None:
    found = caught(broken.ForgetsWhoHasLine, PAIR, Add(3, 4), Step(), Add(4, 4), Step(2))
    assert found.message == "in step 2 a decode runs r0, r1 on line 1"


def test_a_line_that_a_decode_leaves_out_is_reported_when_it_is_used() -> None:
    found = caught(broken.PrefillsBeforeDecodes, DEVICE, Add(3, 6), Step(), Add(4, 4), Step(2))
    assert found.message == (
        "in step 2 r1 decodes at position 4 on line 1, whose position 0 was overwritten in step 1, "
        "when a decode of r0 left it out"
    )
    assert found.expected == "in every decode since its prefill, or prefilled again first"


def test_a_damaged_line_that_nobody_uses_again_harms_nobody() -> None:
    """The request is aborted, or has got its only token."""
    start: list[Operation] = [Add(3, 6), Step()]
    assert violations(broken.PrefillsBeforeDecodes, DEVICE, [*start, Add(4, 4), Step(), Abort(1), Drain()]) == []
    assert violations(broken.PrefillsBeforeDecodes, DEVICE, [*start, Add(4, 1), Drain()]) == []


def test_a_damaged_line_that_is_prefilled_again_is_whole() -> None:
    operations: list[Operation] = [Add(3, 6), Step(), Add(4, 4), Step(), Abort(1), Step(), Add(5, 1), Drain()]
    assert violations(broken.PrefillsBeforeDecodes, DEVICE, operations) == []


class RunsOutOfBlocks(OnDevice):
    """Takes the last block from the latest job in step 2, as an engine that counts too many does."""

    def need(self, job: object) -> int:
        return super().need(job) + (self.steps == 3 and len(self.running) > 1)  # type: ignore[arg-type]


def test_a_request_that_comes_back_without_a_prefill_is_reported() -> None:
    class Both(broken.DecodesWhoReturns, RunsOutOfBlocks):
        pass

    unharmed = [one.requirement for one in violations(RunsOutOfBlocks, PAIR, [Add(3, 6), Add(4, 6), Drain()])]
    assert not {one for one in unharmed if one.startswith("DEV")}
    found = violations(Both, PAIR, [Add(3, 6), Add(4, 6), Drain()])[-1]
    assert found.requirement == "DEV-2"
    assert found.message == (
        "in step 3 r1 decodes at position 5 on line 1, whose position 0 was overwritten in step 2, "
        "when a decode of r0 left it out"
    )


def test_positions_that_were_never_prefilled_are_reported() -> None:
    found = caught(broken.DecodesPastWhatItHas, DEVICE, Add(4, 4), Step(2))
    assert found.message == "in step 1 r0 decodes at position 4 on line 0, which holds positions 0 to 2"


# -- rows, lengths and shapes ----------------------------------------------------------------------------


def test_rows_that_come_back_by_line_are_reported() -> None:
    operations = (Add(3, 2), Add(4, 6), Add(5, 6), Step(2), Add(6, 4), Step(2))
    found = caught(broken.TakesRowsInOrderOfLines, DEVICE, *operations)
    assert found.message == "in step 3 the decode gives r1's row to r3"
    assert (found.expected, found.got) == ("rows for r1, r2, r3", "r3, r1, r2, on lines [1, 2, 0]")


def test_a_prompt_of_one_token_that_ran_as_a_decode_is_reported_by_its_own_name() -> None:
    found = caught(broken.HandsOverOneToken, DEVICE, Add(3, 6), Step(), Add(1, 4), Step(2))
    assert found.message == (
        "in step 2 r0 decodes at position 4 on line 0, whose position 0 was overwritten in step 1, "
        "when the one-token prompt of r1 ran as a decode"
    )


def test_a_prompt_of_one_token_harms_nobody_when_it_is_alone() -> None:
    assert violations(broken.HandsOverOneToken, DEVICE, [Add(1, 6), Drain()]) == []


def test_a_length_that_no_bucket_holds_is_reported() -> None:
    found = caught(broken.CompiledTooLittle, DEVICE, Add(9, 2), Step())
    assert found.message == "in step 0 the prefill of r0 needs a bucket of 9 tokens"
    assert found.expected == "at most 8, the largest there is"
    found = caught(broken.CompiledTooLittle, DEVICE, Add(7, 4), Drain())
    assert found.message == "in step 2 the decode of r0 needs a bucket of 9 tokens"


def test_a_graph_compiled_after_start_up_is_reported_and_the_session_goes_on() -> None:
    operations: list[Operation] = [Add(3, 2), Drain(), Add(4, 2), Drain()]
    found = caught(broken.CompilesOnDemand, DEVICE, *operations)
    assert found.message == "in step 0 the prefill of r0 makes the device compile"
    assert found.got == "1 compiled for width 3, last positions [2]"
    assert len(violations(broken.CompilesOnDemand, DEVICE, operations)) == 1


# -- the clean one ---------------------------------------------------------------------------------------


def test_the_clean_miniature_on_a_device_is_never_blamed() -> None:
    behaviours: set[str] = set()
    for seed in range(40):
        rng = random.Random(seed)
        length, batch = rng.choice((8, 16, 24)), rng.randint(1, 4)
        config = EngineConfig(
            num_blocks=rng.randint(1, batch + 1), block_size=length, max_num_seqs=batch,
            max_num_batched_tokens=batch * length, max_model_len=length, fixed_batch=True,
        )  # fmt: skip
        session = Session(OnDevice(config), config)
        assert session.run(drive.random_operations(rng, 60, config)) == [], f"seed {seed}"
        behaviours |= session.ledger.behaviours.keys()
    assert {
        "device: decode in another bucket",
        "device: full batch, lines out of order",
        "device: line used again",
        "device: one-token prompt",
        "device: prompt fills its bucket",
    } <= behaviours
