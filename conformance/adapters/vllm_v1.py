"""vLLM's V1 engine: its unmodified `Scheduler` and `AsyncScheduler`, driven from the model runner's seat.

One adapter for the releases from 0.10.0 on and, as far as plain features go, for 0.8.5. What differs between them
(constructor arguments, fields of the configuration and of the scheduler's output, two model runners) is read off the
installed classes.

What an oracle has to know about this engine:

- Block 0 is the null block: of ``num_blocks`` blocks one never serves a request.
- ``max_model_len`` limits all tokens of a sequence, outputs included.
- There is one queue and one policy of preemption: recompute. The victim is the last of the running set, under
  priority the least urgent of it; a waiting request preempts nobody, however urgent.
- Prefill and decode are not told apart: every running request is first given the tokens it lacks, within the
  budget, then newcomers. A step that preempts admits nobody.
- A whole prompt that ends at a block boundary hits all of its blocks but the last one.
- With a pipeline, steps run on the device in the order of their scheduling (``steps_in_order``): a block of a
  request that is over may be handed out while a step that still writes it is under way.
- ``pipeline_depth`` is the length of the engine core's queue of batches. With ``async_scheduling`` tokens are
  taken for granted before they are sampled; otherwise a request waits for its token, as in pipeline parallelism.
- With a KV connector, blocks of whoever is over, or was aborted while it loaded, may be kept for a few steps.
- Of recurrent state, a cached one inside a block is copied before its request runs on (``copies_cached_states``).
- Of a prompt that comes in parts (``streaming_input``), whoever waits for the next one keeps its blocks, and runs
  before anybody who has none.
- Combinations of options that no release gets right are refused unless ``known_faults`` asks for them.
- The engine's own start-up check refuses a pool that cannot hold one sequence of ``max_model_len``.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec

from conformance.adapters._vllm_v1_books import PreemptionLog, snapshot_of
from conformance.adapters._vllm_v1_config import Setup, build
from conformance.adapters._vllm_v1_connector import StepTransfers, Transfers
from conformance.adapters._vllm_v1_options import capabilities_of, check, is_async, model_runner_of
from conformance.adapters._vllm_v1_release import Release, accepted, installed_release, takes
from conformance.adapters._vllm_v1_streaming import StreamedInputs, inputs_of
from conformance.adapters._vllm_v1_worker import InputBatch, Sampling
from conformance.protocol import (
    AdapterError,
    Capabilities,
    CommitResult,
    EngineConfig,
    Finished,
    Request,
    RequestId,
    RequestRefused,
    Sampled,
    SequenceKey,
    Snapshot,
    StepPlan,
    Usage,
)

_PAUSE_EVERY = 8
_PAUSE_FROM = 5
"""With ``pause``, of so many steps those from this number on are paused."""


class _Step(NamedTuple):
    """A batch in the engine core's queue."""

    number: int
    output: Any
    sampling: list[Sampling]
    transfers: StepTransfers | None


class VllmV1Engine:
    """One V1 scheduler with the model runner's input batch. Made by `make`."""

    def __init__(self, release: Release, config: EngineConfig, setup: Setup, capabilities: Capabilities) -> None:
        self._release = release
        self._capabilities = capabilities
        self._config = config
        self._scheduler = setup.scheduler
        self._pool = setup.scheduler.kv_cache_manager.block_pool
        self._hasher = setup.hasher
        self._preempts_on_reset = capabilities.reset_with_live == "preempts"
        connector = setup.scheduler.connector
        self._transfers: Transfers | None = None if connector is None else connector.transfers
        self._order = setup.order
        self._to_unload: set[RequestId] = set()
        """Requests whose late load brought nothing: the engine gives their blocks back when it comes by."""
        self._log = PreemptionLog(setup.scheduler, release.request_status.PREEMPTED)
        self._inputs = InputBatch(
            runner=model_runner_of(release, config),
            is_async=is_async(release, config),
            null_block=self._pool.null_block.block_id,
            windows=setup.windows,
            sizes=setup.sizes,
            order=setup.order,
        )
        self._proposes = config.num_speculative_tokens > 0 and not is_async(release, config)
        """Drafts pass through the scheduler; an asynchronous one leaves them to the model runner."""
        self._pause = str(config.engine_options.get("pause", "none"))
        self._check_admission = self._admission_check(setup.scheduler.scheduler_config)
        self._loras: dict[str, Any] = {}
        self._outputs: dict[RequestId, list[int]] = {}
        self._inputs_to_come = StreamedInputs(late=config.engine_options.get("streaming_input") == "late")
        self._queue: deque[_Step] = deque()
        self._steps = 0
        self._late: list[Finished] = []
        """Reported by a batch with nothing in it, which nobody commits."""

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def add_request(self, request: Request) -> None:
        """Check and queue the request as the engine's front does. Raises `RequestRefused` in the engine's words."""
        release = self._release
        if request.n > 1:
            raise RequestRefused(f"n = {request.n}: vLLM {release.version} samples in parallel above the engine")
        inputs = inputs_of(request)
        try:
            if self._check_admission is not None:
                self._check_admission()
            for one in inputs:
                release.validate_prompt(one, self._config)
            first, *more = [self._request(one, resumable=bool(request.streamed)) for one in inputs]
        except release.refusals as error:
            raise RequestRefused(str(error)) from error
        self._outputs[request.request_id] = []
        self._scheduler.add_request(first)
        if more:
            closing = msgspec.structs.replace(request, prompt=[0], encoder_items=())
            more.append(self._request(closing, resumable=False))
            for one in self._inputs_to_come.take(request.request_id, more):
                self._scheduler.add_request(one)

    def _request(self, request: Request, *, resumable: bool) -> Any:
        """The engine's own request. Raises one of the release's ``refusals``."""
        release = self._release
        params = release.sampling_params(
            max_tokens=request.max_tokens,
            ignore_eos=True,
            detokenize=False,
            stop_token_ids=[] if request.stop_token is None else [request.stop_token],
        )
        arguments = {
            "request_id": request.request_id,
            "resumable": resumable,
            "prompt_token_ids": list(request.prompt),
            "sampling_params": params,
            "pooling_params": None,
            "eos_token_id": None,
            "arrival_time": float(request.arrival),
            "lora_request": self._lora(request.adapter),
            "cache_salt": request.cache_salt or None,
            "priority": request.priority,
            "block_hasher": self._hasher,
            "multi_modal_inputs": None,
            "multi_modal_hashes": None,
            "multi_modal_placeholders": None,
            "mm_features": [
                release.mm_feature(
                    data=None,
                    modality="image",
                    identifier=item.key,
                    mm_position=release.mm_position(offset=item.first, length=item.size),
                )
                for item in request.encoder_items
            ],
        }
        return release.request(**accepted(release.request, arguments))

    def _lora(self, name: str) -> Any:
        if not name:
            return None
        if name not in self._loras:
            self._loras[name] = self._release.lora_request(name, len(self._loras) + 1, f"/{name}")
        return self._loras[name]

    def _admission_check(self, scheduler_config: Any) -> Callable[[], None] | None:
        """The front's own check of the length of its queue, bound to the figures that it would have."""
        if self._capabilities.queue_max is None and self._capabilities.queue_tokens_max is None:
            return None
        front = SimpleNamespace(
            scheduler_config=scheduler_config,
            admission_stats=None,
            logger_manager=None,
            _record_admission_rejection=lambda reason: reason,
            get_num_unfinished_requests=lambda: len(self._outputs),
            get_num_queued_tokens=lambda: sum(
                self._scheduler.requests[name].num_prompt_tokens for name, tokens in self._outputs.items() if not tokens
            ),
        )
        return functools.partial(self._release.check_admission(), front)

    def abort_request(self, request_id: RequestId) -> None:
        """Pass the id on to the scheduler, whether it is known or not."""
        self._scheduler.finish_requests(request_id, self._release.request_status.FINISHED_ABORTED)
        self._outputs.pop(request_id, None)
        self._inputs_to_come.forget(request_id)

    def schedule(self) -> StepPlan:
        """One turn of the engine core's loop up to the model: nothing at all when there is nothing to do."""
        plan = StepPlan(step=self._steps)
        self._steps += 1
        scheduler = self._scheduler
        for request in self._inputs_to_come.due(plan.step):
            scheduler.add_request(request)
        if self._pause != "none":
            plan.paused = plan.step % _PAUSE_EVERY >= _PAUSE_FROM
            states = self._release.pause_state
            state = states["PAUSED_ALL" if self._pause == "all" else "PAUSED_NEW"] if plan.paused else states.UNPAUSED
            scheduler.set_pause_state(state)
        if not scheduler.has_requests():
            return plan
        output = scheduler.schedule()
        plan.preempted = self._log.take()
        sampling = self._inputs.take(output, plan.sequences, plan.moves)
        if self._config.encoder_cache_size:
            plan.encoder_freed = list(output.free_encoder_mm_hashes)
            plan.encoder_run = [
                (name, index) for name, items in output.scheduled_encoder_inputs.items() for index in items
            ]
        transfers = None if self._transfers is None else self._transfer(self._transfers, output, plan)
        self._queue.append(_Step(plan.step, output, sampling, transfers))
        self._process_idle(self._late)
        return plan

    def _transfer(self, transfers: Transfers, output: Any, plan: StepPlan) -> StepTransfers:
        """What the connector does in the step, as the harness is told of it."""
        step = transfers.step(output.finished_req_ids)
        for load in step.loads:
            if load.block_tables:
                load.block_tables = [load.block_tables[place] for place in self._order]
        plan.loads, plan.loaded = step.loads, step.loaded
        if self._to_unload:
            self._to_unload -= {one.request_id for one in plan.sequences} | {one.request_id for one in step.loads}
            tables = self._scheduler.kv_cache_manager.get_block_ids
            plan.unloaded = [name for name in sorted(self._to_unload) if not any(tables(name))]
            self._to_unload.difference_update(plan.unloaded)
        self._to_unload |= {one.request_id for one in step.loaded if one.failed_from == 0}
        return step

    def commit(self, step: int, sampled: Mapping[SequenceKey, Sampled]) -> CommitResult:
        """Process the oldest batch, and those before it that had nothing to run."""
        result = CommitResult(self._late)
        self._late = []
        queue = self._queue
        while queue and queue[0].number <= step:
            entry = queue.popleft()
            if entry.number < step and entry.sampling:
                raise AdapterError(f"commit({step}): step {entry.number} comes first")
            self._process(entry, sampled if entry.number == step else {}, result.finished)
        self._process_idle(result.finished)
        return result

    def _process_idle(self, finished: list[Finished]) -> None:
        """Process the batches next in turn that run nothing and bring nothing: nobody commits those."""
        queue = self._queue
        while queue and not queue[0].output.total_num_scheduled_tokens:
            transfers = queue[0].transfers
            if transfers is not None and transfers.loaded:
                return
            self._process(queue.popleft(), {}, finished)

    def _process(self, entry: _Step, sampled: Mapping[SequenceKey, Sampled], finished: list[Finished]) -> None:
        tokens_of = self._inputs.commit(entry.sampling, sampled)
        names = list(entry.output.num_scheduled_tokens)
        arguments = {
            "req_ids": names,
            "req_id_to_index": {name: index for index, name in enumerate(names)},
            "sampled_token_ids": [tokens_of.get(name, []) for name in names],
            "logprobs": None,
            "prompt_logprobs_dict": {},
            "pooler_output": [],
        }
        drafts = self._drafts(names, sampled) if self._proposes else None
        if takes(self._release.model_runner_output, "spec_token_ids"):
            arguments["spec_token_ids"] = None if drafts is None else [drafts.get(name, []) for name in names]
        if entry.transfers is not None:
            arguments["kv_connector_output"] = self._connector_output(entry.transfers)
        kind = self._release.model_runner_output
        answers = self._scheduler.update_from_output(entry.output, kind(**accepted(kind, arguments)))
        for answer in answers.values():
            for output in answer.outputs:
                tokens = self._outputs.get(output.request_id)
                if tokens is None:
                    continue  # aborted: its client is gone
                tokens += output.new_token_ids
                if output.finish_reason is not None:
                    finished.append(
                        Finished(request_id=output.request_id, outputs=[tokens], reason=str(output.finish_reason))
                    )
                    self._end(output.request_id)
        if drafts and self._release.draft_token_ids is not None:
            self._scheduler.update_draft_token_ids(
                self._release.draft_token_ids(list(drafts), [list(tokens) for tokens in drafts.values()])
            )

    def _end(self, request_id: RequestId) -> None:
        """The outputs asked for are there: the request is over, or goes on with its next input."""
        request = self._scheduler.requests.get(request_id)
        if request is None or request.is_finished():
            self._inputs_to_come.forget(request_id)
            del self._outputs[request_id]
        else:
            self._inputs_to_come.answered(request_id, self._steps)
            self._outputs[request_id] = []

    def _connector_output(self, transfers: StepTransfers) -> Any:
        """What the workers' side of the connector reports of a step."""
        arguments = {
            "finished_sending": transfers.sent or None,
            "finished_recving": {load.request_id for load in transfers.loaded} or None,
            "invalid_block_ids": transfers.blocks_failed,
            "failed_recving": transfers.requests_failed,
        }
        kind = self._release.kv_connector_output
        return kind(**accepted(kind, arguments))

    @staticmethod
    def _drafts(names: Iterable[RequestId], sampled: Mapping[SequenceKey, Sampled]) -> dict[RequestId, list[int]]:
        """What the model runner proposes for the next step of each request that ran: nothing unless it sampled."""
        return {name: sampled[name, 0].drafts if (name, 0) in sampled else [] for name in names}

    def reset_prefix_cache(self) -> bool:
        """Pass on to the scheduler."""
        reset = self._scheduler.reset_prefix_cache
        if not self._preempts_on_reset:
            return bool(reset())
        done = bool(reset(reset_running_requests=True))
        self._log.take()  # whoever ran is preempted, as ``reset_with_live`` says
        return done

    def usage(self) -> Usage:
        """The pool's and the scheduler's own figures. O(1)."""
        running, waiting = self._scheduler.get_request_counts()
        return Usage(free_blocks=self._pool.get_num_free_blocks(), running=running, waiting=waiting)

    def snapshot(self) -> Snapshot:
        """The block pool, the tables and the queues. O(pool)."""
        return snapshot_of(self._scheduler)

    def close(self) -> None:
        """Drop what is queued, and have the scheduler stop what it may have started."""
        self._outputs.clear()
        self._queue.clear()
        self._scheduler.shutdown()


def make(config: EngineConfig) -> VllmV1Engine:
    """An engine on the installed vLLM.

    Raises `ConfigRefused` for what vLLM's configuration classes and its start-up check refuse (in their words) and
    for unknown options, `AdapterError` when the installed vLLM has no V1 scheduler, ModuleNotFoundError without vLLM.
    """
    release = installed_release()
    capabilities = capabilities_of(release, config)
    check(release, config, capabilities)
    return VllmV1Engine(release, config, build(release, config), capabilities)
