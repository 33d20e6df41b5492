"""The scheduler of sglang releases that read their configuration from a runtime context.

What `conformance.adapters._sglang_engine` says of the earlier ones holds here. The tree of prefixes is the one such a
release chooses by itself, compiled where it can be. Outputs are relayed to the next step's inputs through a buffer by
row, in which a token that nobody has sampled yet is a number below zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

ROW_MARGIN = 4
"""Slots of a request's row beyond the context, as its model runner allocates them."""
IMPORTED_LATE = (
    "elastic_ep.elastic_ep",
    "layers.attention.dsv4.unified_kv_gate",
    "mem_cache.prefill_budget",
    "speculative.spec_utils",
)
"""Modules that it imports when it first runs what needs them."""
GROUP = SimpleNamespace(cpu_group=None, first_rank=0, is_first_rank=True, rank=0, rank_in_group=0, world_size=1)
"""The process group of a process that is alone."""


class Forwarded(NamedTuple):
    """What the model worker was handed, a row per request: ``slots`` are those of all rows' ``tokens``, in order."""

    tokens: list[int]
    rows: list[int]
    ends: list[int]
    lengths: list[int]
    slots: list[int]


def limits_of(args: Any) -> tuple[Any, ...]:
    """What a worker says first of itself: limits in tokens, as the model worker works them out, seed and device."""
    sequence_max = min(args.context_length, args.max_total_tokens) - 1
    return (
        args.max_total_tokens,
        args.max_prefill_tokens,
        args.max_running_requests,
        args.max_queued_requests,
        sequence_max,
        sequence_max - 5,  # the longest prompt
        args.random_seed,
        args.device,
    )


def pools_of(lib: Any, args: Any) -> tuple[Any, Any]:
    """The rows of requests and the allocator of slots, in the sizes of ``args``."""
    rows = lib.memory_pool.ReqToTokenPool(
        args.max_running_requests, args.context_length + ROW_MARGIN, args.device, enable_memory_saver=False
    )
    paged = args.page_size > 1
    kind = lib.allocator.PagedTokenToKVPoolAllocator if paged else lib.allocator.TokenToKVPoolAllocator
    sizes = {"size": args.max_total_tokens} | ({"page_size": args.page_size} if paged else {})
    return rows, kind(**sizes, dtype=lib.torch.float32, device=args.device, kvcache=None, need_sort=False)


class ContextSeat:
    """The model worker. ``forwarded``: what it was handed last."""

    is_hybrid_swa = False
    preloaded_weights_bytes = 0
    weight_load_time = 0.0
    graph_time_usage = None

    def __init__(self, lib: Any, args: Any) -> None:
        self._lib = lib
        self._args = args
        self._launched = 0
        self.forwarded: Any = None
        self.model_config = SimpleNamespace(use_ngram_embedding=False)
        rows, allocator = pools_of(lib, args)
        self.model_runner = SimpleNamespace(
            attn_backend=None,
            canary_manager=None,
            device=args.device,
            forward_stream=lib.torch.cpu.Stream(),
            memory_pool_config=self,  # not None: the pools are there
            model_config=None,
            mtp_draft_device_pools=(),
            mtp_draft_mamba_pools=(),
            ngram_embedding_manager=SimpleNamespace(prepare_for_forward=lambda batch, **_: batch),
            prefill_aware_swa=False,
            prewarm_sampling=lambda: None,
            req_to_token_pool=rows,
            token_to_kv_pool=SimpleNamespace(post_capture_active=False),
            token_to_kv_pool_allocator=allocator,
        )

    def get_worker_info(self) -> tuple[Any, ...]:
        return (*limits_of(self._args), self.model_runner.forward_stream, None, None, None)

    def get_memory_pool(self) -> tuple[Any, Any]:
        runner = self.model_runner
        return runner.req_to_token_pool, runner.token_to_kv_pool_allocator

    def init_attention_backends(self) -> None: ...

    def init_cuda_graphs(self) -> None: ...

    def get_pad_input_ids_func(self) -> None: ...

    def forward_batch_generation(self, batch: Any, **_: Any) -> Any:
        """Tokens that nobody has sampled yet, each the same number below zero, which is the step's own."""
        ends = batch.seq_lens.tolist()
        self.forwarded = Forwarded(
            tokens=batch.input_ids.tolist(),
            rows=batch.req_pool_indices.tolist(),
            ends=ends,
            lengths=list(batch.extend_lens) if batch.forward_mode.is_extend() else [1] * len(ends),
            slots=batch.out_cache_loc.tolist(),
        )
        self._launched += 1
        return self._lib.utils.GenerationBatchResult(
            logits_output=None,
            next_token_ids=self._lib.torch.full((len(ends),), -self._launched, dtype=self._lib.torch.int64),
        )


_GROUPS = ("attn_cp_group", "attn_tp_group", "pp_group", "tp_group", "world_group")


class ContextDriver:
    """What drives a scheduler that has it as its first base: no sockets, no watchdogs, a turn at a time.

    ``sent``: what it has sent to its clients, oldest first. ``current``: the batch of the last turn.
    """

    lib: Any
    running_batch: Any
    last_batch: Any
    reads_tree_locks = False

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, args: Any) -> None:
        ranks = self.lib.runtime_context.SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0)
        self._context = self.lib.runtime_context.create_context(args, role="scheduler", ranks=ranks)
        self._context.parallel.override_permanently(**dict.fromkeys(_GROUPS, GROUP))
        self.current: Any = None
        self.enter()
        self.lib.scheduler.Scheduler.__init__(self, args, SimpleNamespace(nccl_port=0))
        self.enable_skip_finishing_decode = self.enable_overlap  # which its overlapped loop sets

    def enter(self) -> None:
        """Make its context the one of the process."""
        context = self._context
        self.lib.runtime_context._CONTEXT, self.lib.runtime_context._PARALLEL = context, context.parallel

    def init_ipc_channels(self, port_args: Any) -> None:
        self.sent: list[Any] = []
        self.recv_from_tokenizer = self.load_snapshot_writer = None
        outlet = SimpleNamespace(send_output=lambda output, _=None: self.sent.append(output))
        self.ipc_channels = SimpleNamespace(
            recv_from_rpc=None,
            send_metrics_from_scheduler=None,
            send_to_detokenizer=outlet,
            send_to_tokenizer=outlet,
        )

    def init_moe_gemm_config(self) -> None:
        self.require_mlp_sync = False

    def init_tp_model_worker(self) -> None:
        self._seat = self.tp_worker = ContextSeat(self.lib, self.server_args)
        self._seat.model_runner.model_config = self.model_config

    def turn(self) -> Any:
        """Take the turn of its event loop up to where there is a batch for the model worker, or None."""
        plan = self.get_next_batch_to_run(running_batch=self.running_batch, last_batch=self.last_batch)
        self.running_batch, batch = plan.running_batch, plan.batch_to_run
        self.current = self.last_batch = batch
        return batch

    def launch(self, batch: Any) -> tuple[Any, Forwarded]:
        result = self.run_batch(batch)
        return result, self._seat.forwarded

    def fill(self, result: Any, tokens: Sequence[int], rows: Sequence[int]) -> None:
        """Put the tokens where the step's placeholders are: in its result, and in the inputs of the next step."""
        placeholders = result.next_token_ids.tolist()
        result.next_token_ids.copy_(self.lib.torch.tensor(tokens))
        relayed = self.future_map.output_tokens_buf
        for row, placeholder, token in zip(rows, placeholders, tokens, strict=True):
            if relayed[row] == placeholder:
                relayed[row] = token

    def idle(self) -> None:
        self.on_idle()

    def batches(self) -> list[Any]:
        queued = [entry[0] for entry in self.result_queue]
        return [self.running_batch, *queued, *([] if self.last_batch is None else [self.last_batch])]

    def row_of(self, req: Any) -> int:
        return int(req.kv.req_pool_idx)

    def decode_pages(self, batch: Any) -> int:
        """Pages that it counts for the next token of those who go on."""
        ending = self._reqs_finishing_inflight(batch)
        going = [index for index, req in enumerate(batch.reqs) if not req.finished() and req not in ending]
        return int(batch.new_tokens_required_next_decode(going) // self.page_size)

    def free_pages(self) -> list[int]:
        return [int(page) for page in self.token_to_kv_pool_allocator.get_all_free_pages().tolist()]

    def tree_nodes(self) -> Iterable[tuple[list[int], int]]:
        """The slots that nobody has locked; its tree does not tell the others' locks."""
        yield self.tree_cache.tree_core.walk_for_kv_canary(True, False).slot_indices.tolist(), 0  # noqa: FBT003 - by position, in its order


def seated(lib: Any) -> Any:
    """The scheduler class, driven."""
    lib.scheduler.create_scheduler_watchdog = lambda *_, **__: None  # nobody is to be killed for being slow
    return type("ContextScheduler", (ContextDriver, lib.scheduler.Scheduler), {"lib": lib})
