"""nano-vllm: its real `Scheduler` and `BlockManager`, with the harness in the seat of the model runner.

One adapter for the project's own releases (distribution ``nano-vllm``) and for ``nano-vllm-fork`` on PyPI, which
split from it before chunked prefill; which one is installed is seen from what `Scheduler.postprocess` takes. Of the
package only the scheduler's side is imported: its ``__init__`` and its configuration would import transformers and a
model. `LLMEngine.step` is three calls (schedule, run the model, postprocess); the adapter makes the first and the last.

What an oracle has to know about this engine:

- Its prefix cache cannot be switched off: a configuration without prefix caching is refused.
- Nothing is refused at ``add_request``, and ``max_model_len`` is not looked at: ``length_limit`` is not declared.
- The newer scheduler runs a prompt over the token budget in chunks, always; the fork never does.
- It has one end-of-sequence token for all requests.
- It cannot abort.
- Where a table has room for one token only, growth is not noticed (the test is ``length % block_size == 1``):
  the smallest block is two tokens.
- Its own loop does not step an engine in which no request is left, so neither does the adapter.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
from collections.abc import Mapping
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import msgspec

from conformance.protocol import (
    AdapterError,
    Capabilities,
    CommitResult,
    ConfigRefused,
    EngineConfig,
    EngineFault,
    Feature,
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

DISTRIBUTIONS = ("nano-vllm", "nano-vllm-fork")
_NO_TOKEN = -1


class Modules(NamedTuple):
    """What is driven of the package, and what it is called."""

    version: str
    scheduler: Any
    sequence: Any
    sampling_params: Any
    chunks: bool
    """Prompts over the budget are run in chunks, and ``postprocess`` is told which kind of step it ends."""


def _version() -> str:
    for distribution in DISTRIBUTIONS:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


@functools.cache
def modules() -> Modules:
    """Import the scheduler's side. Raises ModuleNotFoundError when nano-vllm, or what it needs, is not installed."""
    if "nanovllm" not in sys.modules:
        spec = importlib.util.find_spec("nanovllm")
        if spec is None:
            raise ModuleNotFoundError("No module named 'nanovllm'", name="nanovllm")
        sys.modules["nanovllm"] = importlib.util.module_from_spec(spec)
    config = ModuleType("nanovllm.config", "A stand-in: the configuration reads the folder of a model.")
    vars(config).update(Config=SimpleNamespace)
    sys.modules.setdefault(config.__name__, config)
    scheduler = importlib.import_module("nanovllm.engine.scheduler")
    return Modules(
        version=_version(),
        scheduler=scheduler.Scheduler,
        sequence=importlib.import_module("nanovllm.engine.sequence").Sequence,
        sampling_params=importlib.import_module("nanovllm.sampling_params").SamplingParams,
        chunks="is_prefill" in inspect.signature(scheduler.Scheduler.postprocess).parameters,
    )


class NanoVllmEngine:
    """One scheduler of nano-vllm. Made by `make`."""

    def __init__(self, found: Modules, config: EngineConfig, capabilities: Capabilities) -> None:
        self._modules = found
        self._capabilities = capabilities
        self._block_size = config.block_size
        self._scheduler = found.scheduler(
            SimpleNamespace(
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                eos=_NO_TOKEN,
                kvcache_block_size=config.block_size,
                num_kvcache_blocks=config.num_blocks,
            )
        )
        self._ids: dict[int, RequestId] = {}
        """Request ids by the engine's ``seq_id``."""
        self._finished: set[RequestId] = set()
        self._victims: list[Preemption] = []
        self._watch_preemptions()
        self._step = 0
        self._in_flight: tuple[list[Any], bool] | None = None
        """The sequences of the step that is not committed yet, and whether it is a prefill."""

    def _watch_preemptions(self) -> None:
        """Read each victim, and the figures behind it, at the moment the scheduler decides."""
        scheduler, preempt = self._scheduler, self._scheduler.preempt

        def watched(seq: Any) -> None:
            free = len(scheduler.block_manager.free_block_ids)
            self._victims.append(
                Preemption(request_id=self._ids[seq.seq_id], mode="recompute", blocks_counted=1, blocks_free=free)
            )
            preempt(seq)

        scheduler.preempt = watched

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def add_request(self, request: Request) -> None:
        """Queue the request. Raises `RequestRefused` for n > 1 and for a second end-of-sequence token."""
        if request.n > 1:
            raise RequestRefused(f"n = {request.n}: nano-vllm runs one sequence per request")
        scheduler = self._scheduler
        if request.stop_token is not None:
            if scheduler.eos not in (_NO_TOKEN, request.stop_token):
                raise RequestRefused(f"stop_token {request.stop_token}: nano-vllm has one for all, {scheduler.eos}")
            scheduler.eos = request.stop_token
        self._set_block_size()
        seq = self._modules.sequence(
            list(request.prompt),
            self._modules.sampling_params(max_tokens=request.max_tokens, ignore_eos=request.stop_token is None),
        )
        self._ids[seq.seq_id] = request.request_id
        scheduler.add(seq)

    def _set_block_size(self) -> None:
        """It is an attribute of the sequences' class: what the engine that is called now goes by."""
        self._modules.sequence.block_size = self._block_size

    def abort_request(self, request_id: RequestId) -> None:
        """Not in this engine. Raises `EngineFault`."""
        raise EngineFault("nano-vllm cannot abort a request")

    def schedule(self) -> StepPlan:
        """One pass of the scheduler: prefills alone, or decodes alone."""
        if self._in_flight is not None:
            raise AdapterError("schedule() before the last step was committed: this engine is synchronous")
        self._set_block_size()
        seqs, is_prefill = ([], False) if self._scheduler.is_finished() else self._scheduler.schedule()
        self._in_flight = list(seqs), is_prefill
        plan = StepPlan(
            step=self._step,
            sequences=[self._plan(seq, is_prefill=is_prefill) for seq in seqs],
            preempted=self._victims,
        )
        self._victims = []
        return plan

    def _plan(self, seq: Any, *, is_prefill: bool) -> SequencePlan:
        """What the model runner reads off a sequence: a decode runs its last token, at the end of its table."""
        first = seq.num_cached_tokens if is_prefill else len(seq) - 1
        end = first + seq.num_scheduled_tokens if self._modules.chunks else len(seq)
        return SequencePlan(
            request_id=self._ids[seq.seq_id],
            first=first,
            num_tokens=end - first,
            block_tables=[list(seq.block_table)],
            samples=end == len(seq),
            token_ids=seq.token_ids[first:end],
        )

    def commit(self, step: int, sampled: Mapping[SequenceKey, Sampled]) -> CommitResult:
        """Hand the tokens to the scheduler, in the order of its step."""
        if self._in_flight is None or step != self._step:
            raise AdapterError(f"commit({step}): step {self._step} is next, and must be scheduled first")
        (seqs, is_prefill), self._in_flight = self._in_flight, None
        self._step += 1
        self._set_block_size()
        answers = [sampled.get((self._ids[seq.seq_id], 0)) for seq in seqs]
        # The model runner samples for every sequence; what a prompt's chunk gives is dropped by the scheduler.
        tokens = [_NO_TOKEN if answer is None else answer.tokens[0] for answer in answers]
        if self._modules.chunks:
            self._scheduler.postprocess(seqs, tokens, is_prefill)
        elif seqs:
            self._scheduler.postprocess(seqs, tokens)
        ended = {self._ids[seq.seq_id]: seq for seq in seqs if seq.is_finished}
        new = [request_id for request_id in ended if request_id not in self._finished]
        self._finished.update(new)
        return CommitResult(
            [
                Finished(request_id=request_id, outputs=[list(ended[request_id].completion_token_ids)])
                for request_id in new
            ]
        )

    def reset_prefix_cache(self) -> bool:
        """There is no way to empty the cache."""
        return False

    def usage(self) -> Usage:
        """Free blocks, cached ones among them, and the lengths of the queues."""
        waiting, running = self._queues()
        free_blocks = len(self._scheduler.block_manager.free_block_ids)
        return Usage(free_blocks=free_blocks, running=len(running), waiting=len(waiting))

    def _queues(self) -> tuple[list[Any], list[Any]]:
        """Who waits and who runs. A prompt run in chunks has its blocks, and stays on the waiting list to its end."""
        waiting = [seq for seq in self._scheduler.waiting if not seq.block_table]
        return waiting, [seq for seq in self._scheduler.waiting if seq.block_table] + list(self._scheduler.running)

    def snapshot(self) -> Snapshot:
        """The block manager's books and the scheduler's queues. O(pool).

        A block on the free list that a prefix can still be found in is cached.
        """
        manager = self._scheduler.block_manager
        findable = set(manager.hash_to_block_id.values())
        waiting, running = self._queues()
        return Snapshot(
            free=[block_id for block_id in manager.free_block_ids if block_id not in findable],
            cached=[block_id for block_id in manager.free_block_ids if block_id in findable],
            held={self._ids[seq.seq_id]: [list(seq.block_table)] for seq in running if seq.block_table},
            ref_counts={block.block_id: block.ref_count for block in manager.blocks if block.ref_count},
            waiting=[self._ids[seq.seq_id] for seq in waiting],
            running=[self._ids[seq.seq_id] for seq in running],
        )

    def close(self) -> None:
        """Nothing to release."""


def make(config: EngineConfig) -> NanoVllmEngine:
    """An engine on the installed nano-vllm, or nano-vllm-fork.

    Raises `ConfigRefused` for features it does not have, for a configuration without prefix caching and for any
    ``engine_options``; ModuleNotFoundError when neither is installed.
    """
    found = modules()
    features: set[Feature] = {"prefix_caching", "recompute", "snapshot", "stop_token", "token_budget", "usage"}
    if found.chunks:
        features.add("chunked_prefill")
    capabilities = Capabilities(
        engine="nano-vllm",
        version=found.version,
        features=frozenset(features),
        block_size_min=2,
        reimplements=("Calls the scheduler as LLMEngine.step does, and not when no request is left.",),
    )
    missing: list[str] = sorted(config.features_needed() - capabilities.features)
    if missing:
        raise ConfigRefused(f"nano-vllm {found.version} does not have: {', '.join(missing)}")
    if config.engine_options:
        raise ConfigRefused(f"engine_options {', '.join(sorted(config.engine_options))}: nano-vllm takes none")
    if config.block_size < capabilities.block_size_min:
        raise ConfigRefused(
            f"block_size {config.block_size}: nano-vllm takes {capabilities.block_size_min} or more",
            msgspec.structs.replace(config, block_size=capabilities.block_size_min, enable_prefix_caching=True),
        )
    if not config.enable_prefix_caching:
        raise ConfigRefused(
            "enable_prefix_caching false: nano-vllm always caches",
            msgspec.structs.replace(config, enable_prefix_caching=True),
        )
    return NanoVllmEngine(found, config, capabilities)
