"""The tokens that are right: the greedy continuation of a prompt by Hugging Face transformers, on the CPU."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import Any

_BRANCHES_MAX = 256


@functools.cache
def greedy(folder: Path) -> Greedy:
    """The reference for the checkpoint in ``folder``, shared by all engines of the process."""
    return Greedy(folder)


class Greedy:
    """Next tokens by argmax of float32 logits. What was asked is remembered, and so are KV caches to go on from."""

    def __init__(self, folder: Path) -> None:
        self._torch = importlib.import_module("torch")
        self._transformers = importlib.import_module("transformers")
        model = self._transformers.AutoModelForCausalLM.from_pretrained(folder)
        self._model = model.float().eval()
        self._tokens: dict[tuple[int, ...], int] = {}
        self._branches: dict[tuple[int, ...], Any] = {}
        """KV caches by the tokens they hold; one is used up by whoever goes on from it."""

    def token(self, tokens: list[int]) -> int:
        """The token that follows ``tokens``. O(1) positions when all but the last were asked for before."""
        prefix = tuple(tokens)
        known = self._tokens.get(prefix)
        if known is None:
            known = self._tokens[prefix] = self._compute(prefix)
        return known

    def _compute(self, prefix: tuple[int, ...]) -> int:
        torch = self._torch
        cache = self._branches.pop(prefix[:-1], None)
        fresh = prefix[-1:]
        if cache is None:
            cache, fresh = self._transformers.DynamicCache(), prefix
        with torch.inference_mode():
            answer = self._model(torch.tensor([fresh]), past_key_values=cache, use_cache=True)
        self._branches[prefix] = answer.past_key_values
        if len(self._branches) > _BRANCHES_MAX:
            del self._branches[next(iter(self._branches))]
        return int(answer.logits[0, -1].argmax())
