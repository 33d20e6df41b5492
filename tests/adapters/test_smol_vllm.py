"""The smol-vllm adapter: the engine's real step is watched, nothing of it repaired."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from conformance.operations import Add, Operation, Step
from conformance.protocol import (
    AdapterError,
    ConfigRefused,
    EngineConfig,
    EngineFault,
    Request,
    RequestRefused,
    Sampled,
    SequencePlan,
)
from conformance.session import Session
from conformance.violations import Violation

pytest.importorskip("smol_vllm", reason="smol-vllm is not installed")

from conformance.adapters.smol_vllm import SmolVllmEngine, make

THREAD = "smol-vllm step"


def request(number: int, prompt_len: int, max_tokens: int) -> Request:
    return Request(request_id=f"r{number}", prompt=list(range(2, 2 + prompt_len)), max_tokens=max_tokens)


@pytest.fixture
def engine() -> Iterator[SmolVllmEngine]:
    engine = make(EngineConfig(num_blocks=12, block_size=4, max_num_seqs=4))
    yield engine
    engine.close()


def run(config: EngineConfig, *operations: Operation) -> list[Violation]:
    return Session(make(config), config).run(operations)


def shape(plan: SequencePlan) -> tuple[str, int, int, list[int]]:
    return plan.request_id, plan.first, plan.num_tokens, plan.block_tables[0]


def test_one_request_from_prompt_to_end(engine: SmolVllmEngine) -> None:
    engine.add_request(request(0, 4, 2))
    first = engine.schedule()
    assert [shape(plan) for plan in first.sequences] == [("r0", 0, 4, [0])]
    assert first.sequences[0].token_ids == [2, 3, 4, 5]
    assert engine.commit(0, {("r0", 0): Sampled([11])}).finished == []
    second = engine.schedule()
    assert [shape(plan) for plan in second.sequences] == [("r0", 4, 1, [0, 1])]
    assert second.sequences[0].token_ids == [11]
    (finished,) = engine.commit(1, {("r0", 0): Sampled([12])}).finished
    assert finished.outputs == [[11, 12]]
    assert sorted(engine.snapshot().free) == list(range(12))


def test_an_idle_step_plans_nothing(engine: SmolVllmEngine) -> None:
    assert engine.schedule().sequences == []
    assert engine.commit(0, {}).finished == []
    assert engine.usage().free_blocks == 12


def test_a_prefill_beside_a_decode_gets_its_tokens_crossed(engine: SmolVllmEngine) -> None:
    engine.add_request(request(0, 5, 4))
    engine.schedule()
    engine.commit(0, {("r0", 0): Sampled([11])})
    engine.add_request(request(1, 5, 4))
    mixed = engine.schedule()
    # The engine calls prefill first, and hands decode the block table of the request it prefills.
    assert [shape(plan) for plan in mixed.sequences] == [("r1", 0, 5, [2, 3]), ("r0", 5, 1, [2, 3])]
    engine.commit(1, {("r0", 0): Sampled([12]), ("r1", 0): Sampled([22])})
    after = {plan.request_id: plan.token_ids for plan in engine.schedule().sequences}
    assert after == {"r0": [22], "r1": [12]}


def test_preemption_is_reported_as_the_swap_it_claims_to_be(capsys: pytest.CaptureFixture[str]) -> None:
    tight = make(EngineConfig(num_blocks=4, block_size=4, max_num_seqs=1))
    tight.add_request(request(0, 9, 7))
    for step in range(4):
        tight.schedule()
        tight.commit(step, {("r0", 0): Sampled([11])})
    plan = tight.schedule()
    (victim,) = plan.preempted
    assert (victim.request_id, victim.mode, victim.blocks_counted, victim.blocks_free) == ("r0", "swap", 1, 0)
    assert plan.moves == []
    assert plan.sequences == []
    assert tight.usage().swapped == 1
    tight.close()
    assert capsys.readouterr().out == ""


def test_an_error_of_the_engine_surfaces_from_the_call_it_happens_in(engine: SmolVllmEngine) -> None:
    engine.add_request(request(0, 4, 2))
    engine.schedule()
    engine._engine.block_manager._free_blocks.clear()
    with pytest.raises(ValueError, match="No free blocks to append token"):
        engine.commit(0, {("r0", 0): Sampled([11])})
    engine._engine.block_manager._block_tables.clear()
    engine._engine.scheduler.running.clear()
    engine._engine.scheduler.waiting.append(None)
    with pytest.raises(AttributeError):
        engine.schedule()


def test_the_two_halves_of_a_step_come_in_turn(engine: SmolVllmEngine) -> None:
    with pytest.raises(AdapterError, match="must be scheduled first"):
        engine.commit(0, {})
    engine.add_request(request(0, 4, 2))
    engine.schedule()
    with pytest.raises(AdapterError, match="synchronous"):
        engine.schedule()


@pytest.mark.parametrize("scheduled", [False, True])
def test_close_ends_the_thread(scheduled: bool) -> None:  # noqa: FBT001 - a parameter
    before = threading.active_count()
    engine = make(EngineConfig())
    if scheduled:
        engine.add_request(request(0, 4, 2))
        engine.schedule()
    assert sum(thread.name == THREAD and thread.daemon for thread in threading.enumerate()) == 1
    engine.close()
    engine.close()
    assert threading.active_count() == before
    with pytest.raises(AdapterError, match="closed"):
        engine._steps.resume([])


def test_an_engine_that_does_not_come_back_is_unwound(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(EngineConfig())
    spinning = threading.Event()

    def spin() -> None:
        spinning.set()
        while True:
            pass

    monkeypatch.setattr(engine._engine.scheduler, "schedule", spin)
    monkeypatch.setattr(engine._steps, "_wait", lambda: spinning.wait() and (_ for _ in ()).throw(TimeoutError))
    with pytest.raises(TimeoutError):
        engine.schedule()
    engine.close()
    engine._steps._thread.join(timeout=30)
    assert not engine._steps._thread.is_alive()


def test_what_it_does_not_have_is_refused(engine: SmolVllmEngine) -> None:
    with pytest.raises(ConfigRefused, match="chunked_prefill, prefix_caching"):
        make(EngineConfig(enable_prefix_caching=True, enable_chunked_prefill=True))
    with pytest.raises(ConfigRefused, match="block_manager"):
        make(EngineConfig(engine_options={"block_manager": "v1"}))
    with pytest.raises(RequestRefused, match="n = 2"):
        engine.add_request(Request(request_id="r0", prompt=[2], max_tokens=1, n=2))
    with pytest.raises(EngineFault, match="abort"):
        engine.abort_request("r0")
    assert not engine.reset_prefix_cache()


def test_its_absent_limits_are_not_held_against_it() -> None:
    config = EngineConfig(num_blocks=64, max_num_batched_tokens=8, max_model_len=8)
    assert run(config, Add(20, 4), Add(20, 4)) == []


@pytest.mark.parametrize(
    ("config", "operations", "requirement"),
    [
        # One request that fits exactly is preempted by the "over 95 % used" rule and never returns.
        (EngineConfig(num_blocks=4, max_num_seqs=1), [Add(9, 7)], "PRG-2"),
        # Three requests take turns until each needs more than a spare block allows.
        (EngineConfig(num_blocks=6), [Add(4, 20), Add(4, 20), Add(4, 20)], "KV-1"),
        # A second request is prefilled beside a decode: the wrong block table, and crossed tokens.
        (EngineConfig(num_blocks=12), [Add(5, 4), Step(), Add(5, 4)], "ACC-3"),
        # A prompt larger than the pool waits for ever.
        (EngineConfig(num_blocks=4), [Add(20, 2)], "PRG-3"),
        # What comes back from its swap reads blocks that nothing was copied to.
        (EngineConfig(num_blocks=4, block_size=1, max_num_seqs=2), [Add(1, 2), Add(1, 2)], "KV-1"),
    ],
)
def test_its_known_faults_are_seen(config: EngineConfig, operations: list[Operation], requirement: str) -> None:
    assert requirement in {violation.requirement for violation in run(config, *operations)}
