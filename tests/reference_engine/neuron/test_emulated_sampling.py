"""Sampling on the emulated device: which tokens can come, from whose settings, and that they can be changed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="the emulated device needs the extra `torch`")

from emulation import build, decode, prefill, prompt  # noqa: E402 - only where torch is
from reference_engine.runners.neuron.emulated import Behaviour, DeviceError  # noqa: E402
from reference_engine.runners.neuron.emulated.configuration import GenerationConfig  # noqa: E402
from reference_engine.runners.neuron.emulated.sampling import DeviceSampler  # noqa: E402

ONE = prompt("one", 6)
LOGITS = torch.tensor([[0.0, 3.0, 2.0, 2.5, -1.0]])


def draws(config: GenerationConfig, count: int = 200, line: int = 0, lines: int = 2) -> Counter[int]:
    sampler = DeviceSampler(config, lines, seed=0)
    return Counter(int(sampler.tokens(LOGITS, [line])) for _ in range(count))


@pytest.mark.parametrize("config", [{}, {"do_sample": True, "top_k": 1}], ids=["greedy", "top_k 1"])
def test_forward_returns_the_best_token_of_each_row(config: dict[str, Any]) -> None:
    model, host = build(on_device_generation=GenerationConfig(**config)), build()
    for given, logits in (
        (prefill(model, [3, 1], [ONE, ONE[:2]]), prefill(host, [3, 1], [ONE, ONE[:2]])),
        (decode(model, [3, 1], [5, 6], [6, 2]), decode(host, [3, 1], [5, 6], [6, 2])),
    ):
        assert given.dtype == torch.int32
        assert given.tolist() == logits.argmax(-1, keepdim=True).tolist()


def test_only_the_top_k_are_drawn_and_all_of_them() -> None:
    assert set(draws(GenerationConfig(do_sample=True, top_k=3))) == {1, 3, 2}
    assert set(draws(GenerationConfig(do_sample=True, top_k=5, global_top_k=2, dynamic=True))) == {1, 3}


def test_top_p_keeps_the_fewest_tokens_that_reach_it_and_at_least_the_minimum() -> None:
    share = LOGITS[0].softmax(-1)
    reach = float(share[1] + share[3])
    assert set(draws(GenerationConfig(do_sample=True, top_p=reach - 0.01))) == {1, 3}
    assert set(draws(GenerationConfig(do_sample=True, top_p=reach + 0.01))) == {1, 3, 2}
    assert set(draws(GenerationConfig(do_sample=True, top_p=0.01, top_p_min_tokens=2))) == {1, 3}


def test_frequencies_follow_the_probabilities_and_the_temperature() -> None:
    share = LOGITS[0].softmax(-1)[1]
    assert draws(GenerationConfig(do_sample=True), 2000)[1] == pytest.approx(2000 * float(share), rel=0.1)
    assert draws(GenerationConfig(do_sample=True, temperature=0.1), 200)[1] > 195


def test_deterministic_takes_the_token_in_which_half_of_the_probability_is_reached() -> None:
    assert LOGITS[0].softmax(-1)[1] < 0.5  # the next one is 3
    assert draws(GenerationConfig(do_sample=True, deterministic=True), 20) == {3: 20}
    flat = DeviceSampler(GenerationConfig(do_sample=True, deterministic=True), 1, seed=0)
    assert int(flat.tokens(torch.zeros(1, 5), [0])) == 2


def test_the_seed_of_the_behaviour_decides_the_draws() -> None:
    config = GenerationConfig(do_sample=True, top_k=50, temperature=5.0)

    def run(seed: int) -> list[int]:
        model = build(Behaviour(sampling_seed=seed), on_device_generation=config)
        return [int(prefill(model, [0], [ONE])) for _ in range(8)]

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_settings_by_line_are_those_of_the_line_and_not_of_the_row() -> None:
    config = GenerationConfig(
        do_sample=True,
        dynamic=True,
        per_batch_line=True,
        top_k=[1, 5, 5, 5],
        temperature=[1.0, 50.0, 50.0, 50.0],
    )
    model, host = build(on_device_generation=config), build()
    best = int(prefill(host, [0], [ONE]).argmax())
    assert {int(prefill(model, [2, 0], [ONE, ONE])[1]) for _ in range(20)} == {best}
    assert len({int(prefill(model, [2, 0], [ONE, ONE])[0]) for _ in range(20)}) > 1
    best = int(decode(host, [0], [7], [6]).argmax())
    assert {int(decode(model, [2, 0], [7, 7], [6, 6])[1]) for _ in range(20)} == {best}


def test_settings_can_be_changed_when_the_model_was_compiled_for_it() -> None:
    config = GenerationConfig(do_sample=True, dynamic=True, per_batch_line=True, top_k=1)
    model, host = build(on_device_generation=config), build()
    best = int(prefill(host, [0], [ONE]).argmax())
    assert int(prefill(model, [0], [ONE])) == best
    assert config.top_k == [1] * 4  # spread over the lines, in place
    config.top_k = [100] * 4
    config.temperature = [50.0] * 4
    assert {int(prefill(model, [0], [ONE])) for _ in range(9)} == {best}  # not written to the device yet
    model.update_generation_config(config)
    assert len({int(prefill(model, [0], [ONE])) for _ in range(20)}) > 1


@pytest.mark.parametrize(
    ("compiled", "new", "reason"),
    [
        ({}, {}, "dynamic=False"),
        ({"dynamic": True}, {"per_batch_line": True}, "per_batch_line"),
        ({"dynamic": True, "per_batch_line": True}, {"per_batch_line": True, "top_k": [1]}, "top_k has 1 entries"),
        ({"dynamic": True}, {"top_p": [1.0]}, "top_p is a list"),
        (None, {}, "without on_device_generation"),
    ],
)
def test_settings_that_do_not_fit_what_was_compiled_are_refused(
    compiled: dict[str, Any] | None, new: dict[str, Any], reason: str
) -> None:
    settings: dict[str, Any] = {} if compiled is None else {"on_device_generation": GenerationConfig(**compiled)}
    with pytest.raises(AssertionError, match=reason):
        build(**settings).update_generation_config(GenerationConfig(**new))


def test_a_line_beyond_the_lists_takes_the_last_entry_or_fails_with_its_rows() -> None:
    config = GenerationConfig(do_sample=True, dynamic=True, per_batch_line=True, top_k=[9, 9, 9, 1])
    model, host = build(on_device_generation=config), build()
    best = int(prefill(host, [0], [ONE]).argmax())
    assert {int(prefill(model, [4], [ONE])) for _ in range(9)} == {best}
    with pytest.raises(DeviceError):
        prefill(build(Behaviour(out_of_range="raise"), on_device_generation=config), [4], [ONE])


def test_sample_takes_the_tokens_of_the_device_and_stops_at_the_token_of_its_settings() -> None:
    keywords: dict[str, Any] = {"cache_ids": torch.arange(6)[None], "start_ids": torch.tensor([0])}
    inputs = torch.tensor([ONE])
    host = build(lines=1).sample(inputs, 20, top_k=1, eos_token_override=999, **keywords).tolist()
    device = build(lines=1, on_device_generation=GenerationConfig())
    assert device.sample(inputs, 20, **keywords).tolist() == host
    stop = host[0][12]
    stopping = build(lines=1, on_device_generation=GenerationConfig(eos_token_id=stop))
    assert stopping.sample(inputs, 20, **keywords).tolist() == [host[0][: host[0].index(stop, 6) + 1]]
