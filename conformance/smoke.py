"""The smoke test judges the adapter, not the engine: the least that any right adapter does.

It runs one request to its end in an ample pool, aborts another, and looks at every answer. When it is red nothing
else is judged, because a verdict on the engine would be a verdict on the adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Final, TypeVar, get_args

import msgspec

from conformance.operations import Add
from conformance.protocol import (
    AdapterError,
    Capabilities,
    CommitResult,
    ConfigRefused,
    Engine,
    EngineConfig,
    EngineFactory,
    Feature,
    Finished,
    Request,
    RequestRefused,
    Sampled,
    SequencePlan,
    Snapshot,
    StepPlan,
    Usage,
)
from conformance.results import SmokeResult
from conformance.token_model import Model, model_of, request_from
from conformance.watchdog import Watchdog

T = TypeVar("T")

STEPS_MAX: Final = 64
"""Steps within which a request of a few tokens must be done."""
POOL_BLOCKS_MIN: Final = 16
OTHER_SHAPES: Final = ((16, 128), (64, 512), (128, 1024), (1, 8), (64, 64))
"""Block size and model length, tried in this order when the engine refuses those of the base configuration."""
SWITCHES: Final[tuple[dict[str, Any], ...]] = (
    {"enable_prefix_caching": True},
    {"enable_chunked_prefill": True},
    {"scheduling_policy": "priority"},
    {"preemption_mode": "swap", "num_swap_blocks": POOL_BLOCKS_MIN},
    {"sliding_window": 8},
    {"num_lookahead_slots": 1},
    {"num_speculative_tokens": 1},
    {"pipeline_depth": 2},
    {"encoder_cache_size": 16, "enable_chunked_prefill": True},
)
"""What scenarios switch on."""
_FIRST_OUTPUT_TOKEN: Final = 7


class Red(Exception):  # noqa: N818 - the colour of the light
    """The adapter did what no right adapter does."""


def smoke(factory: EngineFactory, config: EngineConfig, watchdog: Watchdog | None = None) -> SmokeResult:
    """Run the smoke test with ``config``; nothing is raised. ``refused``: the engine does not take ``config``."""
    light = _Smoke(config, watchdog)
    try:
        light.run(factory)
    except ConfigRefused as answer:
        return SmokeResult(status="refused", reason=str(answer))
    except (AdapterError, Red) as reason:
        return light.red(str(reason))
    except Exception as error:  # noqa: BLE001 - whatever an adapter raises here is its fault
        return light.red(f"{type(error).__name__}: {error}")
    return SmokeResult(status="ok", passed=light.passed, capabilities=light.capabilities)


def find_base(
    factory: EngineFactory, base: EngineConfig, pinned: Collection[str] = (), watchdog: Watchdog | None = None
) -> tuple[EngineConfig, SmokeResult]:
    """A base configuration that the engine takes, and the smoke test of its adapter.

    The test runs one request at a time in an ample pool, whatever is pinned, so that what an engine does wrong at
    the brim of pool or batch is not taken for the adapter's fault. Some engines take only some sizes: what they name
    instead is tried, then, unless the sizes are pinned, others.
    """
    result = smoke(factory, _at_ease(base), watchdog)
    if result.status == "refused":
        result = smoke(factory, base, watchdog)
    if result.status == "refused":
        nearest = _nearest(factory, base, pinned)
        if nearest is not None:
            alone = msgspec.structs.replace(nearest, max_num_seqs=1)
            return nearest, smoke(factory, _nearest(factory, alone) or nearest, watchdog)
    if result.status != "refused" or {"block_size", "max_model_len", "max_num_batched_tokens"} & set(pinned):
        return base, result
    for size, length in OTHER_SHAPES:
        config = msgspec.structs.replace(
            base, block_size=size, max_model_len=length, max_num_batched_tokens=base.max_num_seqs * length
        )
        other = smoke(factory, _at_ease(config), watchdog)
        if other.status != "refused":
            return config, other
    return base, result


def _nearest(factory: EngineFactory, config: EngineConfig, pinned: Collection[str] = ()) -> EngineConfig | None:
    """What the engine would take in place of ``config``, if it says so."""
    try:
        factory(config).close()
    except ConfigRefused as refusal:
        return refusal.instead_of(config, pinned)
    except Exception:  # noqa: BLE001 - the smoke test says what is wrong
        return None
    return config


def _at_ease(config: EngineConfig) -> EngineConfig:
    return msgspec.structs.replace(config, num_blocks=max(config.num_blocks, POOL_BLOCKS_MIN), max_num_seqs=1)


def declared_features(
    factory: EngineFactory, base: EngineConfig, capabilities: Capabilities, pinned: Collection[str] = ()
) -> frozenset[Feature]:
    """All features the engine declares under ``base`` with one thing switched on at a time.

    Some are declared only where they mean something: a reset of the prefix cache where there is one.
    """
    features = set(capabilities.features)
    for fields in SWITCHES:
        if pinned and fields.keys() & set(pinned):
            continue
        try:
            engine = factory(msgspec.structs.replace(base, **fields))
            features |= engine.capabilities.features
            engine.close()
        except Exception:  # noqa: BLE001, S112 - a case that needs this configuration will say what is wrong
            continue
    return frozenset(features)


class _Smoke:
    """One run of the smoke test. ``doing`` says what it is at, ``passed`` what has held so far."""

    def __init__(self, config: EngineConfig, watchdog: Watchdog | None) -> None:
        self.config = config
        self.passed: list[str] = []
        self.doing = "build"
        self.capabilities: Capabilities | None = None
        self._model: Model | None = None
        self._watchdog = watchdog
        self._step = 0

    def red(self, reason: str) -> SmokeResult:
        """The result when the check at hand failed."""
        return SmokeResult(
            status="red", reason=f"{self.doing}: {reason}", passed=self.passed, capabilities=self.capabilities
        )

    def run(self, factory: EngineFactory) -> None:
        # Not watched: the first engine that is built imports its framework, which takes as long as it takes.
        engine = factory(self.config)
        self.passed.append(self.doing)
        capabilities = self._check("capabilities", lambda: engine.capabilities)
        _judge_capabilities(capabilities, self.config)
        self.capabilities = capabilities
        self._model = model_of(engine)
        features = capabilities.features
        self._check("books of a new engine", lambda: self._books(engine, None, fresh=True))
        self._check("an idle step", lambda: self._idle(engine))
        self._check("one request to its end", lambda: self._serve(engine, request_from(self._add(), 0)))
        self._check("books when idle", lambda: self._books(engine, None))
        if "abort" in features:
            self._check("abort", lambda: self._abort(engine, request_from(self._add(), 1)))
        if "reset_prefix_cache" in features:
            self._check("reset_prefix_cache", lambda: self._reset(engine))
        self._check("close", engine.close)

    def _check(self, name: str, check: Callable[[], T]) -> T:
        self.doing = name
        if self._watchdog is not None:
            self._watchdog.start()
            self._watchdog.begin(name)
        try:
            answer = check()
        finally:
            if self._watchdog is not None:
                self._watchdog.end()
        self.passed.append(name)
        return answer

    def _add(self) -> Add:
        """A few tokens: two blocks where blocks are small."""
        length = self.config.max_model_len
        prompt = max(1, min(3, length - 1))
        return Add(prompt_len=prompt, max_tokens=max(1, min(4, length - prompt)))

    # -- serving -----------------------------------------------------------------------------------------

    def _idle(self, engine: Engine) -> None:
        plan = self._schedule(engine)
        _expect(not plan.sequences, f"runs {plan.sequences} with no request")
        self._settle(engine, plan, {})

    def _schedule(self, engine: Engine) -> StepPlan:
        plan = engine.schedule()
        _expect(isinstance(plan, StepPlan), f"schedule() returns {type(plan).__name__}, not a StepPlan")
        _expect(
            plan.step == self._step,
            f"the plan calls itself step {plan.step}; schedule() was called {self._step} times before",
        )
        self._step += 1
        on_device = self.capabilities is not None and self.capabilities.device is not None
        _expect(
            not plan.sequences or bool(plan.device_calls) == on_device,
            f"declares {'a' if on_device else 'no'} device and names {len(plan.device_calls)} calls of one in a plan "
            "that runs something",
        )
        return plan

    def _settle(self, engine: Engine, plan: StepPlan, sampled: dict[tuple[str, int], Sampled]) -> list[Finished]:
        """Commit as a session does: an empty step only where there is no pipeline."""
        if not plan.sequences and self.config.pipeline_depth > 1:
            return []
        result = engine.commit(plan.step, sampled)
        _expect(isinstance(result, CommitResult), f"commit() returns {type(result).__name__}, not a CommitResult")
        _expect(
            self._model is None or not sampled or bool(result.taken),
            "own_model: commit() does not say which tokens were taken",
        )
        return result.finished

    def _serve(self, engine: Engine, request: Request) -> None:
        """Run ``request`` alone until it is reported as finished, once, with the tokens it was given."""
        self._queue(engine, request)
        tokens = list(request.prompt)
        wanted = len(tokens) + request.max_tokens
        computed, finished = 0, []
        for _ in range(STEPS_MAX):
            plan = self._schedule(engine)
            _expect(not plan.rejected, f"rejects the only request: {plan.rejected}")
            if plan.preempted:
                computed = 0
            sampled = {}
            for sequence in plan.sequences:
                computed = self._judge_plan(sequence, request, tokens, computed)
                if sequence.samples:
                    token = self._next(tokens, len(tokens) - len(request.prompt))
                    tokens.append(token)
                    sampled[request.request_id, 0] = Sampled([token])
            self._books(engine, request if plan.sequences else None, idle=False)
            finished += self._settle(engine, plan, sampled)
            if len(tokens) == wanted:
                break
            _expect(
                not finished,
                f"reported as finished with {len(tokens) - len(request.prompt)} outputs: {finished}",
            )
        else:
            raise Red(f"not finished after {STEPS_MAX} steps: {len(tokens)} of {wanted} tokens")
        for _ in range(1 + self._grace):
            plan = self._schedule(engine)
            _expect(not plan.sequences, f"runs {plan.sequences} after the request is done")
            finished += self._settle(engine, plan, {})
        expected = [tokens[len(request.prompt) :]]
        _expect(len(finished) == 1, f"reported as finished {len(finished)} times")
        _expect(
            finished[0].request_id == request.request_id and finished[0].outputs == expected,
            f"finished with {finished[0]}, expected outputs {expected}",
        )

    def _queue(self, engine: Engine, request: Request) -> None:
        try:
            engine.add_request(request)
        except RequestRefused as answer:
            raise Red(
                f"refuses prompt {len(request.prompt)} + {request.max_tokens} tokens in {self.config.num_blocks} "
                f"blocks of {self.config.block_size}: {answer}"
            ) from None

    def _judge_plan(self, plan: SequencePlan, request: Request, tokens: list[int], computed: int) -> int:
        """The plan of the only request is well-formed; returns how many positions are computed after it."""
        config, end = self.config, plan.first + plan.num_tokens
        _expect(
            (plan.request_id, plan.seq) == (request.request_id, 0),
            f"runs sequence {plan.seq} of {plan.request_id}; there is only 0 of {request.request_id}",
        )
        _expect(
            plan.first == computed and plan.num_tokens >= 1 and end <= len(tokens),
            f"runs positions {plan.first} to {end - 1}; {computed} of {len(tokens)} are computed",
        )
        _expect(
            plan.samples == (end == len(tokens)),
            f"samples = {plan.samples} at position {end - 1} of {len(tokens)}",
        )
        groups = [group.block_size for group in config.kv_cache_groups] or [config.block_size]
        _expect(
            len(plan.block_tables) == len(groups),
            f"{len(plan.block_tables)} block tables for {len(groups)} groups",
        )
        assert self.capabilities is not None
        for size, table in zip(groups, plan.block_tables, strict=True):
            need = -(-end // size)
            _expect(len(table) >= need, f"a table of {len(table)} blocks of {size} for {end} tokens")
            for block in table[:need] if config.sliding_window is None else ():
                _expect(
                    0 <= block < config.num_blocks,
                    f"table {table} names block {block} of a pool of {config.num_blocks}",
                )
        if plan.token_ids is not None:
            _expect(
                plan.token_ids == tokens[plan.first : end],
                f"input tokens {plan.token_ids}, expected {tokens[plan.first : end]}",
            )
        return end

    # -- books -------------------------------------------------------------------------------------------

    @property
    def _grace(self) -> int:
        return 0 if self.capabilities is None else self.capabilities.deferred_free_steps

    def _books(self, engine: Engine, running: Request | None, *, idle: bool = True, fresh: bool = False) -> None:
        """Usage and snapshot are what they should be, and name what runs. Whether they add up is for ACC-1 to judge."""
        capabilities = self.capabilities
        assert capabilities is not None
        if "usage" in capabilities.features:
            usage = engine.usage()
            _expect(isinstance(usage, Usage), f"usage() returns {type(usage).__name__}, not a Usage")
            _expect(
                any(getattr(usage, name) is not None for name in Usage.__struct_fields__),
                "usage is declared and every figure is None",
            )
            _expect(not fresh or usage.free_blocks != 0, "usage: a new engine has no free block")
            if idle:
                _expect(usage.running in {None, 0}, f"usage: {usage.running} running when idle")
                _expect(usage.waiting in {None, 0}, f"usage: {usage.waiting} waiting when idle")
        if "snapshot" in capabilities.features:
            snapshot = engine.snapshot()
            _expect(
                isinstance(snapshot, Snapshot),
                f"snapshot() returns {type(snapshot).__name__}, not a Snapshot",
            )
            _expect(not fresh or bool(snapshot.free), "snapshot: a new engine has no free block")
            if running is not None:
                _expect(
                    any(snapshot.held.get(running.request_id, [])),
                    f"snapshot: {running.request_id} runs and holds nothing; held: {sorted(snapshot.held) or 'nobody'}",
                )

    def _next(self, tokens: list[int], outputs: int) -> int:
        """What follows ``tokens``: as a model of the engine's own has it, or one more than the output before."""
        return _FIRST_OUTPUT_TOKEN + outputs if self._model is None else self._model(tokens)

    def _abort(self, engine: Engine, request: Request) -> None:
        self._queue(engine, request)
        plan = self._schedule(engine)
        sampled = {
            (sequence.request_id, sequence.seq): Sampled([self._next(list(request.prompt), 0)])
            for sequence in plan.sequences
            if sequence.samples
        }
        self._settle(engine, plan, sampled)
        engine.abort_request(request.request_id)
        steps = 0 if self.capabilities is None else self.capabilities.aborted_steps
        for number in range(1 + self._grace):
            plan = self._schedule(engine)
            runs_on = number < steps
            _expect(runs_on or not plan.sequences, f"runs {plan.sequences} after its abort")
            finished = self._settle(engine, plan, {})
            _expect(not finished, f"reports {finished} after its abort")
        self._books(engine, None)

    def _reset(self, engine: Engine) -> None:
        answer = engine.reset_prefix_cache()
        _expect(isinstance(answer, bool), f"reset_prefix_cache() returns {type(answer).__name__}, not a bool")


def _expect(condition: bool, otherwise: str) -> None:  # noqa: FBT001 - reads as a sentence where it is called
    if not condition:
        raise Red(otherwise)


def _judge_capabilities(capabilities: Capabilities, config: EngineConfig) -> None:
    _expect(
        isinstance(capabilities, Capabilities),
        f"capabilities is {type(capabilities).__name__}, not a Capabilities",
    )
    _expect(bool(capabilities.engine and capabilities.version), "engine and version must not be empty")
    unknown = sorted(capabilities.features - set(get_args(Feature)))
    _expect(not unknown, f"unknown features {', '.join(unknown)}; known: {', '.join(get_args(Feature))}")
    reserved, null = capabilities.reserved_blocks, capabilities.null_block
    _expect(0 <= reserved < config.num_blocks, f"reserved_blocks = {reserved} in a pool of {config.num_blocks}")
    _expect(
        null is None or (0 <= null < config.num_blocks and reserved >= 1),
        f"null_block = {null} must lie in the pool and be one of the reserved blocks (reserved_blocks = {reserved})",
    )
    least, most = capabilities.block_size_min, capabilities.block_size_max
    _expect(
        least >= 1 and (most is None or least <= most),
        f"block_size_min = {least} and block_size_max = {most}",
    )
    _expect(
        least <= config.block_size <= (most or config.block_size),
        f"block_size = {config.block_size} was accepted; declared are {least} to {most}",
    )
    for name in ("deferred_free_steps", "preallocated_blocks"):
        _expect(getattr(capabilities, name) >= 0, f"{name} = {getattr(capabilities, name)} must not be negative")
    _expect(
        (capabilities.device is not None) <= ("device" in capabilities.features),
        "a device is named and the feature is not declared",
    )
    _expect(
        (config.fixed_batch and "device" in capabilities.features) <= (capabilities.device is not None),
        "a fixed-batch device is declared and was asked for, and none is named",
    )
    _expect(
        not (capabilities.own_model and "stop_token" in capabilities.features),
        "own_model: nobody can make it emit a stop token, so stop_token must not be declared",
    )
    undeclared = sorted(config.features_needed() - capabilities.features)
    _expect(
        not undeclared,
        f"the configuration was accepted but needs {', '.join(undeclared)}, which is not declared",
    )
