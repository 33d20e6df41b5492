"""Where the harness and an engine under test meet: the seat of the model runner.

The harness plays the model. An engine is asked to ``schedule()`` a step, hands over a `StepPlan` that
says exactly what its model runner would be told (which sequences, which positions, through which block
tables), and receives the sampled tokens through ``commit()``. Everything here is data: the structs are
`msgspec.Struct` so that they are fast in process and give a JSON Schema for engines out of process.

Units: a *position* is a 0-based token index within one sequence; a *block id* is a 0-based index into the
device pool; a *logical block* ``i`` of a sequence holds positions ``[i * block_size, (i + 1) * block_size)``;
a *slot* is one position inside one block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, Protocol, TypeAlias

import msgspec

RequestId: TypeAlias = str
BlockId: TypeAlias = int
SequenceKey: TypeAlias = tuple[RequestId, int]
"""One sequence of a request: (request id, index in ``range(request.n)``)."""

OptionValue: TypeAlias = str | int | float | bool

AtLeastOne: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]
NotNegative: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
"""Bounds are checked where data comes in (a file, a word of the command line), not on what our own code builds."""

Feature: TypeAlias = Literal[
    "abort",
    "chunked_prefill",
    "encoder_cache",
    "fork",
    "identity",
    "length_limit",
    "lookahead",
    "pipeline",
    "prefix_caching",
    "priority",
    "recompute",
    "reset_prefix_cache",
    "sliding_window",
    "snapshot",
    "speculation",
    "stop_token",
    "swap",
    "token_budget",
    "usage",
    "watermark",
]
"""What an engine may declare. ``fork``: n > 1 sequences per request. ``identity``: cache salt, adapter or
multimodal content of a request keeps its KV apart. ``length_limit`` / ``token_budget``: the engine obeys
max_model_len / max_num_batched_tokens. ``snapshot`` / ``usage``: the engine can show its books."""


class EngineFault(Exception):  # noqa: N818 - named for whose it is
    """The engine under test broke in a way the adapter recognised (an internal error it reported as such)."""


class RequestRefused(Exception):  # noqa: N818 - an answer, not an error of ours
    """The engine refused a request at ``add_request``; the message is the reason it gives its user."""


class ConfigRefused(ValueError):  # noqa: N818 - an answer, not an error of ours
    """The engine does not accept this `EngineConfig`; the message names the field, the value and the rule."""


class AdapterError(Exception):
    """The adapter (not the engine) cannot go on, for example because the installed release is unknown to it."""


class KVCacheGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One group of layers that share a block table (hybrid models have several)."""

    name: str
    block_size: int
    sliding_window: int | None = None


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What an engine is built with. Units: blocks for ``num_*blocks``, tokens for everything else.

    ``num_blocks`` counts every block of the pool, the null block included where the engine has one.
    ``engine_options`` is passed through to the adapter untouched; each adapter documents its own.
    """

    num_blocks: AtLeastOne = 16
    block_size: AtLeastOne = 4
    max_num_seqs: AtLeastOne = 4
    max_num_batched_tokens: AtLeastOne = 64
    max_model_len: AtLeastOne = 32
    enable_prefix_caching: bool = False
    enable_chunked_prefill: bool = False
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    preemption_mode: Literal["recompute", "swap"] = "recompute"
    num_swap_blocks: NotNegative = 0
    sliding_window: AtLeastOne | None = None
    num_lookahead_slots: NotNegative = 0
    num_speculative_tokens: NotNegative = 0
    watermark: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.0
    pipeline_depth: AtLeastOne = 1
    encoder_cache_size: NotNegative = 0
    kv_cache_groups: tuple[KVCacheGroup, ...] = ()
    engine_options: dict[str, OptionValue] = {}

    def features_needed(self) -> set[Feature]:
        """The features an engine must declare to be run with this configuration."""
        needed: set[Feature] = set()
        if self.enable_prefix_caching:
            needed.add("prefix_caching")
        if self.enable_chunked_prefill:
            needed.add("chunked_prefill")
        if self.scheduling_policy == "priority":
            needed.add("priority")
        if self.preemption_mode == "swap" or self.num_swap_blocks:
            needed.add("swap")
        if self.sliding_window is not None:
            needed.add("sliding_window")
        if self.num_lookahead_slots:
            needed.add("lookahead")
        if self.num_speculative_tokens:
            needed.add("speculation")
        if self.watermark:
            needed.add("watermark")
        if self.pipeline_depth > 1:
            needed.add("pipeline")
        if self.encoder_cache_size:
            needed.add("encoder_cache")
        return needed


class Capabilities(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What an engine declares about itself. Nothing undeclared is held against it: it is UNSUPPORTED."""

    engine: str
    version: str
    features: frozenset[Feature]
    null_block: BlockId | None = None
    """The id that stands for "no block" (padding, out of window); never written, never handed out."""
    reserved_blocks: int = 0
    """Blocks of the pool that never serve a request, the null block included."""
    unit: Literal["token", "page", "block"] = "block"
    keeps_blocks: frozenset[Literal["waiting", "preempted", "finished"]] = frozenset()
    """States in which a request may go on holding blocks."""
    deferred_free_steps: int = 0
    """Commits for which blocks of a finished, aborted or preempted request may stay held."""
    preallocated_blocks: int = 0
    """Blocks a table may hold beyond what its known tokens plus lookahead need."""
    block_size_min: int = 1
    block_size_max: int | None = None
    length_cap: Literal["tokens", "computed"] = "tokens"
    """What max_model_len limits: all tokens of a sequence or only the positions computed (one token more)."""
    merges_equal_blocks: bool = False
    """A table's full block may be replaced by another one with the same content (no copy is named)."""
    chunks_whole_blocks: bool = False
    """With chunked prefill and prefix caching together, a chunk is a whole number of blocks."""
    refuses_outgrowing: bool = False
    """Refuses a request whose prompt fits but whose prompt plus max_tokens cannot ever fit the pool."""
    preempts_for_priority: bool = False
    """Preempts a running request so that a waiting one of higher priority may run."""
    reset_with_live: Literal["refused", "unused_only", "preempts"] = "refused"
    """What reset_prefix_cache does while requests are live: nothing, drop unused blocks, or preempt."""
    options: dict[str, str] = {}
    """Names of `EngineConfig.engine_options` the adapter takes, each with one sentence of help."""
    swarm_options: dict[str, tuple[OptionValue, ...]] = {}
    """Options, with the values under which the engine still claims to keep the contract; the fuzzer draws them."""
    reimplements: tuple[str, ...] = ()
    """What the adapter does in the engine's stead, one sentence each; shown in the matrix."""


class EncoderItem(msgspec.Struct, frozen=True):
    """An encoder input (an image, say) that occupies positions ``[first, first + size)`` of the prompt."""

    key: str
    first: int
    size: int


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request as the harness hands it to an engine. ``arrival`` is an ordinal, never a clock."""

    request_id: RequestId
    prompt: list[int]
    max_tokens: int
    n: int = 1
    priority: int = 0
    """Smaller is more urgent, as in vLLM."""
    arrival: int = 0
    stop_token: int | None = None
    cache_salt: str = ""
    adapter: str = ""
    encoder_items: tuple[EncoderItem, ...] = ()


class SequencePlan(msgspec.Struct, kw_only=True):
    """One sequence to run in a step: positions ``[first, first + num_tokens)`` through ``block_tables``.

    ``samples`` is true when the engine expects a token for this sequence at the end of the step. When the
    prompt of a request with n > 1 completes, sequence 0 alone is planned and all n first tokens are given.
    ``token_ids`` are the input tokens the model runner is told to run, when it is told.
    ``draft_tokens`` are the last ``len(draft_tokens)`` of the ``num_tokens`` positions.
    """

    request_id: RequestId
    seq: int = 0
    first: int
    num_tokens: int
    block_tables: list[list[BlockId]]
    samples: bool = True
    token_ids: list[int] | None = None
    draft_tokens: list[int] = []


class BlockMove(msgspec.Struct, frozen=True):
    """A block operation the model runner does before the forward pass, in the order given.

    ``copy``: device to device. ``swap_out``: device ``src`` to host ``dst``. ``swap_in``: host ``src`` to
    device ``dst``. ``zero``: device ``dst`` is cleared (``src`` is ignored).
    """

    kind: Literal["copy", "swap_out", "swap_in", "zero"]
    src: BlockId
    dst: BlockId


class Preemption(msgspec.Struct, kw_only=True):
    """A request taken off the running set in this step, in the order the engine chose its victims.

    The optional fields are the engine's own arithmetic at that moment, for `kvconform explain`:
    the blocks it counted as needed, the blocks it saw free, and the request it wanted to append to or admit.
    """

    request_id: RequestId
    mode: Literal["recompute", "swap"]
    blocks_counted: int | None = None
    blocks_free: int | None = None
    asked_by: RequestId | None = None


class Rejection(msgspec.Struct, frozen=True):
    """A queued request the engine gave up on while scheduling."""

    request_id: RequestId
    reason: str


class StepPlan(msgspec.Struct, kw_only=True):
    """Everything one step does, as the model runner is told. ``step`` counts `schedule` calls from 0."""

    step: int
    sequences: list[SequencePlan] = []
    moves: list[BlockMove] = []
    preempted: list[Preemption] = []
    rejected: list[Rejection] = []
    encoder_run: list[tuple[RequestId, int]] = []
    """(request, index into its encoder_items) computed into the encoder cache in this step."""
    encoder_freed: list[str] = []
    """Keys of encoder items evicted before this step runs."""


class Sampled(msgspec.Struct):
    """What the model returns for one sequence: accepted tokens, then drafts proposed for its next step."""

    tokens: list[int]
    drafts: list[int] = []


class Finished(msgspec.Struct, kw_only=True):
    """A request the engine reports as complete, with the output tokens of each of its n sequences."""

    request_id: RequestId
    outputs: list[list[int]]
    reason: str = ""


class CommitResult(msgspec.Struct):
    """What the engine says after it has taken the tokens of a step."""

    finished: list[Finished] = []


class Usage(msgspec.Struct, kw_only=True):
    """The engine's own cheap figures, read after every call. None: the engine has no such figure."""

    free_blocks: int | None = None
    """Blocks that could be handed out now: free plus cached-evictable."""
    running: int | None = None
    """Sequences on the running set."""
    waiting: int | None = None
    """Requests waiting, preempted ones included, swapped ones not."""
    swapped: int | None = None
    preemptions: int | None = None
    """Cumulative count of preemptions as the engine's metrics report it."""


class Snapshot(msgspec.Struct, kw_only=True):
    """The engine's whole block accounting, for the full audit. Every list is of block ids."""

    free: list[BlockId]
    """As the engine's free list holds them: a block listed twice is reported, not hidden."""
    cached: list[BlockId] = []
    """Unreferenced but kept for a prefix hit; may be evicted."""
    reserved: list[BlockId] = []
    held: dict[RequestId, list[list[BlockId]]] = {}
    """Device blocks per request: one table per sequence (per group, when there are several)."""
    ref_counts: dict[BlockId, int] | None = None
    swap_free: list[BlockId] | None = None
    waiting: list[RequestId] = []
    running: list[RequestId] = []
    swapped: list[RequestId] = []


class Engine(Protocol):
    """An engine under test. Each call may raise; the session turns what is raised into a finding.

    `RequestRefused` from ``add_request`` is an answer; any other exception from a legal call is a finding.
    """

    @property
    def capabilities(self) -> Capabilities: ...

    def add_request(self, request: Request) -> None:
        """Queue ``request``. Raises `RequestRefused` when the engine will not serve it."""

    def abort_request(self, request_id: RequestId) -> None:
        """Drop the request in whatever state it is; unknown and finished ids are ignored."""

    def schedule(self) -> StepPlan:
        """Decide and return the next step. With a pipeline, earlier steps may not be committed yet."""

    def commit(self, step: int, sampled: Mapping[SequenceKey, Sampled]) -> CommitResult:
        """Take the tokens of step ``step``; steps are committed in the order they were scheduled."""

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix; true when it was done."""

    def usage(self) -> Usage:
        """The engine's own figures, O(1)."""

    def snapshot(self) -> Snapshot:
        """The engine's whole block accounting, O(pool)."""

    def close(self) -> None:
        """Release what the engine holds; the engine is not used afterwards."""


EngineFactory: TypeAlias = Callable[[EngineConfig], Engine]
"""How an engine is made: raises `ConfigRefused` when the engine will not run with that configuration."""


def config_from_mapping(fields: Mapping[str, Any]) -> EngineConfig:
    """Build an `EngineConfig` from plain data. Raises `ConfigRefused` naming the field and what it takes."""
    try:
        return msgspec.convert(dict(fields), EngineConfig)
    except msgspec.ValidationError as error:
        names: Sequence[str] = EngineConfig.__struct_fields__
        raise ConfigRefused(f"engine configuration: {error}; known fields: {', '.join(names)}") from None
