"""Streaming input: when the parts of a prompt are sent, and what the installed vLLM makes of them."""

from __future__ import annotations

from typing import Any

import pytest

from conformance.adapters._vllm_v1_release import installed_release
from conformance.adapters._vllm_v1_streaming import StreamedInputs, inputs_of
from conformance.adapters.vllm_v1 import VllmV1Engine, make
from conformance.operations import Abort, Add, Drain, Operation, Step
from conformance.protocol import (
    AdapterError,
    ConfigRefused,
    EngineConfig,
    KVCacheGroup,
    OptionValue,
    Request,
    Sampled,
    StreamedInput,
)
from conformance.session import Session

pytestmark = pytest.mark.filterwarnings("default")  # importing these releases warns

MODES = ("queued", "late")
WORKLOAD: list[Operation] = [
    Add(7, 3, streamed=((4, 2), (3, 3))),
    Add(5, 9),
    Step(2),
    Add(6, 4, stop_after=1, streamed=((1, 1), (2, 6))),
    Add(3, 1, streamed=((8, 1),)),
    Step(4),
    Abort(1),
    Add(9, 2, family=1, shared_len=9, streamed=((5, 4),)),
    Drain(),
]


def of(*inputs: tuple[int, int]) -> Request:
    return Request(
        request_id="r0", prompt=[5, 6], max_tokens=1, streamed=tuple(StreamedInput([9] * n, m) for n, m in inputs)
    )


def test_every_input_is_sent_as_a_request_of_its_own() -> None:
    assert [(one.prompt, one.max_tokens) for one in inputs_of(of((2, 3), (1, 4)))] == [
        ([5, 6], 1),
        ([9, 9], 3),
        ([9], 4),
    ]


def test_inputs_are_sent_at_once_unless_they_are_late() -> None:
    assert StreamedInputs(late=False).take("r0", ["second", "end"]) == ["second", "end"]
    assert StreamedInputs(late=True).take("r0", ["second", "end"]) == []


def test_a_late_input_follows_the_answer_and_the_last_one_says_so() -> None:
    inputs = StreamedInputs(late=True)
    inputs.take("r0", ["second", "third", "end"])
    assert not inputs.due(9)
    for answered, sent in ((10, ["second"]), (20, ["third", "end"])):
        inputs.answered("r0", answered)
        waits = [step for step in range(answered, answered + 4) if inputs.due(step) == sent]
        assert len(waits) == 1


def test_nothing_is_sent_for_a_request_that_is_over() -> None:
    inputs = StreamedInputs(late=True)
    inputs.take("r0", ["second", "end"])
    inputs.answered("r0", 0)
    inputs.forget("r0")
    assert not inputs.due(99)


# -- with the installed vLLM -------------------------------------------------------------------------------------------


def config_of(mode: str, options: dict[str, OptionValue] | None = None, **fields: Any) -> EngineConfig:
    given = {"num_blocks": 40, "block_size": 4, "max_num_batched_tokens": 64, "max_model_len": 32} | fields
    return EngineConfig(engine_options={"streaming_input": mode, **(options or {})}, **given)


def built(config: EngineConfig) -> VllmV1Engine:
    try:
        installed_release()
    except (AdapterError, ModuleNotFoundError) as error:
        pytest.skip(str(error))
    try:
        return make(config)
    except ConfigRefused as refusal:
        if "not known" in str(refusal) or "in a release that" in str(refusal):
            pytest.skip(str(refusal))
        raise


VARIANTS: dict[str, tuple[dict[str, OptionValue], dict[str, Any]]] = {
    "plain": ({}, {}),
    "cached": ({}, {"enable_prefix_caching": True}),
    "chunked": ({}, {"enable_chunked_prefill": True, "max_num_batched_tokens": 6}),
    "drafts": ({}, {"num_speculative_tokens": 3, "enable_prefix_caching": True}),
    "async": ({"async_scheduling": True}, {"pipeline_depth": 2, "enable_prefix_caching": True}),
    "async-drafts": ({"async_scheduling": True}, {"pipeline_depth": 2, "num_speculative_tokens": 2}),
    "three-stages": ({"async_scheduling": False}, {"pipeline_depth": 3}),
    "connector": ({"kv_connector": "async"}, {"enable_prefix_caching": True}),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_prompt_that_comes_in_parts_keeps_the_contract(variant: str, mode: str) -> None:
    options, fields = VARIANTS[variant]
    config = config_of(mode, options, **fields)
    session = Session(built(config), config)
    assert not session.run(WORKLOAD)
    assert session.ledger.behaviours["went on with more input"] >= 5


def test_all_but_the_last_output_stays_in_the_prompt() -> None:
    engine = built(config_of("queued"))
    engine.add_request(Request(request_id="r0", prompt=[5, 6], max_tokens=2, streamed=(StreamedInput([8, 9], 1),)))
    plans, ends = [], []
    for number, token in enumerate((21, 22, 23)):
        (plan,) = engine.schedule().sequences
        plans.append((plan.first, plan.token_ids))
        ends += engine.commit(number, {("r0", 0): Sampled([token])}).finished
    assert plans == [(0, [5, 6]), (2, [21]), (3, [8, 9])]
    assert [end.outputs for end in ends] == [[[21, 22]], [[23]]]
    assert engine.usage().running == engine.usage().waiting == 0


def test_a_request_between_its_inputs_keeps_its_blocks() -> None:
    engine = built(config_of("late"))
    free = engine.usage().free_blocks
    engine.add_request(Request(request_id="r0", prompt=[5, 6], max_tokens=1, streamed=(StreamedInput([8], 1),)))
    engine.schedule()
    engine.commit(0, {("r0", 0): Sampled([21])})
    usage = engine.usage()
    assert (usage.running, usage.waiting) == (0, 1)
    assert free is not None and usage.free_blocks == free - 1
    engine.abort_request("r0")
    assert engine.usage().free_blocks == free


def test_a_part_that_is_too_long_is_refused_with_the_request() -> None:
    config = config_of("queued")
    session = Session(built(config), config)
    assert session.add(Add(4, 1, streamed=((40, 1),))) is None
    assert session.ledger.behaviours["refused"] == 1


def test_without_the_option_no_such_request_is_added() -> None:
    config = config_of("none")
    session = Session(built(config), config)
    assert session.add(Add(4, 1, streamed=((2, 1),))) is None
    assert not session.ledger.requests


def test_an_output_that_is_kept_though_it_was_dropped_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("queued")
    engine = built(config)
    scheduler = engine._scheduler
    go_on = scheduler._update_request_as_session

    def forgetful(session: Any, update: Any) -> None:
        go_on(session, update)
        session._all_token_ids[-1] += 1
        session.prompt_token_ids[-1] += 1

    monkeypatch.setattr(scheduler, "_update_request_as_session", forgetful)
    found = Session(engine, config).run([Add(4, 2, streamed=((3, 2),)), Drain()])
    assert {violation.requirement for violation in found} & {"PRG-5", "KV-6"}


STATEFUL = (KVCacheGroup("full", 4), KVCacheGroup("state", 4, state=True))


@pytest.mark.parametrize(
    ("options", "fields", "words"),
    [
        ({"reset_running_requests": True}, {}, "reset_running_requests with streaming_input"),
        ({}, {"kv_cache_groups": STATEFUL, "pipeline_depth": 2}, "streaming_input with recurrent state"),
    ],
    ids=["reset", "state"],
)
def test_what_breaks_with_it_is_refused(options: dict[str, OptionValue], fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigRefused, match=words):
        built(config_of("queued", options, enable_prefix_caching=True, **fields))
