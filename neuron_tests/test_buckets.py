"""Prompts and sequences at the sizes the graphs were compiled for, and beyond."""

from __future__ import annotations

import pytest

from neuron_tests.rig import BUCKETS, MAIN, Rig
from reference_engine.engine import RequestError


@pytest.mark.assertion(12)
@pytest.mark.parametrize(
    "lengths",
    [(63,), (64,), (65,), (127,), (128,), (40, 64), (64, 70), (90, 128)],
    ids=lambda lengths: "-".join(map(str, lengths)),
)
def test_prompts_around_the_size_of_a_bucket_are_right(rig: Rig, lengths: tuple[int, ...]) -> None:
    run = rig.run(BUCKETS)
    for number, length in enumerate(lengths):
        run.ask(f"r{number}", length, 5)
    run.drain()
    assert run.calls[0].width == max(lengths), "one call for all, as it is the longest that decides on the padding"
    assert run.wrong() == []


@pytest.mark.assertion(13)
def test_decoding_from_one_bucket_into_the_next_is_right(rig: Rig) -> None:
    run = rig.run(BUCKETS)
    run.ask("crosses", 120, 24)
    run.ask("stays", 30, 24)
    run.drain()
    assert max(max(call.positions) for call in run.calls) > BUCKETS.tokens[0]
    assert run.wrong() == []


@pytest.mark.assertion(14)
def test_a_prompt_beyond_the_buckets_is_refused_and_serving_goes_on(rig: Rig) -> None:
    run = rig.run(BUCKETS)
    run.ask("before", 12, 10)
    run.step()
    with pytest.raises(RequestError, match=r"prompt has 129 tokens and the largest context bucket 128"):
        run.ask("too long", 129, 4)
    run.ask("after", 128, 4)
    run.drain()
    assert run.wrong() == []


@pytest.mark.assertion(15)
def test_a_sequence_fills_its_line_to_the_last_position(rig: Rig) -> None:
    full = MAIN.tokens[-1]
    run = rig.run()
    run.ask("full", full, 50)
    run.ask("one left", full - 1, 50)
    with pytest.raises(RequestError, match=f"{full + 1}"):
        run.ask("one too many", full + 1, 50)
    run.drain()
    assert {name: len(output) for name, (output,) in run.outputs.items()} == {"full": 1, "one left": 2}
    assert max(max(call.positions) for call in run.calls) == full - 1
    assert run.wrong() == []
