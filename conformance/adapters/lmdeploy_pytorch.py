"""lmdeploy's PyTorch engine: its real request handlers, scheduler, input maker and loop, from the executor's seat.

The engine is put together as its constructor does it, with the harness where the executor would be
(`conformance.adapters._lmdeploy_engine`). What the executor is sent, inputs of prefills and deltas of decodes, is
what a plan shows; the decode batch is the worker's own, kept here by the worker's rules.

What an oracle has to know about this engine:

- With ``pipeline_depth = 2`` the loop runs as it is: it sends the next inputs before it takes the outputs of the
  last ones. With 1 it never sends ahead, which the engine itself does only while it is put to sleep; nothing else
  is changed. A decode step asks for room for one token more than the engine knows of, which is the one in flight,
  or, with nothing in flight, a token too many (``lookahead_tokens``).
- Block 0 takes dummy inputs and padding and is never handed out; behind a sliding window it stands for what left.
- A table is given ``prefill_interval`` tokens more than it needs whenever it grows (``preallocated_blocks``).
- A session is limited to the pool less one block (``sequence_tokens_max``): longer prompts are refused, and
  ``max_tokens`` is cut down to what is left. A prompt that leaves room for no token would be prefilled and
  answered with none; here it is refused.
- Prompts longer than ``max_num_batched_tokens`` are prefilled in chunks, whether ``enable_chunked_prefill`` is set
  or not; decode steps are not counted against that budget.
- A preempted request keeps its blocks, and what is computed in them, until somebody else wants them: it may come
  back with one token to compute, or with all of them (``keeps_blocks``).
- Requests of other adapters, or of other salts (which lmdeploy does not know), are given adapter names of their own.
- A finished request holds its blocks until its client ends the session, at once or one step later
  (option ``end_session``).
- What is evicted from the prefix cache is decided by times of access in whole seconds and, among equals, by the
  addresses of objects, so that runs with a full cache differ.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec

from conformance.adapters._lmdeploy_engine import KERNEL_BLOCK_SIZE, RESERVED_BLOCKS, BatchedOutputs, build, modules
from conformance.protocol import (
    AdapterError,
    Capabilities,
    CommitResult,
    ConfigRefused,
    EngineConfig,
    EngineFault,
    Feature,
    Finished,
    OptionValue,
    Preemption,
    Request,
    RequestId,
    RequestRefused,
    Sampled,
    SequenceKey,
    SequencePlan,
    Snapshot,
    StepPlan,
    Usage,
)

_FEATURES: frozenset[Feature] = frozenset(
    {
        "abort",
        "chunked_prefill",
        "identity",
        "length_limit",
        "pipeline",
        "prefix_caching",
        "recompute",
        "sliding_window",
        "snapshot",
        "speculation",
        "stop_token",
        "token_budget",
        "usage",
    }
)
_DEPTH_MAX = 2
_OPTIONS = {
    "prefill_interval": "Decode rounds that waiting prompts let pass at most, and tokens set aside ahead (16).",
    "kernel_block_size": "Tokens of the blocks its kernels know, a divisor of block_size; block_size itself (0).",
    "ttft_policy": "Which long prompt is taken first: size (default) or fifo.",
    "end_session": "When the client of a finished request ends its session: at_once (default) or next_step.",
}


class _Line:
    """One sequence of the worker's decode batch: how many positions are computed, how many tokens may still come."""

    __slots__ = ("appendable", "computed", "drafts", "request_id", "token")

    def __init__(self, request_id: RequestId, computed: int, appendable: int) -> None:
        self.request_id = request_id
        self.computed = computed
        self.appendable = appendable
        self.token: int | None = None
        """The next step's input, where it is known when that step is scheduled."""
        self.drafts: list[int] = []
        """What the next step runs behind it, with speculation."""


class _Forward(NamedTuple):
    """A forward pass under way: its lines in order, the stop words of each, and what it is."""

    lines: list[_Line]
    stop_words: list[list[int]]
    decodes: bool
    samples: bool


class LmdeployEngine:
    """One lmdeploy engine without a model. Made by `make`."""

    def __init__(self, config: EngineConfig, engine: Any, capabilities: Capabilities) -> None:
        self._capabilities = capabilities
        self._engine = engine
        self._scheduler = engine.scheduler
        self._manager = engine.scheduler.block_manager
        self._seat = engine.executor
        self._loop = modules().engine_loop.build_engine_loop(engine)
        self._pipelined = config.pipeline_depth > 1
        self._num_drafts = config.num_speculative_tokens
        self._block_size = config.block_size
        self._kernel_blocks = config.block_size // engine.cache_config.kernel_block_size
        self._end_later = config.engine_options.get("end_session") == "next_step"
        self._status = modules().pytorch_messages.MessageStatus
        self._types = modules().request.RequestType
        self._sessions: dict[RequestId, int] = {}
        self._ids: list[RequestId] = []
        self._responses: dict[RequestId, Any] = {}
        self._ending: list[RequestId] = []
        self._lines: list[_Line] = []
        self._flying: deque[_Forward] = deque()
        self._next: tuple[Any, Any] | None = None
        """Forward inputs that were sent and the sequences they are for, before the loop has turned to them."""
        self._waiting_for_output: Coroutine[Any, Any, Any] | None = None
        self._preempted: list[Preemption] = []
        self._watch_preemptions()
        self._step = 0

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    # -- requests ----------------------------------------------------------------------------------------

    def _ask(self, kind: Any, **data: Any) -> Any:
        """Have the engine handle one client request; returns its response."""
        lib = modules()
        response = lib.request.Response(lib.messages.ResponseType.INTERNAL_ENGINE_ERROR, 0, asyncio.Event())
        self._engine.req_manager.process_request(kind, [lib.request.Request(kind, 0, data, response)])
        return response

    def add_request(self, request: Request) -> None:
        """Open a session and add its message. Raises `RequestRefused` for n > 1 and for what is too long."""
        if request.n > 1:
            raise RequestRefused(f"n = {request.n}: lmdeploy runs one sequence per session")
        limit = self._engine.max_session_len
        if len(request.prompt) >= limit:
            raise RequestRefused(
                f"INPUT_LENGTH_ERROR: {len(request.prompt)} tokens, max_session_len is {limit}, outputs included"
            )
        session_id = len(self._ids)
        self._ids.append(request.request_id)
        self._sessions[request.request_id] = session_id
        self._ask(self._types.ADD_SESSION, session_id=session_id)
        self._responses[request.request_id] = self._ask(
            self._types.ADD_MESSAGE,
            session_id=session_id,
            token_ids=list(request.prompt),
            sampling_param=modules().pytorch_messages.SamplingParam(
                max_new_tokens=request.max_tokens,
                stop_words=[] if request.stop_token is None else [request.stop_token],
            ),
            adapter_name=f"{request.adapter}/{request.cache_salt}" if request.adapter or request.cache_salt else None,
        )

    def abort_request(self, request_id: RequestId) -> None:
        """Stop the session and end it, as a client does whose user has gone."""
        session_id = self._sessions.get(request_id, -1)
        self._ask(self._types.STOP_SESSION, session_id=session_id)
        self._ask(self._types.END_SESSION, session_id=session_id)
        self._responses.pop(request_id, None)

    def _watch_preemptions(self) -> None:
        """Note who leaves the running set, with the engine's own figures at that moment."""
        preempt = self._scheduler.preempt_seqs
        prealloc = self._engine.engine_strategy.get_prealloc_size(is_decoding=True)

        def watched(seqs: Any) -> None:
            seqs = list(seqs)
            active = [seq for seq in seqs if seq.status in (self._status.RUNNING, self._status.READY)]
            self._preempted += [
                Preemption(
                    request_id=self._ids[seq.session_id],
                    mode="recompute",
                    blocks_counted=int(self._manager.num_required_blocks(seq, prealloc)),
                    blocks_free=int(self._manager.get_num_free_gpu_blocks()),
                    asked_by=self._ids[seq.session_id],
                )
                for seq in active
            ]
            preempt(seqs)

        self._scheduler.preempt_seqs = watched

    # -- steps -------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Let the engine send inputs: the first ones, or the ones it sends ahead of the outputs in flight."""
        plan = StepPlan(step=self._step)
        self._step += 1
        if self._waiting_for_output is not None:
            raise AdapterError("schedule() with two steps in flight: the loop sends one ahead, no more")
        if self._next is None:
            if not self._pipelined or self._loop.has_runable_event.has_unfinished():
                inputs, running = _finished(self._loop.inputs_maker.send_next_inputs())
                self._next = None if running is None else (inputs, running)
        elif self._pipelined:
            self._take_turn()
        else:
            raise AdapterError("schedule() before the last step was committed: pipeline_depth is 1")
        ending, self._ending = self._ending, []
        for request_id in ending:
            self._end(request_id)
        plan.preempted, self._preempted = self._preempted, []
        if self._seat.sent:
            (inputs,) = self._seat.sent
            self._seat.sent.clear()
            self._run(inputs, plan.sequences)
        return plan

    def _take_turn(self) -> None:
        """Run the loop up to where it waits for the outputs of the oldest step in flight."""
        assert self._next is not None, "a step is in flight"
        inputs, running = self._next
        self._next = None
        self._scheduler.activate_seqs(running)
        turn = self._loop._main_loop_get_outputs(running=running, forward_inputs=inputs)
        turn.send(None)
        self._waiting_for_output = turn

    def _run(self, inputs: dict[str, Any], plans: list[SequencePlan]) -> None:
        """What the worker does with the inputs it is sent, tensors aside."""
        model_inputs, delta, sampling = inputs["inputs"], inputs["delta"], inputs["sampling_inputs"]
        if delta is not None:
            self._lines = [self._lines[index] for index in delta.indice_cpu.tolist()]
        stop_words = [[]] * len(sampling.session_ctx) if sampling.stop_words is None else sampling.stop_words.tolist()
        if model_inputs is None:
            lines, samples = self._lines, True
            for line, table, ignored in zip(
                lines, delta.block_offsets.tolist(), delta.num_ignored_history.tolist(), strict=True
            ):
                plan = self._plan(line, line.computed, 1 + self._num_drafts, table, ignored, samples=True)
                plan.token_ids = None if line.token is None else [line.token, *line.drafts]
                plan.draft_tokens = [0] * self._num_drafts if self._pipelined else line.drafts
                plan.optimistic = self._pipelined and self._num_drafts > 0
                plans.append(plan)
                line.computed += 1 + self._num_drafts  # all of them, until it is known which are accepted
        else:
            samples = not model_inputs.is_chunk or model_inputs.is_last_chunk
            lines = self._prefill(model_inputs, inputs["stopping_criteria"], sampling, plans, samples=samples)
            if samples:
                self._lines = self._lines + lines
        self._flying.append(_Forward(lines, stop_words, model_inputs is None, samples))

    def _prefill(
        self, inputs: Any, criteria: Any, sampling: Any, plans: list[SequencePlan], *, samples: bool
    ) -> list[_Line]:
        tokens = inputs.input_ids[0].tolist()
        lines = []
        start = 0
        for context, first, length, appendable, table, ignored in zip(
            sampling.session_ctx,
            inputs.history_lengths.tolist(),
            inputs.seq_length.tolist(),
            criteria.num_appendable_ids.tolist(),
            inputs.block_offsets.tolist(),
            inputs.num_ignored_history.tolist(),
            strict=True,
        ):
            line = _Line(self._ids[context["session_id"]], first + length, appendable)
            plan = self._plan(line, first, length, table, ignored, samples=samples)
            plan.token_ids = tokens[start : start + length]
            plans.append(plan)
            lines.append(line)
            start += length
        return lines

    def _plan(
        self, line: _Line, first: int, length: int, offsets: list[int], ignored: int, *, samples: bool
    ) -> SequencePlan:
        table = self._blocks_of(offsets)
        return SequencePlan(
            request_id=line.request_id,
            first=first,
            num_tokens=length,
            block_tables=[[0] * (ignored // self._block_size) + table],
            samples=samples,
        )

    def _blocks_of(self, offsets: list[int]) -> list[int]:
        """The table that was spread over kernel blocks, without the padding up to the longest one of the batch."""
        width = self._kernel_blocks
        table = [offset // width for offset in offsets[::width]]
        if [block * width + index for block in table for index in range(width)] != offsets:
            raise EngineFault(f"kernel blocks {offsets} are not those of whole blocks, {width} each")
        while table and table[-1] == 0:
            table.pop()
        return table

    def commit(self, step: int, sampled: Mapping[SequenceKey, Sampled]) -> CommitResult:
        """Hand the outputs of the oldest step in flight to the loop, and look at its responses."""
        if not self._flying:
            if self._pipelined:
                raise AdapterError(f"commit({step}): nothing is in flight")
            return CommitResult()
        if self._waiting_for_output is None:
            # Only an engine about to sleep does not send ahead.
            self._loop._sleep_requested = not self._pipelined
            self._take_turn()
            self._loop._sleep_requested = False
        turn, self._waiting_for_output = self._waiting_for_output, None
        assert turn is not None, "a turn was taken"
        inputs, running = _resumed(turn, self._outputs(self._flying.popleft(), sampled))
        self._next = None if running is None else (inputs, running)
        self._loop.inputs_maker.preempt_invalid_decode_seqs()
        self._loop.has_runable_event.set()
        return CommitResult(self._finished())

    def _outputs(self, forward: _Forward, sampled: Mapping[SequenceKey, Sampled]) -> BatchedOutputs:
        """The model's outputs: the tokens of each line, where it stops, and drafts for its next step.

        Tokens that were not accepted are -1; ``stop_pos`` is the index of a line's last token, -1 if it goes on.
        """
        torch = modules().torch
        width = 1 + (self._num_drafts if forward.decodes else 0)
        tokens, ends = [], []
        for line, words in zip(forward.lines, forward.stop_words, strict=True):
            sample = sampled.get((line.request_id, 0)) if forward.samples else None
            own, drafts = ([0], []) if sample is None else (sample.tokens, sample.drafts)
            tokens.append(own + [-1] * (width - len(own)))
            ends.append(_stop_position(own, words, line.appendable) if forward.samples else -1)
            if forward.samples:
                self._advance(line, width, own, drafts)
        outputs = BatchedOutputs(torch.tensor(tokens), torch.tensor(ends) >= 0)
        if self._num_drafts:
            outputs.stop_pos = torch.tensor(ends)
            outputs.extra_outputs = SimpleNamespace(
                draft_token_ids=torch.tensor([line.drafts or [0] * self._num_drafts for line in forward.lines])
            )
        else:
            outputs.next_token_ids = outputs.next_token_ids[:, 0]
        return outputs

    def _advance(self, line: _Line, width: int, tokens: list[int], drafts: list[int]) -> None:
        """Take the tokens of one line, of ``width`` that were run, into the decode batch."""
        line.appendable -= len(tokens)
        line.drafts = drafts or [0] * self._num_drafts
        line.computed -= width - len(tokens)
        line.token = None if self._pipelined else tokens[-1]

    def _finished(self) -> list[Finished]:
        """Send what the loop has to say to its clients; those of finished requests end their sessions."""
        queue = self._loop.resp_queue
        finish = modules().messages.ResponseType.FINISH
        finished = []
        while not queue.empty():
            outputs = queue.get_nowait()
            self._loop._send_resps(list(outputs.values()))
            for session_id in outputs:
                request_id = self._ids[session_id]
                response = self._responses.get(request_id)
                if response is not None and response.type is finish:
                    finished.append(Finished(request_id=request_id, outputs=[response.data["token_ids"].tolist()]))
                    del self._responses[request_id]
        for one in finished:
            if self._end_later:
                self._ending.append(one.request_id)
            else:
                self._end(one.request_id)
        return finished

    def _end(self, request_id: RequestId) -> None:
        self._ask(self._types.END_SESSION, session_id=self._sessions[request_id])

    def reset_prefix_cache(self) -> bool:
        """The engine has no such call."""
        return False

    # -- books -------------------------------------------------------------------------------------------

    def usage(self) -> Usage:
        """Free blocks, those of the prefix cache that nobody holds included, and queue lengths. O(cached)."""
        allocator = self._manager.allocator
        free = int(self._manager.get_num_free_gpu_blocks())
        cached = sum(int(allocator.get_ref_count(block)) == 1 for block in self._cached())
        scheduler = self._scheduler
        return Usage(
            free_blocks=free + cached,
            running=scheduler.num_running() + scheduler.num_ready(),
            waiting=scheduler.num_waiting(),
        )

    def _cached(self) -> list[int]:
        """Logical blocks in the prefix tree."""
        found = []
        stack = list(self._scheduler.block_trie._roots.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if node.parent is not None:
                found.append(int(node.block_id))
        return found

    def snapshot(self) -> Snapshot:
        """The allocator's and the prefix tree's own books, in physical blocks. O(pool).

        The tree's reference to a block is not counted among its holders.
        """
        allocator = self._manager.allocator
        physical = allocator._log_mem.phy_map.tolist()
        gpu = allocator._gpu_allocator
        counts = {physical[block]: count for block, count in enumerate(allocator._log_mem.ref_count.tolist()) if count}
        cached = []
        for block in self._cached():
            count = counts[physical[block]] = counts.get(physical[block], 0) - 1
            if count <= 0:
                cached.append(physical[block])
        held: dict[RequestId, list[list[int]]] = {}
        queues: dict[Any, list[RequestId]] = {}
        for seq in self._scheduler.seq_manager.get_all_sequences():
            request_id = self._ids[seq.session_id]
            held[request_id] = [self._manager.get_block_table(seq).tolist()]
            queues.setdefault(seq.status, []).append(request_id)
        status = self._status
        return Snapshot(
            free=gpu._free_blocks[gpu._num_blocks - gpu._free_count :].tolist(),
            cached=cached,
            reserved=list(range(RESERVED_BLOCKS)),
            held=held,
            ref_counts={block: count for block, count in counts.items() if count},
            waiting=queues.get(status.WAITING, []),
            running=queues.get(status.READY, []) + queues.get(status.RUNNING, []),
        )

    def close(self) -> None:
        """Leave the loop where it waits."""
        if self._waiting_for_output is not None:
            self._waiting_for_output.close()


def _stop_position(tokens: list[int], stop_words: list[int], appendable: int) -> int:
    """The index at which a sequence stops that may still append so many tokens, -1 if it goes on."""
    ends = [index for index, token in enumerate(tokens) if token in stop_words]
    if len(tokens) >= appendable:
        ends.append(appendable - 1)
    return min(ends, default=-1)


def _finished(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that waits for nothing."""
    return _resumed(coroutine, None)


def _resumed(coroutine: Coroutine[Any, Any, Any], value: Any) -> Any:
    """Run a coroutine to its end, with ``value`` for what it waits for. Raises `AdapterError` if it waits again."""
    try:
        coroutine.send(value)
    except StopIteration as end:
        return end.value
    raise AdapterError("the engine's loop waits for something the adapter does not know")


def make(config: EngineConfig) -> LmdeployEngine:
    """An engine on the installed lmdeploy.

    Raises `ConfigRefused` for what lmdeploy's configuration refuses (in its words) and for what it does not have,
    ModuleNotFoundError when it, or what it needs, is not installed.
    """
    options = config.engine_options
    unknown = sorted(set(options) - set(_OPTIONS))
    if unknown:
        raise ConfigRefused(f"engine_options {', '.join(unknown)}: not known; taken are {', '.join(_OPTIONS)}")
    prefill_interval = _integer(options, "prefill_interval", 16, least=1)
    kernel_block_size = _integer(options, "kernel_block_size", 0, least=0) or config.block_size
    _check_choice(options, "ttft_policy", ("size", "fifo"))
    _check_choice(options, "end_session", ("at_once", "next_step"))
    engine = build(
        config,
        kernel_block_size=kernel_block_size,
        prefill_interval=prefill_interval,
        ttft_policy=str(options.get("ttft_policy", "size")),
    )
    capabilities = _capabilities(config, engine, prefill_interval)
    missing: list[str] = sorted(config.features_needed() - capabilities.features)
    if config.kv_cache_groups:
        missing.append("kv_cache_groups")
    if missing:
        raise ConfigRefused(f"lmdeploy {capabilities.version} does not have: {', '.join(missing)}")
    if config.pipeline_depth > _DEPTH_MAX:
        raise ConfigRefused(f"pipeline_depth = {config.pipeline_depth}: the loop sends one step ahead, 2 at most")
    decoded = config.max_num_seqs * (1 + config.num_speculative_tokens)
    if config.max_num_batched_tokens < decoded:
        raise ConfigRefused(
            f"max_num_batched_tokens = {config.max_num_batched_tokens}: it bounds prefills only, and a decode step "
            f"runs up to {decoded} tokens",
            msgspec.structs.replace(config, max_num_batched_tokens=decoded),
        )
    if config.sliding_window is not None and config.enable_prefix_caching:
        raise ConfigRefused("Sliding window prefix caching is not supported.")
    return LmdeployEngine(config, engine, capabilities)


def _integer(options: Mapping[str, OptionValue], name: str, default: int, *, least: int) -> int:
    value = options.get(name, default)
    if not isinstance(value, int) or value < least:
        raise ConfigRefused(f"engine_options {name} = {value!r}: an integer of at least {least}")
    return value


def _check_choice(options: Mapping[str, OptionValue], name: str, choices: tuple[str, ...]) -> None:
    if options.get(name, choices[0]) not in choices:
        raise ConfigRefused(f"engine_options {name} = {options[name]!r}: one of {', '.join(choices)}")


def _capabilities(config: EngineConfig, engine: Any, prefill_interval: int) -> Capabilities:
    drafts = config.num_speculative_tokens
    prealloc = engine.engine_strategy.get_prealloc_size(is_decoding=True) + drafts
    later = config.engine_options.get("end_session") == "next_step"
    return Capabilities(
        engine="lmdeploy",
        version=modules().version,
        features=_FEATURES,
        null_block=0,
        steps_in_order=True,
        reserved_blocks=RESERVED_BLOCKS,
        keeps_blocks=frozenset({"preempted"}),
        deferred_free_steps=1 if later else 0,
        prefill_interval=prefill_interval,
        preallocated_blocks=-(-prealloc // config.block_size),
        lookahead_tokens=3 * drafts + (0 if config.pipeline_depth > 1 else 1),
        block_size_min=KERNEL_BLOCK_SIZE,
        merges_equal_blocks=True,
        sequence_tokens_max=engine.max_session_len,
        options=_OPTIONS,
        swarm_options={
            "prefill_interval": (1, 4, 16),
            "kernel_block_size": (0, 16),
            "ttft_policy": ("size", "fifo"),
            "end_session": ("at_once", "next_step"),
        },
        reimplements=(
            "Puts the engine together as its constructor does, without an executor.",
            "Refuses what is longer than max_session_len, as the engine's client side does.",
            "Keeps the worker's decode batch: appended to by prefills, selected from by the indices of deltas.",
            "Stops a sequence at its stop words or at the count sent with its prefill, as the model agent does.",
            "Takes the turns of the engine's main loop: activate, outputs, next inputs, preempt what fell out.",
        ),
    )
