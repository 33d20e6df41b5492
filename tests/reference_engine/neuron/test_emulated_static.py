"""Without continuous batching, and the host's sampling loop around a model."""

from __future__ import annotations

from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="the emulated device needs the extra `torch`")

from emulation import alone, build, make, prompt  # noqa: E402 - only where torch is

SHORT, MIDDLE = prompt("short", 3), prompt("middle", 17)


def static(batch: int, **keywords: Any) -> Any:
    model = make(n_positions=[64], context_length_estimate=[16], batch_size=batch, **keywords)
    model.to_neuron()
    return model


@pytest.mark.parametrize("length", [1, 10, 16, 20])
def test_a_static_batch_samples_greedily_in_step(length: int) -> None:
    prompts = [prompt("a", length), prompt("b", length)]
    generated = static(2).sample(torch.tensor(prompts), sequence_length=40, top_k=1, eos_token_override=999)
    assert generated.tolist() == [one + alone(one, 40 - length) for one in prompts]


def test_a_row_that_stopped_repeats_its_stop_token() -> None:
    output = alone(SHORT, 12)
    stop = output[4]
    first = output.index(stop)
    generated = static(1).sample(torch.tensor([SHORT]), sequence_length=15, top_k=1, eos_token_override=stop)
    assert generated.tolist() == [SHORT + output[: first + 1]]
    both = static(2).sample(torch.tensor([SHORT, MIDDLE[:3]]), sequence_length=15, top_k=1, eos_token_override=stop)
    assert both[0, 3:].tolist() == output[: first + 1] + [stop] * (11 - first)


def test_sample_takes_positions_and_lines_under_continuous_batching() -> None:
    model = build(lines=2)
    prompts = torch.tensor([prompt("a", 6), prompt("b", 6)])
    generated = model.sample(
        prompts,
        sequence_length=30,
        cache_ids=torch.arange(6).expand(2, 6),
        start_ids=torch.tensor([1, 0]),
        top_k=1,
        eos_token_override=999,
    )
    assert generated.tolist() == [prompt(name, 6) + alone(prompt(name, 6), 24) for name in "ab"]


def test_sample_refuses_what_was_not_compiled_or_is_not_emulated() -> None:
    model = static(2)
    with pytest.raises(ValueError, match="3 rows"):
        model.sample(torch.tensor([SHORT] * 3), sequence_length=10, top_k=1)
    with pytest.raises(NotImplementedError, match="top_k=1"):
        model.sample(torch.tensor([SHORT] * 2), sequence_length=10)
    with pytest.raises(TypeError, match="eos_token_override"):
        model.sample(torch.tensor([SHORT] * 2), sequence_length=10, top_k=1)


def test_forward_refuses_rows_without_lines_and_arguments_it_does_not_take() -> None:
    ids, positions = torch.tensor([SHORT]), torch.arange(3)[None]
    with pytest.raises(ValueError, match="start_ids are missing"):
        build()(ids, cache_ids=positions)
    with pytest.raises(NotImplementedError, match="start_ids as an offset"):
        static(1)(ids, start_ids=torch.tensor([1]))
    with pytest.raises(NotImplementedError, match="last_token_id"):
        build()(ids, cache_ids=positions, start_ids=torch.tensor([0]), last_token_id=torch.tensor([2]))
