"""mini-sglang: its real `Scheduler`, managers and prefix caches, with the harness in the engine's seat.

It is not on PyPI: what is found as the package ``minisgl`` is driven. The scheduler is put together as its
constructor does it, without CUDA streams; messages go in, and its replies say what is finished.

What an oracle has to know about this engine:

- A block is a page, a token where ``block_size`` is 1. The last block of the pool takes padding.
- With ``pipeline_depth = 2`` it overlaps, which is how it runs by itself: a step is handed over before the last one's
  tokens are taken, and the device runs them in order (``steps_in_order``).
- It never preempts: a request is admitted when prompt and ``max_tokens`` fit beside what the others may still need.
- A prompt over the token budget is prefilled in chunks, always; decodes are not counted against it.
- A prompt as long as ``max_model_len`` or the pool is dropped with a line in the log; here it is refused.
- It has one end-of-sequence token for all requests.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import logging
from collections import deque
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec

from conformance.adapters._pages import pages_of
from conformance.adapters._stand_ins import stood_in
from conformance.protocol import (
    AdapterError,
    BlockId,
    Capabilities,
    CommitResult,
    ConfigRefused,
    EngineConfig,
    EngineFault,
    Feature,
    Finished,
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
        "length_limit",
        "pipeline",
        "prefix_caching",
        "snapshot",
        "stop_token",
        "token_budget",
        "usage",
    }
)
_NO_TOKEN = -1
_ROW_TOKENS = 32
"""Rows of the page table are a multiple of so many tokens."""


class _Output(NamedTuple):
    """What the engine's forward pass returns; ``next_tokens_cpu`` is filled in when the step is committed."""

    next_tokens_gpu: Any
    next_tokens_cpu: Any
    copy_done: Any


class _Flight(NamedTuple):
    data: tuple[Any, _Output]
    request_ids: list[RequestId]


class _Unpinned:
    """torch without page-locked memory, which needs an accelerator."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)

    def empty(self, *args: Any, pin_memory: bool = False, **options: Any) -> Any:
        return self._torch.empty(*args, **options)

    def tensor(self, *args: Any, pin_memory: bool = False, **options: Any) -> Any:
        return self._torch.tensor(*args, **options)


class Modules(NamedTuple):
    """The modules of minisgl the adapter names things from. ``prompt``: makes a tensor that is as good as pinned."""

    core: Any
    message: Any
    scheduler: Any
    prompt: Any
    torch: Any


def _equal_length(key: Any, other: Any) -> int:
    """How many of the first tokens agree, as a kernel of theirs counts them."""
    length = min(len(key), len(other))
    differing = (key[:length] != other[:length]).nonzero()
    return int(differing[0]) if len(differing) else length


_ABSENT = (
    "minisgl.distributed",
    "minisgl.engine",
    "minisgl.kernel",
    "minisgl.utils.arch",
    "minisgl.utils.hf",
    "minisgl.utils.mp",
    "minisgl.utils.torch_utils",
)


@functools.cache
def modules() -> Modules:
    """Import what is driven. Raises ModuleNotFoundError when minisgl, or what it needs, is not installed."""
    if importlib.util.find_spec("minisgl") is None:
        raise ModuleNotFoundError("No module named 'minisgl'", name="minisgl")
    torch: Any = importlib.import_module("torch")
    with stood_in(_ABSENT, {"minisgl.kernel": {"fast_compare_key": _equal_length}}):
        scheduler: Any = importlib.import_module("minisgl.scheduler.scheduler")
        cache: Any = importlib.import_module("minisgl.scheduler.cache")
        for name in ("radix_cache", "naive_cache"):
            importlib.import_module(f"minisgl.kvcache.{name}")
        importlib.import_module("minisgl.kernel")
        found = Modules(
            core=importlib.import_module("minisgl.core"),
            message=importlib.import_module("minisgl.message"),
            scheduler=scheduler,
            prompt=type("Prompt", (torch.Tensor,), {"pin_memory": lambda self: self}),
            torch=torch,
        )
    scheduler.torch = cache.torch = _Unpinned(torch)
    scheduler.logger = SimpleNamespace(debug_rank0=_nothing, info_rank0=_nothing, warning_rank0=_nothing)
    logging.getLogger("minisgl").setLevel(logging.CRITICAL)
    return found


def _nothing(*_: Any) -> None:
    """Stands for what is done for the model alone, and for what goes to the log."""


class MiniSglangEngine:
    """One mini-sglang scheduler without a model. Made by `make`."""

    def __init__(self, config: EngineConfig, capabilities: Capabilities) -> None:
        self._capabilities = capabilities
        self._page_size = config.block_size
        self._overlaps = config.pipeline_depth > 1
        self._sent: list[Any] = []
        self._scheduler = self._build(config)
        self._cache = self._scheduler.cache_manager
        self._ids: list[RequestId] = []
        self._outputs: dict[RequestId, list[int]] = {}
        """Requests that the engine has not ended yet -> their outputs."""
        self._held: dict[RequestId, tuple[int, int]] = {}
        """Those that hold slots -> their row and how many, as of the last step they ran in."""
        self._flying: deque[_Flight] = deque()
        self._plan = StepPlan(step=0)
        self._step = 0

    def _build(self, config: EngineConfig) -> Any:
        """What its constructor does, in its order, with what of its engine it is going to use."""
        lib = modules()
        pages = config.num_blocks - 1
        length = min(config.max_model_len, pages * config.block_size)
        lib.core._GLOBAL_CTX = lib.core.Context(config.block_size)
        width = -(-length // _ROW_TOKENS) * _ROW_TOKENS
        table = lib.torch.zeros((config.max_num_seqs + 1, width), dtype=lib.torch.int32)
        part = lib.scheduler
        scheduler = part.Scheduler.__new__(part.Scheduler)
        scheduler.engine = SimpleNamespace(
            attn_backend=SimpleNamespace(prepare_metadata=_nothing),
            forward_batch=self._forward,
            graph_runner=SimpleNamespace(pad_batch=lambda batch: setattr(batch, "padded_reqs", batch.reqs)),
            max_seq_len=length,
            page_table=table,
            sampler=SimpleNamespace(prepare=_nothing),
        )
        scheduler.device = table.device
        scheduler.table_manager = part.TableManager(config.max_num_seqs, table)
        kind = "radix" if config.enable_prefix_caching else "naive"
        scheduler.cache_manager = part.CacheManager(pages, config.block_size, table, kind)
        scheduler.decode_manager = part.DecodeManager(config.block_size)
        scheduler.prefill_manager = part.PrefillManager(
            scheduler.cache_manager, scheduler.table_manager, scheduler.decode_manager
        )
        scheduler.finished_reqs = set()
        scheduler.eos_token_id = _NO_TOKEN
        scheduler.token_pool = scheduler.table_manager.token_pool
        scheduler.prefill_budget = config.max_num_batched_tokens
        scheduler.send_result = self._sent.extend
        return scheduler

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def add_request(self, request: Request) -> None:
        """Send the request. Raises `RequestRefused` for n > 1 and for a prompt that it drops."""
        if request.n > 1:
            raise RequestRefused(f"n = {request.n}: mini-sglang runs one sequence per request")
        lib, scheduler = modules(), self._scheduler
        if request.stop_token is not None:
            if scheduler.eos_token_id not in (_NO_TOKEN, request.stop_token):
                raise RequestRefused(f"stop token {request.stop_token}: all requests stop at {scheduler.eos_token_id}")
            scheduler.eos_token_id = request.stop_token
        sampling = lib.core.SamplingParams(ignore_eos=request.stop_token is None, max_tokens=request.max_tokens)
        prompt = lib.torch.tensor(request.prompt, dtype=lib.torch.int32).as_subclass(lib.prompt)
        uid, waiting = len(self._ids), len(scheduler.prefill_manager.pending_list)
        self._ids.append(request.request_id)
        scheduler._process_one_msg(lib.message.UserMsg(uid, prompt, sampling))
        if len(scheduler.prefill_manager.pending_list) == waiting:
            raise RequestRefused(f"dropped: {len(request.prompt)} tokens, at most {scheduler.engine.max_seq_len - 1}")
        self._outputs[request.request_id] = []

    def abort_request(self, request_id: RequestId) -> None:
        """Send an abort, which takes effect at once."""
        if request_id in self._ids:
            self._scheduler._process_one_msg(modules().message.AbortBackendMsg(self._ids.index(request_id)))
            self._outputs.pop(request_id, None)
            self._held.pop(request_id, None)

    # -- steps -------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Take the turn of the engine's loop up to where its forward pass is under way."""
        if len(self._flying) > int(self._overlaps):
            raise AdapterError(f"schedule() with {len(self._flying)} steps in flight: the loop is one ahead at most")
        self._plan = plan = StepPlan(step=self._step)
        self._step += 1
        data = self._scheduler._schedule_next_batch()
        if data is not None:
            output = self._scheduler._forward(data)
            self._flying.append(_Flight((data, output), [one.request_id for one in plan.sequences]))
        elif not self._flying:
            self._scheduler.cache_manager.check_integrity()
        return plan

    def _forward(self, batch: Any, _: Any) -> _Output:
        """The engine's seat: show the batch, and advance its requests as the engine does."""
        lib = modules()
        tokens, start = batch.input_ids.tolist(), 0
        written = batch.out_loc.tolist()
        for req in batch.reqs:
            first, end = req.cached_len, req.device_len
            request_id = self._ids[req.uid]
            slots = self._scheduler.engine.page_table[req.table_idx, :end].tolist()
            length = end - first
            if slots[first:] != written[start : start + length]:
                raise EngineFault(f"{request_id} writes slots {written[start : start + length]}, reads {slots[first:]}")
            self._held[request_id] = (req.table_idx, end)
            self._plan.sequences.append(
                SequencePlan(
                    request_id=request_id,
                    first=first,
                    num_tokens=length,
                    block_tables=[pages_of(request_id, slots, self._page_size)],
                    samples=not isinstance(req, modules().scheduler.ChunkedReq),
                    token_ids=None if self._overlaps and batch.is_decode else tokens[start : start + length],
                )
            )
            start += length
            req.complete_one()
        zeros = lib.torch.zeros(len(batch.reqs), dtype=lib.torch.int32)
        return _Output(zeros, zeros.clone(), SimpleNamespace(synchronize=_nothing))

    def commit(self, step: int, sampled: Mapping[SequenceKey, Sampled]) -> CommitResult:
        """Give the oldest step in flight its tokens and let the scheduler process them."""
        if not self._flying:
            if self._overlaps:
                raise AdapterError(f"commit({step}): nothing is in flight")
            return CommitResult()
        (forwarded, output), request_ids = self._flying.popleft()
        samples = [sampled.get((request_id, 0)) for request_id in request_ids]
        tokens = [0 if sample is None else sample.tokens[0] for sample in samples]
        output.next_tokens_cpu.copy_(modules().torch.tensor(tokens))
        if not self._overlaps:
            self._scheduler.token_pool[forwarded.write_tuple] = output.next_tokens_cpu
        self._scheduler._process_last_data((forwarded, output))
        finished = []
        for reply in self._sent:
            request_id = self._ids[reply.uid]
            if request_id not in self._outputs:
                continue  # it has ended: a step too many, or an abort with a step in flight
            self._outputs[request_id].append(reply.next_token)
            if reply.finished:
                self._held.pop(request_id, None)
                finished.append(Finished(request_id=request_id, outputs=[self._outputs.pop(request_id)]))
        self._sent.clear()
        return CommitResult(finished)

    def reset_prefix_cache(self) -> bool:
        """The engine has no such call."""
        return False

    # -- books -------------------------------------------------------------------------------------------

    def usage(self) -> Usage:
        """Free and evictable pages, and requests that hold a row or wait for one."""
        running = len(self._held)
        return Usage(
            free_blocks=int(self._cache.available_size) // self._page_size,
            running=running,
            waiting=len(self._outputs) - running,
        )

    def snapshot(self) -> Snapshot:
        """Free list, prefix tree and the rows of requests, in pages. O(pool)."""
        size = self._page_size
        table = self._scheduler.engine.page_table
        held = {
            request_id: [slot // size for slot in table[row, :length:size].tolist()]
            for request_id, (row, length) in self._held.items()
        }
        counts = dict.fromkeys((page for pages in held.values() for page in pages), 1)
        cached: list[BlockId] = []
        root = getattr(self._cache.prefix_cache, "root_node", None)
        stack = [] if root is None else list(root.children.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            pages = [slot // size for slot in node.value[::size].tolist()]
            if node.ref_count:
                counts.update(dict.fromkeys(pages, node.ref_count))
            else:
                cached += pages
        return Snapshot(
            free=[slot // size for slot in self._cache.free_slots.tolist()],
            cached=cached,
            reserved=[self._capabilities.null_block or 0],
            held={request_id: [pages] for request_id, pages in held.items()},
            ref_counts=counts,
            waiting=[request_id for request_id in self._outputs if request_id not in held],
            running=list(held),
        )

    def close(self) -> None:
        """There is nothing to release."""


def make(config: EngineConfig) -> MiniSglangEngine:
    """An engine on the mini-sglang that is found.

    Raises `ConfigRefused` for what it does not have, ModuleNotFoundError when it, or what it needs, is not installed.
    """
    if config.engine_options:
        raise ConfigRefused(f"engine_options {', '.join(sorted(config.engine_options))}: mini-sglang takes none")
    modules()
    missing: list[str] = sorted(config.features_needed() - _FEATURES)
    if config.kv_cache_groups:
        missing.append("kv_cache_groups")
    if missing:
        raise ConfigRefused(f"mini-sglang does not have: {', '.join(missing)}")
    if config.pipeline_depth > 2:  # noqa: PLR2004 - one step ahead
        raise ConfigRefused(f"pipeline_depth = {config.pipeline_depth}: it overlaps one step, 2 at most")
    if config.num_blocks == 1:
        raise ConfigRefused("num_blocks = 1: one takes padding", msgspec.structs.replace(config, num_blocks=2))
    if config.max_num_batched_tokens < config.max_num_seqs:
        raise ConfigRefused(
            f"max_num_batched_tokens = {config.max_num_batched_tokens}: it bounds prefills only, and a decode step "
            f"runs up to {config.max_num_seqs} tokens",
            msgspec.structs.replace(config, max_num_batched_tokens=config.max_num_seqs),
        )
    try:
        version = importlib.metadata.version("minisgl")
    except importlib.metadata.PackageNotFoundError:
        version = "0"
    last = config.num_blocks - 1
    capabilities = Capabilities(
        engine="mini-sglang",
        version=version,
        features=_FEATURES,
        null_block=last,
        reserved_blocks=1,
        unit="token" if config.block_size == 1 else "page",
        deferred_free_steps=1 if config.pipeline_depth > 1 else 0,
        steps_in_order=True,
        sequence_tokens_max=min(config.max_model_len, last * config.block_size),
        merges_equal_blocks=True,
        reimplements=(
            "Puts the scheduler together as its constructor does, without CUDA streams.",
            "Advances the requests of a forward pass by a token each, as the engine does.",
            "Compares keys of the prefix tree in Python in place of a kernel.",
        ),
    )
    return MiniSglangEngine(config, capabilities)
