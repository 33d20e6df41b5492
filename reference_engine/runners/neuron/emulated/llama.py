"""The arithmetic of a Llama on CPU tensors: one padded prompt, or one token on every line.

Shapes: H query heads and K KV heads of ``head_dim`` D; a decode has N lines, a prefill P positions. Everything is in
the dtype of the weights; logits come back in float32.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from reference_engine.runners.neuron.emulated.cache import Cache


class Layer(NamedTuple):
    """Weights of one layer; the projections that share an input are one matrix."""

    attention_norm: Any
    query_key_value: Any
    output: Any
    mlp_norm: Any
    gate_up: Any
    down: Any


class Llama:
    """Weights from a checkpoint and the two passes over them.

    Raises ValueError for what the device does not compute: a head size that is not hidden / heads, biases, a rotary
    scaling other than llama3, a missing or unknown weight.
    """

    def __init__(self, config: Any, weights: dict[str, Any], dtype: Any) -> None:
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = getattr(config, "num_key_value_heads", None) or self.heads
        self.head_dim: int = config.hidden_size // self.heads
        self.epsilon: float = config.rms_norm_eps
        check_architecture(config)
        left = {name: tensor.to(dtype) for name, tensor in weights.items() if not name.endswith("rotary_emb.inv_freq")}
        if getattr(config, "tie_word_embeddings", False) and "model.embed_tokens.weight" in left:
            left.setdefault("lm_head.weight", left["model.embed_tokens.weight"])
        try:
            self.embedding, self.norm, self.head = (
                left.pop(f"{name}.weight") for name in ("model.embed_tokens", "model.norm", "lm_head")
            )
            self.layers = [_layer(left, f"model.layers.{number}") for number in range(config.num_hidden_layers)]
        except KeyError as missing:
            raise ValueError(f"the checkpoint has no {missing.args[0]}") from None
        if left:
            raise ValueError(f"weights the device has no place for: {', '.join(sorted(left))}")
        self.frequencies = rotary_frequencies(config, self.head_dim)

    def _rotation(self, positions: Any) -> tuple[Any, Any]:
        """Cosines and sines of positions [n], each [n, 1, D]."""
        angles = positions.to(torch.float32)[:, None] * self.frequencies
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        return angles.cos().to(self.norm.dtype), angles.sin().to(self.norm.dtype)

    def _projected(self, layer: Layer, states: Any, rotation: tuple[Any, Any]) -> tuple[Any, Any, Any]:
        """Rotated queries [n, H, D], rotated keys and plain values [n, K, D] of states [n, hidden]."""
        mixed = functional.linear(_rms_norm(states, layer.attention_norm, self.epsilon), layer.query_key_value)
        mixed = mixed.view(len(states), -1, self.head_dim)
        rotated, values = mixed[:, : self.heads + self.kv_heads], mixed[:, self.heads + self.kv_heads :]
        half = self.head_dim // 2
        turned = torch.cat((-rotated[..., half:], rotated[..., :half]), dim=-1)
        rotated = rotated * rotation[0] + turned * rotation[1]
        return rotated[:, : self.heads], rotated[:, self.heads :], values

    def _mlp(self, layer: Layer, states: Any) -> Any:
        gate, up = functional.linear(_rms_norm(states, layer.mlp_norm, self.epsilon), layer.gate_up).chunk(2, dim=-1)
        return functional.linear(functional.silu(gate) * up, layer.down)

    def _logits(self, states: Any) -> Any:
        return functional.linear(_rms_norm(states, self.norm, self.epsilon), self.head).to(torch.float32)

    def prefill(self, tokens: Any, positions: Any, last: int) -> tuple[Any, Any, Any]:
        """One prompt padded to its bucket. The mask is lower-triangular, whatever ``positions`` say.

        Args: tokens [P]; their rotary positions [P]; the index of the token to answer.
        Returns: logits [vocab]; keys and values, each [layers, P, K, D].
        """
        states, rotation, group = self.embedding[tokens], self._rotation(positions), self.heads // self.kv_heads
        all_keys, all_values = [], []
        for layer in self.layers:
            queries, keys, values = self._projected(layer, states, rotation)
            all_keys.append(keys)
            all_values.append(values)
            wide = (part.repeat_interleave(group, dim=1).transpose(0, 1) for part in (keys, values))
            mixed = functional.scaled_dot_product_attention(queries.transpose(0, 1), *wide, is_causal=True)
            states = states + functional.linear(mixed.transpose(0, 1).flatten(1), layer.output)
            states = states + self._mlp(layer, states)
        return self._logits(states[last]), torch.stack(all_keys), torch.stack(all_values)

    def decode(self, tokens: Any, positions: Any, cache: Cache, seen: Any, writes: tuple[Any, Any]) -> Any:
        """One token on every line, against the cache; each layer reads before it writes.

        Args: tokens and positions [N]; ``seen`` [N, P], True where a line attends to a position of the cache, beside
        its own fresh token; ``writes``, the lines whose row is written and the lines whose KV goes there.
        Returns: logits [N, vocab].
        """
        lines, bucket = seen.shape
        targets, sources = writes
        states, rotation, group = self.embedding[tokens], self._rotation(positions), self.heads // self.kv_heads
        hidden = ~seen.repeat_interleave(self.kv_heads, dim=0)[:, None]
        for number, layer in enumerate(self.layers):
            queries, keys, values = self._projected(layer, states, rotation)
            # One matrix product for each KV head of each line.
            queries = queries.reshape(lines * self.kv_heads, group, self.head_dim) / math.sqrt(self.head_dim)
            own_keys, own_values = (part.reshape(-1, 1, self.head_dim) for part in (keys, values))
            before_keys, before_values = cache.before(number, bucket)
            scores = torch.bmm(queries, before_keys.transpose(1, 2)).masked_fill(hidden, -math.inf)
            scores = torch.cat((scores, torch.bmm(queries, own_keys.transpose(1, 2))), dim=-1).softmax(-1)
            mixed = torch.bmm(scores[..., :-1], before_values) + scores[..., -1:] * own_values
            cache.write_tokens(number, targets, positions[targets], keys[sources], values[sources])
            states = states + functional.linear(mixed.view(lines, -1), layer.output)
            states = states + self._mlp(layer, states)
        return self._logits(states)


def check_architecture(config: Any) -> None:
    """Raise ValueError for an architecture that the device does not compute."""
    head_dim, declared = config.hidden_size // config.num_attention_heads, getattr(config, "head_dim", None)
    if declared not in (None, head_dim) or head_dim % 2:
        raise ValueError(f"head_dim = {declared}: must be hidden_size / num_attention_heads = {head_dim}, and even")
    if getattr(config, "hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act = {config.hidden_act!r}: the device computes silu")
    rotary_frequencies(config, head_dim)


def _layer(weights: dict[str, Any], name: str) -> Layer:
    """Take the weights of one layer out of ``weights``. Raises KeyError."""
    attention = [weights.pop(f"{name}.self_attn.{part}_proj.weight") for part in "qkvo"]
    mlp = [weights.pop(f"{name}.mlp.{part}_proj.weight") for part in ("gate", "up", "down")]
    norms = [weights.pop(f"{name}.{part}_layernorm.weight") for part in ("input", "post_attention")]
    return Layer(norms[0], torch.cat(attention[:3]), attention[3], norms[1], torch.cat(mlp[:2]), mlp[2])


def _rms_norm(states: Any, weight: Any, epsilon: float) -> Any:
    wide = states.to(torch.float32)
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)).to(states.dtype)


def rotary_frequencies(config: Any, head_dim: int) -> Any:
    """Angle per position of each pair of a head, [head_dim / 2]; plain, or scaled as Llama 3 does it.

    Raises ValueError for another scaling. Takes the fields of transformers 4 and (rope_parameters) 5.
    """
    scaling = getattr(config, "rope_scaling", None) or getattr(config, "rope_parameters", None) or {}
    base = scaling.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0
    plain = 1.0 / (base ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return plain
    if kind != "llama3":
        raise ValueError(f"rope_scaling of type {kind!r}: the device knows none and llama3")
    factor, trained = scaling["factor"], scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    # Between the two wavelengths trained/high and trained/low the slowing sets in gradually.
    share = ((trained * plain / (2 * math.pi) - low) / (high - low)).clamp(0.0, 1.0)
    return plain * (share + (1.0 - share) / factor)
