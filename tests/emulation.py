"""Small models on the emulated Neuron device, and requests that are driven on its lines by hand. Needs torch."""

from __future__ import annotations

import atexit
import json
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from random import Random
from tempfile import mkdtemp
from typing import Any

import torch

from reference_engine.runners.neuron.emulated import Behaviour, Fault, installed
from reference_engine.runners.neuron.emulated.checkpoint import save_tiny_llama
from reference_engine.runners.neuron.emulated.configuration import ContinuousBatchingConfig, NeuronConfig
from reference_engine.runners.neuron.emulated.model import LlamaForSampling

torch.set_num_threads(1)

VOCABULARY = 256
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


_folders: dict[str, Path] = {}


def checkpoint(**fields: Any) -> Path:
    """A folder with a small Llama, until the process ends; the same fields give the same folder."""
    key = json.dumps(fields, sort_keys=True)
    if key not in _folders:
        folder = Path(mkdtemp(prefix="tiny-llama-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        _folders[key] = save_tiny_llama(folder, **{**SIZES, **fields})
    return _folders[key]


def build(
    behaviour: Behaviour | None = None,
    *,
    lines: int = 4,
    context: Any = (32,),
    tokens: Any = (64,),
    folder: Path | None = None,
    **settings: Any,
) -> Any:
    """A model of ``lines`` lines, on the device; ``settings`` are those of NeuronConfig, and ``amp``."""
    model = make(
        behaviour,
        folder,
        n_positions=list(tokens),
        context_length_estimate=context if isinstance(context, int) else list(context),
        batch_size=lines,
        amp=settings.pop("amp", "f32"),
        neuron_config=batching(lines, **settings),
    )
    model.to_neuron()
    return model


def make(behaviour: Behaviour | None = None, folder: Path | None = None, **keywords: Any) -> Any:
    """A model with the keywords of its class, not yet on the device."""
    with installed(behaviour):
        return LlamaForSampling.from_pretrained(folder or checkpoint(), **keywords)


def batching(lines: int, **settings: Any) -> NeuronConfig:
    """Continuous batching on ``lines`` lines."""
    shared = ContinuousBatchingConfig(batch_size_for_shared_caches=lines)
    return NeuronConfig(continuous_batching=shared, **settings)


def broken(*faults: Fault, **fields: Any) -> Behaviour:
    """A device with these faults."""
    return Behaviour(faults=faults, **fields)


def prompt(name: str, length: int) -> list[int]:
    """``length`` tokens that are those of ``name``; never 0, which is padding."""
    random = Random(f"{name}:{length}")
    return [random.randrange(1, VOCABULARY) for _ in range(length)]


def prefill(model: Any, lines: Sequence[int], prompts: Sequence[Sequence[int]], width: int | None = None) -> Any:
    """Logits of prompts on lines, handed over in one call of ``width`` (by default the longest prompt's)."""
    width = width or max(map(len, prompts))
    pad = [[0] * (width - len(one)) for one in prompts]
    ids = [[*one, *zeros] for one, zeros in zip(prompts, pad, strict=True)]
    positions = [[*range(len(one)), *zeros] for one, zeros in zip(prompts, pad, strict=True)]
    return model(torch.tensor(ids), cache_ids=torch.tensor(positions), start_ids=torch.tensor(lines))


def decode(model: Any, lines: Sequence[int], tokens: Sequence[int], positions: Sequence[int]) -> Any:
    """Logits of one token on each of ``lines``."""
    columns = (torch.tensor(list(values))[:, None] for values in (tokens, positions))
    ids, at = columns
    return model(ids, cache_ids=at, start_ids=torch.tensor(lines))


class Requests:
    """Requests on lines of their own, decoded greedily; it trusts the rows to come back in the order asked for."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.tokens: dict[int, list[int]] = {}
        """All tokens on each line, the last of them not yet fed back."""
        self.lengths: dict[int, int] = {}

    def start(self, prompts: dict[int, list[int]], width: int | None = None) -> Requests:
        """Prefill a prompt on each line, in one call; whatever was there is over."""
        logits = prefill(self.model, list(prompts), list(prompts.values()), width)
        self.lengths.update({line: len(one) for line, one in prompts.items()})
        self.tokens.update({line: list(one) for line, one in prompts.items()})
        self._append(list(prompts), logits)
        return self

    def go(self, steps: int, lines: Sequence[int] | None = None) -> Requests:
        """Decode ``steps`` tokens on ``lines``, by default on all, in the order of their start."""
        asked = list(self.tokens if lines is None else lines)
        for _ in range(steps):
            last = [self.tokens[line][-1] for line in asked]
            self._append(asked, decode(self.model, asked, last, [len(self.tokens[line]) - 1 for line in asked]))
        return self

    def _append(self, lines: list[int], logits: Any) -> None:
        for line, token in zip(lines, logits.argmax(-1).tolist(), strict=True):
            self.tokens[line].append(token)

    def output(self, line: int) -> list[int]:
        """What was generated on a line."""
        return self.tokens[line][self.lengths[line] :]


def alone(one: list[int], count: int, model: Any = None) -> list[int]:
    """``count`` tokens after a prompt that is alone on a device (by default a healthy one), after a reset."""
    if model is None:
        return list(_healthy(tuple(one), count))
    model.reset()
    return Requests(model).start({0: one}, width=max(2, len(one))).go(count - 1).output(0)


@cache
def _healthy(one: tuple[int, ...], count: int) -> list[int]:
    return alone(list(one), count, _single_line())


@cache
def _single_line() -> Any:
    return build(lines=1, tokens=(128,))
