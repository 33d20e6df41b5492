"""The reference engine under the harness's protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from conformance import protocol
from conformance.protocol import (
    BlockMove,
    Capabilities,
    CommitResult,
    ConfigRefused,
    DeviceCall,
    DeviceShape,
    EngineConfig,
    Feature,
    Finished,
    OptionValue,
    RequestRefused,
    Sampled,
    SequenceKey,
    SequencePlan,
    Snapshot,
    StepPlan,
    Usage,
)
from reference_engine import config as core_config
from reference_engine.block_pool import NULL_BLOCK
from reference_engine.engine import Engine, RequestError
from reference_engine.request import Request
from reference_engine.request import Sequence as RequestSequence
from reference_engine.runners.neuron.device import DeviceCall as CallToDevice
from reference_engine.runners.neuron.device import DeviceConfig, DeviceStats, Route, Rows
from reference_engine.runners.neuron.runner import NeuronRunner
from reference_engine.scheduler import Plan, ScheduledSequence

VERSION = "1"

FEATURES: frozenset[Feature] = frozenset(
    {
        "abort",
        "chunked_prefill",
        "device",
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
        "stop_token",
        "swap",
        "token_budget",
        "usage",
        "watermark",
    }
)

NOT_ON_A_DEVICE: frozenset[Feature] = frozenset(
    {"chunked_prefill", "fork", "lookahead", "pipeline", "prefix_caching", "sliding_window", "swap"}
)
SMALLEST_BUCKET = 4
"""Tokens; so small that short requests fill buckets and pass from one to the next."""

OPTIONS: dict[str, str] = {
    "append_check": "How blocks are counted before the running set appends: "
    + ", ".join(core_config.APPEND_CHECK_NAMES),
    "free_list": "Which free block is handed out: " + ", ".join(core_config.FREE_LIST_ORDERS),
    "max_chunk_tokens": "Most prefill tokens of one sequence in a step, 0 for the token budget alone",
    "null_block": "Keep block 0 as the null block; true by default with a sliding window, else false",
}

SWARM_OPTIONS: dict[str, tuple[OptionValue, ...]] = {
    "free_list": core_config.FREE_LIST_ORDERS,
    "max_chunk_tokens": (1, 2, 5),
    "null_block": (True,),
}

_UNSUPPORTED = ("num_speculative_tokens", "encoder_cache_size", "kv_cache_groups")
_SHARED_FIELDS = tuple(name for name in core_config.FIELD_NAMES if name in EngineConfig.__struct_fields__)


def make(config: EngineConfig) -> protocol.Engine:
    """Build the reference engine. Raises `ConfigRefused`, naming field, value and rule."""
    return ReferenceAdapter(_core_config(config), fixed_batch=config.fixed_batch)


def _core_config(config: EngineConfig) -> core_config.EngineConfig:
    for name in _UNSUPPORTED:
        if getattr(config, name):
            raise ConfigRefused(f"{name} = {getattr(config, name)!r}: the reference engine does not have this")
    unknown = sorted(set(config.engine_options) - set(OPTIONS))
    if unknown:
        raise ConfigRefused(f"engine_options: no option {', '.join(unknown)}; known: {', '.join(OPTIONS)}")
    fields: dict[str, Any] = {name: getattr(config, name) for name in _SHARED_FIELDS}
    fields["null_block"] = config.sliding_window is not None
    fields.update(config.engine_options)
    try:
        return core_config.EngineConfig(**fields)
    except core_config.ConfigError as error:
        raise ConfigRefused(str(error), _without_idle_chunks(config)) from None


def _without_idle_chunks(config: EngineConfig) -> EngineConfig | None:
    """``config`` without a bound on chunks where there are none, if that is what it has."""
    if config.enable_chunked_prefill or "max_chunk_tokens" not in config.engine_options:
        return None
    options = {name: value for name, value in config.engine_options.items() if name != "max_chunk_tokens"}
    return msgspec.structs.replace(config, engine_options=options)


class RecordingDevice:
    """A Neuron device, as its runner sees it, that runs nothing. What it gives for a row is the row's number."""

    def __init__(self, config: DeviceConfig) -> None:
        self.config = config
        self.stats = DeviceStats()
        self._rows = 0
        """Since `take_calls`."""

    @property
    def shape(self) -> DeviceShape:
        config = self.config
        return DeviceShape(
            batch=config.lines, context_buckets=config.context_buckets, token_buckets=config.token_buckets
        )

    def prefill(self, lines: Sequence[int], prompts: Sequence[Sequence[int]], width: int | None = None) -> Rows:
        return self._record(lines, [len(prompt) - 1 for prompt in prompts], width or max(map(len, prompts)))

    def decode(self, lines: Sequence[int], tokens: Sequence[int], positions: Sequence[int]) -> Rows:
        return self._record(lines, positions, 1)

    def _record(self, lines: Sequence[int], positions: Sequence[int], width: int) -> Rows:
        route: Route = "prefill" if width > 1 else "decode"  # whatever was meant
        self.stats.calls.append(CallToDevice(route, tuple(lines), tuple(positions), width))
        first, self._rows = self._rows, self._rows + len(lines)
        return [[row] for row in range(first, self._rows)]

    def take_calls(self, holders: Mapping[int, SequenceKey], given: Mapping[SequenceKey, int]) -> list[DeviceCall]:
        """The calls since the last time. ``holders``: whose a line is. ``given``: the row that each one got."""
        receivers = iter([key for key, _ in sorted(given.items(), key=lambda pair: pair[1])])
        calls = [
            DeviceCall(
                route=call.route,
                rows=[holders[line] for line in call.lines],
                lines=list(call.lines),
                positions=list(call.positions),
                width=call.width,
                returned=[next(receivers) for _ in call.lines],
            )
            for call in self.stats.calls
        ]
        self.stats.clear()
        self._rows = 0
        return calls

    def build(self) -> None:
        """There is nothing to compile."""

    def reset(self) -> None:
        """There is no cache."""

    def close(self) -> None:
        """There is nothing to give up."""


def _device_for(config: core_config.EngineConfig) -> RecordingDevice:
    """A line for each sequence that may run; buckets of `SMALLEST_BUCKET`, twice as many tokens, and so on."""
    longest = config.max_model_len
    buckets = tuple(sorted({min(SMALLEST_BUCKET << doublings, longest) for doublings in range(longest.bit_length())}))
    return RecordingDevice(
        DeviceConfig(
            model_path="",
            lines=config.max_num_seqs,
            context_buckets=buckets,
            token_buckets=buckets,
            sample_on_device=True,
        )
    )


class ReferenceAdapter:
    """Translates between `reference_engine.engine.Engine` and `conformance.protocol.Engine`.

    With ``fixed_batch``, the Neuron runner makes the calls that a device would get. Raises `ConfigRefused` for what
    such a device cannot serve.
    """

    def __init__(self, config: core_config.EngineConfig, *, fixed_batch: bool = False) -> None:
        self.config = config
        self.engine = Engine(config)
        self.device = _device_for(config) if fixed_batch else None
        try:
            self.runner = None if self.device is None else NeuronRunner(self.device, config)
        except core_config.ConfigError as error:
            raise ConfigRefused(f"{error} (fixed_batch = True)") from None
        self._capabilities = Capabilities(
            engine="reference",
            version=VERSION,
            features=FEATURES - NOT_ON_A_DEVICE if self.device else FEATURES,
            null_block=NULL_BLOCK if config.null_block else None,
            reserved_blocks=int(config.null_block),
            deferred_free_steps=config.pipeline_depth if config.pipeline_depth > 1 else 0,
            refuses_outgrowing=True,
            device=self.device.shape if self.device else None,
            options=OPTIONS,
            swarm_options=SWARM_OPTIONS,
        )

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def add_request(self, request: protocol.Request) -> None:
        if request.encoder_items:
            raise RequestRefused(f"request {request.request_id}: the reference engine takes no encoder items")
        inner = Request(
            request.request_id,
            request.prompt,
            request.max_tokens,
            n=request.n,
            priority=request.priority,
            arrival=request.arrival,
            stop_token=request.stop_token,
            salt=request.cache_salt,
            adapter=request.adapter,
        )
        try:
            if self.runner is not None:
                self.runner.check(inner)
            self.engine.add_request(inner)
        except RequestError as error:
            raise RequestRefused(str(error)) from None

    def abort_request(self, request_id: str) -> None:
        self.engine.abort_request(request_id)

    def schedule(self) -> StepPlan:
        plan = self.engine.schedule()
        step = StepPlan(step=plan.step, sequences=[_sequence_plan(scheduled) for scheduled in plan.sequences])
        if plan.moves or plan.preempted:
            _add_moves(step, plan)
        if self.device is not None and self.runner is not None:
            given = self.runner.execute(plan)
            step.device_calls = self.device.take_calls(
                {self.runner.lines[name]: (name, 0) for name in self.runner.lines}, given
            )
        return step

    def commit(self, step: int, sampled: Mapping[SequenceKey, Sampled]) -> CommitResult:
        finished = self.engine.commit(step, {key: _only_token(key, sample) for key, sample in sampled.items()})
        if self.runner is not None:
            self.runner.settle(self.engine)
        return CommitResult([Finished(request_id=name, outputs=outputs, reason=why) for name, outputs, why in finished])

    def reset_prefix_cache(self) -> bool:
        return self.engine.reset_prefix_cache()

    def usage(self) -> Usage:
        scheduler = self.engine.scheduler
        return Usage(
            free_blocks=self.engine.blocks.pool.available,
            running=scheduler.running_sequences,
            waiting=len(scheduler.waiting),
            swapped=len(scheduler.swapped),
            preemptions=scheduler.num_preemptions,
            queried_tokens=self.engine.blocks.queried_tokens,
            hit_tokens=self.engine.blocks.hit_tokens,
        )

    def snapshot(self) -> Snapshot:
        pool, scheduler = self.engine.blocks.pool, self.engine.scheduler
        held: dict[str, list[list[int]]] = {}
        for request in scheduler.running:
            held[request.request_id] = [_held_blocks(sequence, pool.reserved) for sequence in request.live]
        for sequence in self.engine.blocks.deferred:
            held.setdefault(sequence.request.request_id, []).append(_held_blocks(sequence, pool.reserved))
        return Snapshot(
            free=list(pool.free),
            cached=list(pool.evictable),
            reserved=list(range(pool.reserved)),
            held=held,
            ref_counts={block: count for block, count in enumerate(pool.refs) if count},
            swap_free=list(self.engine.blocks.host.free),
            waiting=[request.request_id for request in scheduler.waiting],
            running=[request.request_id for request in scheduler.running],
            swapped=[request.request_id for request in scheduler.swapped],
        )

    def close(self) -> None:
        """Nothing to release: the engine is plain Python data."""


def _sequence_plan(scheduled: ScheduledSequence) -> SequencePlan:
    sequence, first, num_tokens, samples = scheduled
    end = first + num_tokens
    return SequencePlan(
        request_id=sequence.request.request_id,
        seq=sequence.index,
        first=first,
        num_tokens=num_tokens,
        block_tables=[sequence.table[:]],
        samples=samples,
        # A token that a step in flight has yet to sample is not known here.
        token_ids=sequence.tokens[first:end] if end <= len(sequence.tokens) else None,
    )


def _add_moves(step: StepPlan, plan: Plan) -> None:
    step.moves = [BlockMove(kind, src, dst) for kind, src, dst in plan.moves]
    step.preempted = [
        protocol.Preemption(
            request_id=preemption.request.request_id,
            mode=preemption.mode,
            blocks_counted=preemption.blocks_counted,
            blocks_free=preemption.blocks_free,
            asked_by=preemption.asked_by.request_id,
        )
        for preemption in plan.preempted
    ]


def _only_token(key: SequenceKey, sample: Sampled) -> int:
    if len(sample.tokens) != 1:
        raise ValueError(f"{len(sample.tokens)} tokens for sequence {key}: without speculation it is one per step")
    return sample.tokens[0]


def _held_blocks(sequence: RequestSequence, num_reserved: int) -> list[int]:
    return [block for block in sequence.table if block >= num_reserved]
