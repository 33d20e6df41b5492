"""smol-vllm: its real `LLMEngine.step`, with the harness in the seat of the model it calls.

That engine's step is one call which schedules, calls ``model.prefill`` and ``model.decode``, and then books
the tokens. The adapter puts a stand-in model into the engine and runs ``step`` in a thread of its own; the
stand-in hands control over when the engine has told the model all it is going to tell, and takes it back with
the tokens. Only one of the two threads ever runs. So scheduling, choosing block tables and handing out tokens
are the engine's own doing, and its errors surface from the call in which they occur.

What an oracle has to know about this engine:

- It has no ``max_num_batched_tokens`` and no ``max_model_len``: there is nothing to set, so a configuration
  is taken whatever it says of them, and a workload that exceeds them is run in full. Neither
  ``token_budget`` nor ``length_limit`` is declared.
- It preempts by what it calls swapping: the blocks are freed, nothing is copied, and a request that returns
  gets fresh blocks and goes on decoding. The adapter reports mode ``swap`` without block moves, because that
  is the interface the engine presents (queue ``swapped``, ``blocks_to_swap_out``, no prefill on return); that
  the KV is gone is for the shadow KV to see. Both settings of ``preemption_mode`` lead to this.
- A table covers all known tokens, the one just sampled included: a block is taken when its first token is
  sampled, not when its KV is computed.
- A prefill is told no block tables; the plan shows those that the block manager holds for it at that moment.
- It cannot abort.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.metadata
import io
from collections.abc import Callable, Mapping
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, SupportsIndex

from conformance.protocol import (
    AdapterError,
    BlockId,
    Capabilities,
    CommitResult,
    ConfigRefused,
    EngineConfig,
    EngineFault,
    Finished,
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

_Groups = list[Any]
_Tables = list[list[BlockId]]


class _Silent(io.TextIOBase):
    """Where the engine's announcements of preemptions go."""

    def write(self, text: str) -> int:
        return len(text)


_SILENT = _Silent()
_LOOK_SECONDS = 0.2
"""How often a wait for the engine is interrupted, to let an exception raised in the waiting thread arrive."""


class _Turn:
    """What the engine's thread hands over: the model calls of a step, or its end."""

    __slots__ = ("decode", "decode_tables", "error", "outputs", "prefill")

    def __init__(self) -> None:
        self.prefill: _Groups = []
        self.decode: _Groups = []
        self.decode_tables: _Tables = []
        self.outputs: list[Any] | None = None
        self.error: Exception | None = None


class _Closed(BaseException):
    """Unwinds a step that is waiting for tokens when the engine is closed; not for the engine to catch."""


class _PrefillTokens(list[int]):
    """The answer to ``prefill``. It is filled by the hand-over that the engine's next move brings about.

    The engine either calls ``decode`` next, which fills it, or looks at its first item; nothing else can
    tell the two kinds of step apart without looking into the engine.
    """

    def __init__(self, settle: Callable[[], list[int]]) -> None:
        super().__init__()
        self._settle = settle

    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        self._settle()
        return super().__getitem__(index)


class _SeatedModel:
    """The model the engine calls. ``exchange`` gives a step's calls to the harness and waits for tokens."""

    def __init__(self, exchange: Callable[[_Turn], list[int]]) -> None:
        self._exchange = exchange
        self._turn: _Turn | None = None
        self._prefill_tokens: _PrefillTokens | None = None

    def prefill(self, groups: _Groups) -> list[int]:
        self._turn = _Turn()
        self._turn.prefill = list(groups)
        self._prefill_tokens = _PrefillTokens(self._settle)
        return self._prefill_tokens

    def decode(self, groups: _Groups, block_tables: _Tables) -> list[int]:
        turn = self._turn or _Turn()
        turn.decode = list(groups)
        turn.decode_tables = [list(table) for table in block_tables]
        self._turn = turn
        return self._settle()

    def _settle(self) -> list[int]:
        """Hand the collected calls over once; returns the tokens of ``decode``."""
        turn, self._turn = self._turn, None
        if turn is None:
            return []
        tokens = self._exchange(turn)
        split = len(turn.prefill)
        if self._prefill_tokens is not None:
            self._prefill_tokens.extend(tokens[:split])
            self._prefill_tokens = None
        return tokens[split:]


class _Stage:
    """The thread in which the engine's steps run, and the strict hand-over between it and the harness."""

    def __init__(self, step: Callable[[], list[Any]]) -> None:
        self._step = step
        self._to_engine: SimpleQueue[list[int] | None] = SimpleQueue()
        self._to_harness: SimpleQueue[_Turn] = SimpleQueue()
        self._lost = False
        """The engine did not come back to the harness: its thread may still run."""
        self._thread = Thread(target=self._run, name="smol-vllm step", daemon=True)
        self._thread.start()

    def resume(self, tokens: list[int]) -> _Turn:
        """Let the engine run (a new step, or on with ``tokens``) until it needs the harness again."""
        if self._lost or not self._thread.is_alive():
            raise AdapterError("the engine is closed, or did not return from an earlier call")
        with contextlib.redirect_stdout(_SILENT):
            self._lost = True
            self._to_engine.put(tokens)
            turn = self._wait()
            self._lost = False
        if turn.error is not None:
            raise turn.error
        return turn

    def _wait(self) -> _Turn:
        while True:
            try:
                return self._to_harness.get(timeout=_LOOK_SECONDS)
            except Empty:
                continue

    def exchange(self, turn: _Turn) -> list[int]:
        """Called in the engine's thread: give ``turn`` to the harness, return the tokens it answers with."""
        self._to_harness.put(turn)
        tokens = self._to_engine.get()
        if tokens is None:
            raise _Closed
        return tokens

    def close(self) -> None:
        """End the thread. One that hangs in the engine is told to unwind and not waited for."""
        self._to_engine.put(None)
        if self._lost and self._thread.ident is not None:
            thread_id = ctypes.c_ulong(self._thread.ident)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread_id, ctypes.py_object(_Closed))
        else:
            self._thread.join()

    def _run(self) -> None:
        while self._to_engine.get() is not None:
            end = _Turn()
            try:
                end.outputs = self._step()
            except _Closed:
                return
            except Exception as error:  # noqa: BLE001 - it is raised again in the harness's thread
                end.error = error
            self._to_harness.put(end)


class SmolVllmEngine:
    """One smol-vllm engine and the thread its steps run in. Made by `make`."""

    def __init__(self, module: Any, config: EngineConfig, capabilities: Capabilities) -> None:
        self._capabilities = capabilities
        self._engine = module.LLMEngine(
            num_gpu_blocks=config.num_blocks,
            block_size=config.block_size,
            max_batch_size=config.max_num_seqs,
            enable_metrics=False,
        )
        self._stage = _Stage(self._engine.step)
        self._engine.model = _SeatedModel(self._stage.exchange)
        self._victims: list[Preemption] = []
        self._watch_preemptions()
        self._ids: list[RequestId] = []
        self._step = 0
        self._awaiting: list[SequenceKey] | None = None
        self._ended: list[Any] = []

    def _watch_preemptions(self) -> None:
        """Read each schedule's victims and, at the moment its blocks are freed, the figures behind it."""
        scheduler, manager = self._engine.scheduler, self._engine.block_manager
        schedule, free = scheduler.schedule, manager.free
        figures: dict[int, tuple[int | None, int]] = {}

        def watched_free(seq_id: int) -> None:
            # The victim is off the running list by now, and was counted when its blocks were found wanting.
            wanted, free_blocks = len(scheduler.running) + 1, manager.num_free_blocks()
            figures[seq_id] = (wanted if free_blocks < wanted else None, free_blocks)
            free(seq_id)

        def watched_schedule() -> Any:
            figures.clear()
            outputs = schedule()
            for group_id in outputs.blocks_to_swap_out:
                wanted, free_blocks = figures.get(group_id, (None, None))
                self._victims.append(
                    Preemption(
                        request_id=self._ids[group_id],
                        mode="swap",
                        blocks_counted=wanted,
                        blocks_free=free_blocks,
                    )
                )
            return outputs

        manager.free = watched_free
        scheduler.schedule = watched_schedule

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def add_request(self, request: Request) -> None:
        """Queue the request. Raises `RequestRefused` for n > 1, which this engine does not know."""
        if request.n > 1:
            raise RequestRefused(f"n = {request.n}: smol-vllm runs one sequence per request")
        stop = [] if request.stop_token is None else [request.stop_token]
        self._engine.add_request(list(request.prompt), max_tokens=request.max_tokens, stop_token_ids=stop)
        self._ids.append(request.request_id)

    def abort_request(self, request_id: RequestId) -> None:
        """Not in this engine. Raises `EngineFault`."""
        raise EngineFault("smol-vllm cannot abort a request")

    def schedule(self) -> StepPlan:
        """Start a step and let it run until the engine has called its model, or to its end if it does not."""
        if self._awaiting is not None:
            raise AdapterError("schedule() before the last step was committed: this engine is synchronous")
        turn = self._stage.resume([])
        self._ended = turn.outputs or []
        plan = StepPlan(step=self._step, preempted=self._victims)
        self._victims = []
        tables = self._engine.block_manager.get_block_table
        plan.sequences += [self._plan(group, tables(group.group_id), first=0) for group in turn.prefill]
        plan.sequences += [
            self._plan(group, table, first=group.sequences[0].num_tokens - 1)
            for group, table in zip(turn.decode, turn.decode_tables, strict=True)
        ]
        self._awaiting = [(sequence.request_id, 0) for sequence in plan.sequences]
        return plan

    def _plan(self, group: Any, table: list[BlockId], first: int) -> SequencePlan:
        seq = group.sequences[0]
        return SequencePlan(
            request_id=self._ids[group.group_id],
            first=first,
            num_tokens=seq.num_tokens - first,
            block_tables=[list(table)],
            token_ids=(seq.prompt_tokens + seq.output_tokens)[first:],
        )

    def commit(self, step: int, sampled: Mapping[SequenceKey, Sampled]) -> CommitResult:
        """Answer the engine's model calls, in the order of the plan, and let the step run to its end."""
        if self._awaiting is None or step != self._step:
            raise AdapterError(f"commit({step}): step {self._step} is next, and must be scheduled first")
        awaiting, self._awaiting = self._awaiting, None
        self._step += 1
        outputs = self._ended
        if awaiting:
            turn = self._stage.resume([sampled[key].tokens[0] for key in awaiting])
            if turn.outputs is None:
                raise AdapterError("the engine called its model twice in one step")
            outputs = turn.outputs
        return CommitResult(
            [
                Finished(request_id=self._ids[output.group_id], outputs=[list(output.output_tokens)])
                for output in outputs
                if output.finished
            ]
        )

    def reset_prefix_cache(self) -> bool:
        """There is no prefix cache."""
        return False

    def usage(self) -> Usage:
        """Queue lengths and free blocks; the engine does not count preemptions."""
        scheduler = self._engine.scheduler
        return Usage(
            free_blocks=self._engine.block_manager.num_free_blocks(),
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            swapped=len(scheduler.swapped),
        )

    def snapshot(self) -> Snapshot:
        """The block manager's private books and the scheduler's queues. O(pool)."""
        manager, scheduler = self._engine.block_manager, self._engine.scheduler
        return Snapshot(
            free=list(manager._free_blocks),
            held={self._ids[group_id]: [list(table)] for group_id, table in manager._block_tables.items()},
            ref_counts=dict(manager._ref_count),
            waiting=[self._ids[group.group_id] for group in scheduler.waiting],
            running=[self._ids[group.group_id] for group in scheduler.running],
            swapped=[self._ids[group.group_id] for group in scheduler.swapped],
        )

    def close(self) -> None:
        """End the engine's thread, in the middle of a step if need be."""
        self._stage.close()


def make(config: EngineConfig) -> SmolVllmEngine:
    """An engine on the installed smol-vllm.

    Raises `ConfigRefused` for features it does not have and for any ``engine_options``, ModuleNotFoundError
    when it is not installed. Its limits are `EngineConfig.max_num_seqs` and the pool, no others.
    """
    capabilities = Capabilities(
        engine="smol-vllm",
        version=importlib.metadata.version("smol-vllm"),
        features=frozenset({"snapshot", "stop_token", "swap", "usage"}),
        reimplements=(
            "Shows a prefill with the block table its block manager holds; the engine tells its model none.",
        ),
    )
    missing: list[str] = sorted(config.features_needed() - capabilities.features)
    if config.kv_cache_groups:
        missing.append("kv_cache_groups")
    if missing:
        raise ConfigRefused(f"smol-vllm {capabilities.version} does not have: {', '.join(missing)}")
    if config.engine_options:
        options = ", ".join(sorted(config.engine_options))
        raise ConfigRefused(f"engine_options {options}: smol-vllm takes none")
    return SmolVllmEngine(importlib.import_module("smol_vllm"), config, capabilities)
