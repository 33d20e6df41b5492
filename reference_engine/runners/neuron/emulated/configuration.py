"""The configuration objects of `transformers_neuronx.config`, by their names, keywords, defaults and refusals.

Interface of release 0.13 of transformers-neuronx (its config.py). Settings that only choose a layout or a kernel
are kept and change nothing here. Standard library only.
"""

from __future__ import annotations

import enum
from typing import Any

LAYOUT_BSH, LAYOUT_HSB, LAYOUT_SBH = "BSH", "HSB", "SBH"

DTYPES = ("float32", "float16", "bfloat16")


class Layout(str, enum.Enum):
    """Order of the dimensions batch, sequence and hidden; equal to its name, as the real one is."""

    HSB = LAYOUT_HSB
    BSH = LAYOUT_BSH
    SBH = LAYOUT_SBH


class GQA(str, enum.Enum):
    """How KV heads are spread when they are fewer than the query heads."""

    SHARD_OVER_HEADS = "shard-over-heads"
    SHARD_OVER_BATCH = "shard-over-batch"
    REPLICATED_HEADS = "replicated-heads"
    ALL_GATHER_HEADS = "all-gather-heads"


class ContinuousBatchingConfig:
    """Continuous batching with ``batch_size_for_shared_caches`` lines; ``max_num_seqs`` is its newer name.

    Raises AssertionError for an unknown keyword, KeyError without a number of lines.
    """

    def __init__(self, **keywords: Any) -> None:
        lines = keywords.pop("max_num_seqs", None)
        self.max_num_seqs: int = keywords.pop("batch_size_for_shared_caches") if lines is None else lines
        self.max_model_len: int | None = keywords.pop("max_model_len", None)
        self.optimized_paged_attention = bool(keywords.pop("optimized_paged_attention", False))
        self.enable_chunked_prefill = bool(keywords.pop("enable_chunked_prefill", False))
        assert not keywords, f"ContinuousBatchingConfig does not know {', '.join(sorted(keywords))}"
        if self.enable_chunked_prefill:
            assert self.optimized_paged_attention, "chunked prefill goes with optimized_paged_attention only"

    @property
    def batch_size_for_shared_caches(self) -> int:
        """The number of lines."""
        return self.max_num_seqs


class GenerationConfig:
    """Sampling on the device: with it, `forward` returns token ids.

    ``top_k``, ``top_p`` and ``temperature`` are lists, one entry a line, when ``per_batch_line`` is set.
    """

    def __init__(
        self,
        *,
        max_length: int | None = None,
        do_sample: bool = False,
        top_k: int | list[int] = 50,
        top_p: float | list[float] = 1.0,
        top_p_min_tokens: int | list[int] = 1,
        global_top_k: int | None = None,
        eos_token_id: int | list[int] | None = None,
        temperature: float | list[float] = 1.0,
        dynamic: bool = False,
        deterministic: bool = False,
        per_batch_line: bool = False,
    ) -> None:
        self.max_length = max_length
        self.do_sample = do_sample
        self.top_k = top_k
        self.top_p = _floats(top_p)
        self.top_p_min_tokens = top_p_min_tokens
        self.global_top_k = global_top_k
        self.eos_token_id = eos_token_id
        self.temperature = _floats(temperature)
        self.dynamic = dynamic
        self.deterministic = deterministic
        self.per_batch_line = per_batch_line

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GenerationConfig) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment] # it is changed in place, as the real one is


def _floats(value: float | list[float]) -> float | list[float]:
    return [float(one) for one in value] if isinstance(value, list) else float(value)


class QuantizationConfig:
    """Weight quantisation: accepted by name, refused when a model is made with it."""

    def __init__(
        self,
        quant_dtype: str = "s8",
        dequant_dtype: str = "f16",
        quantize_method: str = "vector_dynamic",
        quantize_attn: bool = True,  # noqa: FBT001, FBT002 - the interface
        no_quantize_list: tuple[str, ...] | list[str] = (),
    ) -> None:
        _one_of("quant_dtype", quant_dtype, ("s8", "f8e4m3fn"))
        _one_of("quantize_method", quantize_method, ("vector_dynamic", "direct_cast"))
        self.quant_dtype, self.dequant_dtype, self.quantize_method = quant_dtype, dequant_dtype, quantize_method
        self.quantize_attn, self.no_quantize_list = quantize_attn, list(no_quantize_list)


class KVCacheQuantizationConfig:
    """Quantisation of the cache: accepted by name, refused when a model is made with it."""

    def __init__(
        self, quant_dtype: str = "s8", dequant_dtype: str = "bf16", quantize_method: str = "direct_cast"
    ) -> None:
        _one_of("quant_dtype", quant_dtype, ("s8", "f16", "bf16", "f8e4m3fn"))
        _one_of("quantize_method", quantize_method, ("direct_cast",))
        self.quant_dtype, self.dequant_dtype, self.quantize_method = quant_dtype, dequant_dtype, quantize_method


class SparseAttnConfig:
    """Sparse attention: accepted by name, refused when a model is made with it."""

    def __init__(self, attn_type: str = "blk_sparse", **keywords: Any) -> None:
        assert attn_type in ("blk_sparse", "window", "custom"), f"attn_type = {attn_type!r} is not known"
        self.attn_type = attn_type
        vars(self).update(keywords)


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise NotImplementedError(f"{name} = {value!r}: must be one of {', '.join(allowed)}")


DEFAULTS: dict[str, Any] = {
    "sparse_attn": None,
    "quant": None,
    "kv_cache_quant": None,
    "continuous_batching": None,
    "attention_layout": Layout.HSB,
    "collectives_layout": Layout.HSB,
    "cache_layout": Layout.SBH,
    "padding_side": "left",
    "group_query_attention": None,
    "sequence_parallel_norm": False,
    "sequence_parallel_norm_threshold": 2048,
    "bf16_rms_norm": False,
    "on_device_embedding": False,
    "on_device_generation": None,
    "all_reduce_dtype": None,
    "cast_logits_dtype": "float32",
    "fuse_qkv": False,
    "qkv_tiling": False,
    "weight_tiling": False,
    "mlp_in_weight_tiling_permute_order": [1, 2, 0, 3],
    "mlp_out_weight_tiling_permute_order": [1, 2, 0, 3],
    "log_softmax_scores": False,
    "shard_over_sequence": False,
    "output_all_logits": False,
    "attn_output_transposed": False,
    "fused_rmsnorm_qkv": False,
    "fused_rmsnorm_mlp": False,
    "mlp_out_weight_transpose": False,
    "fuse_mlp": False,
    "is_eagle_target": False,
    "is_eagle_draft": False,
    "has_pre_attention_norm": True,
    "compilation_worker_count": None,
    "duplicate_q_weight_sos": False,
}
"""Every keyword of NeuronConfig (release 0.13) with its default."""

NOT_EMULATED: dict[str, Any] = {
    "sparse_attn": None,
    "quant": None,
    "kv_cache_quant": None,
    "sequence_parallel_norm": False,
    "bf16_rms_norm": False,
    "cache_layout": Layout.SBH,
    "log_softmax_scores": False,
    "shard_over_sequence": False,
    "output_all_logits": False,
    "is_eagle_target": False,
    "is_eagle_draft": False,
    "has_pre_attention_norm": True,
}
"""What would change results or shapes: a model is made only with these values."""


class NeuronConfig:
    """All settings of a model. Keywords only; raises AssertionError for one that is unknown or out of range."""

    continuous_batching: ContinuousBatchingConfig | None
    on_device_generation: GenerationConfig | None
    group_query_attention: GQA | None
    padding_side: str
    cast_logits_dtype: str

    def __init__(self, **keywords: Any) -> None:
        unknown = sorted(keywords.keys() - DEFAULTS.keys())
        assert not unknown, f"NeuronConfig does not know {', '.join(unknown)}"
        for name, default in DEFAULTS.items():
            value = keywords.get(name, default)
            setattr(self, name, list(value) if isinstance(value, list) else value)
        for name in ("attention_layout", "collectives_layout", "cache_layout"):
            setattr(self, name, Layout(getattr(self, name)))
        if self.group_query_attention is not None:
            self.group_query_attention = GQA(self.group_query_attention)
        assert self.cast_logits_dtype in DTYPES, f"cast_logits_dtype = {self.cast_logits_dtype!r}: one of {DTYPES}"
        assert self.padding_side in ("left", "right"), f"padding_side = {self.padding_side!r}: left or right"
        if self.continuous_batching:
            self.padding_side = "right"  # lines are aligned at their left end
        if keywords.get("qkv_tiling"):
            assert keywords.get("fuse_qkv"), "qkv_tiling goes with fuse_qkv only"

    @property
    def lhs_aligned(self) -> bool:
        """Whether every line begins at position 0, whatever its length."""
        return self.padding_side == "right"

    def not_emulated(self) -> list[str]:
        """The settings that the emulated device cannot follow, as ``name = value``."""
        found = [
            f"{name} = {getattr(self, name)!r}" for name, only in NOT_EMULATED.items() if getattr(self, name) != only
        ]
        batching = self.continuous_batching
        if batching is not None and batching.optimized_paged_attention:
            found.append("continuous_batching.optimized_paged_attention = True")
        return found
