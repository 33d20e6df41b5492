"""Llama checkpoints on disk: reading one, and writing a tiny one with random weights.

Needs torch and safetensors. Nothing is unpickled: a ``.bin`` file is read as tensors only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file

SAFETENSORS, PYTORCH = "model.safetensors", "pytorch_model.bin"


def read_config(folder: str | Path) -> SimpleNamespace:
    """The fields of ``config.json``. Raises FileNotFoundError without it, ValueError when it is not an object."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: not found; a checkpoint folder holds config.json and {SAFETENSORS}")
    fields = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(fields, dict):
        raise ValueError(f"{path}: must hold a JSON object, not {type(fields).__name__}")  # noqa: TRY004 - of the file
    return SimpleNamespace(**fields)


def read_weights(folder: str | Path) -> dict[str, Any]:
    """All tensors by name, from the first that is there: safetensors, its shards, a split folder, ``.bin``, its shards.

    Raises FileNotFoundError when there is none of them.
    """
    base = Path(folder)
    if (base / SAFETENSORS).is_file():
        return dict(load_file(base / SAFETENSORS))
    if (base / f"{SAFETENSORS}.index.json").is_file():
        return _shards(base, f"{SAFETENSORS}.index.json")
    if (base / PYTORCH).is_dir():
        return _split(base / PYTORCH)
    if (base / PYTORCH).is_file():
        return _tensors(base / PYTORCH)
    if (base / f"{PYTORCH}.index.json").is_file():
        return _shards(base, f"{PYTORCH}.index.json")
    raise FileNotFoundError(f"{base}: holds neither {SAFETENSORS} nor {PYTORCH}, whole or in shards")


def _tensors(path: Path) -> dict[str, Any]:
    return dict(load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True))


def _shards(base: Path, index: str) -> dict[str, Any]:
    names = json.loads((base / index).read_text(encoding="utf-8"))["weight_map"]
    weights: dict[str, Any] = {}
    for shard in sorted(set(names.values())):
        weights |= _tensors(base / Path(shard).name)
    return weights


def _split(folder: Path) -> dict[str, Any]:
    """One file a tensor, as `save_pretrained_split` writes them."""
    keys = json.loads((folder / "key_to_filename.json").read_text(encoding="utf-8"))
    return {key: torch.load(folder / Path(name).name, weights_only=True) for key, name in keys.items()}


def save_pretrained_split(model: Any, folder: str | Path) -> None:
    """Save a Hugging Face model with one file a tensor, in a folder called ``pytorch_model.bin``."""
    base = Path(folder)
    target = base / PYTORCH
    target.mkdir(parents=True, exist_ok=True)
    for config in (model.config, model.generation_config):
        config.save_pretrained(base)
    keys = {}
    for number, (key, tensor) in enumerate(model.state_dict().items()):
        keys[key] = f"{number:04d}.bin"
        torch.save(tensor, target / keys[key])
    (target / "key_to_filename.json").write_text(json.dumps(keys, indent=2), encoding="utf-8")


# --------------------------------------------------------------------------------------------------- a tiny Llama

TINY: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "torch_dtype": "float32",
    "use_cache": True,
}
"""Small enough to compile in seconds at tp_degree 2, large enough to be plausible; weights spread by 0.2, for with the
usual 0.02 the logits are nearly tied and a comparison of tokens means little."""


def save_tiny_llama(folder: str | Path, seed: int = 0, **fields: Any) -> Path:
    """Write a Llama with random float32 weights, a function of ``seed`` and ``fields`` alone; returns the folder.

    ``fields`` change entries of ``config.json``, such as ``num_hidden_layers`` or ``rope_scaling``. The files are
    ``config.json``, ``generation_config.json`` and ``model.safetensors``: Hugging Face, vLLM and
    transformers-neuronx take them as they are. They are written the same whatever release of transformers is there.
    """
    base = Path(folder)
    base.mkdir(parents=True, exist_ok=True)
    config = {**TINY, **fields}
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: torch.ones(shape)
        if len(shape) == 1
        else torch.randn(shape, generator=generator) * config["initializer_range"]
        for name, shape in _shapes(config).items()
    }
    save_file(weights, base / SAFETENSORS, metadata={"format": "pt"})
    for name, content in (("config.json", config), ("generation_config.json", {"_from_model_config": True})):
        (base / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return base


def _shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight, in the order in which the generator fills them."""
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    kv = hidden // heads * config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        shapes |= {
            f"{layer}.self_attn.q_proj.weight": (hidden, hidden),
            f"{layer}.self_attn.k_proj.weight": (kv, hidden),
            f"{layer}.self_attn.v_proj.weight": (kv, hidden),
            f"{layer}.self_attn.o_proj.weight": (hidden, hidden),
            f"{layer}.mlp.gate_proj.weight": (inner, hidden),
            f"{layer}.mlp.up_proj.weight": (inner, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, inner),
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
        }
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes
