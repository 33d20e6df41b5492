"""The sglang adapter on the installed release: what it reports is what the engine did."""

from __future__ import annotations

import importlib.util
import random
import sys
from typing import Any

import pytest

from conformance.operations import Abort, Add, Operation, Step
from conformance.protocol import (
    AdapterError,
    ConfigRefused,
    EngineConfig,
    OptionValue,
    Request,
    RequestRefused,
    Sampled,
)
from conformance.session import Session

if importlib.util.find_spec("sglang") is None:
    pytest.skip("sglang is not installed", allow_module_level=True)

from by_hand import ADAPTER_FAULTS, broken, request, shape, step
from conformance.adapters._sglang_engine import modules
from conformance.adapters.sglang_scheduler import make
from workloads import random_traffic

pytestmark = pytest.mark.filterwarnings("default")  # importing torch warns


def early() -> bool:
    """Whether this is a release whose scheduler keeps its arguments in a global variable, not in a runtime context."""
    return modules().runtime_context is None


def config_of(options: dict[str, OptionValue] | None = None, **fields: Any) -> EngineConfig:
    given = {"num_blocks": 81, "block_size": 1, "max_num_batched_tokens": 40, "max_model_len": 40} | fields
    return EngineConfig(engine_options=options or {}, **given)


def test_stand_ins_are_left_to_sglang_alone() -> None:
    make(config_of()).close()
    assert "sglang.srt.managers.scheduler" in sys.modules
    assert "sglang.srt.models" not in sys.modules
    outside = {"PIL", "fastapi", "requests", "triton"} & sys.modules.keys()
    assert [name for name in outside if type(sys.modules[name]).__name__ == "AbsentModule"] == []


# ---------------------------------------------------------------------------------------------- from prompt to end


def test_one_request_from_prompt_to_end() -> None:
    engine = make(config_of())
    engine.add_request(request(0, 3, 2))
    (prompt,) = step(engine, token=11).sequences
    assert (shape(prompt), prompt.token_ids) == (("r0", 0, 3, [1, 2, 3]), request(0, 3, 2).prompt)
    plan = engine.schedule()
    assert (shape(plan.sequences[0]), plan.sequences[0].token_ids) == (("r0", 3, 1, [1, 2, 3, 4]), [11])
    (finished,) = engine.commit(1, {("r0", 0): Sampled([12])}).finished
    assert (finished.outputs, finished.reason) == ([[11, 12]], "length")
    assert sorted(engine.snapshot().free) == list(range(1, 81))


def test_pages_are_shown_as_blocks() -> None:
    engine = make(config_of(block_size=4, num_blocks=9, max_model_len=20))
    engine.add_request(request(0, 6, 4))
    assert [shape(step(engine).sequences[0])[1:] for _ in range(4)] == [
        (0, 6, [1, 2]),
        (6, 1, [1, 2]),
        (7, 1, [1, 2]),
        (8, 1, [1, 2, 3]),
    ]
    assert engine.capabilities.unit == "page"


def test_the_overlap_scheduler_hands_over_the_next_step_before_the_tokens_of_the_last() -> None:
    engine = make(config_of(pipeline_depth=2))
    engine.add_request(request(0, 3, 9, stop_token=12))
    first, second = engine.schedule(), engine.schedule()
    assert [shape(plan.sequences[0])[1:3] for plan in (first, second)] == [(0, 3), (3, 1)]
    assert second.sequences[0].token_ids is None  # still to be sampled
    with pytest.raises(AdapterError, match="2 steps in flight"):
        engine.schedule()
    assert engine.commit(0, {("r0", 0): Sampled([11])}).finished == []
    assert shape(engine.schedule().sequences[0])[1:3] == (4, 1)  # it cannot know yet that this is one too many
    (finished,) = engine.commit(1, {("r0", 0): Sampled([12])}).finished
    assert finished.outputs == [[11, 12]]
    engine.commit(2, {})
    assert engine.usage().free_blocks == 80


def test_a_stop_token_ends_a_sequence() -> None:
    engine = make(config_of())
    engine.add_request(request(0, 5, 9, stop_token=42))
    step(engine)
    engine.schedule()
    (finished,) = engine.commit(1, {("r0", 0): Sampled([42])}).finished
    assert (finished.outputs, finished.reason) == ([[7, 42]], "stop")


def test_a_prompt_over_the_budget_goes_in_chunks_of_whole_pages() -> None:
    engine = make(config_of(block_size=4, max_num_batched_tokens=8, enable_chunked_prefill=True))
    engine.add_request(request(0, 19, 2))
    chunks = [step(engine).sequences[0] for _ in range(3)]
    assert [(chunk.first, chunk.num_tokens, chunk.samples) for chunk in chunks] == [
        (0, 8, False),
        (8, 8, False),
        (16, 3, True),
    ]


def test_who_prefilled_beside_a_chunk_of_somebody_else_samples_ever_after() -> None:
    engine = make(config_of(block_size=4, max_num_batched_tokens=8, enable_chunked_prefill=True, num_blocks=25))
    for number in (0, 1):
        engine.add_request(request(number, 10, 9))
    ran = [[(one.request_id, one.num_tokens, one.samples) for one in step(engine).sequences] for _ in range(5)]
    assert ran[-1] == [("r0", 1, True), ("r1", 1, True)]
    if not early():  # which gives the rest of a budget to nobody
        assert ran[1] == [("r0", 2, True), ("r1", 4, False)]


def test_decodes_run_along_with_chunks_when_they_are_mixed() -> None:
    config = config_of({"mixed_chunk": True}, max_num_batched_tokens=8, enable_chunked_prefill=True)
    engine = make(config)
    engine.add_request(request(0, 3, 9))
    step(engine)
    engine.add_request(request(1, 12, 2))
    assert [shape(one)[:3] for one in step(engine).sequences] == [("r1", 0, 7), ("r0", 3, 1)]


# ---------------------------------------------------------------------------------------------- the prefix tree


def test_what_is_cached_is_shown_apart_from_what_is_held() -> None:
    engine = make(config_of(enable_prefix_caching=True, block_size=4, num_blocks=21))
    engine.add_request(request(0, 10, 1))
    step(engine)
    books = engine.snapshot()
    assert (books.cached, len(books.free), books.ref_counts) == ([1, 2], 18, {} if early() else None)
    engine.add_request(request(0, 10, 2))
    (hit,) = engine.schedule().sequences
    assert (hit.first, hit.num_tokens) == (8, 2)
    books = engine.snapshot()
    assert (books.cached, books.held) == ([], {"r0": hit.block_tables})
    assert books.ref_counts == (dict.fromkeys(hit.block_tables[0], 1) if early() else None)
    assert engine.usage().free_blocks == 17
    assert engine.reset_prefix_cache() is False


def test_a_flush_with_nothing_to_do_forgets_every_prefix() -> None:
    engine = make(config_of(enable_prefix_caching=True))
    engine.add_request(request(0, 10, 1))
    step(engine)
    assert engine.reset_prefix_cache() is True
    assert (engine.snapshot().cached, len(engine.snapshot().free)) == ([], 80)


def test_adapters_are_kept_apart() -> None:
    engine = make(config_of(enable_prefix_caching=True))
    for number, name in enumerate(("", "a", "b")):
        engine.add_request(Request(request_id=f"r{number}", prompt=[3] * 10, max_tokens=1, adapter=name))
        assert step(engine).sequences[0].first == 0


def test_salts_are_kept_apart_where_the_scheduler_gets_to_know_them() -> None:
    engine = make(config_of(enable_prefix_caching=True))
    firsts = []
    for number, salt in enumerate(("one", "another", "one")):
        engine.add_request(Request(request_id=f"r{number}", prompt=[3] * 10, max_tokens=1, cache_salt=salt))
        firsts.append(step(engine).sequences[0].first)
    assert firsts == ([0, 9, 9] if early() else [0, 0, 9])


def test_a_flush_waits_for_a_refused_prompt_to_run_out() -> None:
    engine = make(config_of(pipeline_depth=2, enable_prefix_caching=True))
    engine.add_request(request(0, 38, 1))
    assert [one.request_id for one in engine.schedule().rejected] == ["r0"]
    assert engine.reset_prefix_cache() is True
    assert len(engine.snapshot().free) == 80


# ---------------------------------------------------------------------------------------------- preemption, abort


def test_a_retracted_request_is_reported_with_the_engines_own_figures() -> None:
    engine = make(config_of(num_blocks=60, max_num_seqs=2))
    engine.add_request(request(0, 8, 24))
    step(engine)
    engine.add_request(request(1, 9, 24))
    plan = step(engine)
    for _ in range(2, 40):
        plan = step(engine)
        if plan.preempted:
            break
    (victim,) = plan.preempted
    assert (victim.request_id, victim.mode, victim.blocks_counted, victim.blocks_free) == ("r1", "recompute", 2, 0)
    books = engine.snapshot()
    assert (books.waiting, list(books.held)) == (["r1"], ["r0"])


@pytest.mark.parametrize("depth", [1, 2])
def test_an_aborted_request_runs_once_more_and_gives_everything_back(depth: int) -> None:
    engine = make(config_of(pipeline_depth=depth, max_num_seqs=2))
    for number in range(3):
        engine.add_request(request(number, 5, 20))
    plans = []
    for number in range(9):
        if number == 3:
            engine.abort_request("r2")  # it waits: it is gone at once
            engine.abort_request("r1")
            engine.abort_request("never seen")
        plans.append(engine.schedule())
        if number >= depth - 1:
            oldest = plans[number - depth + 1]
            engine.commit(oldest.step, {(one.request_id, 0): Sampled([7]) for one in oldest.sequences})
    ran = [len(plan.sequences) for plan in plans]
    assert ran == [2, 2, 2, 2, 1, 1, 1, 1, 1]
    assert (list(engine.snapshot().held), engine.usage().running, engine.usage().waiting) == (["r0"], 1, 0)
    assert engine.usage().free_blocks == 80 - len(plans[-1].sequences[0].block_tables[0])


@pytest.mark.parametrize("depth", [1, 2])
def test_an_abort_between_two_chunks(depth: int) -> None:
    engine = make(config_of(pipeline_depth=depth, enable_chunked_prefill=True, max_num_batched_tokens=8))
    engine.add_request(request(0, 30, 2))
    plans = [engine.schedule()]
    engine.abort_request("r0")
    for number in range(1, 7):
        plans.append(engine.schedule() if depth == 2 else plans[0])
        engine.commit(number - 1, {})
        if depth == 1:
            plans[number] = engine.schedule()
    ran = [len(plan.sequences) for plan in plans]
    assert sum(ran) == (3 + depth if early() else 1)
    assert (engine.usage().free_blocks, engine.usage().running, engine.snapshot().held) == (80, 0, {})


def test_a_request_that_the_scheduler_gives_up_is_reported_at_the_next_commit() -> None:
    engine = make(config_of())
    engine.add_request(request(0, 5, 9))
    step(engine, token=11)
    engine._scheduler.sent.append(modules().io_struct.AbortReq(rid="r000000"))
    plan = engine.schedule()
    (finished,) = engine.commit(plan.step, {("r0", 0): Sampled([12])}).finished
    assert (finished.request_id, finished.outputs, finished.reason) == ("r0", [[11]], "abort")


def test_ids_that_clients_choose_are_matched_by_their_beginning() -> None:
    ends_r1: list[Operation] = [*(Add(3, 8) for _ in range(11)), Step(), Abort(index=1)]
    wide: dict[str, Any] = {"num_blocks": 200, "max_num_seqs": 16, "max_num_batched_tokens": 60}
    client = config_of({"request_ids": "client"}, **wide)
    found = Session(make(client), client).run(ends_r1)
    assert "r10 is reported as finished after step 1 before it has its tokens" in {one.message for one in found}
    assert broken(make, config_of(**wide), *ends_r1) == set()


# ---------------------------------------------------------------------------------------------- refusals


def test_a_prompt_too_long_is_refused_by_way_of_a_token() -> None:
    engine = make(config_of())
    assert engine.capabilities.sequence_tokens_max == 38
    engine.add_request(request(0, 34, 1))
    plan = engine.schedule()
    assert (plan.sequences, [one.request_id for one in plan.rejected]) == ([], ["r0"])
    assert "exceeds the maximum allowed length (34 tokens)" in plan.rejected[0].reason
    assert engine.snapshot().reserved == [0, 1]  # what the token takes
    assert engine.commit(0, {}).finished == []
    assert engine.usage().free_blocks == 80


def test_refusals_of_configurations_name_the_nearest() -> None:
    with pytest.raises(ConfigRefused, match="chunked_prefill_size must be divisible by page_size") as refusal:
        make(config_of(block_size=4, max_num_batched_tokens=10, enable_chunked_prefill=True))
    assert refusal.value.instead is not None
    assert refusal.value.instead.max_num_batched_tokens == 12
    with pytest.raises(ConfigRefused, match="Memory pool size is too small") as refusal:
        make(config_of(num_blocks=7))
    assert refusal.value.instead is not None
    make(refusal.value.instead).close()
    with pytest.raises(ConfigRefused, match="max_num_batched_tokens = 39") as refusal:
        make(config_of(max_num_batched_tokens=39))
    assert refusal.value.instead is not None
    make(refusal.value.instead).close()


def test_a_pool_in_pages_is_to_hold_more_than_a_context_where_max_tokens_are_cut_down() -> None:
    config = config_of(block_size=4, num_blocks=12, max_model_len=44, max_num_batched_tokens=44)
    if early():
        make(config).close()
        return
    with pytest.raises(ConfigRefused, match="max_tokens are cut down") as refusal:
        make(config)
    assert refusal.value.instead is not None
    assert refusal.value.instead.max_model_len == 38
    engine = make(refusal.value.instead)
    engine.add_request(request(0, 25, 99))  # of 44 slots: 28 of the prompt's pages, 4 of another and one are left out
    finished = [done for _ in range(12) for done in engine.commit(engine.schedule().step, {}).finished]
    assert [len(done.outputs[0]) for done in finished] == [11]


def test_what_it_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigRefused, match="colour: not known; taken are conservativeness"):
        make(config_of({"colour": "green"}))
    with pytest.raises(ConfigRefused, match="conservativeness = -1"):
        make(config_of({"conservativeness": -1}))
    with pytest.raises(ConfigRefused, match="eviction = 'best': one of lru, lfu"):
        make(config_of({"eviction": "best"}))
    with pytest.raises(ConfigRefused, match="swap"):
        make(config_of(preemption_mode="swap", num_swap_blocks=4))
    with pytest.raises(ConfigRefused, match="pipeline_depth = 3"):
        make(config_of(pipeline_depth=3))
    with pytest.raises(RequestRefused, match="n = 2"):
        make(config_of()).add_request(request(0, 5, 2, n=2))


# ---------------------------------------------------------------------------------------------- workloads


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    "fields",
    [{}, {"enable_prefix_caching": True}, {"enable_chunked_prefill": True, "max_num_batched_tokens": 12}],
    ids=["plain", "cached", "chunked"],
)
@pytest.mark.parametrize(("size", "num_blocks"), [(1, 44), (4, 12), (4, 60)], ids=["tokens", "pages", "ample"])
def test_the_books_add_up_on_random_workloads(depth: int, fields: dict[str, Any], size: int, num_blocks: int) -> None:
    config = config_of(block_size=size, num_blocks=num_blocks, pipeline_depth=depth, max_model_len=36, **fields)
    for seed in range(5):
        session = Session(make(config), config)
        found = session.run(random_traffic(random.Random(seed), range(1, 31), 30))
        assert [violation for violation in found if violation.requirement in ADAPTER_FAULTS] == [], seed
