"""Under ``strict_interface`` no call passes that the real interface does not document, and every one that it does."""

from __future__ import annotations

from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="the emulated device needs the extra `torch`")

from emulation import VOCABULARY, Requests, alone, batching, build, make, prompt  # noqa: E402 - only where torch is
from reference_engine.runners.neuron.emulated import Behaviour, InterfaceError, installed  # noqa: E402
from reference_engine.runners.neuron.emulated.configuration import (  # noqa: E402
    ContinuousBatchingConfig,
    GenerationConfig,
)
from reference_engine.runners.neuron.emulated.model import LlamaForSampling  # noqa: E402

STRICT = Behaviour(strict_interface=True)
ONE = prompt("one", 3)


def arguments(**changes: Any) -> dict[str, Any]:
    """Two prompts on lines 2 and 0, the second of them shorter; and what is changed about that."""
    two = {
        "input_ids": torch.tensor([ONE, [8, 9, 0]]),
        "cache_ids": torch.tensor([[0, 1, 2], [0, 1, 0]]),
        "start_ids": torch.tensor([2, 0]),
    }
    return {**two, **changes}


def tokens(**changes: Any) -> dict[str, Any]:
    """One token on lines 2 and 0; and what is changed about that."""
    two = {
        "input_ids": torch.tensor([[5], [6]]),
        "cache_ids": torch.tensor([[3], [2]]),
        "start_ids": torch.tensor([2, 0]),
    }
    return {**two, **changes}


@pytest.fixture(scope="module")
def model() -> Any:
    return build(STRICT)


def test_a_whole_run_as_documented_passes(model: Any) -> None:
    model.reset()
    requests = Requests(model).start({2: ONE, 0: prompt("two", 32)}).go(10)
    requests.start({1: [77]}, width=2).go(5)
    assert requests.output(1) == alone([77], 6)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"start_ids": torch.tensor([[3], [1]])},
        {"start_ids": torch.tensor([3, 1], dtype=torch.int32)},
        {name: value.to(torch.int32) for name, value in arguments().items()},
    ],
)
def test_every_documented_form_passes(model: Any, changes: dict[str, Any]) -> None:
    model(**arguments(**changes))
    model(**tokens(**{name: value[:, :1] if name != "start_ids" else value for name, value in changes.items()}))


def test_the_documented_form_without_keywords_passes(model: Any) -> None:
    model(*arguments().values())


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another argument": (arguments(last_token_id=torch.tensor([2, 1])), "forward: .* only; got last_token_id"),
    "an unknown argument": (arguments(positions=torch.tensor([2])), "forward: .* got positions"),
    "lists": (arguments(input_ids=[[1, 2]]), "input_ids: expected a torch.Tensor; got list"),
    "no positions": (arguments(cache_ids=None), "cache_ids: expected a torch.Tensor; got NoneType"),
    "no lines": (arguments(start_ids=None), "start_ids: expected a torch.Tensor; got NoneType"),
    "float ids": (arguments(input_ids=torch.ones(2, 3)), r"input_ids.dtype: .* got torch.float32"),
    "boolean lines": (arguments(start_ids=torch.tensor([True, False])), r"start_ids.dtype: .* got torch.bool"),
    "short positions": (
        arguments(cache_ids=torch.tensor([[0, 1, 2], [0, 1, 0]], dtype=torch.int16)),
        r"cache_ids.dtype: .* got torch.int16",
    ),
    "two widths of integers": (
        tokens(cache_ids=torch.tensor([[3], [2]], dtype=torch.int32)),
        r"cache_ids.dtype: expected that of input_ids, torch.int64; got torch.int32",
    ),
    "a flat prompt": (arguments(input_ids=torch.tensor(ONE)), r"input_ids.shape: expected \[n, T\].* got \(3,\)"),
    "no rows": (
        {
            "input_ids": torch.zeros(0, 1, dtype=torch.int64),
            "cache_ids": torch.zeros(0, 1, dtype=torch.int64),
            "start_ids": torch.zeros(0, dtype=torch.int64),
        },
        r"input_ids.shape: .* got \(0, 1\)",
    ),
    "positions of one row": (arguments(cache_ids=torch.tensor([[0, 1, 2]])), r"cache_ids.shape: .* got \(1, 3\)"),
    "flat positions": (tokens(cache_ids=torch.tensor([3, 2])), r"cache_ids.shape: .* got \(2,\)"),
    "too few lines": (arguments(start_ids=torch.tensor([2])), r"start_ids.shape: .* got \(1,\)"),
    "lines in a row": (arguments(start_ids=torch.tensor([[2, 0]])), r"start_ids.shape: .* got \(1, 2\)"),
    "a token beyond the vocabulary": (
        tokens(input_ids=torch.tensor([[5], [VOCABULARY]])),
        rf"input_ids: expected token ids in \[0, {VOCABULARY}\); got 5 to {VOCABULARY}",
    ),
    "a negative token": (tokens(input_ids=torch.tensor([[5], [-1]])), "input_ids: .* got -1 to 5"),
    "line n in a prefill": (arguments(start_ids=torch.tensor([2, 4])), r"start_ids: .* \[0, 4\); got \[2, 4\]"),
    "line n in a decode": (tokens(start_ids=torch.tensor([4, 0])), r"start_ids: .* got \[4, 0\]"),
    "a negative line": (arguments(start_ids=torch.tensor([-1, 0])), r"start_ids: .* got \[-1, 0\]"),
    "a line twice": (tokens(start_ids=torch.tensor([1, 1])), r"start_ids: expected every line once; got \[1, 1\]"),
    "a negative position": (tokens(cache_ids=torch.tensor([[3], [-1]])), "cache_ids: expected positions from 0"),
    "a gap in the positions": (
        arguments(cache_ids=torch.tensor([[0, 2, 3], [0, 1, 0]])),
        r"cache_ids\[0\]: .* got \[0, 2, 3\]",
    ),
    "padding counted on": (
        arguments(input_ids=torch.tensor([ONE, [8, 0, 0]]), cache_ids=torch.tensor([[0, 1, 2], [0, 0, 1]])),
        r"cache_ids\[1\]: .* got \[0, 0, 1\]",
    ),
    "a row that begins later": (
        arguments(cache_ids=torch.tensor([[0, 1, 2], [1, 2, 3]])),
        r"cache_ids\[1\]: .* got \[1, 2, 3\]",
    ),
    "padding that is not 0": (
        arguments(input_ids=torch.tensor([ONE, [8, 9, 7]])),
        r"input_ids\[1\]: expected 0 after the prompt; got \[7\]",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_call_that_is_not_documented_is_refused_with_what_was_wrong(model: Any, name: str) -> None:
    keywords, message = WRONG[name]
    executed = sum(model.ledger.executions.values())
    with pytest.raises(InterfaceError, match=message):
        model(**keywords)
    assert sum(model.ledger.executions.values()) == executed


def test_what_the_device_refuses_by_itself_is_left_to_it(model: Any) -> None:
    with pytest.raises(AssertionError, match="invalid input prompt length"):
        model(
            torch.tensor([prompt("any", 33)]),
            cache_ids=torch.arange(33)[None],
            start_ids=torch.tensor([0]),
        )
    with pytest.raises(StopIteration):
        model(**tokens(cache_ids=torch.tensor([[64], [0]])))


def test_without_it_the_host_code_alone_decides() -> None:
    lenient = build()
    lenient(**arguments(start_ids=torch.tensor([2, 4])))
    lenient(**tokens(start_ids=torch.tensor([1, 1])))
    with pytest.raises(RuntimeError, match="dtype"):
        lenient(**WRONG["two widths of integers"][0])


# ------------------------------------------------------------------------------------------------ the constructor


def make_strictly(**changes: Any) -> Any:
    """A model with the keywords that the suite passes; and what is changed about them."""
    keywords = {
        "n_positions": [64],
        "context_length_estimate": [32],
        "batch_size": 4,
        "tp_degree": 2,
        "amp": "f32",
        "neuron_config": batching(4),
    }
    return make(STRICT, **{**keywords, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_position": [64]}, "keywords among .*n_positions.*; got n_position"),
        ({"dtype": "f32"}, "got dtype"),
        ({"amp": "float32"}, "amp: expected one of f32, bf16, f16; got 'float32'"),
        ({"tp_degree": 3}, "tp_degree: expected one of"),
        ({"tp_degree": "2"}, "tp_degree: expected one of"),
        ({"n_positions": [64, 0]}, r"n_positions: expected a positive integer .*; got \[64, 0\]"),
        ({"n_positions": (64,)}, r"n_positions: .*; got \(64,\)"),
        ({"context_length_estimate": [32, True]}, "context_length_estimate: "),
    ],
)
def test_a_constructor_call_that_is_not_documented_is_refused(changes: dict[str, Any], message: str) -> None:
    make_strictly()
    with pytest.raises(InterfaceError, match=message):
        make_strictly(**changes)


def test_a_configuration_of_another_package_is_refused() -> None:
    with installed(STRICT), pytest.raises(InterfaceError, match="neuron_config: expected a NeuronConfig"):
        LlamaForSampling(object(), neuron_config=ContinuousBatchingConfig(max_num_seqs=1))  # type: ignore[arg-type]


def test_an_unknown_keyword_is_swallowed_in_silence_without_it() -> None:
    make(n_positions=[64], n_position=[32])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"top_k": 0}, "top_k: expected at least 1; got 0"),
        ({"temperature": 0.0}, r"temperature: expected above 0; got 0\.0"),
        ({"top_p": 1.5}, r"top_p: expected in \(0, 1\]; got 1\.5"),
        ({"per_batch_line": True, "top_k": [1, 1, -1, 1]}, r"top_k: .* got \[1, 1, -1, 1\]"),
    ],
)
def test_sampling_settings_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    per_line = settings.get("per_batch_line", False)
    model = build(STRICT, on_device_generation=GenerationConfig(dynamic=True, per_batch_line=per_line))
    model.update_generation_config(GenerationConfig(per_batch_line=per_line, top_k=1))
    with pytest.raises(InterfaceError, match=message):
        model.update_generation_config(GenerationConfig(**settings))
    with pytest.raises(InterfaceError, match="expected a GenerationConfig; got dict"):
        model.update_generation_config(settings)
