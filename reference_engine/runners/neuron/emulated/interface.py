"""The documented interface, checked: a call that passes here has the names, types, shapes and ranges of the real one.

Sources: transformers-neuronx base.py and llama/model.py for `forward` under continuous batching; the developer guide
for tp degrees. Every refusal is an `InterfaceError` that says what was passed and what is expected.
"""

from __future__ import annotations

from typing import Any

import torch

from reference_engine.runners.neuron.emulated.behaviour import InterfaceError
from reference_engine.runners.neuron.emulated.configuration import GenerationConfig, NeuronConfig

AMPS = ("f32", "bf16", "f16")
TP_DEGREES = (1, 2, 4, 8, 24, 32)
"""Documented for Inf2 (up to 24) and Trn1 (32)."""
INTEGERS = (torch.int64, torch.int32)


def _expect(what: str, got: object, expected: str, *, holds: bool) -> None:
    if not holds:
        raise InterfaceError(f"{what}: expected {expected}; got {got}")


def check_constructor(keywords: dict[str, Any], unknown: dict[str, Any]) -> None:
    """The keywords of `LlamaForSampling`; the real constructor swallows unknown ones in silence."""
    _expect("LlamaForSampling", ", ".join(sorted(unknown)), f"keywords among {', '.join(keywords)}", holds=not unknown)
    _expect("amp", repr(keywords["amp"]), f"one of {', '.join(AMPS)}", holds=keywords["amp"] in AMPS)
    degree = keywords["tp_degree"]
    _expect("tp_degree", degree, f"one of {TP_DEGREES}", holds=_is_integer(degree) and degree in TP_DEGREES)
    for name, more in (("n_positions", ""), ("context_length_estimate", ", or None"), ("batch_size", "")):
        value = keywords[name]
        sizes = value if isinstance(value, list) else [value]
        least = 0 if name == "context_length_estimate" and not isinstance(value, list) else 1
        fits = bool(sizes) and all(_is_integer(size) and size >= least for size in sizes)
        expected = f"a positive integer or a list of them{more}"
        _expect(name, repr(value), expected, holds=fits or (value is None and bool(more)))
    config = keywords["neuron_config"]
    kind = f"{type(config).__module__}.{type(config).__name__}"
    fits = config is None or isinstance(config, NeuronConfig)
    _expect("neuron_config", kind, "a NeuronConfig of transformers_neuronx.config", holds=fits)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def check_generation_config(config: object) -> None:
    """What `update_generation_config` takes: positive top_k and temperature, top_p in (0, 1]."""
    if not isinstance(config, GenerationConfig):
        raise InterfaceError(f"update_generation_config: expected a GenerationConfig; got {type(config).__name__}")
    for name, least, most in (("top_k", 1, None), ("temperature", 0.0, None), ("top_p", 0.0, 1.0)):
        value = getattr(config, name)
        for one in value if isinstance(value, list) else [value]:
            fits = (one >= least if name == "top_k" else one > least) and (most is None or one <= most)
            expected = {"top_k": "at least 1", "temperature": "above 0", "top_p": "in (0, 1]"}[name]
            _expect(name, repr(value), expected, holds=fits)


def check_forward(inputs: Any, cache_ids: Any, start_ids: Any, extra: dict[str, Any], vocab: int, lines: int) -> None:
    """The arguments of `forward` under continuous batching, on ``lines`` lines.

    A prompt that is too long and a position beyond the last bucket are left to the device, which refuses them.
    """
    given = ", ".join(sorted(name for name, value in extra.items() if value is not None))
    _expect("forward", given, "input_ids, cache_ids and start_ids only", holds=not given)
    for name, value in (("input_ids", inputs), ("cache_ids", cache_ids), ("start_ids", start_ids)):
        _expect(name, type(value).__name__, "a torch.Tensor", holds=isinstance(value, torch.Tensor))
        _expect(f"{name}.device", value.device, "cpu", holds=value.device.type == "cpu")
        _expect(f"{name}.dtype", value.dtype, "torch.int64 or torch.int32", holds=value.dtype in INTEGERS)
    same = inputs.dtype == cache_ids.dtype
    _expect("cache_ids.dtype", cache_ids.dtype, f"that of input_ids, {inputs.dtype}", holds=same)
    two = inputs.dim() == 2  # noqa: PLR2004 - rows and columns
    _expect("input_ids.shape", tuple(inputs.shape), "[n, T], neither 0", holds=two and inputs.numel() > 0)
    n, width = inputs.shape
    same = cache_ids.shape == inputs.shape
    _expect("cache_ids.shape", tuple(cache_ids.shape), f"that of input_ids, {(n, width)}", holds=same)
    fits = tuple(start_ids.shape) in ((n,), (n, 1))
    _expect("start_ids.shape", tuple(start_ids.shape), f"({n},) or ({n}, 1), a line for each row", holds=fits)
    _expect("input_ids", _range(inputs), f"token ids in [0, {vocab})", holds=_within(inputs, vocab))
    _expect("start_ids", start_ids.tolist(), f"lines in [0, {lines})", holds=_within(start_ids, lines))
    numbers = start_ids.flatten().tolist()
    _expect("start_ids", numbers, "every line once", holds=len(set(numbers)) == n)
    if width > 1:
        _check_prompts(inputs, cache_ids)
    else:
        _expect("cache_ids", cache_ids.flatten().tolist(), "positions from 0", holds=int(cache_ids.min()) >= 0)


def _check_prompts(inputs: Any, cache_ids: Any) -> None:
    for row, (tokens, positions) in enumerate(zip(inputs.tolist(), cache_ids.tolist(), strict=True)):
        length = max(positions) + 1
        wanted = [*range(length), *[0] * (len(positions) - length)]
        expected = "0, 1, ... up to the last token of the prompt, then 0"
        _expect(f"cache_ids[{row}]", positions, expected, holds=positions == wanted[: len(positions)])
        padding = tokens[length:]
        _expect(f"input_ids[{row}]", padding, "0 after the prompt", holds=not any(padding))


def _within(values: Any, end: int) -> bool:
    return int(values.min()) >= 0 and int(values.max()) < end


def _range(values: Any) -> str:
    return f"{int(values.min())} to {int(values.max())}"
