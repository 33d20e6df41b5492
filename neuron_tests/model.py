"""The model under test, a tiny Llama with random weights, and what it says on the CPU. torch is imported when used."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

VOCABULARY = 512
LEAST_GAP = 1e-3
"""Logits are of the order of 10 and right to about 1e-4 in float32: below this gap either of two tokens is right."""

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
"""Heads divide by 2 cores, and the sizes are of the kind that AWS compiles in its own tests."""


def save_tiny_llama(folder: Path, seed: int = 0) -> None:
    """Write a checkpoint to ``folder``: config.json, generation_config.json, model.safetensors; float32.

    The weights are a function of ``seed``, whatever the release of transformers. They make attention broad, so that
    a spoilt position is noticed wherever it is, and near-ties of the best two tokens rare.
    """
    torch, llama = importlib.import_module("torch"), importlib.import_module("transformers")
    model = llama.LlamaForCausalLM(llama.LlamaConfig(**SIZES))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if weight.ndim > 1:
                weight.normal_(0.0, 0.2 if name == "lm_head.weight" else 0.08, generator=generator)
    model.save_pretrained(folder)


class Truth:
    """The model of Hugging Face, in float32 on the CPU."""

    def __init__(self, folder: Path) -> None:
        self._torch = importlib.import_module("torch")
        self._model: Any = importlib.import_module("transformers").LlamaForCausalLM.from_pretrained(folder).eval()
        self._compared = 0
        self._near_ties = 0

    def counts(self) -> dict[str, int]:
        """Tokens compared, and those taken for right that were second best by less than `LEAST_GAP`."""
        return {"tokens_compared": self._compared, "near_ties": self._near_ties}

    def disagreement(self, prompt: Sequence[int], output: Sequence[int]) -> str | None:
        """Where ``output`` is not what greedy decoding makes of ``prompt``, or None.

        Every token is judged after the tokens before it as they are in ``output``, all in one pass.
        """
        torch = self._torch
        with torch.no_grad():
            logits = self._model(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1]
        best = logits.topk(2)
        for index, (token, tokens, values) in enumerate(
            zip(output, best.indices.tolist(), best.values.tolist(), strict=True)
        ):
            gap = values[0] - values[1]
            if token == tokens[1] and gap < LEAST_GAP:
                self._near_ties += 1
            elif token != tokens[0]:
                return f"token {index} of {len(output)} is {token}, and the CPU says {tokens[0]} by {gap:.4f}"
            self._compared += 1
        return None
