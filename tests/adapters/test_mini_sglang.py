"""The mini-sglang adapter on the package that is found: what it reports is what the engine did."""

from __future__ import annotations

import importlib.util
import random
from typing import Any

import pytest

from conformance.operations import Abort, Add, Operation, Step
from conformance.protocol import AdapterError, ConfigRefused, EngineConfig, RequestRefused, Sampled
from conformance.session import Session

if importlib.util.find_spec("minisgl") is None:
    pytest.skip("mini-sglang is not installed", allow_module_level=True)

from by_hand import ADAPTER_FAULTS, broken, request, step
from conformance.adapters.mini_sglang import make
from workloads import random_traffic

pytestmark = pytest.mark.filterwarnings("default")  # importing torch warns


def config_of(**fields: Any) -> EngineConfig:
    given = {"num_blocks": 81, "block_size": 1, "max_num_batched_tokens": 40, "max_model_len": 40} | fields
    return EngineConfig(**given)


def test_one_request_from_prompt_to_end() -> None:
    engine = make(config_of(block_size=4, num_blocks=9))
    engine.add_request(request(0, 6, 3))
    (prompt,) = step(engine, token=11).sequences
    assert (prompt.first, prompt.num_tokens, prompt.block_tables, prompt.token_ids) == (
        (0, 6, [[0, 1]], request(0, 6, 3).prompt)
    )
    (decode,) = step(engine, token=12).sequences
    assert (decode.first, decode.num_tokens, decode.token_ids) == (6, 1, [11])
    engine.schedule()
    (finished,) = engine.commit(2, {("r0", 0): Sampled([13])}).finished
    assert finished.outputs == [[11, 12, 13]]
    assert sorted(engine.snapshot().free) == list(range(8))
    assert engine.snapshot().reserved == [8]


def test_a_prompt_over_the_budget_goes_in_chunks() -> None:
    engine = make(config_of(max_num_batched_tokens=8))
    engine.add_request(request(0, 19, 2))
    chunks = [step(engine).sequences[0] for _ in range(3)]
    assert [(chunk.first, chunk.num_tokens, chunk.samples) for chunk in chunks] == [
        (0, 8, False),
        (8, 8, False),
        (16, 3, True),
    ]


def test_a_stop_token_ends_a_sequence() -> None:
    engine = make(config_of())
    engine.add_request(request(0, 5, 9, stop_token=42))
    step(engine)
    engine.schedule()
    (finished,) = engine.commit(1, {("r0", 0): Sampled([42])}).finished
    assert finished.outputs == [[7, 42]]


def test_an_abort_gives_everything_back_at_once() -> None:
    engine = make(config_of(max_num_seqs=1))
    for number in range(2):
        engine.add_request(request(number, 5, 8))
    step(engine)
    assert (engine.usage().free_blocks, engine.usage().running, engine.usage().waiting) == (75, 1, 1)
    for rid in ("r0", "r1", "r0", "never seen"):
        engine.abort_request(rid)
    assert (engine.usage().free_blocks, engine.usage().running, engine.usage().waiting) == (80, 0, 0)


def test_what_it_does_not_serve_is_refused() -> None:
    engine = make(config_of())
    with pytest.raises(RequestRefused, match="dropped: 40 tokens, at most 39"):
        engine.add_request(request(0, 40, 1))
    with pytest.raises(RequestRefused, match="n = 2"):
        engine.add_request(request(1, 4, 1, n=2))
    with pytest.raises(ConfigRefused, match="priority"):
        make(config_of(scheduling_policy="priority"))
    with pytest.raises(ConfigRefused, match="pipeline_depth = 3"):
        make(config_of(pipeline_depth=3))
    with pytest.raises(ConfigRefused, match="max_num_batched_tokens = 3"):
        make(config_of(max_num_batched_tokens=3))
    overlapped = make(config_of(pipeline_depth=2))
    overlapped.add_request(request(0, 5, 9))
    overlapped.schedule()
    overlapped.schedule()
    with pytest.raises(AdapterError, match="2 steps in flight"):
        overlapped.schedule()


@pytest.mark.parametrize("budget", [40, 12], ids=["whole", "chunked"])
def test_the_books_add_up_on_random_workloads(budget: int) -> None:
    config = config_of(num_blocks=45, max_num_batched_tokens=budget)
    for seed in range(5):
        found = Session(make(config), config).run(random_traffic(random.Random(seed), range(1, 31), 30))
        assert [violation for violation in found if violation.requirement in ADAPTER_FAULTS] == [], seed


@pytest.mark.parametrize(
    ("config", "operations", "requirement"),
    [
        # A prompt sent twice: its last page is freed under it.
        (
            config_of(num_blocks=4, block_size=4, max_num_seqs=1, enable_prefix_caching=True),
            [Add(8, 1, 0, 8), Step(2), Add(8, 3, 0, 8)],
            "KV-1",
        ),
        # With overlap the reply before the last says that it is the last.
        (config_of(pipeline_depth=2), [Add(4, 3)], "PRG-5"),
        # An abort while the prefill is under way.
        (
            config_of(pipeline_depth=2, enable_prefix_caching=True),
            [Add(4, 30), Step(), Abort(0), Step(3)],
            "PRG-8",
        ),
        # Four pages wanted, three there.
        (config_of(num_blocks=4, block_size=8), [Add(2, 2)] * 4, "PRG-8"),
    ],
)
def test_its_known_faults_are_seen(config: EngineConfig, operations: list[Operation], requirement: str) -> None:
    assert requirement in broken(make, config, *operations)
