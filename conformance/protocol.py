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

from collections.abc import Callable, Collection, Mapping, Sequence
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
    "device",
    "encoder_cache",
    "fork",
    "identity",
    "kv_cache_groups",
    "kv_connector",
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
    "state_groups",
    "stop_token",
    "streaming_input",
    "swap",
    "token_budget",
    "usage",
    "watermark",
]
"""What an engine may declare. ``device``: it hands cache lines to a device of fixed batch and fixed shapes, always or
when ``EngineConfig.fixed_batch`` asks for it. ``fork``: n > 1 sequences per request. ``identity``: cache salt,
adapter or multimodal content of a request keeps its KV apart. ``kv_cache_groups``: it can be given several.
``state_groups``: some may be of layers with a recurrent state. ``kv_connector``: KV of a prompt may be loaded from
elsewhere in place of being computed (`KVLoad`). ``streaming_input``: a prompt may come in parts, each run once the
ones before are answered (`StreamedInput`). ``length_limit`` / ``token_budget``: the engine obeys max_model_len /
max_num_batched_tokens. ``snapshot`` / ``usage``: the engine can show its books."""


class EngineFault(Exception):  # noqa: N818 - named for whose it is
    """The engine under test broke in a way the adapter recognised (an internal error it reported as such)."""


class RequestRefused(Exception):  # noqa: N818 - an answer, not an error of ours
    """The engine refused a request at ``add_request``; the message is the reason it gives its user."""


class ConfigRefused(ValueError):  # noqa: N818 - an answer, not an error of ours
    """The engine does not accept this `EngineConfig`; the message names the field, the value and the rule.

    ``instead``: the nearest configuration that it does accept, where the adapter can tell.
    """

    def __init__(self, message: str, instead: EngineConfig | None = None) -> None:
        super().__init__(message)
        self.instead = instead

    def instead_of(self, config: EngineConfig, pinned: Collection[str] = ()) -> EngineConfig | None:
        """``instead``, unless it changes a field that is ``pinned``."""
        if self.instead is None or any(getattr(self.instead, name) != getattr(config, name) for name in pinned):
            return None
        return self.instead


class AdapterError(Exception):
    """The adapter (not the engine) cannot go on, for example because the installed release is unknown to it."""


class KVCacheGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One group of layers that share a block table (hybrid models have several).

    ``state``: the layers keep a recurrent state in place of KV. A block holds one state, that after the last position
    run of those that lie in it. A step reads the state after position ``first - 1``, as it was before the step, and
    leaves the one after its own last position; nothing is in the blocks between.
    """

    name: str
    block_size: int
    sliding_window: int | None = None
    state: bool = False


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
    fixed_batch: bool = False
    """Run on a device of fixed batch and fixed shapes, where the engine has one (feature ``device``)."""
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
        if self.kv_cache_groups:
            needed.add("kv_cache_groups")
        if any(group.state for group in self.kv_cache_groups):
            needed.add("state_groups")
        return needed


class DeviceShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a fixed-batch device was compiled for at start-up; it runs nothing else without compiling again.

    ``batch``: lines of its KV cache, one sequence each. Buckets are tokens, ascending: the prompt lengths it prefills
    at (a shorter prompt is padded), and the sequence lengths up to which it decodes.
    """

    batch: AtLeastOne
    context_buckets: tuple[AtLeastOne, ...]
    token_buckets: tuple[AtLeastOne, ...]


class Capabilities(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
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
    """States in which a request may go on holding blocks. ``preempted``: it may also be run on in the very step."""
    deferred_free_steps: int = 0
    """Commits for which blocks of a finished, aborted or preempted request may stay held."""
    aborted_steps: int = 0
    """Steps in which a running request may still be planned after its abort; what they compute is nobody's."""
    steps_in_order: bool = False
    """Steps in flight run one after the other on the device: a block may be handed on before they are committed."""
    preallocated_blocks: int = 0
    """Blocks a table may hold beyond what its known tokens plus lookahead need."""
    lookahead_tokens: int = 0
    """Tokens beyond the next one for which a decode is given room, on top of what is configured."""
    running_max: int | None = None
    """Sequences the engine admits to its running set, where that is fewer than max_num_seqs."""
    prefill_interval: int = 1
    """Steps from one prefill to the next while somebody decodes: newcomers wait for their turn."""
    sequence_tokens_max: int | None = None
    """Tokens a sequence may reach by the engine's own reckoning, where that may be less than max_model_len."""
    block_size_min: int = 1
    block_size_max: int | None = None
    length_cap: Literal["tokens", "computed"] = "tokens"
    """What max_model_len limits: all tokens of a sequence or only the positions computed (one token more)."""
    sequences_apart: bool = False
    """Forks a request before its prompt is computed to the end; then each sequence is scheduled and preempted alone.

    A request about to be forked may be planned with no token.
    """
    merges_equal_blocks: bool = False
    """A table's full block may be replaced by another one with the same content (no copy is named)."""
    chunks_whole_blocks: bool = False
    """With chunked prefill and prefix caching together, a chunk is a whole number of blocks."""
    copies_cached_states: bool = False
    """Before a request runs past a state of its own that is cached inside a block, the state gets a block to itself."""
    refuses_outgrowing: bool = False
    """Refuses a request whose prompt fits but whose prompt plus max_tokens cannot ever fit the pool."""
    queue_max: int | None = None
    """Requests the engine takes at a time, running ones included: further ones are refused, to be asked again later."""
    queue_tokens_max: int | None = None
    """Prompt tokens of requests without a first token from which on further requests are refused, too."""
    preempts_for_priority: bool = False
    """Preempts a running request so that a waiting one of higher priority may run."""
    load_failures: Literal["recompute", "fail"] = "recompute"
    """What becomes of a request that needs KV whose load failed: computed again from there, or ended with an error."""
    reset_with_live: Literal["refused", "unused_only", "preempts"] = "refused"
    """What reset_prefix_cache does while requests are live: nothing, drop unused blocks, or preempt."""
    device: DeviceShape | None = None
    """The fixed-batch device the engine runs on as it is configured; its plans then name every `DeviceCall`."""
    blocks_beyond_lines: int = 0
    """Blocks the engine insists on beside one for each line of its device, where it sizes the pool by its lines."""
    own_model: bool = False
    """The engine takes its tokens from a model of its own, as `OwnModel` and `CommitResult.taken` tell. Nobody can
    make such a model stop, so ``stop_token`` is not declared with it."""
    options: dict[str, str] = {}
    """Names of `EngineConfig.engine_options` the adapter takes, each with one sentence of help."""
    swarm_options: dict[str, tuple[OptionValue, ...]] = {}
    """Options, with the values under which the engine still claims to keep the contract; the fuzzer draws them."""
    reimplements: tuple[str, ...] = ()
    """What the adapter does in the engine's stead, one sentence each; shown in the matrix."""


class EncoderItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An encoder input (an image, say) that occupies positions ``[first, first + size)`` of the prompt."""

    key: str
    first: int
    size: int


class StreamedInput(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a prompt grows by while its request is live, and how many tokens the model then answers with at most."""

    prompt: list[int]
    max_tokens: int


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One request as the harness hands it to an engine. ``arrival`` is an ordinal, never a clock.

    ``streamed``: when the outputs asked for are there, which is reported as an end of the request each time, the last
    of them is dropped, and the prompt is everything else and the next of these inputs.
    """

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
    streamed: tuple[StreamedInput, ...] = ()


class SequencePlan(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """One sequence to run in a step: positions ``[first, first + num_tokens)`` through ``block_tables``.

    ``samples`` is true when the engine expects a token for this sequence at the end of the step. When the
    prompt of a request with n > 1 completes, sequence 0 alone is planned and all n first tokens are given.
    ``token_ids`` are the input tokens the model runner is told to run, when it is told.
    ``draft_tokens`` are the last ``len(draft_tokens)`` of the ``num_tokens`` positions; one below 0 is a place that the
    engine pads, which holds no draft and is always rejected.
    ``optimistic``: the engine does not know yet how many drafts of the steps in flight are accepted, and ``first``
    takes all of them for accepted. The model runner starts earlier by those it rejected, and runs the drafts that it
    proposed itself after the last of those steps.
    """

    request_id: RequestId
    seq: int = 0
    first: int
    num_tokens: int
    block_tables: list[list[BlockId]]
    samples: bool = True
    token_ids: list[int] | None = None
    draft_tokens: list[int] = []
    optimistic: bool = False


class BlockMove(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A block operation the model runner does before the forward pass, in the order given.

    ``copy``: device to device. ``swap_out``: device ``src`` to host ``dst``. ``swap_in``: host ``src`` to
    device ``dst``. ``zero``: device ``dst`` is cleared (``src`` is ignored).
    """

    kind: Literal["copy", "swap_out", "swap_in", "zero"]
    src: BlockId
    dst: BlockId


class KVLoad(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """KV of positions ``[first, first + num_tokens)`` of a request that comes from outside the device.

    What comes is the KV of the request's own prefix; the null block takes none. ``late``: it arrives in the background,
    in a later step at the earliest, and the request holds the blocks meanwhile and does not run; with no token, its
    source has yet to say what it has. Else it is there before the step that names it runs.
    ``failed_from``: from this position on, a multiple of the block size, nothing came. The engine hears of that at the
    commit of the step in which the load was to be there.
    """

    request_id: RequestId
    first: int
    num_tokens: int
    block_tables: list[list[BlockId]]
    late: bool = False
    failed_from: int | None = None


class Preemption(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """A request taken off the running set in this step, in the order the engine chose its victims.

    The optional fields are the engine's own arithmetic at that moment, for `kvconform explain`:
    the blocks it counted as needed, the blocks it saw free, and the request it wanted to append to or admit.
    """

    request_id: RequestId
    mode: Literal["recompute", "swap"]
    seq: int | None = None
    """One of several sequences, while the others go on; None: all of them."""
    blocks_counted: int | None = None
    blocks_free: int | None = None
    asked_by: RequestId | None = None


class Rejection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A queued request the engine gave up on while scheduling."""

    request_id: RequestId
    reason: str


class DeviceCall(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """One call into a fixed-batch device: row ``i`` runs sequence ``rows[i]`` on cache line ``lines[i]``.

    A prefill writes a line from position 0 on. A decode runs one token on each line, those it does not name included.
    ``route`` is the one that the *device* takes: by the width of the input alone, a prompt of one token may be a
    decode to it. ``positions``: of each row's last token. ``width``: tokens of a row as handed over, padding included.
    ``returned[i]``: the sequence that was given what the device computed for ``rows[i]``; None where that cannot be
    told. ``compiled``: graphs the call made the device compile.
    """

    route: Literal["prefill", "decode"]
    rows: list[SequenceKey]
    lines: list[int]
    positions: list[int]
    width: int
    returned: list[SequenceKey] | None = None
    compiled: int = 0


class StepPlan(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """Everything one step does, as the model runner is told. ``step`` counts `schedule` calls from 0."""

    step: int
    sequences: list[SequencePlan] = []
    moves: list[BlockMove] = []
    preempted: list[Preemption] = []
    rejected: list[Rejection] = []
    loads: list[KVLoad] = []
    """Begun in this step."""
    loaded: list[KVLoad] = []
    """Late loads that arrive while this step runs, at its end for all that anybody knows."""
    unloaded: list[RequestId] = []
    """Requests that gave back the blocks set aside for a late load of which nothing came."""
    paused: bool = False
    """The engine was told to hold back, by whoever operates it: it owes nobody a turn in this step."""
    encoder_run: list[tuple[RequestId, int]] = []
    """(request, index into its encoder_items) computed into the encoder cache in this step."""
    encoder_freed: list[str] = []
    """Keys of encoder items evicted before this step runs."""
    device_calls: list[DeviceCall] = []
    """What the step hands to the engine's fixed-batch device, in order."""


class Sampled(msgspec.Struct, forbid_unknown_fields=True):
    """What the model returns for one sequence: accepted tokens, then drafts proposed for its next step."""

    tokens: list[int]
    drafts: list[int] = []


class Finished(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """A request the engine reports as complete, with the output tokens of each of its n sequences.

    One with streamed inputs is reported for each of them, with the outputs that answer it.
    """

    request_id: RequestId
    outputs: list[list[int]]
    reason: str = ""


class Taken(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """The tokens that an engine with a model of its own took for one sequence in a step."""

    request_id: RequestId
    seq: int = 0
    tokens: list[int]


class CommitResult(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """What the engine says after it has taken the tokens of a step."""

    finished: list[Finished] = []
    taken: list[Taken] = []
    """What came of the engine's own model, which it went on with in place of what it was handed."""


class Usage(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
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
    queried_tokens: int | None = None
    """Cumulative count of prompt tokens looked up in the prefix cache: of each request once, as it first starts."""
    hit_tokens: int | None = None
    """How many of those were found. What a preempted request finds on its return is no hit."""


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


class OwnModel(Protocol):
    """What an engine that declares ``own_model`` has besides: the truth that its tokens are held against."""

    def reference_token(self, tokens: list[int]) -> int:
        """The token that follows ``tokens`` (a prompt and outputs so far), computed apart from the engine.

        A function of ``tokens`` alone. Tokens of prompts are below `conformance.token_model.VOCABULARY_SIZE`, those
        that are returned below 2**20. What it raises is the adapter's fault.
        """


EngineFactory: TypeAlias = Callable[[EngineConfig], Engine]
"""How an engine is made: raises `ConfigRefused` when the engine will not run with that configuration."""


def config_from_mapping(fields: Mapping[str, Any]) -> EngineConfig:
    """Build an `EngineConfig` from plain data. Raises `ConfigRefused` naming the field and what it takes."""
    try:
        return msgspec.convert(dict(fields), EngineConfig)
    except msgspec.ValidationError as error:
        names: Sequence[str] = EngineConfig.__struct_fields__
        raise ConfigRefused(f"engine configuration: {error}; known fields: {', '.join(names)}") from None
