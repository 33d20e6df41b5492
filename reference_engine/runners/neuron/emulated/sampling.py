"""Sampling: on the device, line by line, and the host's loop around a model.

The order of the filters is the device's (transformers-neuronx layers/generation.py): the best of all in descending
order, temperature, top-k, top-p, then one draw against the running sum of the probabilities.
"""

from __future__ import annotations

from typing import Any

import torch

from reference_engine.runners.neuron.emulated.configuration import GenerationConfig

PER_LINE = ("top_k", "top_p", "temperature", "top_p_min_tokens")


def check_generation(config: GenerationConfig, lines: int) -> None:
    """Spread per-line settings over ``lines`` lines. Raises AssertionError for lists of another length or no place."""
    for name in PER_LINE:
        value = getattr(config, name)
        if not config.per_batch_line:
            assert not isinstance(value, list), f"{name} is a list, which goes with per_batch_line only"
        elif not isinstance(value, list):
            setattr(config, name, [value] * lines)
        else:
            assert len(value) == lines, f"{name} has {len(value)} entries: one for each of {lines} lines is needed"


class DeviceSampler:
    """Picks tokens on the device with the settings given last. Deterministic in ``seed`` and the calls made."""

    def __init__(self, config: GenerationConfig, lines: int, seed: int) -> None:
        self.lines = lines
        self._generator = torch.Generator().manual_seed(seed)
        self._static = config
        self._settings: dict[str, Any] = {}
        self._take(config)

    def _take(self, config: GenerationConfig) -> None:
        check_generation(config, self.lines)
        self._settings = {
            name: list(value) if isinstance(value := getattr(config, name), list) else value for name in PER_LINE
        }

    def update(self, config: GenerationConfig) -> None:
        """Take other settings: a copy of their values as of now, as they are written to the device.

        Raises AssertionError when the model was not compiled for that.
        """
        assert self._static.dynamic, "the model was compiled with GenerationConfig(dynamic=False): it cannot change"
        assert config.per_batch_line == self._static.per_batch_line, (
            f"per_batch_line = {config.per_batch_line}: the model was compiled with {self._static.per_batch_line}"
        )
        self._take(config)

    def tokens(self, logits: Any, lines: list[int]) -> Any:
        """One token for each row of logits [n, vocab], row i being on ``lines[i]``: int32 [n, 1]."""
        if not (self._static.do_sample or self._static.dynamic):
            picked = logits.argmax(-1)
        else:
            picked = torch.stack([self._draw(row, line) for row, line in zip(logits, lines, strict=True)])
        return picked.to(torch.int32)[:, None]

    def _draw(self, logits: Any, line: int) -> Any:
        # An index beyond the list is clamped, as XLA's gather does.
        at = min(max(line, 0), self.lines - 1)
        top_k, top_p, temperature, least = (
            value[at] if isinstance(value := self._settings[name], list) else value for name in PER_LINE
        )
        best, indices = (logits / temperature).sort(descending=True, stable=True)
        kept = min(top_k, self._static.global_top_k or top_k)
        probabilities = best[:kept].softmax(-1)
        below = probabilities.cumsum(-1) - probabilities < top_p
        below[:least] = True
        summed = (probabilities * below).cumsum(-1)
        level = 0.5 if self._static.deterministic else float(torch.rand((), generator=self._generator))
        chosen = int((level > summed / summed[-1]).sum())
        return indices[chosen]


def generate(
    model: Any, inputs: Any, total: int, cache_ids: Any, start_ids: Any, stop: set[int], *, on_device: bool
) -> Any:
    """The host's greedy loop over `forward`: prompts [n, T] and what follows, [n, at most ``total``].

    With ``cache_ids`` [n, T] every row goes on after its own last position, until the longest reaches ``total``. A row
    that stopped repeats its stop token; when all have stopped, the loop ends.
    """
    rows = [inputs]
    at = (
        torch.full((len(inputs), 1), inputs.shape[1] - 1)
        if cache_ids is None
        else cache_ids.max(1, keepdim=True).values
    )
    at = at.to(inputs.dtype)
    scores = model(inputs, cache_ids, start_ids)
    ended = torch.zeros(len(inputs), 1, dtype=torch.bool)
    last = inputs[:, -1:]
    for position in range(int(at.max()) + 1, total):
        tokens = (scores if on_device else scores.argmax(-1, keepdim=True)).to(inputs.dtype)
        tokens = torch.where(ended, last, tokens)
        rows.append(tokens)
        last = tokens
        ended = ended | torch.isin(tokens, torch.tensor(sorted(stop), dtype=tokens.dtype))
        if position + 1 == total or bool(ended.all()):
            break
        at = at + 1
        scores = model(tokens, at if model.neuron_config.lhs_aligned else at[0], start_ids)
    return torch.cat(rows, dim=1)
