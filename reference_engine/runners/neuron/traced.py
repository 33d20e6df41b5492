"""One decode step over a fixed batch of lines, small enough to compile in seconds and without transformers-neuronx.

It checks the compiler, the runtime and the device by themselves, and goes on doing so where transformers-neuronx can
no longer be installed. The caches go in and come out, so nothing depends on aliases of inputs and outputs. A write is
a choice between two tensors and not a scatter: there is no index, hence none out of bound. A line that is not live
keeps its cache as it is, which transformers-neuronx does not promise.

Needs torch; ``backend="neuron"`` needs torch-neuronx and a device.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import nn

Backend: TypeAlias = Literal["neuron", "jit", "eager"]

HIDDEN = -30000.0
"""Score of a position that is not seen: its weight underflows to 0, and it is finite in every dtype."""


class Step(NamedTuple):
    """The input of one step, for each line: its token, its position, and whether it takes part."""

    tokens: list[int]
    positions: list[int]
    live: list[bool]


class Outcome(NamedTuple):
    """What a step gives, for each line: logits ``[vocabulary]``, and the caches after it, ``[length, dim]``."""

    logits: list[list[float]]
    keys: list[list[list[float]]]
    values: list[list[list[float]]]


class DecodeStep(nn.Module):  # type: ignore[misc] # torch is not followed
    """An embedding, one attention head over the line's own past and present, and an output layer."""

    def __init__(self, lines: int, length: int, *, vocab: int = 64, dim: int = 32, seed: int = 0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.query, self.key, self.value = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.head = nn.Linear(dim, vocab, bias=False)
        self.register_buffer("places", torch.arange(length, dtype=torch.int32)[None])
        self.cache_shape = (lines, length, dim)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in self.parameters():
                weight.normal_(0.0, weight.shape[-1] ** -0.5, generator=generator)

    def forward(self, tokens: Any, positions: Any, live: Any, keys: Any, values: Any) -> Any:
        """Int32 ``[lines]`` three times and the caches ``[lines, length, dim]``; returns logits and new caches."""
        states = self.embedding(tokens)
        keys, values = (
            torch.where(self.written(positions, live), layer(states)[:, None], cache)
            for layer, cache in ((self.key, keys), (self.value, values))
        )
        scores = (self.query(states)[:, None] * keys).sum(-1) * keys.shape[-1] ** -0.5
        scores = torch.where(self.places <= positions[:, None], scores, torch.full_like(scores, HIDDEN))
        mixed = (scores.softmax(-1)[..., None] * values).sum(1)
        return self.head(states + mixed), keys, values

    def written(self, positions: Any, live: Any) -> Any:
        """Which slots are written: of a live line, the one at its position. ``[lines, length, 1]``."""
        return ((self.places == positions[:, None]) & (live[:, None] != 0))[..., None]


def run(module: DecodeStep, steps: list[Step], backend: Backend) -> list[Outcome]:
    """Trace ``module`` for ``backend`` and run ``steps`` from empty caches."""
    keys = torch.zeros(module.cache_shape)
    values = torch.zeros(module.cache_shape)
    call = _traced(module.eval(), (*_inputs(steps[0]), keys, values), backend)
    outcomes: list[Outcome] = []
    with torch.no_grad():
        for step in steps:
            logits, keys, values = call(*_inputs(step), keys, values)
            outcomes.append(Outcome(logits.tolist(), keys.tolist(), values.tolist()))
    return outcomes


def _inputs(step: Step) -> tuple[Any, ...]:
    return tuple(torch.tensor(part, dtype=torch.int32) for part in step)


def _traced(module: DecodeStep, example: tuple[Any, ...], backend: Backend) -> Any:
    if backend == "eager":
        return module
    if backend == "jit":
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", DeprecationWarning
            )  # torch wants torch.export; the device takes TorchScript
            return torch.jit.trace(module, example)
    neuron = importlib.import_module("torch_neuronx")
    return neuron.trace(module, example, compiler_args=["--auto-cast", "none", "-O1"])
