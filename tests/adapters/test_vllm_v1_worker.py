"""The model runner's input batch follows the scheduler's diffs and nothing else. No vLLM is needed to show it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from conformance.adapters._vllm_v1_worker import InputBatch
from conformance.protocol import BlockMove, EngineFault, Sampled, SequencePlan

PROMPT = [5, 6, 7, 8, 9]


class Runner:
    """An input batch that is told one step after the other. Fields not given are those of an idle step."""

    def __init__(self, *, runner: str = "v1", is_async: bool = False, window: int | None = None) -> None:
        self.inputs = InputBatch(runner=runner, is_async=is_async, null_block=0, windows=(window,), sizes=(2,))
        self.moves: list[BlockMove] = []

    def step(self, tokens: dict[str, int], sampled: int | None = None, **fields: Any) -> dict[str, SequencePlan]:
        """Run a step of ``tokens`` per request; ``sampled`` is the token of whoever samples, once it is over."""
        plans: list[SequencePlan] = []
        self.moves = []
        output = {
            "finished_req_ids": set(),
            "preempted_req_ids": None,
            "scheduled_new_reqs": [],
            "scheduled_cached_reqs": cached(),
            "scheduled_spec_decode_tokens": {},
            "num_scheduled_tokens": tokens,
        } | fields
        sampling = self.inputs.take(SimpleNamespace(**output), plans, self.moves)
        if sampled is not None:
            self.inputs.commit(sampling, {(one.request_id, 0): Sampled([sampled]) for one in sampling})
        return {plan.request_id: plan for plan in plans}


def new(name: str, blocks: list[int], computed: int = 0, prefill: list[int] | None = None) -> Any:
    return SimpleNamespace(
        req_id=name,
        prompt_token_ids=PROMPT,
        prefill_token_ids=prefill,
        block_ids=(blocks,),
        num_computed_tokens=computed,
    )


def cached(*rows: tuple[str, list[int] | None, int, int], resumed: str = "", all_tokens: Any = None) -> Any:
    """Rows of request, blocks, positions computed, outputs known."""
    return SimpleNamespace(
        req_ids=[row[0] for row in rows],
        new_block_ids=[None if row[1] is None else (row[1],) for row in rows],
        new_token_ids=[],
        num_computed_tokens=[row[2] for row in rows],
        num_output_tokens=[row[3] for row in rows],
        resumed_req_ids={resumed} if resumed else set(),
        all_token_ids=all_tokens or {},
    )


def test_blocks_are_appended_and_the_token_of_the_last_step_is_run() -> None:
    runner = Runner()
    (plan,) = runner.step({"a": 5}, 40, scheduled_new_reqs=[new("a", [1, 2, 3])]).values()
    assert (plan.first, plan.num_tokens, plan.samples, plan.token_ids) == (0, 5, True, PROMPT)
    plan = runner.step({"a": 1}, 41, scheduled_cached_reqs=cached(("a", None, 5, 1)))["a"]
    assert (plan.block_tables, plan.token_ids) == ([[1, 2, 3]], [40])
    plan = runner.step({"a": 1}, 42, scheduled_cached_reqs=cached(("a", [7], 6, 2)))["a"]
    assert (plan.block_tables, plan.token_ids) == ([[1, 2, 3, 7]], [41])


def test_a_chunk_samples_nothing_until_the_prompt_is_done() -> None:
    runner = Runner()
    assert not runner.step({"a": 4}, scheduled_new_reqs=[new("a", [1, 2])])["a"].samples
    assert runner.step({"a": 1}, scheduled_cached_reqs=cached(("a", [3], 4, 0)))["a"].samples


def test_a_resumed_request_has_its_table_replaced_and_its_tokens_kept() -> None:
    runner = Runner()
    runner.step({"a": 5}, 40, scheduled_new_reqs=[new("a", [1, 2, 3])])
    runner.step({})
    plan = runner.step({"a": 6}, scheduled_cached_reqs=cached(("a", [8, 9, 4], 0, 1), resumed="a"))["a"]
    assert (plan.first, plan.block_tables, plan.token_ids) == (0, [[8, 9, 4]], [*PROMPT, 40])


def test_older_releases_flag_who_is_resumed() -> None:
    runner = Runner()
    runner.step({"a": 5}, 40, scheduled_new_reqs=[new("a", [1, 2, 3])])
    row = cached(("a", [8, 9, 4], 0, 1))
    del row.resumed_req_ids, row.num_output_tokens
    row.resumed_from_preemption = [True]
    assert runner.step({"a": 6}, scheduled_cached_reqs=row)["a"].block_tables == [[8, 9, 4]]


def test_runner_v2_forgets_the_preempted_and_takes_them_as_new() -> None:
    runner = Runner(runner="v2")
    runner.step({"a": 5}, 40, scheduled_new_reqs=[new("a", [1, 2, 3], prefill=PROMPT)])
    runner.step({}, preempted_req_ids={"a"})
    with pytest.raises(EngineFault, match="a, which it does not know"):
        runner.step({"a": 1}, scheduled_cached_reqs=cached(("a", None, 5, 1)))
    plan = runner.step({"a": 4}, scheduled_new_reqs=[new("a", [8, 9, 4], 2, [*PROMPT, 40])])["a"]
    assert (plan.first, plan.token_ids, plan.samples) == (2, [7, 8, 9, 40], True)


def test_tokens_under_way_are_not_claimed_to_be_known() -> None:
    runner = Runner(is_async=True)
    runner.step({"a": 5}, scheduled_new_reqs=[new("a", [1, 2, 3])])
    plan = runner.step({"a": 1}, scheduled_cached_reqs=cached(("a", None, 5, 1)))["a"]
    assert (plan.token_ids, plan.samples) == (None, True)


def test_the_first_stage_of_a_pipeline_runs_the_tokens_it_is_told() -> None:
    runner = Runner()
    runner.step({"a": 5}, scheduled_new_reqs=[new("a", [1, 2, 3])])
    row = cached(("a", None, 5, 1))
    row.new_token_ids = [[44]]
    assert runner.step({"a": 1}, scheduled_cached_reqs=row)["a"].token_ids == [44]


def test_an_asynchronous_runner_catches_up_with_what_it_missed() -> None:
    runner = Runner(is_async=True)
    runner.step({"a": 5}, scheduled_new_reqs=[new("a", [1, 2, 3])])
    runner.step({})
    row = cached(("a", [8, 9, 4], 0, 1), resumed="a", all_tokens={"a": [*PROMPT, 44]})
    assert runner.step({"a": 6}, scheduled_cached_reqs=row)["a"].token_ids == [*PROMPT, 44]


def test_blocks_before_the_window_are_the_null_block() -> None:
    runner = Runner(window=3)
    runner.step({"a": 5}, 40, scheduled_new_reqs=[new("a", [1, 2, 3])])
    plan = runner.step({"a": 1}, 41, scheduled_cached_reqs=cached(("a", None, 5, 1)))["a"]
    assert plan.block_tables == [[0, 2, 3]]  # position 5 reads 3, 4 and 5
    plan = runner.step({"a": 1}, 42, scheduled_cached_reqs=cached(("a", [7], 6, 2)))["a"]
    assert plan.block_tables == [[0, 0, 3, 7]]


def test_blocks_are_zeroed_before_they_are_copied() -> None:
    runner = Runner()
    copies = [SimpleNamespace(src_block_id=4, dst_block_id=2)]
    runner.step({}, new_block_ids_to_zero=[2, 3], kv_cache_block_copies=copies)
    assert runner.moves == [BlockMove("zero", 2, 2), BlockMove("zero", 3, 3), BlockMove("copy", 4, 2)]


def test_a_finished_request_is_unknown_from_then_on() -> None:
    runner = Runner()
    runner.step({"a": 5}, 40, scheduled_new_reqs=[new("a", [1, 2, 3])])
    with pytest.raises(EngineFault, match="a, which it does not know"):
        runner.step({"a": 1}, finished_req_ids={"a"}, scheduled_cached_reqs=cached(("a", None, 5, 1)))


def test_what_no_runner_can_run_is_the_engine_s_fault() -> None:
    runner = Runner()
    runner.step({"a": 5}, 40, scheduled_new_reqs=[new("a", [1, 2, 3])])
    with pytest.raises(EngineFault, match="-1 tokens of a"):
        runner.step({"a": -1}, scheduled_cached_reqs=cached(("a", None, 5, 1)))
    with pytest.raises(EngineFault, match="resume a without a block table"):
        runner.step({"a": 1}, scheduled_cached_reqs=cached(("a", None, 5, 1), resumed="a"))
