"""Checkpoints: the tiny Llama is a function of its seed, and is read from every form that the device reads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="the emulated device needs the extra `torch`")
safetensors: Any = pytest.importorskip("safetensors.torch", reason="the emulated device needs the extra `torch`")

from emulation import SIZES, alone, build, checkpoint, prompt  # noqa: E402 - only where torch is
from reference_engine.runners.neuron.emulated import installed  # noqa: E402
from reference_engine.runners.neuron.emulated.checkpoint import (  # noqa: E402
    TINY,
    read_config,
    read_weights,
    save_pretrained_split,
    save_tiny_llama,
)
from reference_engine.runners.neuron.emulated.model import (  # noqa: E402
    MistralForSampling,
    NeuronAutoModelForCausalLM,
)

ONE = prompt("one", 5)


def sizes_of(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.iterdir()}


def test_a_tiny_llama_is_the_same_for_a_seed_and_another_for_another(tmp_path: Path) -> None:
    folders = [save_tiny_llama(tmp_path / str(number), seed, **SIZES) for number, seed in enumerate([7, 7, 8])]
    files = [[(folder / name).read_bytes() for name in sorted(sizes_of(folder))] for folder in folders]
    assert sorted(sizes_of(folders[0])) == ["config.json", "generation_config.json", "model.safetensors"]
    assert files[0] == files[1]
    assert files[0][:2] == files[2][:2]
    assert files[0][2] != files[2][2]
    weight = read_weights(folders[0])["model.layers.1.mlp.down_proj.weight"]
    assert weight.dtype == torch.float32
    assert float(weight.std()) == pytest.approx(TINY["initializer_range"], rel=0.05)


def test_hugging_face_saves_and_loads_the_same_weights(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="loads and saves with Hugging Face")
    folder = checkpoint()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert type(model).__name__ == "LlamaForCausalLM"
    state, weights = model.state_dict(), read_weights(folder)
    assert state.keys() == weights.keys()
    assert all(torch.equal(state[name], weights[name]) for name in weights)
    model.save_pretrained(tmp_path / "again")
    again = build(folder=tmp_path / "again", tokens=(128,))
    assert alone(ONE, 8, again) == alone(ONE, 8)


def in_shards(folder: Path, name: str) -> None:
    """Write the weights in two files, with an index."""
    weights = read_weights(folder)
    (folder / "model.safetensors").unlink()
    halves = [sorted(weights)[::2], sorted(weights)[1::2]]
    index = {}
    for number, half in enumerate(halves):
        shard = f"{Path(name).stem}-{number}{Path(name).suffix}"
        tensors = {key: weights[key].clone() for key in half}
        if name.endswith(".bin"):
            torch.save(tensors, folder / shard)
        else:
            safetensors.save_file(tensors, folder / shard)
        index.update(dict.fromkeys(half, shard))
    (folder / f"{name}.index.json").write_text(json.dumps({"weight_map": index}), encoding="utf-8")


def whole_bin(folder: Path) -> None:
    weights = read_weights(folder)
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")


def in_parts(folder: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="splits a model of Hugging Face")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    shutil.rmtree(folder)
    save_pretrained_split(model, folder)
    assert (folder / "pytorch_model.bin").is_dir()


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    "form",
    [
        lambda folder: in_shards(folder, "model.safetensors"),
        lambda folder: in_shards(folder, "pytorch_model.bin"),
        whole_bin,
        in_parts,
    ],
    ids=["shards", "bin shards", "bin", "split"],
)
def test_every_form_of_a_checkpoint_is_read(tmp_path: Path, form: Any, *, tied: bool) -> None:
    original = checkpoint(tie_word_embeddings=tied)
    folder = tmp_path / "other"
    shutil.copytree(original, folder)
    form(folder)
    assert not (folder / "model.safetensors").exists()
    expected = alone(ONE, 8, build(folder=original))
    assert alone(ONE, 8, build(folder=folder)) == expected


class Payload:
    """Would be unpickled by who trusts a file."""


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    folder = tmp_path / "evil"
    shutil.copytree(checkpoint(), folder)
    (folder / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Payload()}, folder / "pytorch_model.bin")
    with pytest.raises(Exception, match="Weights only load failed"):
        read_weights(folder)


def test_a_folder_without_a_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config\.json: not found"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ValueError, match="must hold a JSON object, not list"):
        read_config(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"holds neither model\.safetensors nor pytorch_model\.bin"):
        read_weights(tmp_path)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"head_dim": 8}, "head_dim = 8: must be hidden_size / num_attention_heads = 16"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_scaling of type 'yarn'"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 KV heads"),
    ],
)
def test_an_architecture_that_the_device_does_not_compute_is_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        build(folder=checkpoint(**fields))


def without(name: str, folder: Path) -> Path:
    weights = read_weights(checkpoint())
    del weights[name]
    return with_weights(weights, folder)


def with_weights(weights: dict[str, Any], folder: Path) -> Path:
    shutil.copytree(checkpoint(), folder)
    safetensors.save_file(weights, folder / "model.safetensors")
    return folder


def test_weights_that_are_missing_or_have_no_place_are_named(tmp_path: Path) -> None:
    for number, name in enumerate(["model.layers.1.mlp.up_proj.weight", "lm_head.weight", "model.norm.weight"]):
        with pytest.raises(ValueError, match=f"has no {name}"):
            build(folder=without(name, tmp_path / str(number)))
    biased = {**read_weights(checkpoint()), "model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}
    with pytest.raises(ValueError, match=r"no place for: model\.layers\.0\.self_attn\.q_proj\.bias"):
        build(folder=with_weights(biased, tmp_path / "biased"))


def test_a_mistral_is_served_while_its_window_is_no_narrower_than_its_positions() -> None:
    mistral = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    for window in (None, 64, 32):
        folder = checkpoint(sliding_window=window, **mistral)
        with installed():
            if window == 32:
                with pytest.raises(NotImplementedError, match="sliding_window = 32"):
                    NeuronAutoModelForCausalLM.from_pretrained(folder, n_positions=[64])
                continue
            model = NeuronAutoModelForCausalLM.from_pretrained(folder, n_positions=[64])
        assert type(model) is MistralForSampling


def test_the_class_is_picked_by_the_kind_of_model() -> None:
    with installed(), pytest.raises(ValueError, match="model_type = 'gpt2'"):
        NeuronAutoModelForCausalLM.from_pretrained(checkpoint(model_type="gpt2"))
