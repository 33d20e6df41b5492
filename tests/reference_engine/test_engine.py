"""The engine's front: configuration, refusals, aborts in every state, budgets, the pipeline, the window, forks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from reference_engine.config import ConfigError
from reference_engine.engine import RequestError
from reference_engine.request import Request, Status


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_blocks": 0}, "num_blocks = 0: must be an integer of at least 1"),
        ({"block_size": True}, "block_size = True: must be an integer"),
        ({"max_model_len": 1}, "max_model_len = 1: must be at least 2"),
        ({"watermark": 1.0}, r"watermark = 1.0: must be in \[0, 1\)"),
        ({"append_check": "some"}, "append_check = 'some': must be one of exact, touched, per_sequence, strict"),
        ({"free_list": "any"}, "free_list = 'any': must be one of first-in, last-in, from-the-end"),
        ({"null_block": 1}, "null_block = 1: must be true or false"),
        ({"num_blocks": 1, "null_block": True}, "num_blocks = 1: must be at least 2 with a null block"),
        ({"sliding_window": 0}, "sliding_window = 0: must be at least 1"),
        ({"sliding_window": 8}, "sliding_window = 8: needs null_block"),
        ({"max_num_batched_tokens": 31}, "max_num_batched_tokens = 31: must be at least max_model_len"),
        ({"preemption_mode": "swap"}, "num_swap_blocks = 0: must be at least 1"),
        ({"append_check": "per_sequence", "num_lookahead_slots": 2}, "num_lookahead_slots = 2: must be 0"),
        ({"max_chunk_tokens": 4}, "max_chunk_tokens = 4: needs enable_chunked_prefill"),
    ],
)
def test_a_configuration_is_refused_with_field_value_and_rule(
    drive: Callable[..., Any], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        drive(**fields)


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "fields", "message"),
    [
        (0, 1, {}, "the prompt is empty"),
        (1, 0, {}, "max_tokens = 0"),
        (1, 1, {"n": 0}, "n = 0 must be at least 1"),
        (32, 1, {}, "32 tokens leaves no room for an output token under max_model_len = 32"),
        (33, 1, {}, "33 tokens leaves no room"),
        (1, 1, {"n": 5}, "n = 5 is more than max_num_seqs = 4"),
        (20, 6, {}, "1 x 26 tokens can need 7 blocks of 4, and one request can have 6 of 8"),
        (20, 99, {}, "1 x 32 tokens can need 8 blocks"),
        (9, 4, {"n": 3}, "3 x 13 tokens can need 9 blocks"),
    ],
)
def test_what_can_never_fit_is_refused_and_changes_nothing(
    drive: Callable[..., Any], prompt_len: int, max_tokens: int, fields: dict[str, Any], message: str
) -> None:
    driver = drive(null_block=True, watermark=0.2)
    with pytest.raises(RequestError, match=message):
        driver.add("r", prompt_len, max_tokens, **fields)
    assert not driver.engine.requests
    assert not driver.engine.scheduler.waiting


@pytest.mark.parametrize(("prompt_len", "max_tokens", "outputs"), [(31, 5, 1), (30, 5, 2), (5, 3, 3), (31, 1, 1)])
def test_a_request_gets_exactly_its_tokens(
    drive: Callable[..., Any], prompt_len: int, max_tokens: int, outputs: int
) -> None:
    driver = drive()
    driver.add("r", prompt_len, max_tokens)
    driver.drain()
    assert len(driver.finished["r"].outputs[0]) == outputs
    assert driver.finished["r"].reason == "length"


def test_a_request_that_fills_the_pool_but_for_its_last_token_is_served(drive: Callable[..., Any]) -> None:
    driver = drive(num_blocks=1, max_model_len=5)
    driver.add("r", 4, 1)  # five tokens, of which four are ever computed
    driver.drain()
    assert len(driver.finished["r"].outputs[0]) == 1


def test_an_id_is_refused_while_it_is_live_and_taken_again_afterwards(drive: Callable[..., Any]) -> None:
    driver = drive()
    driver.add("r", 3, 2)
    with pytest.raises(RequestError, match="a request of this id is live"):
        driver.add("r", 3, 2)
    driver.drain()
    driver.add("r", 4, 3)
    driver.drain()
    assert len(driver.finished["r"].outputs[0]) == 3


# -- aborts ----------------------------------------------------------------------------------------------


def abort_and_drain(driver: Any, name: str) -> None:
    """Abort twice; everybody else finishes, and the driver's audits see to the books."""
    driver.engine.abort_request(name)
    driver.engine.abort_request(name)
    driver.drain()
    assert name not in driver.finished
    assert driver.pool.available == driver.config.usable_blocks


def test_abort_while_waiting_running_and_amid_a_prefill(drive: Callable[..., Any]) -> None:
    driver = drive(max_num_seqs=2, max_num_batched_tokens=4, enable_chunked_prefill=True)
    for number, name in enumerate(["runs", "prefills", "waits"]):
        driver.add(name, 6, 4, arrival=number)
    driver.step()
    driver.step()
    statuses = [(r.status, r.live[0].scheduled) for r in driver.engine.requests.values()]
    assert statuses == [(Status.RUNNING, 6), (Status.RUNNING, 2), (Status.WAITING, 0)]
    for name in ("waits", "prefills"):
        driver.engine.abort_request(name)
        driver.audit()
    abort_and_drain(driver, "runs")


@pytest.mark.parametrize(("mode", "status"), [("recompute", Status.WAITING), ("swap", Status.SWAPPED)])
def test_abort_of_a_preempted_request(drive: Callable[..., Any], mode: str, status: Status) -> None:
    driver = drive(num_blocks=4, max_model_len=16, preemption_mode=mode, num_swap_blocks=4)
    driver.add("old", 6, 10)
    victim = driver.add("young", 6, 10, arrival=1)
    while not driver.preempted:
        driver.step()
    assert victim.status is status
    abort_and_drain(driver, "young")
    assert driver.engine.blocks.host.available == 4


def test_abort_between_schedule_and_commit(drive: Callable[..., Any]) -> None:
    driver = drive()
    driver.add("r", 6, 4)
    plan = driver.engine.schedule()
    driver.engine.abort_request("r")
    driver.audit()
    assert driver.pool.available == 8  # without a pipeline nobody gets them before the step is done
    assert driver.engine.commit(plan.step, {("r", 0): 7}) == []
    driver.audit()


def test_abort_of_a_finished_and_of_an_unknown_request(drive: Callable[..., Any]) -> None:
    driver = drive()
    driver.add("r", 3, 1)
    driver.drain()
    for name in ("r", "never seen"):
        driver.engine.abort_request(name)
    driver.audit()
    assert list(driver.finished) == ["r"]


# -- budgets and order -----------------------------------------------------------------------------------


def test_sequences_take_turns_when_the_budget_is_smaller_than_the_running_set(drive: Callable[..., Any]) -> None:
    driver = drive(num_blocks=16, max_num_batched_tokens=2, enable_chunked_prefill=True)
    driver.add("four", 2, 12, n=4)
    driver.step()
    for _ in range(5):
        ran = [scheduled.sequence.index for _ in range(2) for scheduled in driver.step().sequences]
        assert sorted(ran) == [0, 1, 2, 3]


def test_turns_are_taken_within_one_priority_only(drive: Callable[..., Any]) -> None:
    driver = drive(num_blocks=16, max_num_batched_tokens=3, enable_chunked_prefill=True, scheduling_policy="priority")
    driver.add("low", 1, 9, priority=1, n=2)
    driver.add("high", 1, 9, priority=0, n=2, arrival=1)
    driver.step()
    ran = [[(s.sequence.request.request_id, s.sequence.index) for s in driver.step().sequences] for _ in range(4)]
    assert all({("high", 0), ("high", 1)} < set(step) for step in ran)
    assert [index for step in ran for name, index in step if name == "low"] == [0, 1, 0, 1]


def test_decodes_are_not_held_up_by_a_long_prefill(drive: Callable[..., Any]) -> None:
    driver = drive(max_num_batched_tokens=4, enable_chunked_prefill=True)
    driver.add("decodes", 3, 8)
    driver.step()
    driver.add("long", 20, 1, arrival=1)
    chunks = [[s.num_tokens for s in driver.step().sequences] for _ in range(6)]
    assert chunks == [[1, 3]] * 6


def test_several_prefills_run_in_chunks_at_once(drive: Callable[..., Any]) -> None:
    driver = drive(max_num_batched_tokens=9, max_chunk_tokens=3, enable_chunked_prefill=True)
    for number in range(2):
        driver.add(f"r{number}", 10, 1, arrival=number)
    assert [(s.first, s.num_tokens) for s in driver.step().sequences] == [(0, 3), (0, 3)]
    assert [(s.first, s.num_tokens) for s in driver.step().sequences] == [(3, 3), (3, 3)]
    driver.drain()


def test_without_chunks_a_step_is_prefills_or_decodes(drive: Callable[..., Any]) -> None:
    driver = drive(num_blocks=16)
    for number in range(3):
        driver.add(f"r{number}", 4, 6, arrival=number)
        driver.step()
    driver.drain()
    for plan in driver.plans:
        assert len({scheduled.first == 0 for scheduled in plan.sequences}) <= 1


def test_the_running_set_counts_every_sequence(drive: Callable[..., Any]) -> None:
    driver = drive(num_blocks=16, max_num_seqs=3)
    driver.add("pair", 4, 3, n=2)
    driver.add("other", 4, 3, n=2, arrival=1)
    driver.step()
    assert [r.request_id for r in driver.engine.scheduler.running] == ["pair"]
    driver.drain()
    assert len(driver.finished) == 2


def test_the_watermark_is_left_free_by_admissions_and_used_by_growth(drive: Callable[..., Any]) -> None:
    driver = drive(num_blocks=4, max_model_len=16, watermark=0.25)
    driver.add("first", 4, 8)
    driver.add("second", 8, 4, arrival=1)
    driver.add("third", 4, 8, arrival=2)
    driver.step()
    assert [r.request_id for r in driver.engine.scheduler.waiting] == ["third"]
    driver.step()
    assert driver.pool.available == 0 or driver.preempted
    driver.drain()


@pytest.mark.parametrize("check", ["exact", "touched"])
def test_lookahead_slots_end_with_the_sequence(drive: Callable[..., Any], check: str) -> None:
    driver = drive(num_lookahead_slots=12, append_check=check)
    driver.add("alone", 3, 4)
    driver.step()
    driver.step()
    assert len(driver.tables["alone", 0]) == 2  # positions 0 to 5 can be computed, and no more
    driver.drain()


def test_lookahead_slots_come_from_what_is_left(drive: Callable[..., Any]) -> None:
    driver = drive(num_blocks=5, max_model_len=16, num_lookahead_slots=8)
    driver.add("old", 3, 13)
    driver.add("young", 3, 2, arrival=1)
    driver.step()
    assert [len(driver.tables[name, 0]) for name in ("old", "young")] == [3, 1]
    driver.add("next", 4, 1, arrival=2)
    assert driver.step().sequences[0].sequence.request.request_id == "next"
    assert not driver.preempted
    driver.drain()


# -- forks, window, pipeline -----------------------------------------------------------------------------


def test_a_fork_copies_before_it_writes_and_the_last_holder_writes_in_place(drive: Callable[..., Any]) -> None:
    driver = drive()
    driver.add("three", 6, 3, n=3)
    driver.step()
    shared = driver.engine.requests["three"].live[0].table[1]
    assert driver.pool.refs[shared] == 3
    plan = driver.step()
    assert [(move.kind, move.src) for move in plan.moves] == [("copy", shared)] * 2
    assert sorted(driver.tables["three", index][1] for index in range(3)) == sorted(
        [shared, *(move.dst for move in plan.moves)]
    )
    driver.drain()


def test_sequences_of_a_request_end_one_by_one(drive: Callable[..., Any]) -> None:
    driver = drive()
    request = driver.add("pair", 4, 5, n=2)
    driver.step()
    request.stop_token = request.live[0].tokens[-1]  # too late for sequence 0's first token
    plan = driver.engine.schedule()
    driver._run(plan)
    tokens = {("pair", 0): request.stop_token, ("pair", 1): 99}
    assert driver.engine.commit(plan.step, tokens) == []
    assert request.width == 1
    assert driver.engine.scheduler.running_sequences == 1
    driver.audit()


def test_blocks_out_of_the_window_become_the_null_block(drive: Callable[..., Any]) -> None:
    driver = drive(sliding_window=6, null_block=True)
    driver.add("r", 14, 5)
    driver.step()
    assert 0 not in driver.tables["r", 0]
    driver.step()  # position 14 reads 9 to 14
    assert driver.tables["r", 0][:2] == [0, 0]
    assert 0 not in driver.tables["r", 0][2:]
    assert driver.pool.available == 7 - 2
    driver.drain()


def test_the_window_makes_room_before_anybody_is_preempted(drive: Callable[..., Any]) -> None:
    driver = drive(num_blocks=5, max_model_len=16, sliding_window=4, null_block=True)
    driver.add("old", 8, 8)
    driver.add("young", 8, 8, arrival=1)
    driver.drain()
    assert not driver.preempted


def test_requests_of_one_arrival_are_told_apart(drive: Callable[..., Any]) -> None:
    driver = drive(max_num_seqs=1)
    for name in ("first", "second", "third"):
        driver.add(name, 4, 2)
    driver.engine.abort_request("second")
    driver.drain()
    assert list(driver.finished) == ["first", "third"]


def test_whole_prompts_share_the_budget_by_what_they_compute(drive: Callable[..., Any]) -> None:
    driver = drive(num_blocks=24, max_num_batched_tokens=32, enable_prefix_caching=True)
    prompt = list(range(31))
    driver.add("first", prompt, 1)
    driver.drain()
    for name in ("again", "and again"):
        driver.add(name, prompt, 1)
    assert [(s.first, s.num_tokens) for s in driver.step().sequences] == [(28, 3), (28, 3)]


def test_a_pipeline_schedules_ahead_but_never_past_the_last_token(drive: Callable[..., Any]) -> None:
    driver = drive(pipeline_depth=3)
    driver.add("r", 4, 3)
    spans = [[(s.first, s.num_tokens) for s in driver.engine.schedule().sequences] for _ in range(3)]
    assert spans == [[(0, 4)], [(4, 1)], [(5, 1)]]
    with pytest.raises(RuntimeError, match="3 steps are in flight, pipeline_depth = 3"):
        driver.engine.schedule()
    for step in (1, 3):  # behind another one, and never scheduled
        with pytest.raises(ValueError, match=f"step {step} is committed out of order"):
            driver.engine.commit(step, {})
    driver.engine.commit(0, {("r", 0): 7})
    assert driver.engine.schedule().sequences == []  # the third output is on its way


def test_blocks_in_flight_are_not_handed_out_before_their_step_is_committed(drive: Callable[..., Any]) -> None:
    driver = drive(num_blocks=2, max_model_len=8, pipeline_depth=2, max_num_seqs=1)
    driver.add("stops", 3, 5, stop_token=7)
    first, second = driver.engine.schedule(), driver.engine.schedule()
    driver.add("next", 7, 1, arrival=1)
    (finished,) = driver.engine.commit(first.step, {("stops", 0): 7})
    assert finished.reason == "stop"
    driver.audit()
    assert driver.pool.available == 1
    assert driver.engine.schedule().sequences == []
    assert driver.engine.commit(second.step, {("stops", 0): 9}) == []
    driver.audit()
    assert driver.pool.available == 2
    driver.drain()
    assert list(driver.finished) == ["next"]


def test_nobody_is_preempted_while_a_step_in_flight_uses_its_blocks(drive: Callable[..., Any]) -> None:
    driver = drive(num_blocks=4, max_model_len=16, pipeline_depth=2)
    driver.add("old", 6, 10)
    driver.add("young", 6, 10, arrival=1)
    in_flight: list[tuple[str, int]] = []
    while not driver.preempted:
        in_flight = [(r.request_id, s.in_flight) for r in driver.engine.requests.values() for s in r.live]
        driver.step()
    assert ("young", 0) in in_flight
    assert driver.preempted == ["young"]
    driver.drain()


def test_nobody_is_preempted_while_blocks_come_free_with_a_step_in_flight(drive: Callable[..., Any]) -> None:
    driver = drive(num_blocks=3, max_model_len=8, pipeline_depth=2)
    driver.add("stops", 2, 5, stop_token=1)
    driver.add("old", 3, 5, arrival=1)
    driver.add("young", 2, 5, arrival=2)
    engine = driver.engine

    def scheduled() -> list[str]:
        plan = engine.schedule()
        assert not plan.preempted
        return [s.sequence.request.request_id for s in plan.sequences]

    everybody = ["stops", "old", "young"]
    assert scheduled() == everybody
    assert scheduled() == everybody
    engine.commit(0, {(name, 0): 9 for name in everybody})
    assert scheduled() == ["stops"]  # the next needs a block, and the victim is in flight
    engine.commit(1, {("stops", 0): 1, ("old", 0): 9, ("young", 0): 9})
    assert scheduled() == []  # the victim is at rest, but a block is about to come free
    engine.commit(2, {("stops", 0): 9})
    assert scheduled() == ["old", "young"]


def test_a_step_in_flight_still_reads_what_leaves_the_window(drive: Callable[..., Any]) -> None:
    driver = drive(sliding_window=4, null_block=True, pipeline_depth=2)
    driver.add("r", 8, 6)
    driver.engine.schedule()
    driver.engine.schedule()
    sequence = driver.engine.requests["r"].live[0]
    assert 0 not in sequence.table  # nothing is committed, so nothing has left the window
    driver.engine.commit(0, {("r", 0): 5})
    driver.engine.schedule()
    assert sequence.table[0] == 0


def test_a_request_can_be_made_with_every_field() -> None:
    request = Request("r", [1, 2], 3, n=2, priority=1, arrival=4, stop_token=5, salt="s", adapter="a")
    assert request.identity == ("s", "a")
    assert request.width == 2
    assert request.live[0].output == []
