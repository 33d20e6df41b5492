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
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from conformance.adapters import _sglang_context
from conformance.adapters._sglang_context import GROUP, Forwarded, limits_of, pools_of
from conformance.adapters._stand_ins import stood_in

VOCABULARY_SIZE = 1 << 20

_ABSENT = (
    "IPython",
    "PIL",
    "aiohttp",
    "dill",
    "fastapi",
    "huggingface_hub",
    "orjson",
    "pybase64",
    "requests",
    "setproctitle",
    "starlette",
    "tqdm",
    "transformers",
    "triton",
    "uvicorn",
    "yaml",
    "sglang.kernels",
    "sglang.srt.configs",
    "sglang.srt.connector",
    "sglang.srt.disaggregation.base",
    "sglang.srt.disaggregation.decode",
    "sglang.srt.disaggregation.decode_kvcache_offload_manager",
    "sglang.srt.disaggregation.prefill",
    "sglang.srt.distributed",
    "sglang.srt.eplb",
    "sglang.srt.function_call",
    "sglang.srt.layers",
    "sglang.srt.lora.lora_overlap_loader",
    "sglang.srt.managers.mm_utils",
    "sglang.srt.managers.tp_worker",
    "sglang.srt.mem_cache.hiradix_cache",
    "sglang.srt.model_loader",
    "sglang.srt.multiplex",
    "sglang.srt.parser",
    "sglang.srt.rust_server",
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
    """The model worker. ``forwarded``: what it was handed last."""

    is_hybrid = False
    model_runner = SimpleNamespace(hybrid_gdn_config=None, mambaish_config=None)

    def __init__(self, *, server_args: Any, **_: Any) -> None:
        self._args = server_args
        self.forwarded: Any = None

    def get_worker_info(self) -> tuple[Any, ...]:
        return (*limits_of(self._args), None, None, None)

    def get_memory_pool(self) -> tuple[Any, Any]:
        return pools_of(modules(), self._args)

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
        self_opened_think_start_ids=None,
        think_end_ids=None,
        vocab_size=VOCABULARY_SIZE,
    )


def _none(*_: Any, **__: Any) -> None:
    """Nothing of the kind."""


_HYBRIDS = (
    "glm5_next_config",
    "hybrid_gdn_config",
    "hybrid_lightning_config",
    "kimi_linear_config",
    "linear_attn_model_spec",
    "mamba2_config",
)
_MODEL_SIDE: dict[str, dict[str, Any]] = {
    "huggingface_hub.utils": {
        "logging": SimpleNamespace(get_logger=lambda: SimpleNamespace(handlers=[]), enable_propagation=_none)
    },
    "sglang.kernels.ops.mamba.triton_ops": {"initialize_mamba_selective_state_update_backend": None},
    "sglang.kernels.ops.quantization.fp8_kernel": {"is_fp8_fnuz": _none},
    "sglang.srt.configs.hybrid_arch": dict.fromkeys(_HYBRIDS, _none),
    "sglang.srt.configs.model_config": {
        "ModelConfig": SimpleNamespace(from_server_args=_model_config),
        "is_deepseek_dsa": _none,
    },
    "sglang.srt.configs.shared_experts": {"default_shared_experts_config": _none},
    "sglang.srt.distributed": {
        "bootstrap": SimpleNamespace(init_parallel_runtime=_none, init_layer_runtime=_none),
        "get_pp_group": _none,
        "get_world_group": _none,
    },
    "sglang.srt.distributed.parallel_state": {"get_tensor_model_parallel_rank": lambda: 0},
    "sglang.srt.eplb.expert_distribution": {"EPLB_BALANCEDNESS_WINDOW_SIZES": ()},
    "sglang.srt.layers.attention.dsa.utils": {"aiter_can_use_preshuffle_paged_mqa": _none},
    "sglang.srt.layers.dp_attention": {
        "compute_dp_attention_world_info": lambda *_: (0, 1, 0),
        "get_dp_tp_group": lambda: GROUP,
    },
    "sglang.srt.managers.mm_utils": {"init_embedding_cache": _none},
    "sglang.srt.managers.tp_worker": {"TpModelWorker": Seat},
    "sglang.srt.model_loader.utils": {"get_resolved_model_impl": _none},
    "sglang.srt.utils.torch_memory_saver_adapter": {
        "TorchMemorySaverAdapter": SimpleNamespace(
            create=lambda **_: SimpleNamespace(region=lambda _: nullcontext()),
        )
    },
    "triton": {"__version__": "0", "jit": lambda function=None, **_: function or (lambda it: it)},
}
"""What the scheduler calls of the modules that are stood in for."""


class Modules(NamedTuple):
    """The modules of sglang the adapter names things from; ``runtime_context`` is None where there is none."""

    version: str
    allocator: Any
    io_struct: Any
    memory_pool: Any
    runtime_context: Any
    sampling_params: Any
    scheduler: Any
    server_args: Any
    torch: Any
    utils: Any

    @property
    def has_kernels(self) -> bool:
        """Whether the slots of pages are allocated by kernels alone; else there is a way without."""
        return hasattr(self.allocator, "alloc_extend_kernel")

    @property
    def clips_to_pool(self) -> bool:
        """Whether a request's max_tokens are cut down to what an empty pool leaves its prompt."""
        return hasattr(self.allocator.TokenToKVPoolAllocator, "max_new_tokens_for_memory")


@contextmanager
def importing() -> Iterator[None]:
    """Have the stand-ins in their places."""
    handlers = list(logging.root.handlers)
    with stood_in(_ABSENT, _MODEL_SIDE), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.root.handlers[:] = handlers  # to which importing it adds one


def importing_late() -> AbstractContextManager[None]:
    """The same in releases that import more when arguments are checked and a scheduler is constructed."""
    return nullcontext() if modules().runtime_context is None else importing()


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

    with importing():
        scheduler = load("managers.scheduler")
        load("managers.tp_worker")  # which the scheduler imports when it is constructed
        found = Modules(
            version=importlib.metadata.version("sglang"),
            allocator=load("mem_cache.allocator"),
            io_struct=load("managers.io_struct"),
            memory_pool=load("mem_cache.memory_pool"),
            runtime_context=load("runtime_context") if importlib.util.find_spec("sglang.srt.runtime_context") else None,
            sampling_params=load("sampling.sampling_params"),
            scheduler=scheduler,
            server_args=load("server_args"),
            torch=torch,
            utils=load("managers.utils"),
        )
        for name in _sglang_context.IMPORTED_LATE if found.runtime_context else ():
            load(name)
    if found.has_kernels:
        found.allocator.alloc_extend_kernel = _Kernel(_alloc_extend)
        found.allocator.alloc_decode_kernel = _Kernel(_alloc_decode)
    scheduler.get_available_gpu_memory = lambda *_, **__: 0.0
    scheduler.logging = SimpleNamespace(warning=lambda *_: None)  # it warns of a refused flush on the root logger
    logging.getLogger("sglang").setLevel(logging.CRITICAL)
    return found


class Driver:
    """What drives a scheduler that has it as its first base: no sockets, no watchdog, a turn at a time.

    ``sent``: what it has sent to its clients, oldest first. ``current``: the batch of the last turn.
    """

    cur_batch: Any
    reads_tree_locks = True

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, args: Any) -> None:
        lib = modules()
        lib.server_args.set_global_server_args_for_scheduler(args)
        ports = SimpleNamespace(nccl_port=0)
        lib.scheduler.Scheduler.__init__(self, args, ports, 0, tp_rank=0, moe_ep_rank=0, pp_rank=0, dp_rank=None)

    def enter(self) -> None:
        """Make its arguments the ones that are kept in a global variable."""
        modules().server_args.set_global_server_args_for_scheduler(self.server_args)

    def init_sockets(self, server_args: Any, port_args: Any) -> None:
        self.sent: list[Any] = []
        self.recv_from_tokenizer = self.recv_from_rpc = self.idle_sleeper = None
        outlet = SimpleNamespace(send_output=lambda output, _=None: self.sent.append(output))
        self.send_to_tokenizer = self.send_to_detokenizer = outlet

    def watchdog_thread(self) -> None:
        """Nobody is to be killed for being slow."""

    @property
    def current(self) -> Any:
        return self.cur_batch

    def turn(self) -> Any:
        """Take the turn of its event loop up to where there is a batch for the model worker, or None."""
        self.last_batch = self.cur_batch
        self.cur_batch = self.get_next_batch_to_run()
        return self.cur_batch

    def launch(self, batch: Any) -> tuple[Any, Forwarded]:
        tokens = batch.input_ids.tolist()
        result = self.run_batch(batch)
        handed = self.tp_worker.forwarded
        ends = handed.seq_lens.tolist()
        lengths = [1] * len(ends) if handed.extend_seq_lens is None else handed.extend_seq_lens
        rows, slots = handed.req_pool_indices.tolist(), handed.out_cache_loc.tolist()
        return result, Forwarded(tokens, rows, ends, lengths, slots)

    def fill(self, result: Any, tokens: Sequence[int], rows: Sequence[int]) -> None:
        """Put the tokens where the step's placeholders are."""
        result.next_token_ids.copy_(modules().torch.tensor(tokens))

    def idle(self) -> None:
        self.self_check_during_idle()

    def batches(self) -> list[Any]:
        return [self.running_batch, *([] if self.cur_batch is None else [self.cur_batch])]

    def row_of(self, req: Any) -> int:
        return int(req.req_pool_idx)

    def decode_pages(self, batch: Any) -> int:
        """Pages that it counts for the next token of those who go on."""
        going = [index for index, req in enumerate(batch.reqs) if not req.finished()]
        return int(batch.new_page_count_next_decode(going))

    def free_pages(self) -> list[int]:
        pool = self.token_to_kv_pool_allocator
        return [*pool.free_pages.tolist(), *pool.release_pages.tolist()]

    def tree_nodes(self) -> Iterable[tuple[list[int], int]]:
        """The slots of each node and how many requests have locked it."""
        stack = [] if self.tree_cache.disable else list(self.tree_cache.root_node.children.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node.value.tolist(), node.lock_ref


@functools.cache
def _scheduler_class() -> Any:
    lib = modules()
    if lib.runtime_context is not None:
        return _sglang_context.seated(lib)
    return type("SeatedScheduler", (Driver, lib.scheduler.Scheduler), {})


def build(args: Any) -> Any:
    """A scheduler without a model."""
    with importing_late():
        return _scheduler_class()(args)
