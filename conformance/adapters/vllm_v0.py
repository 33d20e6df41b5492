"""vLLM's V0 engine: its unmodified `Scheduler` and block managers, driven from the model runner's seat.

One adapter for the releases that have it, up to 0.8.5. What differs between them (two block managers or one,
the priority policy, forking in the engine, resetting the prefix cache) is read off the installed classes.
Driven so far: 0.6.0, 0.6.3.post1, 0.6.6 and 0.8.5.post2.

What an oracle has to know about this engine:

- ``max_model_len`` limits the positions that are computed. The engine's own `StopChecker` stops a sequence
  once it has more than ``max_model_len`` tokens, so the last one sampled may be number ``max_model_len + 1``
  (``length_cap = "computed"``).
- Admission allocates the blocks of all known tokens at once, under chunked prefill too. A decode step makes
  room for its one token and the lookahead slots. A table never exceeds
  ceil((known tokens + lookahead) / block_size), so nothing is preallocated beyond that; a sequence that
  leaves the running set keeps no device block (``keeps_blocks`` is empty).
- A prompt that can never fit is dropped while scheduling (a `Rejection`), and so is a request that has
  outgrown the pool, when it is to be resumed; nothing is refused when it is added
  (``refuses_outgrowing = False``).
- The watermark is a constant (0.01 of the pool, rounded down) that the engine never passes on. With
  ``watermark = 0.0`` it is left as shipped: pools of 100 blocks and more withhold blocks from admission.
- Preemption is by recompute for a group with one sequence and by swap for wider ones, unless swap is asked
  for.
- With a sliding window, block manager v2 takes a null block out of the pool when the first sequence decodes,
  for ever and without counting it. `Capabilities.null_block` and ``reserved_blocks`` change at that moment;
  the option ``null_block_at_start`` has the engine take it before the first request instead.
- Under prefix caching a block that becomes full is replaced in its table by a cached one of equal content.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from conformance.adapters._vllm_v0_books import PreemptionLog, books_of, snapshot_of, usage_of
from conformance.adapters._vllm_v0_config import block_manager_of, build_scheduler, capabilities_of, check
from conformance.adapters._vllm_v0_release import Release, installed_release, takes
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
    Usage,
)


class _Scheduled(NamedTuple):
    """A scheduled group, kept from `schedule` to `commit`; the engine reuses its own records of it."""

    group: Any
    num_tokens: int
    samples: bool


class VllmV0Engine:
    """One V0 scheduler with its block manager and output processor. Made by `make`."""

    def __init__(self, release: Release, config: EngineConfig, scheduler: Any, capabilities: Capabilities) -> None:
        self._release = release
        self._capabilities = capabilities
        self._block_size = config.block_size
        self._max_model_len = config.max_model_len
        self._scheduler = scheduler
        self._manager = scheduler.block_manager
        self._books = books_of(self._manager, release.device)
        self._log = PreemptionLog(release, scheduler, self._books)
        self._null_block_expected = config.sliding_window is not None
        self._ids = release.counter()
        processor = release.output_processor.create_output_processor(
            scheduler.scheduler_config,
            None,
            [scheduler],
            self._ids,
            _no_tokenizer,
            release.stop_checker(config.max_model_len, _no_tokenizer),
        )
        self._process = processor.process_outputs
        if takes(self._process, "is_async"):
            self._process = functools.partial(self._process, is_async=False)
        self._running = release.sequence_status.RUNNING
        self._wide = False
        """Whether any request asked for several sequences."""
        self._groups: dict[RequestId, Any] = {}
        self._keys: dict[int, SequenceKey] = {}
        self._logprobs: dict[int, dict[int, Any]] = {}
        self._step = 0
        self._pending: list[_Scheduled] | None = None

    @property
    def capabilities(self) -> Capabilities:
        if self._null_block_expected:
            null = self._books.null_block()
            if null is not None:
                self._capabilities = msgspec.structs.replace(self._capabilities, null_block=null, reserved_blocks=1)
                self._null_block_expected = False
        return self._capabilities

    def add_request(self, request: Request) -> None:
        """Queue the request as one sequence group. Raises `RequestRefused` when vLLM's own classes object."""
        release = self._release
        if request.n > 1 and not release.forks_in_engine:
            raise RequestRefused(f"n = {request.n}: vLLM {release.version} samples in parallel above the engine")
        try:
            release.validate_prompt(request.prompt, self._max_model_len)
            params = release.sampling_params(
                n=request.n,
                max_tokens=request.max_tokens,
                ignore_eos=True,
                detokenize=False,
                stop_token_ids=[] if request.stop_token is None else [request.stop_token],
            )
        except ValueError as error:
            raise RequestRefused(str(error)) from error
        seq = release.sequence(next(self._ids), release.token_inputs(list(request.prompt)), self._block_size)
        priority = {"priority": request.priority} if release.has_priority else {}
        group = release.sequence_group(
            request_id=request.request_id,
            seqs=[seq],
            arrival_time=float(request.arrival),
            sampling_params=params,
            **priority,
        )
        self._scheduler.add_seq_group(group)
        self._wide |= request.n > 1
        self._groups[request.request_id] = group
        self._keys[seq.seq_id] = (request.request_id, 0)

    def abort_request(self, request_id: RequestId) -> None:
        """Pass the id on to the scheduler, whether it is known or not."""
        self._scheduler.abort_seq_group(request_id)
        self._forget(request_id)

    def schedule(self) -> StepPlan:
        """Run `Scheduler.schedule` and read off what the worker would be told."""
        if self._pending is not None:
            raise AdapterError("schedule() before the last step was committed: this engine is synchronous")
        metadata, outputs, *_ = self._scheduler.schedule()
        plan = StepPlan(step=self._step, preempted=self._log.take())
        self._pending = []
        for scheduled, meta in zip(outputs.scheduled_seq_groups, metadata, strict=True):
            self._pending.append(_Scheduled(scheduled.seq_group, scheduled.token_chunk_size, meta.do_sample))
            self._plan_group(meta, plan.sequences)
        moves = plan.moves
        moves += [BlockMove("swap_in", src, dst) for src, dst in outputs.blocks_to_swap_in]
        moves += [BlockMove("swap_out", src, dst) for src, dst in outputs.blocks_to_swap_out]
        moves += [BlockMove("copy", src, dst) for src, dst in outputs.blocks_to_copy]
        for group in outputs.ignored_seq_groups:
            plan.rejected.append(Rejection(group.request_id, self._reason(group)))
            self._forget(group.request_id)
        return plan

    def _plan_group(self, meta: Any, plans: list[SequencePlan]) -> None:
        for seq_id, data in meta.seq_data.items():
            request_id, index = self._keys[seq_id]
            if meta.is_prompt:
                computed = data.get_num_computed_tokens()
                end = min(data.get_len(), computed + meta.token_chunk_size)
                first = _first_position(computed, end, len(meta.computed_block_nums or ()) * self._block_size)
                token_ids = data.get_token_ids()[first:end]
            else:
                end = data.get_len()
                first = end - 1
                token_ids = [data.get_last_token_id()]
            plans.append(
                SequencePlan(
                    request_id=request_id,
                    seq=index,
                    first=first,
                    num_tokens=end - first,
                    block_tables=[list(meta.block_tables[seq_id])],
                    samples=meta.do_sample,
                    token_ids=token_ids,
                )
            )

    def commit(self, step: int, sampled: Mapping[SequenceKey, Sampled]) -> CommitResult:
        """Hand the tokens to the engine's own output processor, as its synchronous step does."""
        if self._pending is None or step != self._step:
            raise AdapterError(f"commit({step}): step {self._step} is next, and must be scheduled first")
        pending, self._pending = self._pending, None
        self._step += 1
        result = CommitResult()
        for group, num_tokens, samples in pending:
            if group.is_finished():
                continue  # aborted since it was scheduled
            group.update_num_computed_tokens(num_tokens)
            if samples:
                self._process(group, [self._output_of(group, sampled)])
                if len(group.seqs) > 1:
                    for index, seq in enumerate(group.seqs):
                        self._keys[seq.seq_id] = (group.request_id, index)
            if group.is_finished():
                outputs = [list(seq.get_output_token_ids()) for seq in group.seqs]
                result.finished.append(
                    Finished(request_id=group.request_id, outputs=outputs, reason=self._reason(group))
                )
        if result.finished:
            self._scheduler.free_finished_seq_groups()
            for finished in result.finished:
                self._forget(finished.request_id)
        return result

    def _output_of(self, group: Any, sampled: Mapping[SequenceKey, Sampled]) -> Any:
        """The sampler's output for one group: a token per running sequence, or n for a prompt that will fork.

        The engine keeps the parent for the last sample and forks a child for each of the others, in order;
        sequence 0 is the parent.
        """
        rid = group.request_id
        width = group.sampling_params.n
        if width == 1:
            parents = [(group.seqs[0].seq_id, 0)]
        elif len(group.seqs) == 1:
            parents = [(group.seqs[0].seq_id, index) for index in (*range(1, width), 0)]
        else:
            running = group.get_seqs(status=self._running)
            parents = [(seq.seq_id, self._keys[seq.seq_id][1]) for seq in running]
        samples = []
        for parent, index in parents:
            (token,) = sampled[rid, index].tokens
            logprobs = self._logprobs.get(token)
            if logprobs is None:
                logprobs = self._logprobs[token] = {token: self._release.logprob(0.0)}
            samples.append(self._release.sequence_output(parent, token, logprobs))
        return self._release.group_output(samples, None)

    def _reason(self, group: Any) -> str:
        """What the engine tells its user: the finish reason, which for a dropped request says no more."""
        status = group.seqs[0].status
        return f"{status.name}: {self._release.sequence_status.get_finished_reason(status)}"

    def _forget(self, request_id: RequestId) -> None:
        group = self._groups.pop(request_id, None)
        if group is None:
            return
        for seq in group.seqs:
            # A table that outlives its request is a leak; its owner stays known for the snapshot.
            if seq.seq_id not in self._manager.block_tables:
                self._keys.pop(seq.seq_id, None)

    def reset_prefix_cache(self) -> bool:
        """Pass on to the scheduler, in the releases that have it."""
        return self._release.resets_prefix_cache and bool(self._scheduler.reset_prefix_cache())

    def usage(self) -> Usage:
        """The scheduler's queues and counters. O(running)."""
        if not self._wide:
            return usage_of(self._scheduler)
        running = sum([not seq.is_finished() for group in self._scheduler.running for seq in group.seqs])
        return usage_of(self._scheduler, running)

    def snapshot(self) -> Snapshot:
        """The block manager's private books and the scheduler's queues. O(pool)."""
        return snapshot_of(self._scheduler, self._books, self._keys)

    def close(self) -> None:
        """Drop what is queued; nothing else is held."""
        self._groups.clear()
        self._keys.clear()
        self._pending = None


def _no_tokenizer(_: Any) -> Any:
    raise AdapterError("the engine asked for a tokenizer although no text is involved")


def _first_position(computed: int, end: int, cached: int) -> int:
    """Where the model runner starts a prefill of positions ``[computed, end)`` when ``cached`` are hit.

    It skips what is cached and, when all of it is, computes the last position again.
    """
    if cached <= computed:
        return computed
    return cached if cached < end else end - 1


def make(config: EngineConfig) -> VllmV0Engine:
    """An engine on the installed vLLM.

    Raises `ConfigRefused` for what vLLM's configuration classes refuse (in their words) and for unknown
    options, `AdapterError` when the installed vLLM has no V0 scheduler, ModuleNotFoundError without vLLM.
    """
    release = installed_release()
    manager = block_manager_of(release, config)
    capabilities = capabilities_of(release, config, manager)
    check(config, capabilities, manager)
    return VllmV0Engine(release, config, build_scheduler(release, config, manager), capabilities)
