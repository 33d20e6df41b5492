"""Every request gets its own tokens, whoever had its line before and whoever has the others now."""

from __future__ import annotations

import pytest

from neuron_tests.rig import MAIN, SAMPLING, Rig, Run, prompt
from reference_engine.runners.neuron.device import Device, Rows, best_token


@pytest.mark.assertion(4)
def test_tokens_are_those_of_hugging_face_alone_and_in_a_full_batch(rig: Rig) -> None:
    alone = rig.run()
    alone.ask("long", 20, 70)
    alone.drain()
    assert alone.wrong() == []
    full = rig.run()
    for name, length in (("long", 20), ("a", 3), ("b", 47), ("c", 90)):
        full.ask(name, length, 30)
    full.drain()
    assert full.wrong() == []
    assert full.outputs["long"][0] == alone.outputs["long"][0][:30]


def _one_after_the_other(rig: Rig, *lengths: int) -> Run:
    """Requests with prompts of these lengths, each alone on the same line."""
    run = rig.run(max_num_seqs=1, num_blocks=1)
    for number, length in enumerate(lengths):
        run.ask(f"r{number}", length, 20)
    run.drain()
    assert {line for call in run.calls for line in call.lines} == {0}
    return run


@pytest.mark.assertion(5)
def test_a_short_request_sees_nothing_of_the_long_one_before_it(rig: Rig) -> None:
    assert _one_after_the_other(rig, 100, 5).wrong() == []


@pytest.mark.assertion(6)
def test_a_long_request_is_whole_on_the_line_of_a_short_one(rig: Rig) -> None:
    assert _one_after_the_other(rig, 5, 100).wrong() == []


@pytest.mark.assertion(23)
def test_the_same_workload_gives_the_same_tokens_twice(rig: Rig) -> None:
    outputs: list[dict[str, list[list[int]]]] = []
    for _ in range(2):
        run = rig.run()
        for number in range(6):
            run.ask(f"r{number}", 4 + 7 * number, 25)
        outputs.append(run.drain())
    assert outputs[0] == outputs[1]


@pytest.mark.assertion(24)
def test_each_request_of_a_batch_stops_at_its_own_length(rig: Rig) -> None:
    run = rig.run()
    for name, length, max_tokens in (("a", 30, 3), ("b", 4, 25), ("c", 11, 1), ("d", 60, 14)):
        run.ask(name, length, max_tokens)
    run.drain()
    assert run.wrong() == []


def _decoded(device: Device, steps: int) -> list[Rows]:
    """The rows of a prefill on two of the lines and of ``steps`` decodes of fixed tokens."""
    prompts = [prompt("x", 9), prompt("y", 21)]
    first = device.prefill([0, 2], prompts)
    return [first, *(device.decode([0, 2], prompt(f"step {step}", 2), [9 + step, 21 + step]) for step in range(steps))]


@pytest.mark.assertion(30)
def test_sampling_on_the_device_gives_the_best_token_of_the_host(rig: Rig) -> None:
    logits = _decoded(rig.device(MAIN), 8)
    sampled = _decoded(rig.device(SAMPLING), 8)
    assert [[int(row[0]) for row in rows] for rows in sampled] == [[best_token(row) for row in rows] for rows in logits]


@pytest.mark.assertion(31)
def test_a_reset_brings_the_first_answers_back(rig: Rig) -> None:
    answers: list[tuple[Rows, list[Rows]]] = []
    for _ in range(2):
        device = rig.device()
        # Position 3 of a line that was never written: what it attends to are zeros, or what was left behind.
        unwritten = device.decode([1], [7], [3])
        answers.append((unwritten, _decoded(device, 4)))
    assert answers[0] == answers[1]
