"""The emulated device computes the model: its tokens are those of Hugging Face, alone and in a full batch."""

from __future__ import annotations

from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="the emulated device needs the extra `torch`")
transformers: Any = pytest.importorskip("transformers", reason="the truth is Hugging Face's")

from emulation import Requests, alone, build, checkpoint, prefill, prompt  # noqa: E402 - only where torch is

LEAST_GAP = 1e-3
"""Logits are of the order of 10 and right to about 1e-5."""

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "grouped": {},
    "one KV head": {"num_key_value_heads": 1},
    "as many KV heads as heads": {"num_key_value_heads": 4},
    "rotary of Llama 3": {"rope_scaling": LLAMA3},
    "another rotary base": {"rope_theta": 500.0},
    "tied": {"tie_word_embeddings": True},
    "the size for hardware": {
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
}
PROMPTS = {2: prompt("a", 3), 0: prompt("b", 17), 3: prompt("c", 32), 1: prompt("d", 31)}
"""By line; in the order of the call, which is not that of the lines."""
STEPS = 66


class Truth:
    """Hugging Face's model of a checkpoint."""

    def __init__(self, folder: Any) -> None:
        self.model = transformers.LlamaForCausalLM.from_pretrained(folder, torch_dtype=torch.float32).eval()

    def disagreements(self, one: list[int], output: list[int]) -> list[int]:
        """Where ``output`` is not greedy; a token that is second best by less than `LEAST_GAP` is right as well."""
        with torch.no_grad():
            logits = self.model(torch.tensor([[*one, *output]])).logits[0, len(one) - 1 : -1]
        given = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
        wrong: list[int] = (logits.max(-1).values - given > LEAST_GAP).nonzero().flatten().tolist()
        return wrong


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tokens_are_those_of_hugging_face_in_a_full_batch_and_alone(name: str) -> None:
    folder = checkpoint(**ARCHITECTURES[name])
    truth, model = Truth(folder), build(folder=folder, tokens=(128,))
    together = Requests(model).start(PROMPTS).go(STEPS - 1)
    for line, one in PROMPTS.items():
        assert truth.disagreements(one, together.output(line)) == []
    assert alone(PROMPTS[0], STEPS, model) == together.output(0)


def test_the_comparison_can_fail() -> None:
    output = alone(PROMPTS[0], STEPS)
    output[40] = (output[40] + 1) % 256
    assert 40 in Truth(checkpoint()).disagreements(PROMPTS[0], output)


def test_other_weights_give_other_tokens() -> None:
    other = build(folder=checkpoint(seed=1), tokens=(128,))
    assert alone(PROMPTS[0], 8) != alone(PROMPTS[0], 8, other)


@pytest.mark.parametrize("amp", ["bf16", "f16"])
def test_narrower_types_give_float32_logits_near_those_of_float32(amp: str) -> None:
    exact, narrow = (prefill(build(amp=one), [0], [prompt("a", 9)])[0] for one in ("f32", amp))
    assert narrow.dtype == torch.float32
    assert not torch.equal(exact, narrow)
    assert (exact - narrow).abs().max() < 0.15 * exact.abs().max()
