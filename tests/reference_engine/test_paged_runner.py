"""The reference engine's tables, executed with tensors, give the tokens that the model gives without an engine."""

from __future__ import annotations

from collections import Counter
from functools import cache
from random import Random
from typing import Any, NamedTuple

import pytest

from conformance.protocol import EngineConfig
from reference_engine import config as core
from reference_engine.block_pool import NULL_BLOCK
from reference_engine.engine import Engine
from reference_engine.request import Request
from reference_engine.runners.serving import Arrival, serve
from reference_engine.scheduler import Plan
from workloads import arrivals_of, core_config, random_operations

torch: Any = pytest.importorskip("torch", reason="the paged runner needs the extra `torch`")
for library in ("transformers.models.llama.modeling_llama", "transformers.models.mistral.modeling_mistral"):
    pytest.importorskip(library, reason="the paged runner needs the extra `torch`")

from reference_engine.runners.paged import (  # noqa: E402 - only where torch is
    PagedRunner,
    PoisonedReadError,
    Row,
    tiny_model,
)

torch.set_num_threads(1)

WINDOW = 7
LEAST_GAP = 1e-3
"""Logits are of the order of 50 and, as the norms round to float32, right to about 1e-5."""


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny_model()


@pytest.fixture(scope="module")
def mistral() -> Any:
    return tiny_model(seed=1, sliding_window=WINDOW)


# -------------------------------------------------------------------------------------------------- workloads


class Scenario(NamedTuple):
    """A configuration, and what must happen in its workloads for the comparison to mean something."""

    config: EngineConfig
    must_see: set[str]


SMALL: dict[str, Any] = {
    "num_blocks": 10,
    "block_size": 4,
    "max_num_seqs": 5,
    "max_num_batched_tokens": 32,
    "max_model_len": 28,
}


def scenario(*must_see: str, **fields: Any) -> Scenario:
    return Scenario(EngineConfig(**{**SMALL, **fields}), set(must_see))


SCENARIOS = {
    "recompute": scenario("preempted to recompute", "forked", "copy", "stopped", "preempted with several sequences"),
    "swap": scenario(
        "preempted to swap", "swap_out", "swap_in", "forked", "copy", preemption_mode="swap", num_swap_blocks=12
    ),
    "swap-when-it-fits": scenario(
        "preempted to swap", "preempted to recompute", preemption_mode="swap", num_swap_blocks=3
    ),
    "prefix-caching": scenario("hit", "preempted to recompute", "copy", enable_prefix_caching=True),
    "chunked": scenario(
        "chunk", "preempted to recompute", "forked", enable_chunked_prefill=True, max_num_batched_tokens=7
    ),
    "priority": scenario("preempted the older", scheduling_policy="priority"),
    "all-at-once": scenario(
        "chunk", "hit", "swap_in", "copy", "preempted the older", "stopped",
        enable_prefix_caching=True, enable_chunked_prefill=True, max_num_batched_tokens=9,
        scheduling_policy="priority", preemption_mode="swap", num_swap_blocks=8, watermark=0.1,
    ),
    "pipeline": scenario(
        "input in flight", "chunk", "hit", "preempted to recompute", "stopped",
        pipeline_depth=2, enable_prefix_caching=True, enable_chunked_prefill=True, max_num_batched_tokens=12,
    ),
    "lookahead": scenario("blocks ahead", "preempted to recompute", "copy", "forked", num_lookahead_slots=3),
    "block-of-one": scenario("preempted to recompute", "hit", num_blocks=34, block_size=1, enable_prefix_caching=True),
    "block-per-sequence": scenario("forked", "copy", "swap_in", num_blocks=3, block_size=28, preemption_mode="swap",
                                   num_swap_blocks=3),
    "window": scenario("out of the window", "preempted to recompute", "forked", sliding_window=WINDOW),
    "window-chunked-cached-swapped": scenario(
        "out of the window", "chunk", "hit", "swap_in",
        sliding_window=WINDOW, num_blocks=9, enable_prefix_caching=True, enable_chunked_prefill=True,
        max_num_batched_tokens=8, preemption_mode="swap", num_swap_blocks=8,
    ),
}  # fmt: skip


# ------------------------------------------------------------------------------------ what the model says alone


@cache
def generate(model: Any, prompt: tuple[int, ...], max_new_tokens: int, stop_token: int | None) -> list[int]:
    """What Hugging Face generates with a cache of its own."""
    ids = torch.tensor([prompt])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False,
        eos_token_id=stop_token, pad_token_id=0,
    )  # fmt: skip
    return [int(token) for token in output[0, len(prompt) :]]


def expected_outputs(model: Any, request: Request, max_model_len: int) -> list[list[int]]:
    """The tokens of each sequence: the (s+1)-th best first token, then greedily."""
    prompt = tuple(request.sequences[0].tokens[: request.prompt_len])
    most = min(request.max_tokens, max_model_len - request.prompt_len)
    outputs = [generate(model, prompt, most, request.stop_token)]
    with torch.no_grad():
        firsts = model(torch.tensor([prompt])).logits[0, -1].topk(request.n).indices.tolist()
    assert outputs[0][0] == firsts[0]
    for first in firsts[1:]:
        ended = most == 1 or first == request.stop_token
        more = [] if ended else generate(model, (*prompt, first), most - 1, request.stop_token)
        outputs.append([first, *more])
    return outputs


def set_stop_tokens(model: Any, random: Random, arrivals: list[Arrival]) -> None:
    """Give some requests a stop token that the model will emit in good time."""
    for _, request in arrivals:
        if random.random() < 0.3:
            prompt = tuple(request.sequences[0].tokens)
            request.stop_token = generate(model, prompt, 5, None)[random.randrange(5)]


class Seen(Counter[str]):
    """Counts what happens in the plans of a run: a comparison of tokens means little where nothing happened."""

    def __init__(self, config: core.EngineConfig) -> None:
        super().__init__()
        self.config = config

    def plan(self, plan: Plan) -> None:
        for victim, mode, _, _, asked_by in plan.preempted:
            self[f"preempted to {mode}"] += 1
            self["preempted with several sequences"] += len(victim.live) > 1
            self["preempted the older"] += victim.arrival < asked_by.arrival
        for move in plan.moves:
            self[move.kind] += 1
        for sequence, first, num_tokens, samples in plan.sequences:
            self["chunk"] += not samples
            self["forked"] += sequence.index > 0
            self["input in flight"] += first + num_tokens > len(sequence.tokens)
            self["blocks ahead"] += samples and len(sequence.table) > -(-(first + num_tokens) // self.config.block_size)
            self["out of the window"] += self.config.null_block and sequence.table[0] == NULL_BLOCK

    def end(self, engine: Engine, arrivals: list[Arrival], outputs: dict[str, list[list[int]]]) -> None:
        self["hit"] += engine.blocks.hit_tokens
        for _, request in arrivals:
            for output in outputs[request.request_id]:
                length = min(request.prompt_len + request.max_tokens, engine.config.max_model_len)
                self["stopped"] += request.prompt_len + len(output) < length


# ------------------------------------------------------------------------------------------------------- tests


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_request_gets_the_tokens_that_the_model_generates_alone(name: str, llama: Any, mistral: Any) -> None:
    config, must_see = SCENARIOS[name]
    model = llama if config.sliding_window is None else mistral
    seen = Seen(core_config(config))
    for seed in range(4):
        random = Random(seed)
        arrivals = arrivals_of(random_operations(random, config))
        set_stop_tokens(model, random, arrivals)
        expected = {
            request.request_id: expected_outputs(model, request, config.max_model_len) for _, request in arrivals
        }
        engine = Engine(core_config(config))
        runner = PagedRunner(model, engine.config)
        outputs = serve(engine, runner, arrivals, seen.plan)
        assert outputs == expected, f"seed {seed}"
        assert runner.smallest_gap > LEAST_GAP
        assert engine.blocks.pool.held == 0 == engine.blocks.host.held
        seen.end(engine, arrivals, outputs)
    missing = {what for what in must_see if not seen[what]}
    assert not missing, f"the workloads never had {missing}: {dict(seen)}"


def test_poison_shows_a_read_of_what_was_never_written(llama: Any) -> None:
    runner = PagedRunner(llama, core_config(EngineConfig(**SMALL)))
    runner.forward([], [Row(("a", 0), 0, [5, 6, 7, 8, 9], [3, 4])])
    with pytest.raises(PoisonedReadError, match=r"of a, run from position 7, reads position 5 in block 4"):
        runner.forward([], [Row(("a", 0), 7, [5], [3, 4])])


def test_poison_shows_a_read_of_what_was_freed(llama: Any) -> None:
    engine = Engine(core_config(EngineConfig(**SMALL)))
    runner = PagedRunner(llama, engine.config)
    tables: list[list[int]] = []
    serve(
        engine, runner, [(0, Request("a", [5] * 9, 3))], lambda plan: tables.append(plan.sequences[0].sequence.table[:])
    )
    with pytest.raises(PoisonedReadError, match="reads position 0"):
        runner.forward([], [Row(("a", 0), 11, [5], tables[-1])])


def test_a_model_and_an_engine_of_different_windows_are_not_put_together(llama: Any) -> None:
    config = core_config(EngineConfig(**SMALL, sliding_window=WINDOW))
    with pytest.raises(ValueError, match="sliding_window = 7: must be None, as in the model"):
        PagedRunner(llama, config)


class _Idle(Engine):
    """Never runs anything."""

    def schedule(self) -> Plan:
        return Plan(0)


def test_serving_ends_when_an_engine_never_runs_what_it_took(llama: Any) -> None:
    engine = _Idle(core_config(EngineConfig(**SMALL)))
    with pytest.raises(RuntimeError, match=r"step 0 runs nothing and a wait \(PRG-1\)"):
        serve(engine, PagedRunner(llama, engine.config), [(0, Request("a", [5], 1))])
