"""Lines of the device: which are named in a call, in what order, and what becomes of those that are not."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from neuron_tests import probe
from neuron_tests.rig import MAIN, Rig, Run
from reference_engine.runners.neuron.device import DeviceCall
from reference_engine.runners.neuron.lines import LineOrder, from_the_middle, highest_first

# -------------------------------------------------------------------------------------------------- invariants


def out_of_range(calls: Iterable[DeviceCall], lines: int) -> list[DeviceCall]:
    """Calls that name a line that does not exist, or one twice."""
    return [call for call in calls if len({line for line in call.lines if 0 <= line < lines}) != len(call.lines)]


def decoded_after_omission(calls: Iterable[DeviceCall]) -> list[tuple[int, DeviceCall]]:
    """Decodes of a line that an earlier decode left out, with no prefill in between: position 0 is not its own."""
    spoilt: set[int] = set()
    seen: set[int] = set()
    found: list[tuple[int, DeviceCall]] = []
    for call in calls:
        if call.route == "prefill":
            spoilt -= set(call.lines)
        else:
            found += [(line, call) for line in call.lines if line in spoilt]
            spoilt |= seen - set(call.lines)
        seen |= set(call.lines)
    return found


def narrow_prefills(calls: Iterable[DeviceCall]) -> list[DeviceCall]:
    """Prompts handed over in calls of width 1, which the device takes for decodes."""
    return [call for call in calls if call.route == "prefill" and call.width == 1]


# ------------------------------------------------------------------------------------------------------- tests


@pytest.mark.assertion(7)
def test_line_numbers_exist_and_differ_whatever_the_block_ids(rig: Rig) -> None:
    run = rig.run(num_blocks=MAIN.lines + 1, free_list="from-the-end")
    for number in range(6):
        run.ask(f"r{number}", 8, 4 + number)
    run.drain()
    blocks = {block for plan in run.plans for one in plan.sequences for block in one.sequence.table}
    assert run.calls
    assert out_of_range(run.calls, MAIN.lines) == [], f"blocks in use at the end: {sorted(blocks)}"
    assert run.wrong() == []


@pytest.mark.assertion(8)
@pytest.mark.parametrize("order", [highest_first, from_the_middle], ids=["descending", "mixed"])
def test_a_full_batch_in_any_order_of_lines_returns_to_its_requests(rig: Rig, order: LineOrder) -> None:
    run = rig.run(line_order=order)
    for number in range(MAIN.lines):
        run.ask(f"r{number}", 6 + 5 * number, 12)
    run.step()
    assert [run.lines[f"r{number}"] for number in range(MAIN.lines)] != list(range(MAIN.lines))
    run.drain()
    assert {len(call.lines) for call in run.device.stats.decodes} == {MAIN.lines}
    assert run.wrong() == []
    rig.notes["row_order"] = probe.row_order(rig.device())


@pytest.mark.assertion(9)
def test_a_one_token_prompt_changes_nobody_else(rig: Rig) -> None:
    run = rig.run()
    for number in range(3):
        run.ask(f"r{number}", 9 + number, 20)
    for _ in range(4):
        run.step()
    run.ask("one", 1, 10)
    run.drain()
    assert run.wrong() == []
    rig.notes["one_token_call_damages"] = probe.one_token_call_damages(rig.device())


@pytest.mark.assertion(11)
def test_leaving_out_a_live_line_damages_it(rig: Rig) -> None:
    damaged = probe.omission_damages(rig.device())
    rig.notes["omitted_line_damaged"] = damaged
    assert damaged, "a line left out of a decode kept its position 0: the device has changed, and DEV-2 can be dropped"


@pytest.mark.assertion(10)
@settings(  # no shrinking: on a device each example costs hundreds of calls, and the invariants name the one
    max_examples=20,
    deadline=None,
    derandomize=True,
    database=None,
    report_multiple_bugs=False,
    phases=(Phase.generate,),
)
@given(
    jobs=st.lists(
        st.tuples(st.integers(1, 40), st.integers(1, 12), st.integers(0, 3), st.booleans()), min_size=4, max_size=9
    )
)
def test_every_live_line_is_in_every_decode(rig: Rig, jobs: list[tuple[int, int, int, bool]]) -> None:
    run = _served(rig, jobs)
    assert decoded_after_omission(run.calls) == []
    assert out_of_range(run.calls, MAIN.lines) == []
    assert narrow_prefills(run.calls) == []
    assert run.lines.free == tuple(range(MAIN.lines))
    assert run.wrong() == []


def _served(rig: Rig, jobs: list[tuple[int, int, int, bool]]) -> Run:
    """Jobs of (prompt length, output tokens, steps until the next one, abort the one before)."""
    run = rig.run()
    for number, (length, max_tokens, steps, abort) in enumerate(jobs):
        run.ask(f"r{number}", length, max_tokens)
        if abort:
            run.abort(f"r{number - 1}")
        for _ in range(steps):
            if run.busy:
                run.step()
    run.drain()
    return run


@pytest.mark.assertion(17)
def test_the_line_of_an_aborted_request_is_free_in_the_next_step(rig: Rig) -> None:
    run = rig.run()
    for number in range(MAIN.lines):
        run.ask(f"r{number}", 10 + number, 18)
    for _ in range(5):
        run.step()
    line = run.lines["r1"]
    run.abort("r1")
    run.ask("next", 30, 12)
    run.step()
    assert run.lines["next"] == line
    run.drain()
    assert run.prefills == MAIN.lines + 1
    assert run.wrong() == []


@pytest.mark.assertion(18)
def test_an_abort_while_waiting_or_in_the_step_of_the_prefill_leaks_no_line(rig: Rig) -> None:
    run = rig.run()
    run.ask("waiting", 10, 8)
    run.abort("waiting")
    for name in ("planned", "prefilled"):
        run.ask(name, 10, 8)
    plan = run.engine.schedule()
    run.abort("planned")
    sampled = run.runner.execute(plan)
    run.abort("prefilled")
    run.engine.commit(plan.step, sampled)
    for number in range(MAIN.lines):
        run.ask(f"r{number}", 10, 8)
    plan = run.step()
    assert len(plan.sequences) == MAIN.lines
    run.drain()
    assert run.lines.free == tuple(range(MAIN.lines))
    assert run.wrong() == []
