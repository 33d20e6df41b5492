"""The V1 scheduler of vLLM 0.8 in the shape of later ones: what is told of it is what it did."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest

from conformance.adapters._vllm_v1_early import EarlyScheduler
from conformance.adapters.vllm_v1 import make
from conformance.operations import Abort, Add, Drain, Operation, Step
from conformance.protocol import EngineConfig
from conformance.session import Session


class Early:
    """A scheduler that runs one new request and one that goes on."""

    def __init__(self) -> None:
        self.waiting: Any = None
        self.running = ["r0", "r1"]
        self.kv_cache_manager = SimpleNamespace(req_to_blocks={})
        self.updated: list[Any] = []
        new = SimpleNamespace(req_id="r1", prompt_token_ids=[5], block_ids=[3], num_computed_tokens=0)
        on = SimpleNamespace(
            req_id="r0", resumed_from_preemption=True, new_token_ids=[9], new_block_ids=[1, 2], num_computed_tokens=4
        )
        self.output = SimpleNamespace(scheduled_new_reqs=[new], scheduled_cached_reqs=[on], finished_req_ids={"r2"})

    def schedule(self) -> Any:
        return self.output

    def update_from_output(self, output: Any, tokens: Any) -> Any:
        self.updated.append((output, tokens))
        return "outputs"


def test_tables_are_told_by_group_and_changes_by_field() -> None:
    output = EarlyScheduler(Early()).schedule()
    assert [one.block_ids for one in output.scheduled_new_reqs] == [([3],)]
    assert vars(output.scheduled_cached_reqs) == {
        "req_ids": ["r0"],
        "resumed_from_preemption": [True],
        "new_token_ids": [[9]],
        "new_block_ids": [([1, 2],)],
        "num_computed_tokens": [4],
    }
    assert output.finished_req_ids == {"r2"}


def test_the_scheduler_gets_back_what_it_made() -> None:
    inner = Early()
    scheduler = EarlyScheduler(inner)
    assert scheduler.update_from_output(scheduler.schedule(), "tokens") == {0: "outputs"}
    assert inner.updated == [(inner.output, "tokens")]


def test_who_is_put_back_at_the_head_is_seen() -> None:
    inner = Early()
    scheduler = EarlyScheduler(inner)
    seen: list[str] = []
    prepend = scheduler.waiting.prepend_request

    def watched(request: str) -> None:
        seen.append(request)
        prepend(request)

    scheduler.waiting.prepend_request = watched
    inner.waiting.append("r3")
    inner.waiting.appendleft("r4")
    assert (list(inner.waiting), seen) == (["r4", "r3"], ["r4"])
    assert scheduler.get_request_counts() == (2, 2)


@pytest.mark.filterwarnings("default")
def test_a_plain_workload_keeps_the_contract_on_the_release_itself() -> None:
    if importlib.util.find_spec("vllm") is None or importlib.util.find_spec("vllm.v1.core.specialized_manager") is None:
        pytest.skip("vLLM 0.8 is not installed")
    config = EngineConfig(num_blocks=9, block_size=4, max_model_len=32, enable_prefix_caching=True)
    session = Session(make(config), config)
    workload: list[Operation] = [Add(9, 12, family=1, shared_len=4)] * 4
    assert not session.run([*workload, Step(5), Abort(1), Drain(), *workload, Drain()])
    assert session.preemptions
    assert session.ledger.behaviours["prefix hit"]
