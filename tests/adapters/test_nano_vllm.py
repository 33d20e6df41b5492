"""The nano-vllm adapter: the real scheduler of the release that is installed, nothing of it repaired."""

from __future__ import annotations

import importlib.util

import pytest

from conformance.operations import Add, Operation
from conformance.protocol import AdapterError, ConfigRefused, EngineConfig, Request, RequestRefused, Sampled
from conformance.session import Session
from conformance.violations import Violation

if importlib.util.find_spec("nanovllm") is None:
    pytest.skip("nano-vllm is not installed", allow_module_level=True)

from conformance.adapters.nano_vllm import NanoVllmEngine, make, modules

CACHING = EngineConfig(num_blocks=12, block_size=4, max_num_seqs=4, enable_prefix_caching=True)
of_the_fork = pytest.mark.skipif(modules().chunks, reason="of nano-vllm-fork, which runs no prompt in chunks")
of_the_project = pytest.mark.skipif(not modules().chunks, reason="of nano-vllm, which runs prompts in chunks")


def request(number: int, prompt_len: int, max_tokens: int, stop_token: int | None = None) -> Request:
    prompt = list(range(2, 2 + prompt_len))
    return Request(request_id=f"r{number}", prompt=prompt, max_tokens=max_tokens, stop_token=stop_token)


def run(config: EngineConfig, *operations: Operation) -> list[Violation]:
    return Session(make(config), config).run(operations)


@pytest.fixture
def engine() -> NanoVllmEngine:
    return make(CACHING)


def test_one_request_from_prompt_to_end(engine: NanoVllmEngine) -> None:
    engine.add_request(request(0, 4, 2))
    (prefill,) = engine.schedule().sequences
    assert (prefill.first, prefill.num_tokens, prefill.token_ids) == (0, 4, [2, 3, 4, 5])
    assert prefill.block_tables == [[0]]
    assert engine.commit(0, {("r0", 0): Sampled([11])}).finished == []
    (decode,) = engine.schedule().sequences
    assert (decode.first, decode.num_tokens, decode.token_ids) == (4, 1, [11])
    assert decode.block_tables == [[0, 1]]
    (finished,) = engine.commit(1, {("r0", 0): Sampled([12])}).finished
    assert finished.outputs == [[11, 12]]
    assert sorted(engine.snapshot().free + engine.snapshot().cached) == list(range(12))


def test_an_idle_step_does_not_call_the_scheduler(engine: NanoVllmEngine) -> None:
    assert engine.schedule().sequences == []
    assert engine.commit(0, {}).finished == []


def test_a_stop_token_ends_a_request(engine: NanoVllmEngine) -> None:
    engine.add_request(request(0, 4, 5, stop_token=1))
    engine.schedule()
    (finished,) = engine.commit(0, {("r0", 0): Sampled([1])}).finished
    assert finished.outputs == [[1]]


def test_what_it_does_not_know_is_refused(engine: NanoVllmEngine) -> None:
    with pytest.raises(RequestRefused, match="one sequence per request"):
        engine.add_request(Request(request_id="two", prompt=[2], max_tokens=1, n=2))
    engine.add_request(request(0, 4, 5, stop_token=1))
    with pytest.raises(RequestRefused, match="has one for all, 1"):
        engine.add_request(request(1, 4, 5, stop_token=7))


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (EngineConfig(), "always caches"),
        (EngineConfig(block_size=1, enable_prefix_caching=True), "takes 2 or more"),
        (EngineConfig(enable_prefix_caching=True, scheduling_policy="priority"), "does not have: priority"),
        (EngineConfig(enable_prefix_caching=True, engine_options={"x": 1}), "engine_options x"),
    ],
)
def test_a_configuration_it_cannot_run_is_refused(config: EngineConfig, match: str) -> None:
    with pytest.raises(ConfigRefused, match=match) as refused:
        make(config)
    if refused.value.instead is not None:
        assert make(refused.value.instead).capabilities.engine == "nano-vllm"


def test_a_step_is_committed_before_the_next(engine: NanoVllmEngine) -> None:
    engine.add_request(request(0, 4, 2))
    engine.schedule()
    with pytest.raises(AdapterError, match="synchronous"):
        engine.schedule()
    with pytest.raises(AdapterError, match="step 0 is next"):
        engine.commit(3, {})


def test_two_engines_of_different_block_sizes_live_side_by_side(engine: NanoVllmEngine) -> None:
    other = make(EngineConfig(num_blocks=12, block_size=8, enable_prefix_caching=True))
    for each in (engine, other):
        each.add_request(request(0, 8, 2))
    assert [len(each.schedule().sequences[0].block_tables[0]) for each in (engine, other)] == [2, 1]


@of_the_project
def test_a_prompt_over_the_budget_comes_in_chunks_and_counts_as_running() -> None:
    engine = make(EngineConfig(max_num_batched_tokens=4, enable_prefix_caching=True))
    engine.add_request(request(0, 6, 2))
    (chunk,) = engine.schedule().sequences
    assert (chunk.num_tokens, chunk.samples) == (4, False)
    assert (engine.usage().running, engine.usage().waiting) == (1, 0)
    engine.commit(0, {})
    (rest,) = engine.schedule().sequences
    assert (rest.first, rest.num_tokens, rest.samples) == (4, 2, True)


@of_the_fork
def test_a_hit_on_a_whole_prompt_leaves_nothing_to_run() -> None:
    alike = Add(prompt_len=4, max_tokens=2, shared_len=4)
    assert [violation.requirement for violation in run(CACHING, alike, alike)] == ["PRG-5"]


@of_the_fork
def test_who_is_preempted_stays_on_the_running_list() -> None:
    config = EngineConfig(num_blocks=3, block_size=2, max_num_seqs=2, enable_prefix_caching=True)
    broken = {
        violation.requirement
        for violation in run(config, Add(prompt_len=1, max_tokens=4), Add(prompt_len=2, max_tokens=3))
    }
    assert "PRG-8" in broken
