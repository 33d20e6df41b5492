"""vLLM's own Neuron code, from `LLMEngine` down to the device, run one engine step at a time.

Engine, scheduler, executor, worker, model runner and model loader are the release's, unmodified. Below them is a
Neuron device: the one of this machine, or with ``device=emulated`` the emulated one with real Llama weights on the
CPU. Nothing is handed to the engine but requests: it takes the tokens of its own device, and they are held against
the greedy continuation by Hugging Face. Driven so far: 0.6.0 and 0.8.5.post2, emulated.

What an oracle has to know about this engine:

- One block holds a whole sequence (``block_size`` must be ``max_model_len``), and the number of the block *is* the
  line of the device that the sequence runs on.
- The worker sizes the pool itself: ``max_num_seqs`` blocks, and one more from 0.8.0 on (PR 13589). The option
  ``blocks_plus_one`` gives releases before that the one more, as PR 8008 proposed; no release ever had it so.
- A prompt is prefilled as a whole whatever prefix is cached: the model runner passes over what the scheduler says of
  cached blocks.
- What the device raises ends the step: the plan that led to it is shown first, and the commit raises it.
- ``max_model_len`` limits the positions computed (``length_cap = "computed"``), and there are no swaps, copies,
  lookahead slots or chunks: vLLM's executor and model runner assert that there are none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from conformance.adapters._greedy import Greedy, greedy
from conformance.adapters._vllm_neuron_config import (
    NeuronRelease,
    Options,
    build_engine,
    capabilities_of,
    check,
    options_of,
)
from conformance.adapters._vllm_neuron_device import (
    DeviceLog,
    device_present,
    import_installed,
    one_thread,
    tiny_llama,
)
from conformance.adapters._vllm_v0_books import PreemptionLog, books_of, snapshot_of, usage_of
from conformance.adapters._vllm_v0_release import Release, installed_release
from conformance.protocol import (
    AdapterError,
    BlockMove,
    Capabilities,
    CommitResult,
    EngineConfig,
    Finished,
    Rejection,
    Request,
    RequestId,
    RequestRefused,
    Sampled,
    SequenceKey,
    SequencePlan,
    Snapshot,
    StepPlan,
    Taken,
    Usage,
)


class _Scheduled(NamedTuple):
    """A group of a step, and how many outputs it had when the step was scheduled."""

    group: Any
    outputs_before: int


class VllmNeuronEngine:
    """One `LLMEngine` on a Neuron device. Made by `make`."""

    def __init__(
        self, release: Release, options: Options, engine: Any, capabilities: Capabilities, truth: Greedy
    ) -> None:
        self._release = release
        self.capabilities = capabilities
        self._engine = engine
        self._truth = truth
        (self._scheduler,) = engine.scheduler
        self._books = books_of(self._scheduler.block_manager, self._release.device)
        self._preemptions = PreemptionLog(self._release, self._scheduler, self._books)
        self._device = DeviceLog(_wrapper_of(engine), is_emulated=options.emulation is not None)
        # The device divides by the temperature; the host takes 0 for "greedy".
        self._greedily = {"temperature": 1.0, "top_k": 1} if options.on_device_sampling else {"temperature": 0.0}
        self._threads = one_thread if options.model is None else contextlib.nullcontext
        self._keys: dict[int, SequenceKey] = {}
        self._step = 0
        self._scheduled: list[_Scheduled] | None = None
        self._raised: Exception | None = None
        self._answer: Any = None
        """Of the scheduler, in the step under way."""
        self._process = engine._process_model_outputs
        self._listen()

    def _listen(self) -> None:
        """Hear what is scheduled, and put the last part of the engine's step off until the commit."""
        schedule = self._scheduler.schedule

        def watched_schedule() -> Any:
            self._answer = schedule()
            return self._answer

        def put_off(ctx: Any, **named: Any) -> None:
            outputs, *_ = ctx.output_queue[-1]
            if not outputs:  # nothing ran
                self._process(ctx=ctx, **named)

        self._scheduler.schedule = watched_schedule
        self._engine._process_model_outputs = put_off

    # -- requests ----------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Queue the request through `LLMEngine.add_request`. Raises `RequestRefused` with its words."""
        priority = {"priority": request.priority} if request.priority else {}
        try:
            self._engine.add_request(
                request.request_id,
                {"prompt_token_ids": list(request.prompt)},
                self._release.sampling_params(
                    n=request.n, max_tokens=request.max_tokens, ignore_eos=True, detokenize=False, **self._greedily
                ),
                arrival_time=float(request.arrival),
                **priority,
            )
        except ValueError as error:
            raise RequestRefused(str(error)) from error
        group = self._scheduler.waiting[-1]
        if group.request_id != request.request_id:
            raise AdapterError(f"{request.request_id} was queued, and {group.request_id} is last in the queue")
        self._keys[group.seqs[0].seq_id] = (request.request_id, 0)

    def abort_request(self, request_id: RequestId) -> None:
        """Pass the id on to the engine, whether it is known or not."""
        self._engine.abort_request(request_id)

    def reset_prefix_cache(self) -> bool:
        """Pass on to the engine, in the releases that have it."""
        return self._release.resets_prefix_cache and bool(self._engine.reset_prefix_cache())

    def reference_token(self, tokens: list[int]) -> int:
        """The greedy token after ``tokens`` by Hugging Face, whatever the device says."""
        with self._threads():
            return self._truth.token(tokens)

    # -- a step ------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Run `LLMEngine.step` up to where it processes what the device returned."""
        if self._scheduled is not None:
            raise AdapterError("schedule() before the last step was committed: this engine is synchronous")
        self._answer = None
        try:
            with self._threads():
                self._engine.step()
        except Exception as error:
            if self._answer is None:
                raise  # not even scheduled
            self._raised = error
        metadata, outputs, *_ = self._answer
        plan = StepPlan(step=self._step, preempted=self._preemptions.take())
        self._scheduled = []
        for scheduled, meta in zip(outputs.scheduled_seq_groups, metadata, strict=True):
            group = scheduled.seq_group
            self._scheduled.append(_Scheduled(group, group.seqs[0].get_output_len()))
            plan.sequences += [self._plan_of(meta, seq_id, data) for seq_id, data in meta.seq_data.items()]
        plan.device_calls = self._device.take([(one.request_id, one.seq) for one in plan.sequences])
        plan.moves = [BlockMove("copy", src, dst) for src, dst in outputs.blocks_to_copy]
        plan.rejected = [Rejection(group.request_id, self._reason(group)) for group in outputs.ignored_seq_groups]
        return plan

    def _plan_of(self, meta: Any, seq_id: int, data: Any) -> SequencePlan:
        """As the model runner has it: a prompt with all its tokens, cached or not, or the last token."""
        tokens = list(data.get_token_ids())
        first = 0 if meta.is_prompt else len(tokens) - 1
        request_id, index = self._keys[seq_id]
        return SequencePlan(
            request_id=request_id,
            seq=index,
            first=first,
            num_tokens=len(tokens) - first,
            block_tables=[list(meta.block_tables[seq_id])],
            samples=meta.do_sample,
            token_ids=tokens[first:],
        )

    def commit(self, step: int, sampled: Mapping[SequenceKey, Sampled]) -> CommitResult:
        """Let the engine process what its device returned; ``sampled`` is what that should have been."""
        if self._scheduled is None or step != self._step:
            raise AdapterError(f"commit({step}): step {self._step} is next, and must be scheduled first")
        scheduled, self._scheduled = self._scheduled, None
        self._step += 1
        if self._raised is not None:
            raise self._raised
        (context,) = self._engine.scheduler_contexts
        if context.output_queue:
            self._process(ctx=context)
        result = CommitResult()
        for group, outputs_before in scheduled:
            (seq,) = group.seqs
            outputs = list(seq.get_output_token_ids())
            result.taken.append(Taken(request_id=group.request_id, tokens=outputs[outputs_before:]))
            if group.is_finished():
                result.finished.append(
                    Finished(request_id=group.request_id, outputs=[outputs], reason=self._reason(group))
                )
        return result

    def _reason(self, group: Any) -> str:
        status = group.seqs[0].status
        return f"{status.name}: {self._release.sequence_status.get_finished_reason(status)}"

    # -- books -------------------------------------------------------------------------------------------

    def usage(self) -> Usage:
        """The scheduler's queues and counters. O(1)."""
        return usage_of(self._scheduler)

    def snapshot(self) -> Snapshot:
        """The block manager's private books and the scheduler's queues. O(pool)."""
        return snapshot_of(self._scheduler, self._books, self._keys)

    def close(self) -> None:
        """Let go of the engine, and the model and caches with it."""
        self._keys.clear()
        del self._engine, self._scheduler, self._books, self._preemptions, self._device, self._process


def _wrapper_of(engine: Any) -> Any:
    """What vLLM wraps around the model on the device."""
    worker = engine.model_executor.driver_worker
    worker = getattr(worker, "worker", worker)  # later releases wrap it
    return worker.model_runner.model


def make(config: EngineConfig) -> VllmNeuronEngine:
    """An engine of the installed vLLM.

    Raises `ConfigRefused` for what does not run on Neuron, in vLLM's words where it has any, for options that are not
    known and for a device that is not there; `AdapterError` when the installed vLLM has no Neuron code;
    ModuleNotFoundError without vLLM.
    """
    options = options_of(config)
    if options.emulation is None:
        import_installed()  # before all that takes time
    release = installed_release()
    with device_present(options.emulation):
        neuron = NeuronRelease(release)
        capabilities = capabilities_of(neuron, config, options)
        check(config, capabilities)
        folder = options.model or tiny_llama(on_cpu=options.emulation is not None)
        engine = build_engine(neuron, config, options, str(folder))
        return VllmNeuronEngine(release, options, engine, capabilities, greedy(folder))
