"""The KV connector: what it loads, loses and sends on its own, and what the installed vLLM makes of it."""

from __future__ import annotations

from typing import Any

import pytest

from conformance.adapters._vllm_v1_connector import Transfers, TransferSettings
from conformance.adapters._vllm_v1_release import installed_release
from conformance.adapters.vllm_v1 import make
from conformance.operations import Abort, Add, Drain, Operation, Step
from conformance.protocol import AdapterError, ConfigRefused, EngineConfig, KVCacheGroup, OptionValue
from conformance.session import Session

PROMPTED = 40
"""Requests from r0 on, among which each kind of match occurs."""


def settings(**fields: Any) -> TransferSettings:
    given: dict[str, Any] = {
        "late": True,
        "loads": True,
        "unit": 4,
        "load_steps_max": 0,
        "failing": 0,
        "whole": True,
        "by_request": False,
        "send_steps": 0,
    }
    return TransferSettings(**(given | fields))


def matches(transfers: Transfers, prompt_len: int, length: int, computed: int = 0) -> dict[str, int]:
    found = {}
    for number in range(PROMPTED):
        more, _ = transfers.match(f"r{number}", prompt_len, length, computed)
        if more is not None:
            found[f"r{number}"] = more
    return found


def test_matches_are_none_whole_blocks_or_a_whole_prompt() -> None:
    assert set(matches(Transfers(settings()), 10, 10).values()) == {0, 4, 8, 10}


def test_the_engine_is_asked_to_come_again_once() -> None:
    transfers = Transfers(settings())
    first, second = matches(transfers, 10, 10), matches(transfers, 10, 10)
    assert len(first) < len(second) == PROMPTED
    assert all(second[name] == more for name, more in first.items())
    assert [one.num_tokens for one in transfers.step(set()).loads] == [0] * (PROMPTED - len(first))


def test_a_load_in_time_leaves_a_token_to_compute() -> None:
    assert max(matches(Transfers(settings(late=False)), 8, 8).values()) == 4


def test_what_the_engine_has_itself_is_not_loaded() -> None:
    assert all(more <= 2 for more in matches(Transfers(settings()), 10, 10, computed=8).values())


def whole_prompt(transfers: Transfers) -> str:
    return next(name for name, more in matches(transfers, 10, 10).items() if more == 10)


def test_a_whole_prompt_is_loaded_once() -> None:
    transfers = Transfers(settings())
    name = whole_prompt(transfers)
    assert transfers.match(name, 10, 10, 0) == (10, True)
    transfers.allocated(name, [[1, 2, 3]], 10)
    assert transfers.match(name, 10, 10, 0) == (8, True)


def test_a_late_load_arrives_after_its_steps() -> None:
    transfers = Transfers(settings(load_steps_max=3))
    arrived = []
    for number in range(PROMPTED):
        if transfers.match(f"r{number}", 10, 10, 0)[0]:
            transfers.allocated(f"r{number}", [[1, 2, 3]], 8)
    begun = len(transfers.step(set()).loads)
    for step in range(4):
        arrived += [step] * len(transfers.step(set()).loaded)
    assert begun > len(arrived) > 0  # some came with the step in which they began
    assert len(set(arrived)) > 1


def test_a_failed_load_names_its_blocks_from_the_first_that_did_not_come() -> None:
    transfers = Transfers(settings(failing=1, late=False))
    transfers.match("r0", 13, 13, 4)
    transfers.allocated("r0", [[7, 0, 8, 9]], 8)
    step = transfers.step(set())
    (load,) = step.loads
    assert load.failed_from == 8  # the null block takes nothing and cannot fail
    assert step.blocks_failed == {8}


def test_a_finished_request_is_sent_once_the_worker_has_heard_of_it() -> None:
    transfers = Transfers(settings(send_steps=2))
    assert transfers.keeps("r0", sends=True)
    assert not transfers.keeps("r1", sends=False)
    sent = [transfers.step(finished).sent for finished in (set(), {"r0"}, set(), set(), set())]
    assert sent == [set(), set(), set(), {"r0"}, set()]


# -- on the installed release ------------------------------------------------------------------------------------

WORKLOAD: list[Operation] = [
    *[Add(prompt_len=9, max_tokens=12, family=1, shared_len=4, priority=number % 2) for number in range(5)],
    Step(4),
    Abort(1),
    Add(prompt_len=20, max_tokens=5, family=1, shared_len=12, salt=1),
    Step(),
    Abort(2),
    Drain(),
    *[Add(prompt_len=8, max_tokens=4) for _ in range(4)],
    Step(),
    Abort(0),
    Step(2),
]


def session_on(options: dict[str, OptionValue], **fields: Any) -> Session:
    """A session on the installed release, or a skip where it lacks an option."""
    pytest.importorskip("vllm")
    given = {"num_blocks": 25, "block_size": 4, "max_num_batched_tokens": 64, "max_model_len": 32} | fields
    config = EngineConfig(engine_options=options, **given)
    try:
        return Session(make(config), config)
    except AdapterError as error:
        pytest.skip(str(error))
    except ConfigRefused as refusal:
        if "not known" in str(refusal):
            pytest.skip(str(refusal))
        raise


PIPELINES: dict[str, tuple[int, dict[str, OptionValue]]] = {
    "sync": (1, {}),
    "two-stages": (2, {"async_scheduling": False}),
    "async": (2, {"async_scheduling": True}),
}


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("caching", [False, True], ids=["uncached", "cached"])
@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_loads_keep_the_contract(kind: str, pipeline: str, caching: bool) -> None:  # noqa: FBT001
    depth, options = PIPELINES[pipeline]
    session = session_on(
        options | {"kv_connector": kind, "kv_role": "kv_consumer", "kv_load_steps": 2},
        pipeline_depth=depth,
        enable_prefix_caching=caching,
    )
    assert not session.run(WORKLOAD)
    assert session.ledger.behaviours["late load arrived" if kind == "async" else "KV loaded in time"]


def session_with_states(kind: str, *, caching: bool, **options: OptionValue) -> Session:
    groups = (KVCacheGroup("full", 4), KVCacheGroup("state", 4 if caching else 32, state=True))
    try:
        return session_on(
            {"kv_connector": kind, "kv_load_steps": 2, **options},
            kv_cache_groups=groups,
            enable_prefix_caching=caching,
            num_blocks=60,
        )
    except ConfigRefused as refusal:
        pytest.skip(str(refusal))


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("caching", [False, True], ids=["uncached", "cached"])
def test_recurrent_states_are_loaded(caching: bool) -> None:  # noqa: FBT001
    session = session_with_states("async", caching=caching)
    assert not session.run(WORKLOAD)
    assert bool(session.ledger.behaviours.get("late load arrived")) is caching  # else a block is as long as the model


@pytest.mark.filterwarnings("default")
def test_a_state_that_does_not_come_with_the_rest_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    session = session_with_states("async", caching=True)
    transfers = session.engine._transfers  # type: ignore[attr-defined]
    allocated = transfers.allocated

    def partly(request_id: str, tables: list[list[int]], num_tokens: int) -> None:
        full, state = session.engine._order  # type: ignore[attr-defined]
        tables[state] = [0] * len(tables[full])
        allocated(request_id, tables, num_tokens)

    monkeypatch.setattr(transfers, "allocated", partly)
    assert "KV-1" in {violation.requirement for violation in session.run(WORKLOAD)}


@pytest.mark.filterwarnings("default")
def test_states_loaded_in_time_are_refused_with_a_prefix_cache() -> None:
    with pytest.raises(ConfigRefused, match=r"sync loads with recurrent state|does not have: state_groups"):
        session_on(
            {"kv_connector": "sync"},
            kv_cache_groups=(KVCacheGroup("full", 4), KVCacheGroup("state", 4, state=True)),
            enable_prefix_caching=True,
        )


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_loads_that_fail_are_computed_again_or_end_the_request(kind: str, policy: str) -> None:
    session = session_on({"kv_connector": kind, "kv_load_failures": 2, "kv_load_failure_policy": policy})
    assert not session.run(WORKLOAD)
    assert session.ledger.behaviours[
        "recomputed after a failed load" if policy == "recompute" else "ended by a failed load"
    ]


@pytest.mark.filterwarnings("default")
def test_blocks_of_what_is_sent_come_back() -> None:
    session = session_on({"kv_connector": "sync", "kv_role": "kv_producer", "kv_send_steps": 2}, pipeline_depth=2)
    busy: list[Operation] = [*WORKLOAD, Add(prompt_len=1, max_tokens=31), Drain()]  # older ones send while they run
    violations = {violation.requirement for violation in session.run(busy)}
    assert violations <= {"ACC-6", "ACC-7"}, violations
    release = tuple(int(part) for part in installed_release().version.split(".")[:2])
    assert bool(violations) == (release < (0, 22))  # they never hear of the last one's end


@pytest.mark.filterwarnings("default")
def test_a_load_into_blocks_that_were_handed_on_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    session = session_on({"kv_connector": "async", "kv_load_steps": 3}, num_blocks=10)
    scheduler = session.engine._scheduler  # type: ignore[attr-defined]
    free = scheduler._free_request

    def hasty(request: Any, **named: Any) -> Any:
        named.pop("delay_free_blocks", None)
        answer = free(request, **named)
        scheduler.requests[request.request_id] = request  # whose load is still to be reported
        return answer

    monkeypatch.setattr(scheduler, "_free_request", hasty)
    seen = session.run([*[Add(prompt_len=12, max_tokens=9) for _ in range(3)], Step(), *[Abort(0)] * 3,
                        *[Add(prompt_len=12, max_tokens=9) for _ in range(4)], Drain()])  # fmt: skip
    assert seen


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("options", [{"pause": "new"}, {"pause": "all"}, {"max_num_queued_reqs": 2},
                                     {"max_num_queued_tokens": 8}, {"long_prefill_token_threshold_adaptive": True,
                                                                    "long_prefill_token_threshold": 3}],
                         ids=lambda options: next(iter(options)))  # fmt: skip
def test_pauses_and_queue_limits_keep_the_contract(options: dict[str, OptionValue]) -> None:
    session = session_on(options, enable_chunked_prefill=True, max_num_batched_tokens=8)
    assert not session.run(WORKLOAD)
    reached = {"pause": "a step was paused", "max_num_queued_reqs": "refused for requests in the queue",
               "max_num_queued_tokens": "refused for prompt tokens in the queue"}  # fmt: skip
    name = next(iter(options))
    assert session.ledger.behaviours[reached.get(name, "prefill in chunks")]
