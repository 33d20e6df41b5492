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
import importlib
import importlib.metadata
import io
from collections.abc import Callable, Mapping
from typing import Any, SupportsIndex

from conformance.adapters._handover import Handover, Turn
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


class _Calls:
    """What a step gives its model."""

    __slots__ = ("decode", "decode_tables", "prefill")

    def __init__(self) -> None:
        self.prefill: _Groups = []
        self.decode: _Groups = []
        self.decode_tables: _Tables = []


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

    def __init__(self, exchange: Callable[[_Calls], list[int]]) -> None:
        self._exchange = exchange
        self._calls: _Calls | None = None
        self._prefill_tokens: _PrefillTokens | None = None

    def prefill(self, groups: _Groups) -> list[int]:
        self._calls = _Calls()
        self._calls.prefill = list(groups)
        self._prefill_tokens = _PrefillTokens(self._settle)
        return self._prefill_tokens

    def decode(self, groups: _Groups, block_tables: _Tables) -> list[int]:
        calls = self._calls or _Calls()
        calls.decode = list(groups)
        calls.decode_tables = [list(table) for table in block_tables]
        self._calls = calls
        return self._settle()

    def _settle(self) -> list[int]:
        """Hand the collected calls over once; returns the tokens of ``decode``."""
        calls, self._calls = self._calls, None
        if calls is None:
            return []
        tokens = self._exchange(calls)
        split = len(calls.prefill)
        if self._prefill_tokens is not None:
            self._prefill_tokens.extend(tokens[:split])
            self._prefill_tokens = None
        return tokens[split:]


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
        self._steps: Handover[list[int]] = Handover(self._engine.step, "smol-vllm step")
        self._engine.model = _SeatedModel(self._steps.exchange)
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
        turn = self._resume([])
        calls, self._ended = (_Calls(), turn.value) if turn.over else (turn.value, [])
        plan = StepPlan(step=self._step, preempted=self._victims)
        self._victims = []
        tables = self._engine.block_manager.get_block_table
        plan.sequences += [self._plan(group, tables(group.group_id), first=0) for group in calls.prefill]
        plan.sequences += [
            self._plan(group, table, first=group.sequences[0].num_tokens - 1)
            for group, table in zip(calls.decode, calls.decode_tables, strict=True)
        ]
        self._awaiting = [(sequence.request_id, 0) for sequence in plan.sequences]
        return plan

    def _resume(self, tokens: list[int]) -> Turn:
        with contextlib.redirect_stdout(_SILENT):
            return self._steps.resume(tokens)

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
            turn = self._resume([sampled[key].tokens[0] for key in awaiting])
            if not turn.over:
                raise AdapterError("the engine called its model twice in one step")
            outputs = turn.value
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
        self._steps.close()


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
