"""How many requests run at once, and that nobody is computed twice."""

from __future__ import annotations

import pytest

from neuron_tests.rig import MAIN, Rig, Run, Shape
from reference_engine.config import AppendCheckName


def full_batch(rig: Rig, shape: Shape, requests: int, *, length: int = 10, max_tokens: int = 16) -> Run:
    """``requests`` requests at once, served to the end by an engine with a block for each line of the shape."""
    run = rig.run(shape)
    for number in range(requests):
        run.ask(f"r{number}", length + number % 3, max_tokens)
    run.drain()
    return run


@pytest.mark.assertion(1)
def test_at_the_batch_size_every_prompt_is_prefilled_once(rig: Rig) -> None:
    run = full_batch(rig, MAIN, MAIN.lines)
    assert (run.prefills, run.preemptions) == (MAIN.lines, 0)
    assert run.wrong() == []


@pytest.mark.assertion(1, only="emulated")
@pytest.mark.parametrize("lines", [1, 4, 8, 100, 256])
def test_no_batch_size_recomputes_anything(rig: Rig, lines: int) -> None:
    run = full_batch(rig, Shape(lines, (16,), (32,)), lines, length=5, max_tokens=4)
    assert (run.prefills, run.preemptions) == (lines, 0)
    assert [len(call.lines) for call in run.device.stats.decodes] == [lines] * 3
    assert run.wrong() == []


@pytest.mark.assertion(2)
def test_one_block_serves_one_request(rig: Rig) -> None:
    run = rig.run(num_blocks=1, max_num_seqs=1)
    run.ask("alone", 10, 12)
    run.drain()
    assert (run.prefills, len(run.device.stats.decodes), run.preemptions) == (1, 11, 0)
    assert run.wrong() == []


@pytest.mark.assertion(3)
def test_every_decode_of_a_full_batch_has_a_row_for_each(rig: Rig) -> None:
    run = full_batch(rig, MAIN, MAIN.lines, max_tokens=20)
    assert [len(call.lines) for call in run.device.stats.decodes] == [MAIN.lines] * 19


@pytest.mark.assertion(16)
def test_what_is_too_many_waits_in_order_and_starts_when_a_line_is_free(rig: Rig) -> None:
    run = rig.run()
    lengths = {"r0": 6, "r1": 9, "r2": 12, "r3": 15, "r4": 8, "r5": 3}
    for name, max_tokens in lengths.items():
        run.ask(name, 10, max_tokens)
    run.drain()
    assert run.preemptions == 0
    assert run.prefills == len(lengths)
    assert run.step_of_first_run("r4") == run.step_of_last_run("r0") + 1
    assert run.step_of_first_run("r5") == run.step_of_last_run("r1") + 1
    assert run.wrong() == []


@pytest.mark.assertion(19)
def test_throughput_does_not_collapse_at_the_batch_size(rig: Rig) -> None:
    steps: dict[int, int] = {}
    rates: dict[int, float] = {}
    for requests in (MAIN.lines - 1, MAIN.lines):
        run = full_batch(rig, MAIN, requests, max_tokens=40)
        steps[requests] = len(run.plans)
        rates[requests] = 40 * requests / sum(call.seconds for call in run.calls)
    assert steps[4] <= 1.05 * steps[3], f"{steps[4]} steps for 4 requests, {steps[3]} for 3"
    if rig.kind == "hardware":
        rig.notes["tokens_per_second"] = rates
        assert rates[4] >= 0.95 * rates[3]


@pytest.mark.assertion(27)
@pytest.mark.parametrize("lines", [100, 256])
def test_a_large_batch_runs_all_at_once(rig: Rig, lines: int) -> None:
    run = full_batch(rig, Shape(lines, (16,), (32,)), lines, length=5, max_tokens=4)
    assert max(len(call.lines) for call in run.device.stats.decodes) == lines


@pytest.mark.assertion(32)
@pytest.mark.parametrize(
    ("append_check", "num_blocks", "preempts"),
    [("exact", 4, False), ("touched", 4, True), ("touched", 5, False)],
    ids=["exact-N", "touched-N", "touched-N+1"],
)
def test_the_spare_block_is_a_workaround(
    rig: Rig, append_check: AppendCheckName, num_blocks: int, *, preempts: bool
) -> None:
    run = rig.run(append_check=append_check, num_blocks=num_blocks)
    for number in range(MAIN.lines):
        run.ask(f"r{number}", 10, 8)
    run.drain()
    assert (run.preemptions > 0) is preempts
    assert (run.prefills > MAIN.lines) is preempts
    assert run.wrong() == []
