"""The stand-in package: installing and removing it, its configuration objects, buckets. Most of it needs no torch."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reference_engine.runners.neuron.emulated import (
    AlreadyInstalledError,
    Behaviour,
    Installation,
    installed,
    site_path,
)
from reference_engine.runners.neuron.emulated.buckets import (
    batch_sizes,
    context_buckets,
    covering,
    holding,
    token_buckets,
)
from reference_engine.runners.neuron.emulated.configuration import (
    DEFAULTS,
    GQA,
    LAYOUT_BSH,
    ContinuousBatchingConfig,
    GenerationConfig,
    KVCacheQuantizationConfig,
    Layout,
    NeuronConfig,
    QuantizationConfig,
    SparseAttnConfig,
)

PACKAGE = "transformers_neuronx"
NAMES = {
    "": ["LlamaForSampling", "MistralForSampling", "NeuronAutoModelForCausalLM", "NeuronConfig", "GenerationConfig"],
    ".config": [
        "ContinuousBatchingConfig",
        "GenerationConfig",
        "KVCacheQuantizationConfig",
        "NeuronConfig",
        "QuantizationConfig",
        "SparseAttnConfig",
    ],
    ".constants": ["GQA", "LAYOUT_BSH", "LAYOUT_HSB", "LAYOUT_SBH", "Layout"],
    ".llama.model": ["LlamaForSampling"],
    ".mistral.model": ["MistralForSampling"],
    ".modeling_auto": ["NeuronAutoModelForCausalLM"],
    ".module": ["save_pretrained_split"],
}
"""What vLLM 0.6.0 and 0.8.5 and the hardware suite import, and where from."""


def python(*lines: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a program in a new interpreter, with what this one can import, and with ``path`` before it."""
    search = [str(path)] if path else []
    program = f"import sys; sys.path[:0] = {search + sys.path!r}\n" + "\n".join(lines)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


def test_the_emulation_is_imported_without_torch() -> None:
    done = python(
        "sys.modules.update(torch=None, safetensors=None, transformers=None)",
        "import reference_engine.runners.neuron.emulated as emulated",
        "with emulated.installed(emulated.Behaviour(poison=True)): pass",
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_package_is_there_while_it_is_installed_and_not_before_or_after() -> None:
    pytest.importorskip("torch", reason="the stand-in needs the extra `torch`")
    with pytest.raises(ImportError):
        importlib.import_module(PACKAGE)
    before = sys.path[:]
    with installed() as installation:
        assert isinstance(installation, Installation)
        for module, names in NAMES.items():
            found = importlib.import_module(f"{PACKAGE}{module}")
            assert [name for name in names if not hasattr(found, name)] == []
        assert importlib.import_module(PACKAGE).EMULATED
        assert importlib.import_module(PACKAGE).__version__.endswith("+emulated")
    assert sys.path == before
    assert [name for name in sys.modules if name.split(".")[0] == PACKAGE] == []
    with pytest.raises(ImportError):
        importlib.import_module(PACKAGE)


def test_it_is_taken_away_when_the_context_ends_in_an_error() -> None:
    before = sys.path[:]
    with pytest.raises(KeyError), installed():
        raise KeyError
    assert sys.path == before


def test_models_take_the_behaviour_of_the_innermost_installation_and_are_listed_there() -> None:
    pytest.importorskip("torch", reason="the stand-in needs the extra `torch`")
    emulation = importlib.import_module("emulation")

    def make() -> Any:
        llama = importlib.import_module(f"{PACKAGE}.llama.model")
        return llama.LlamaForSampling.from_pretrained(emulation.checkpoint(), n_positions=[64])

    with installed(Behaviour(poison=True)) as outer:
        first = make()
        with installed(Behaviour(row_order="old")) as inner:
            second = make()
        third = make()
    assert outer.models == [first, third]
    assert inner.models == [second]
    assert [model.behaviour.poison for model in (first, second, third)] == [True, False, True]
    assert second.behaviour.row_order == "old"


def a_package(folder: Path, text: str) -> Path:
    (folder / PACKAGE).mkdir()
    (folder / PACKAGE / "__init__.py").write_text(text, encoding="utf-8")
    return folder


INSTALL = (
    "import reference_engine.runners.neuron.emulated as emulated",
    "with emulated.installed(): print('installed')",
)


def test_it_refuses_to_stand_in_front_of_a_real_package(tmp_path: Path) -> None:
    done = python(*INSTALL, path=a_package(tmp_path, "x = 1\n"))
    assert done.returncode == 1
    assert AlreadyInstalledError.__name__ in done.stderr
    assert str(tmp_path) in done.stderr
    assert "installed" not in done.stdout


def test_a_placeholder_that_cannot_be_imported_is_not_a_real_package(tmp_path: Path) -> None:
    done = python(*INSTALL, path=a_package(tmp_path, "raise ImportError('wrong package')\n"))
    assert (done.returncode, done.stdout.strip()) == (0, "installed")


def test_another_process_finds_it_through_its_path() -> None:
    pytest.importorskip("torch", reason="the stand-in needs the extra `torch`")
    done = python(f"import {PACKAGE}", f"print({PACKAGE}.EMULATED)", *INSTALL, path=site_path())
    assert (done.returncode, done.stdout.split()) == (0, ["True", "installed"])


# -------------------------------------------------------------------------------------------------- configuration


def test_every_documented_keyword_of_neuron_config_is_taken_and_kept() -> None:
    given = NeuronConfig(**DEFAULTS)
    assert {name: getattr(given, name) for name in DEFAULTS} == DEFAULTS
    assert not NeuronConfig().not_emulated()


def test_what_vllm_passes_is_taken() -> None:
    config = NeuronConfig(
        collectives_layout=LAYOUT_BSH,
        attention_layout=LAYOUT_BSH,
        fuse_qkv=True,
        quant=None,
        continuous_batching=ContinuousBatchingConfig(batch_size_for_shared_caches=3),
        weight_tiling=False,
        on_device_generation=GenerationConfig(
            max_length=64,
            do_sample=True,
            per_batch_line=True,
            top_k=[256] * 3,
            top_p=[1.0] * 3,
            temperature=[1.0] * 3,
            dynamic=True,
            global_top_k=256,
        ),
    )
    assert config.not_emulated() == []
    assert config.attention_layout == LAYOUT_BSH  # type: ignore[attr-defined] # set by name
    assert config.attention_layout == Layout.BSH  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: NeuronConfig(continous_batching=None), "NeuronConfig does not know continous_batching"),
        (lambda: NeuronConfig(cast_logits_dtype="float64"), "cast_logits_dtype"),
        (lambda: NeuronConfig(padding_side="middle"), "padding_side"),
        (lambda: NeuronConfig(qkv_tiling=True), "qkv_tiling"),
        (lambda: ContinuousBatchingConfig(batch_size_for_shared_caches=1, lines=2), "does not know lines"),
        (lambda: ContinuousBatchingConfig(max_num_seqs=1, enable_chunked_prefill=True), "optimized_paged_attention"),
        (lambda: SparseAttnConfig("dense"), "attn_type"),
    ],
)
def test_a_configuration_that_the_real_one_asserts_against_is_refused(make: Callable[[], Any], reason: str) -> None:
    with pytest.raises(AssertionError, match=reason):
        make()


def test_positional_unknown_and_missing_arguments_are_refused_as_by_the_real_ones() -> None:
    with pytest.raises(TypeError):
        NeuronConfig(None)  # type: ignore[call-arg] # that is what is tested
    with pytest.raises(TypeError, match="topk"):
        GenerationConfig(topk=1)  # type: ignore[call-arg]
    with pytest.raises(KeyError, match="batch_size_for_shared_caches"):
        ContinuousBatchingConfig()
    with pytest.raises(ValueError, match="XYZ"):
        NeuronConfig(attention_layout="XYZ")
    for make in (lambda: QuantizationConfig("s4"), lambda: KVCacheQuantizationConfig(quantize_method="absmax")):
        with pytest.raises(NotImplementedError, match="must be one of"):
            make()


def test_lines_go_by_either_name_and_align_at_the_left() -> None:
    for keywords in ({"batch_size_for_shared_caches": 5}, {"max_num_seqs": 5}):
        config = ContinuousBatchingConfig(**keywords)
        assert (config.batch_size_for_shared_caches, config.max_num_seqs) == (5, 5)
        assert NeuronConfig(continuous_batching=config).padding_side == "right"
    assert NeuronConfig().padding_side == "left"
    assert NeuronConfig(group_query_attention="replicated-heads").group_query_attention is GQA.REPLICATED_HEADS


def test_lists_of_the_defaults_are_not_shared() -> None:
    one, other = NeuronConfig(), NeuronConfig()
    name = "mlp_in_weight_tiling_permute_order"
    getattr(one, name).reverse()
    assert getattr(other, name) == DEFAULTS[name] == [1, 2, 0, 3]


@pytest.mark.parametrize(
    "settings",
    [
        {"quant": QuantizationConfig()},
        {"kv_cache_quant": KVCacheQuantizationConfig()},
        {"sparse_attn": SparseAttnConfig()},
        {"continuous_batching": ContinuousBatchingConfig(max_num_seqs=1, optimized_paged_attention=True)},
    ],
)
def test_what_would_change_results_is_named_as_not_emulated(settings: dict[str, Any]) -> None:
    (found,) = NeuronConfig(**settings).not_emulated()
    assert found.startswith(next(iter(settings)))


def test_generation_configs_compare_by_their_settings() -> None:
    assert GenerationConfig(top_k=[1, 2]) == GenerationConfig(top_k=[1, 2])
    assert GenerationConfig(top_k=1) != GenerationConfig()
    assert GenerationConfig(temperature=1).temperature == 1.0


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"row_order": "sorted"}, "row_order = 'sorted': must be one of new, old"),
        ({"out_of_range": "clamp"}, "out_of_range = 'clamp': must be one of drop, raise"),
        ({"calls_kept": -1}, "calls_kept = -1"),
    ],
)
def test_a_behaviour_that_does_not_exist_is_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Behaviour(**fields)


# -------------------------------------------------------------------------------------------------------- buckets


@pytest.mark.parametrize(
    ("positions", "buckets"),
    [
        (2048, [128, 256, 512, 1024, 2048]),
        (128, [128]),
        (64, [64]),
        (300, [128, 256, 300]),
        ([512, 64], [64, 512]),
    ],
)
def test_token_buckets(positions: int | list[int], buckets: list[int]) -> None:
    assert token_buckets(positions) == buckets


@pytest.mark.parametrize(
    ("estimate", "buckets"), [(None, [64, 128]), (0, []), (96, [96]), ([128, 32], [32, 128]), ([], [])]
)
def test_context_buckets(estimate: int | list[int] | None, buckets: list[int]) -> None:
    assert context_buckets(estimate, [128, 256]) == buckets


def test_batch_sizes_are_ascending() -> None:
    assert batch_sizes(4) == [4]
    assert batch_sizes([8, 1]) == [1, 8]


@pytest.mark.parametrize(("size", "bucket"), [(1, 64), (64, 64), (65, 128), (128, 128), (129, 128)])
def test_the_covering_bucket_is_the_largest_when_none_covers(size: int, bucket: int) -> None:
    assert covering([64, 128], size) == bucket


@pytest.mark.parametrize(("position", "bucket"), [(0, 64), (63, 64), (64, 128), (127, 128)])
def test_the_bucket_of_a_position_is_the_smallest_that_has_it(position: int, bucket: int) -> None:
    assert holding([64, 128], position) == bucket
    with pytest.raises(StopIteration):
        holding([64, 128], 128)
