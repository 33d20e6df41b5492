"""sglang's `Scheduler`, constructed as it constructs itself, with the harness where its model worker and sockets are.

``sglang.srt.managers.scheduler`` imports the models, the distributed runtime and the server. What the scheduler never
runs here is stood in for (`conformance.adapters._stand_ins`): `_ABSENT` names the modules, and packages that only they
need; what the scheduler does call of them is `_MODEL_SIDE`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import logging
import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

from conformance.adapters._stand_ins import stood_in

VOCABULARY_SIZE = 1 << 20
_ROW_MARGIN = 4
"""Slots of a request's row beyond the context, as its model runner allocates them."""

_ABSENT = (
    "IPython",
    "PIL",
    "dill",
    "fastapi",
    "orjson",
    "pybase64",
    "requests",
    "setproctitle",
    "starlette",
    "tqdm",
    "triton",
    "sglang.srt.configs",
    "sglang.srt.connector",
    "sglang.srt.constrained",
    "sglang.srt.disaggregation.base",
    "sglang.srt.disaggregation.decode",
    "sglang.srt.disaggregation.decode_kvcache_offload_manager",
    "sglang.srt.disaggregation.prefill",
    "sglang.srt.distributed",
    "sglang.srt.eplb",
    "sglang.srt.function_call",
    "sglang.srt.layers",
    "sglang.srt.lora",
    "sglang.srt.managers.mm_utils",
    "sglang.srt.managers.tp_worker",
    "sglang.srt.mem_cache.hiradix_cache",
    "sglang.srt.multiplex",
    "sglang.srt.parser",
    "sglang.srt.two_batch_overlap",
    "sglang.srt.utils.cuda_ipc_transport_utils",
    "sglang.srt.utils.hf_transformers_utils",
    "sglang.srt.utils.torch_memory_saver_adapter",
)


class _Kernel:
    """A kernel in plain Python, launched as triton's are: ``kernel[grid](...)``."""

    def __init__(self, body: Callable[..., None]) -> None:
        self._body = body

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self._body


def _alloc_extend(
    prefix_lens: Any, seq_lens: Any, last_slots: Any, free_pages: Any, slots: Any, _: int, page_size: int, *__: int
) -> None:
    """Slots for the positions from prefix to sequence length: what its last page has left, then free pages in order.

    Where the free pages do not suffice, which the caller finds out by itself, page 0 takes their place.
    """
    pages = iter(free_pages.tolist())
    found: list[int] = []
    for first, end, last in zip(prefix_lens.tolist(), seq_lens.tolist(), last_slots.tolist(), strict=True):
        slot = last
        for position in range(first, end):
            slot = slot + 1 if position % page_size else next(pages, 0) * page_size
            found.append(slot)
    slots[:] = slots.new_tensor(found)


def _alloc_decode(seq_lens: Any, last_slots: Any, free_pages: Any, slots: Any, batch_size: int, page_size: int) -> None:
    _alloc_extend(seq_lens - 1, seq_lens, last_slots, free_pages, slots, batch_size, page_size)


class Seat:
    """The model worker. ``forwarded``: the batch it was handed last."""

    is_hybrid = False
    model_runner = SimpleNamespace(hybrid_gdn_config=None, mambaish_config=None)

    def __init__(self, *, server_args: Any, **_: Any) -> None:
        self._args = server_args
        self.forwarded: Any = None

    def get_worker_info(self) -> tuple[Any, ...]:
        """Limits, as the model worker works them out. Tokens."""
        args = self._args
        sequence_max = min(args.context_length, args.max_total_tokens) - 1
        return (
            args.max_total_tokens,
            args.max_prefill_tokens,
            args.max_running_requests,
            args.max_queued_requests,
            sequence_max,
            sequence_max - 5,
            args.random_seed,
            args.device,
            None,
            None,
            None,
        )

    def get_memory_pool(self) -> tuple[Any, Any]:
        lib, args = modules(), self._args
        rows = lib.memory_pool.ReqToTokenPool(
            args.max_running_requests, args.context_length + _ROW_MARGIN, args.device, enable_memory_saver=False
        )
        paged = args.page_size > 1
        kind = lib.allocator.PagedTokenToKVPoolAllocator if paged else lib.allocator.TokenToKVPoolAllocator
        sizes = {"size": args.max_total_tokens} | ({"page_size": args.page_size} if paged else {})
        return rows, kind(**sizes, dtype=lib.torch.float32, device=args.device, kvcache=None, need_sort=False)

    def get_tp_group(self) -> SimpleNamespace:
        return SimpleNamespace(cpu_group=None, rank=0)

    def get_attention_tp_group(self) -> None: ...

    def get_attention_tp_cpu_group(self) -> None: ...

    def get_pad_input_ids_func(self) -> None: ...

    def forward_batch_generation(self, batch: Any) -> Any:
        """Tokens that nobody has sampled yet: `next_token_ids` is filled in when the step is committed."""
        lib = modules()
        self.forwarded = batch
        return lib.utils.GenerationBatchResult(
            logits_output=SimpleNamespace(hidden_states=None),
            next_token_ids=lib.torch.zeros(len(batch.seq_lens), dtype=lib.torch.int64),
        )


def _model_config(server_args: Any) -> SimpleNamespace:
    return SimpleNamespace(
        context_len=server_args.context_length,
        hf_config=SimpleNamespace(),
        hf_eos_token_id=None,
        is_encoder_decoder=False,
        is_generation=True,
        is_matryoshka=False,
        is_multimodal=False,
        is_multimodal_gen=False,
        vocab_size=VOCABULARY_SIZE,
    )


_MODEL_SIDE: dict[str, dict[str, Any]] = {
    "sglang.srt.configs.model_config": {"ModelConfig": SimpleNamespace(from_server_args=_model_config)},
    "sglang.srt.distributed": {"get_pp_group": lambda: None, "get_world_group": lambda: None},
    "sglang.srt.distributed.parallel_state": {"get_tensor_model_parallel_rank": lambda: 0},
    "sglang.srt.layers.dp_attention": {"compute_dp_attention_world_info": lambda *_: (0, 1, 0)},
    "sglang.srt.managers.mm_utils": {"init_embedding_cache": lambda _: None},
    "sglang.srt.managers.tp_worker": {"TpModelWorker": Seat},
    "sglang.srt.utils.torch_memory_saver_adapter": {
        "TorchMemorySaverAdapter": SimpleNamespace(
            create=lambda **_: SimpleNamespace(region=lambda _: nullcontext()),
        )
    },
    "triton": {"__version__": "0"},
}
"""What the scheduler calls of the modules that are stood in for."""


class Modules(NamedTuple):
    """The modules of sglang the adapter names things from, and its scheduler with this harness around it."""

    version: str
    allocator: Any
    io_struct: Any
    memory_pool: Any
    sampling_params: Any
    scheduler: Any
    seated: Any
    server_args: Any
    torch: Any
    utils: Any


@functools.cache
def modules() -> Modules:
    """Import what is driven. Raises ModuleNotFoundError when sglang, or what it needs, is not installed."""
    torch = importlib.import_module("torch")
    if "sglang" not in sys.modules:
        spec = importlib.util.find_spec("sglang")
        if spec is None:
            raise ModuleNotFoundError("No module named 'sglang'", name="sglang")
        sys.modules["sglang"] = importlib.util.module_from_spec(spec)

    def load(name: str) -> Any:
        return importlib.import_module(f"sglang.srt.{name}")

    with stood_in(_ABSENT, _MODEL_SIDE):
        scheduler = load("managers.scheduler")
        load("managers.tp_worker")  # which the scheduler imports when it is constructed
        found = Modules(
            version=importlib.metadata.version("sglang"),
            allocator=load("mem_cache.allocator"),
            io_struct=load("managers.io_struct"),
            memory_pool=load("mem_cache.memory_pool"),
            sampling_params=load("sampling.sampling_params"),
            scheduler=scheduler,
            seated=_seated(scheduler.Scheduler),
            server_args=load("server_args"),
            torch=torch,
            utils=load("managers.utils"),
        )
    found.allocator.alloc_extend_kernel = _Kernel(_alloc_extend)
    found.allocator.alloc_decode_kernel = _Kernel(_alloc_decode)
    scheduler.get_available_gpu_memory = lambda *_, **__: 0.0
    scheduler.logging = SimpleNamespace(warning=lambda *_: None)  # it warns of a refused flush on the root logger
    logging.getLogger("sglang").setLevel(logging.CRITICAL)
    return found


def _seated(scheduler: Any) -> Any:
    """The scheduler class, with its sockets replaced by a list and without its watchdog."""

    class SeatedScheduler(scheduler):  # type: ignore[misc]  # a base found at run time
        """``sent``: what it has sent to its clients, oldest first."""

        def init_sockets(self, server_args: Any, port_args: Any) -> None:
            self.sent: list[Any] = []
            self.recv_from_tokenizer = self.recv_from_rpc = self.idle_sleeper = None
            outlet = SimpleNamespace(send_output=lambda output, _=None: self.sent.append(output))
            self.send_to_tokenizer = self.send_to_detokenizer = outlet

        def watchdog_thread(self) -> None:
            """Nobody is to be killed for being slow."""

    return SeatedScheduler


def build(args: Any) -> Any:
    """A scheduler without a model."""
    lib = modules()
    lib.server_args.set_global_server_args_for_scheduler(args)
    return lib.seated(args, SimpleNamespace(nccl_port=0), gpu_id=0, tp_rank=0, moe_ep_rank=0, pp_rank=0, dp_rank=None)
