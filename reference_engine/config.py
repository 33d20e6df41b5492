"""The configuration of the reference engine: plain data, checked once, never changed."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, TypeAlias, get_args

FreeListOrder: TypeAlias = Literal["first-in", "last-in", "from-the-end"]
"""Which free block is handed out: the one free longest, the one freed last, or the one freed last beginning
with the highest id."""

AppendCheckName: TypeAlias = Literal["exact", "touched", "per_sequence", "strict"]

FREE_LIST_ORDERS: tuple[str, ...] = get_args(FreeListOrder)
APPEND_CHECK_NAMES: tuple[str, ...] = get_args(AppendCheckName)

_POSITIVE = ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "pipeline_depth")
_NOT_NEGATIVE = ("num_swap_blocks", "num_lookahead_slots", "max_chunk_tokens")


class ConfigError(ValueError):
    """A configuration the engine does not take; the message names the field, the value and the rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What an engine is built with. Blocks for ``num_*blocks``, tokens for everything else.

    ``num_blocks`` counts every block of the device pool, the null block (id 0) included when there is one.
    ``max_num_seqs`` bounds the running set, a request with n sequences counting n. ``watermark`` is the
    share of the pool that admissions leave free. ``max_chunk_tokens`` bounds the prefill chunk of one
    sequence in one step (0: only the token budget does).

    Raises `ConfigError` for a value out of range or a combination that could not serve what it admits.
    """

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    enable_prefix_caching: bool = False
    enable_chunked_prefill: bool = False
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    preemption_mode: Literal["recompute", "swap"] = "recompute"
    num_swap_blocks: int = 0
    sliding_window: int | None = None
    num_lookahead_slots: int = 0
    watermark: float = 0.0
    pipeline_depth: int = 1
    max_chunk_tokens: int = 0
    append_check: AppendCheckName = "exact"
    free_list: FreeListOrder = "first-in"
    null_block: bool = False

    @property
    def usable_blocks(self) -> int:
        """Blocks that can serve requests: the pool without the null block."""
        return self.num_blocks - self.null_block

    @property
    def watermark_blocks(self) -> int:
        """Blocks an admission must leave free: ``watermark`` of the pool, rounded down."""
        return int(self.watermark * self.num_blocks)

    def __post_init__(self) -> None:
        self._check_values()
        self._check_combinations()

    def _check_values(self) -> None:
        for name in _POSITIVE + _NOT_NEGATIVE:
            value, least = getattr(self, name), 1 if name in _POSITIVE else 0
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"{name} = {value!r}: must be an integer of at least {least}")
        if not isinstance(self.max_model_len, int) or self.max_model_len <= 1:
            raise ConfigError(f"max_model_len = {self.max_model_len!r}: must be at least 2 (prompt and output)")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ConfigError(f"sliding_window = {self.sliding_window!r}: must be at least 1, or None")
        if not 0.0 <= self.watermark < 1.0:
            raise ConfigError(f"watermark = {self.watermark!r}: must be in [0, 1)")
        for name in ("enable_prefix_caching", "enable_chunked_prefill", "null_block"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} = {getattr(self, name)!r}: must be true or false")
        for name, allowed in (
            ("scheduling_policy", ("fcfs", "priority")),
            ("preemption_mode", ("recompute", "swap")),
            ("append_check", APPEND_CHECK_NAMES),
            ("free_list", FREE_LIST_ORDERS),
        ):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} = {getattr(self, name)!r}: must be one of {', '.join(allowed)}")

    def _check_combinations(self) -> None:
        if self.usable_blocks < 1:
            raise ConfigError(f"num_blocks = {self.num_blocks}: must be at least 2 with a null block")
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ConfigError(
                f"max_num_batched_tokens = {self.max_num_batched_tokens}: must be at least max_model_len "
                f"({self.max_model_len}) without chunked prefill, or some sequence could not be recomputed"
            )
        if self.preemption_mode == "swap" and not self.num_swap_blocks:
            raise ConfigError("num_swap_blocks = 0: must be at least 1 when preemption_mode is swap")
        if self.sliding_window is not None and not self.null_block:
            raise ConfigError(
                f"sliding_window = {self.sliding_window}: needs null_block, for the blocks out of the window"
            )
        if self.append_check == "per_sequence" and self.num_lookahead_slots:
            raise ConfigError(
                f"num_lookahead_slots = {self.num_lookahead_slots}: must be 0 when append_check is "
                "per_sequence, which counts one block per sequence"
            )
        if self.max_chunk_tokens and not self.enable_chunked_prefill:
            raise ConfigError(f"max_chunk_tokens = {self.max_chunk_tokens}: needs enable_chunked_prefill")


FIELD_NAMES: tuple[str, ...] = tuple(field.name for field in fields(EngineConfig))
