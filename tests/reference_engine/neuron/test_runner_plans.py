"""The Neuron runner: what it hands to the device, in which order, and what it refuses."""

from __future__ import annotations

import dataclasses
from random import Random
from typing import Any

import pytest

from neuron.symbolic import SymbolicDevice, config, next_token
from reference_engine.block_manager import Move
from reference_engine.config import ConfigError, EngineConfig
from reference_engine.engine import Engine, RequestError
from reference_engine.request import Request
from reference_engine.runners.neuron.device import Rows
from reference_engine.runners.neuron.lines import LineOrder, from_the_middle, highest_first, lowest_first
from reference_engine.runners.neuron.runner import NeuronRunner, PlanError
from reference_engine.runners.serving import Serving
from reference_engine.scheduler import Plan, ScheduledSequence

FIELDS: dict[str, Any] = {
    "num_blocks": 4,
    "block_size": 33,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 66,
    "max_model_len": 33,
}


def serving(device: SymbolicDevice | None = None, order: LineOrder = lowest_first, **fields: Any) -> Serving:
    engine = Engine(EngineConfig(**{**FIELDS, **fields}))
    return Serving(engine, NeuronRunner(device or SymbolicDevice(config()), engine.config, line_order=order))


def runner_of(serving: Serving) -> NeuronRunner:
    assert isinstance(serving.runner, NeuronRunner)
    return serving.runner


def device_of(serving: Serving) -> SymbolicDevice:
    device = runner_of(serving).device
    assert isinstance(device, SymbolicDevice)
    return device


def expected(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


# ------------------------------------------------------------------------------------------------- right tokens


@pytest.mark.parametrize("order", [lowest_first, highest_first, from_the_middle])
@pytest.mark.parametrize(
    "fields",
    [{}, {"num_blocks": 5, "free_list": "from-the-end"}, {"append_check": "touched"}, {"max_num_seqs": 3}],
    ids=["exact", "N+1-blocks", "preempting", "fewer-than-lines"],
)
@pytest.mark.parametrize("seed", range(8))
def test_random_workloads_get_their_tokens(seed: int, fields: dict[str, Any], order: LineOrder) -> None:
    random = Random(seed)
    run = serving(order=order, **fields)
    asked: dict[str, tuple[list[int], int]] = {}
    for number in range(20):
        prompt = [random.randrange(1, 60) for _ in range(random.choice((1, 1, 4, 17, 32)))]
        name, count = f"r{number}", random.randint(1, 20)
        run.add(Request(name, list(prompt), count))
        asked[name] = (prompt, min(count, 33 - len(prompt)))
        for _ in range(random.randrange(4)):
            run.step()
        if random.random() < 0.2:
            victim = random.choice(list(asked))
            run.engine.abort_request(victim)
            if victim not in run.outputs:
                del asked[victim]
    run.drain()
    assert {name: output for name, (output,) in run.outputs.items()} == {
        name: expected(prompt, count) for name, (prompt, count) in asked.items()
    }
    preempting = fields.get("append_check") == "touched"
    assert (run.engine.scheduler.num_preemptions > 0) is preempting
    assert runner_of(run).lines.free == (0, 1, 2, 3)


def test_the_symbolic_device_loses_what_the_real_one_loses() -> None:
    device = SymbolicDevice(config())
    device.prefill([0], [[5, 6, 7]])
    device.decode([1], [9], [0])
    assert device.content[0][:3] == [0, 6, 7]
    device.prefill([0], [[5, 6, 7]])
    device.prefill([1], [[9]], width=1)
    assert device.content[0][:3] == [0, 6, 7]
    device.prefill([0], [[5, 6, 7]])
    device.prefill([1], [[9]], width=2)
    assert device.content[0][:3] == [5, 6, 7]


def test_a_token_sampled_on_the_device_is_taken_as_it_is() -> None:
    run = serving(SymbolicDevice(dataclasses.replace(config(), sample_on_device=True)))
    run.add(Request("a", [5, 6], 4))
    assert run.drain() == {"a": [expected([5, 6], 4)]}


# --------------------------------------------------------------------------------------------- what is handed over


def test_rows_go_in_the_order_of_their_lines() -> None:
    run = serving(order=highest_first)
    for number in range(4):
        run.add(Request(f"r{number}", [number + 1] * 3, 3))
    run.drain()
    assert {call.lines for call in device_of(run).stats.calls} == {(0, 1, 2, 3)}
    assert [call.route for call in device_of(run).stats.calls] == ["prefill", "decode", "decode"]


def test_a_prompt_of_one_token_is_widened_to_two() -> None:
    run = serving()
    run.add(Request("one", [7], 2))
    run.step()
    (call,) = device_of(run).stats.calls
    assert (call.route, call.width, call.positions) == ("prefill", 2, (0,))


def test_a_preempted_request_is_prefilled_again_with_what_it_has() -> None:
    run = serving(append_check="touched", num_blocks=1, max_num_seqs=1)
    run.add(Request("a", [5, 6, 7], 4))
    run.drain()
    assert [(call.route, call.positions) for call in device_of(run).stats.calls] == [
        ("prefill", (2,)),
        ("prefill", (3,)),
        ("prefill", (4,)),
        ("prefill", (5,)),
    ]


def test_a_request_aborted_between_plan_and_execution_is_not_run() -> None:
    run = serving()
    for name in ("a", "b"):
        run.add(Request(name, [5, 6], 5))
    run.step()
    plan = run.engine.schedule()
    run.engine.abort_request("a")
    sampled = runner_of(run).execute(plan)
    assert list(sampled) == [("b", 0)]
    assert device_of(run).stats.calls[-1].lines == (1,)


def _one(request: Request, first: int, num_tokens: int) -> ScheduledSequence:
    return ScheduledSequence(request.sequences[0], first, num_tokens, samples=True)


def test_decodes_of_a_mixed_step_come_before_its_prefills() -> None:
    run = serving()
    run.add(Request("old", [5, 6], 5))
    run.step()
    old, new = run.engine.requests["old"], Request("new", [1, 2, 3], 5)
    new.status = old.status
    plan = Plan(1)
    plan.sequences += [_one(new, 0, 3), _one(old, 2, 1)]
    sampled = runner_of(run).execute(plan)
    assert [call.route for call in device_of(run).stats.calls] == ["prefill", "decode", "prefill"]
    assert sampled == {("old", 0): expected([5, 6], 2)[1], ("new", 0): next_token([1, 2, 3])}
    assert device_of(run).content[1][:3] == [1, 2, 3], "the prefill stands after the decode that would have spoilt it"


# -------------------------------------------------------------------------------------------- plans not to be run


def _running(*names: str) -> Serving:
    run = serving()
    for name in names:
        run.add(Request(name, [5, 6], 5))
    run.step()
    return run


def test_a_decode_that_leaves_out_a_live_line_is_not_run() -> None:
    run = _running("a", "b")
    plan = Plan(1)
    plan.sequences.append(_one(run.engine.requests["b"], 2, 1))
    with pytest.raises(PlanError, match=r"a hold lines 0 and are not in the decode of b"):
        runner_of(run).execute(plan)
    assert len(device_of(run).stats.calls) == 1


def test_block_moves_are_not_run() -> None:
    run = _running("a")
    plan = Plan(1)
    plan.moves.append(Move("copy", 0, 1))
    with pytest.raises(PlanError, match="1 block moves, and the device has no cache operations"):
        runner_of(run).execute(plan)


def test_a_chunk_is_not_run() -> None:
    run = _running("a")
    plan = Plan(1)
    plan.sequences.append(ScheduledSequence(run.engine.requests["a"].sequences[0], 0, 1, samples=False))
    with pytest.raises(PlanError, match="a: positions 0 to 0 are a chunk"):
        runner_of(run).execute(plan)


def test_a_decode_of_what_was_never_prefilled_is_not_run() -> None:
    run = serving()
    stranger = Request("x", [5, 6], 5)
    stranger.status = _running("a").engine.requests["a"].status
    plan = Plan(0)
    plan.sequences.append(_one(stranger, 1, 1))
    with pytest.raises(PlanError, match="x: position 1 is to be decoded and it was never prefilled"):
        runner_of(run).execute(plan)


def test_a_preempted_request_that_outgrew_the_buckets_is_not_run() -> None:
    device = SymbolicDevice(config(context=(8,), tokens=(32,)))
    run = serving(device, append_check="touched", num_blocks=1, max_num_seqs=1)
    run.add(Request("a", [5] * 7, 10))
    with pytest.raises(PlanError, match=r"a was preempted .* with 9 tokens; the largest context bucket is 8"):
        run.drain()


class _Short(SymbolicDevice):
    def decode(self, *arguments: Any) -> Rows:
        return super().decode(*arguments)[1:]


def test_a_row_too_few_is_noticed() -> None:
    run = serving(_Short(config()))
    run.add(Request("a", [5, 6], 5))
    with pytest.raises(PlanError, match="1 rows were asked for and 0 came back"):
        run.drain()


# ------------------------------------------------------------------------------------------- refused at the door


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"max_num_seqs": 5}, "max_num_seqs = 5: the device was compiled for 4 lines"),
        ({"block_size": 16}, r"block_size = 16: must be max_model_len \(33\)"),
        ({"block_size": 34, "max_model_len": 34}, "max_model_len = 34: must be at most 33"),
        ({"enable_prefix_caching": True}, "enable_prefix_caching = True: must be false: lines share nothing"),
        ({"enable_chunked_prefill": True}, "enable_chunked_prefill = True: must be false"),
        ({"preemption_mode": "swap", "num_swap_blocks": 1}, "preemption_mode = 'swap': must be recompute"),
        ({"num_swap_blocks": 1}, "num_swap_blocks = 1: must be 0"),
        ({"num_lookahead_slots": 1}, "num_lookahead_slots = 1: must be 0"),
        ({"sliding_window": 8, "null_block": True}, "sliding_window = 8: must be None"),
        ({"pipeline_depth": 2}, "pipeline_depth = 2: must be 1"),
    ],
)
def test_an_engine_the_device_cannot_serve_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        serving(**fields)


def test_a_budget_that_cannot_decode_everybody_is_refused() -> None:
    device = SymbolicDevice(config(lines=50))
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens = 40: must be at least max_num_seqs \(50\)"):
        serving(device, max_num_seqs=50, num_blocks=50, max_num_batched_tokens=40)


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (Request("two", [5], 3, n=2), "request two: n = 2: a line cannot be copied"),
        (Request("long", [5] * 17, 3), "request long: the prompt has 17 tokens and the largest context bucket 16"),
    ],
)
def test_a_request_the_device_cannot_serve_is_refused(request_: Request, said: str) -> None:
    run = serving(SymbolicDevice(config(context=(16,))))
    with pytest.raises(RequestError, match=said):
        run.add(request_)
    assert not run.busy
