"""How a model comes to run: checks, graphs, artefacts, and the ledger of what ran at what cost."""

from __future__ import annotations

from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="the emulated device needs the extra `torch`")

from emulation import Requests, alone, batching, build, decode, make, prefill, prompt  # noqa: E402 - only where torch is
from reference_engine.runners.neuron.emulated import Behaviour, CostModel, Graph, NewGraphError  # noqa: E402
from reference_engine.runners.neuron.emulated.configuration import NeuronConfig  # noqa: E402

SHORT, MIDDLE, LONG = prompt("short", 3), prompt("middle", 17), prompt("long", 30)


def test_nothing_runs_before_to_neuron() -> None:
    model = make(batch_size=2, neuron_config=batching(2), n_positions=[64], context_length_estimate=[32])
    for call in (lambda: prefill(model, [0], [SHORT]), model.reset, lambda: model.cache):
        with pytest.raises(RuntimeError, match="to_neuron"):
            call()


@pytest.mark.parametrize("keywords", [{"batch_size": 3}, {}])
def test_shared_caches_must_have_the_batch_size(keywords: dict[str, Any]) -> None:
    with pytest.raises(AssertionError, match="batch_size_for_shared_caches is 2"):
        make(neuron_config=batching(2), **keywords)


def test_a_context_bucket_must_not_exceed_the_positions() -> None:
    with pytest.raises(AssertionError, match="context_length_estimate 128"):
        make(n_positions=[32, 64], context_length_estimate=[32, 128])


@pytest.mark.parametrize(
    ("keywords", "reason"),
    [
        ({"tp_degree": 3}, "tp_degree = 3"),
        ({"amp": "f8"}, "amp = 'f8'"),
    ],
)
def test_what_cannot_be_split_or_computed_is_refused(keywords: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        make(**keywords)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"bf16_rms_norm": True}, "bf16_rms_norm"),
        ({"output_all_logits": True}, "output_all_logits"),
        ({"cache_layout": "BSH"}, "cache_layout"),
    ],
)
def test_what_is_not_emulated_is_refused_by_name(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotImplementedError, match=reason):
        build(**settings)


def test_the_bsh_cache_layout_needs_continuous_batching() -> None:
    with pytest.raises(AssertionError, match="BSH"):
        make(neuron_config=NeuronConfig(cache_layout="BSH"))


def test_positions_as_an_integer_are_powers_of_two_and_contexts_half_of_them() -> None:
    model = make(n_positions=500, batch_size=2, neuron_config=batching(2))
    assert [(graph.route, graph.bucket) for graph in model.graphs()] == [
        ("prefill", 64),
        ("prefill", 128),
        ("prefill", 250),
        ("decode", 128),
        ("decode", 256),
        ("decode", 500),
    ]


def test_graphs_are_those_of_the_buckets_and_none_is_made_in_service() -> None:
    model = build(context=(16, 32), tokens=(64, 128))
    assert model.ledger.compiled == (
        Graph("prefill", 16, 1),
        Graph("prefill", 32, 1),
        Graph("decode", 64, 4),
        Graph("decode", 128, 4),
    )
    Requests(model).start({0: SHORT, 1: LONG}).go(50)
    assert set(model.ledger.executions) == set(model.ledger.compiled) - {Graph("prefill", 16, 1)}
    assert model.ledger.late == []


def test_the_ledger_forbids_a_graph_that_was_not_compiled_or_counts_it() -> None:
    late = Graph("decode", 1, 1)
    strict, lenient = build().ledger, build(Behaviour(forbid_new_graphs=False)).ledger
    with pytest.raises(NewGraphError, match="bucket=1, batch=1"):
        strict.execute(late, (0,), (0,), 1)
    for _ in range(2):
        lenient.execute(late, (0,), (0,), 1)
    assert strict.late == []
    assert lenient.late == [late]


def test_saved_graphs_are_loaded_and_not_compiled_again(tmp_path: Any) -> None:
    first = build()
    first.save(tmp_path / "artefacts")
    keywords: dict[str, Any] = {"n_positions": [64], "batch_size": 4, "neuron_config": batching(4)}
    second = make(context_length_estimate=[32], **keywords)
    second.load(tmp_path / "artefacts")
    second.to_neuron()
    assert second.ledger.compiled == ()
    assert second.ledger.loaded == first.ledger.compiled
    assert Requests(second).start({0: SHORT}).go(5).output(0) == alone(SHORT, 6)
    other = make(context_length_estimate=[16], **keywords)
    other.load(tmp_path / "artefacts")
    with pytest.raises(FileNotFoundError, match="bucket=16"):
        other.to_neuron()


def test_the_log_says_what_ran_and_keeps_as_much_as_it_was_told() -> None:
    model = build(Behaviour(calls_kept=2))
    Requests(model).start({2: SHORT, 0: LONG}).go(1)
    second, third = model.ledger.calls
    assert second == (1, Graph("prefill", 32, 1), (0,), (29,), 30, ())
    assert third == (2, Graph("decode", 64, 4), (2, 0), (3, 30), 1, (1, 3))
    assert (model.ledger.prefills, model.ledger.decodes) == (2, 1)


def test_a_prefill_costs_its_bucket_and_a_decode_the_same_for_one_line_and_all() -> None:
    model = build(Behaviour(cost=CostModel(prefill_per_position=2, decode=5)), context=(16, 32))
    costs = [model.ledger.cost]
    prefill(model, [0], [SHORT])
    costs.append(model.ledger.cost)
    prefill(model, [0, 1], [MIDDLE, LONG])
    costs.append(model.ledger.cost)
    decode(model, [0], [1], [40])
    costs.append(model.ledger.cost)
    decode(model, [0, 1, 2, 3], [1] * 4, [41] * 4)
    costs.append(model.ledger.cost)
    assert costs == [0, 32, 32 + 128, 165, 170]
    assert build().ledger.behaviour.cost is None


def test_a_model_made_in_inference_mode_can_be_called_outside_of_it() -> None:
    with torch.inference_mode():
        model = build()
        prefill(model, [0], [SHORT])
    assert Requests(model).start({0: SHORT}).go(3).output(0) == alone(SHORT, 4)
