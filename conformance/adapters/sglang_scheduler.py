"""sglang: its real `Scheduler`, batches, prefill policy, radix cache and allocators, from the model worker's seat.

The scheduler constructs itself (`conformance.adapters._sglang_engine`), takes requests as its tokenizer manager sends
them, and its own output messages say what is finished. A plan shows the batch that the model worker is handed and the
rows of the request-to-token pool its attention would read, which must agree.

What an oracle has to know about this engine:

- A block is a page, a token where ``block_size`` is 1. Page 0 takes the outputs of padding and is never handed out.
- With ``pipeline_depth = 2`` its overlap scheduler runs: a step is handed over before the tokens of the last one are
  known, and the device runs them in order (``steps_in_order``).
- Two generations are driven, told apart by what they have: 0.5.5, and 0.5.23, which has a runtime context
  (`conformance.adapters._sglang_context`) and a compiled tree, whose locks are not told.
- A sequence ends two tokens before the context, or the pool, does (``sequence_tokens_max``). A prompt that leaves
  fewer than six tokens of either is refused, which is done by prefilling one token in its place: it is shown as
  rejected in that step, the token, which no request has, is not shown, and its page is reserved meanwhile.
- A running request that is aborted runs once more (``aborted_steps``) and then gives back what it held; between two
  chunks it runs on to the last in 0.5.5, and is gone at once in 0.5.23.
- With ``enable_chunked_prefill`` the budget of prompt tokens is ``chunked_prefill_size``, in whole pages; without,
  ``max_prefill_tokens``, which holds as long as no prompt alone is longer. A chunk may come out with no token, when
  decodes that are mixed in have used up the budget; it is not shown.
- A preempted (retracted) request goes to the end of the queue. With priorities, a waiting request retracts running
  ones that are less urgent by more than the option ``priority_threshold``, when the batch is full.
- After a prefill a page that is computed twice is given up for the one in the tree (``merges_equal_blocks``).
- Admission counts with the share of ``max_tokens`` that running requests have used lately (option
  ``conservativeness``), so that it may leave room, and may retract.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from conformance.adapters._pages import pages_of
from conformance.adapters._sglang_config import PAGES_RESERVED, arguments_of, capabilities_of
from conformance.adapters._sglang_context import Forwarded
from conformance.adapters._sglang_engine import build, modules
from conformance.protocol import (
    AdapterError,
    BlockId,
    Capabilities,
    CommitResult,
    EngineConfig,
    EngineFault,
    Finished,
    Preemption,
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


class _Flight(NamedTuple):
    """A step under way: the batch, what the model worker answered, and which requests its rows are.

    ``shown``: there was something of it in the plan.
    """

    batch: Any
    result: Any
    step: int
    request_ids: list[RequestId]
    rows: list[int]
    shown: bool


class SglangEngine:
    """One sglang scheduler without a model. Made by `make`."""

    def __init__(self, config: EngineConfig, scheduler: Any, capabilities: Capabilities) -> None:
        self._capabilities = capabilities
        self._scheduler = scheduler
        self._tree = scheduler.tree_cache
        self._pool = scheduler.token_to_kv_pool_allocator
        self._rows = scheduler.req_to_token_pool.req_to_token
        self._page_size = config.block_size
        self._overlaps = config.pipeline_depth > 1
        self._with_priorities = config.scheduling_policy == "priority"
        self._id_width = 0 if config.engine_options.get("request_ids") == "client" else 6
        self._ids: dict[str, RequestId] = {}
        """The engine's id of a request -> the harness's."""
        self._requests: dict[RequestId, Any] = {}
        """Requests that the engine has not ended yet."""
        self._lengths: dict[RequestId, int] = {}
        """Requests that hold slots -> how many, as of the last step they ran in."""
        self._outputs: dict[RequestId, list[int]] = {}
        self._doomed: dict[RequestId, str] = {}
        """Refused requests that still wait for their one token, and why; "" once they have had it."""
        self._aborted: set[RequestId] = set()
        self._flying: deque[_Flight] = deque()
        scheduler.result_queue = self._flying
        self._preempted: list[Preemption] = []
        self._given_up: list[Finished] = []
        self._watch_retractions()
        self._tree.pretty_print = lambda: None  # which it does when it runs out of memory
        self._step = 0

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def _enter(self) -> Any:
        """The scheduler, with what it keeps of its configuration in a global variable set to its own."""
        self._scheduler.enter()
        return self._scheduler

    # -- requests ----------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Send the request as the tokenizer manager does. Raises `RequestRefused` for n > 1, of which it makes n."""
        if request.n > 1:
            raise RequestRefused(f"n = {request.n}: the scheduler runs one sequence per request")
        lib, scheduler = modules(), self._enter()
        sampling = lib.sampling_params.SamplingParams(
            max_new_tokens=request.max_tokens,
            stop_token_ids=[] if request.stop_token is None else [request.stop_token],
        )
        sampling.normalize(None)
        rid = self._rid(request.request_id)
        self._ids[rid] = request.request_id
        self._outputs[request.request_id] = []
        scheduler.process_input_requests([self._tokenized(request, rid, sampling)])
        req = self._requests[request.request_id] = scheduler.waiting_queue[-1]
        if req.to_finish is not None:
            self._doomed[request.request_id] = req.to_finish.message

    def _tokenized(self, request: Request, rid: str, sampling: Any) -> Any:
        """The message of the tokenizer manager: a salt has a field of its own in some releases."""
        kind = modules().io_struct.TokenizedGenerateReqInput
        wired = getattr(kind, "__struct_fields__", ())
        apart = "cache_salt" in wired
        given = {"input_embeds": None, "token_type_ids": None, "cache_salt": request.cache_salt or None}
        return kind(
            rid=rid,
            input_text="",
            input_ids=array("q", request.prompt) if wired else list(request.prompt),
            mm_inputs=None,
            sampling_params=sampling,
            return_logprob=False,
            logprob_start_len=-1,
            top_logprobs_num=0,
            token_ids_logprob=None,
            stream=False,
            lora_id=request.adapter or None,
            extra_key=None if apart else request.cache_salt or None,
            priority=request.priority if self._with_priorities else None,
            **{name: value for name, value in given.items() if name in wired},
        )

    def _rid(self, request_id: RequestId) -> str:
        """Servers give ids of one length; a shorter one would stand for all that begin with it."""
        return request_id[:1] + request_id[1:].rjust(self._id_width, "0")

    def abort_request(self, request_id: RequestId) -> None:
        """Send an abort. A request that waits is gone at once, one that runs after one more step."""
        scheduler = self._enter()
        scheduler.process_input_requests([modules().io_struct.AbortReq(rid=self._rid(request_id))])
        if request_id in self._lengths:
            self._aborted.add(request_id)
        elif request_id in self._requests:
            self._forget(request_id)
        scheduler.sent.clear()

    def _forget(self, request_id: RequestId) -> None:
        for kept in (self._requests, self._outputs, self._lengths, self._doomed):
            kept.pop(request_id, None)
        self._aborted.discard(request_id)

    def _watch_retractions(self) -> None:
        """Note who is put back into the queue, with the engine's own figures at that moment."""
        scheduler = self._scheduler
        enqueue, update = scheduler._add_request_to_queue, scheduler.update_running_batch
        figures: list[int | None] = [None, None]

        def watched_update(batch: Any) -> Any:
            figures[:] = scheduler.decode_pages(batch), self._free_pages()
            updated = update(batch)
            figures[:] = None, None
            return updated

        def watched_enqueue(req: Any, is_retracted: bool = False) -> None:  # noqa: FBT001, FBT002 - its signature
            if req.is_retracted:
                request_id = self._ids[req.rid]
                self._lengths.pop(request_id, None)  # it may have finished before
                if request_id not in self._doomed:
                    counted, free = figures
                    self._preempted.append(
                        Preemption(request_id=request_id, mode="recompute", blocks_counted=counted, blocks_free=free)
                    )
            enqueue(req, is_retracted)

        scheduler.update_running_batch, scheduler._add_request_to_queue = watched_update, watched_enqueue

    # -- steps -------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Take the turn of the engine's event loop up to where the model worker has its batch."""
        if len(self._flying) > int(self._overlaps):
            raise AdapterError(f"schedule() with {len(self._flying)} steps in flight: the loop is one ahead at most")
        scheduler = self._enter()
        plan = StepPlan(step=self._step)
        self._step += 1
        batch = scheduler.turn()
        self._note_given_up()
        plan.preempted, self._preempted = self._preempted, []
        if batch is not None:
            result, handed = scheduler.launch(batch)
            ids = [self._ids[req.rid] for req in batch.reqs]
            self._show(plan, batch, handed)
            taken = batch.copy() if self._overlaps else batch
            self._flying.append(_Flight(taken, result, plan.step, ids, handed.rows, shown=bool(plan.sequences)))
        elif not self._flying:
            scheduler.idle()
        if self._overlaps and self._flying and not self._flying[0].shown and (batch is None or len(self._flying) > 1):
            self._process({})  # nobody else knows of it
        return plan

    def _show(self, plan: StepPlan, batch: Any, handed: Forwarded) -> None:
        """Put what the model worker was handed into the plan, row by row."""
        written = handed.slots
        # A batch of decodes that grew from a prefill remembers whose chunk that was.
        chunked = batch.chunked_req if batch.forward_mode.is_extend() else None
        start = 0
        for req, row, end, length in zip(batch.reqs, handed.rows, handed.ends, handed.lengths, strict=True):
            request_id = self._ids[req.rid]
            if length < 0:
                raise EngineFault(f"the model worker is told to run {length} tokens of {request_id}")
            slots = self._rows[row, :end].tolist()
            if slots[end - length :] != written[start : start + length]:
                raise EngineFault(
                    f"{request_id} writes slots {written[start : start + length]} at positions {end - length} to "
                    f"{end - 1} and reads {slots[end - length :]} there"
                )
            self._requests[request_id] = req
            self._lengths[request_id] = end
            reason = self._doomed.get(request_id)
            if reason:
                plan.rejected.append(Rejection(request_id, reason))
                self._doomed[request_id] = ""
            elif reason is None and length:
                inputs = handed.tokens[start : start + length]
                plan.sequences.append(
                    SequencePlan(
                        request_id=request_id,
                        first=end - length,
                        num_tokens=length,
                        block_tables=[pages_of(request_id, slots, self._page_size)],
                        samples=req is not chunked,
                        token_ids=None if min(inputs) < 0 else inputs,
                    )
                )
            start += length

    def commit(self, step: int, sampled: Mapping[SequenceKey, Sampled]) -> CommitResult:
        """Give the oldest step in flight its tokens and let the scheduler process them."""
        given_up, self._given_up = self._given_up, []
        if not self._flying or self._flying[0].step != step:
            return CommitResult(given_up)  # nothing was run, or a reset has waited for it
        self._enter()
        return CommitResult([*given_up, *self._process(sampled)])

    def _process(self, sampled: Mapping[SequenceKey, Sampled]) -> list[Finished]:
        flight = self._flying.popleft()
        samples = [sampled.get((request_id, 0)) for request_id in flight.request_ids]
        tokens = [0 if sample is None else sample.tokens[0] for sample in samples]
        self._scheduler.fill(flight.result, tokens, flight.rows)
        self._scheduler.process_batch_result(flight.batch, flight.result)
        return self._finished()

    def _note_given_up(self) -> None:
        """Read the messages of requests that ended without a step: aborted between chunks, or given up."""
        for message in self._scheduler.sent:
            request_id = self._ids[message.rid]
            if request_id not in self._aborted:
                outputs = list(self._requests[request_id].output_ids)
                self._given_up.append(Finished(request_id=request_id, outputs=[outputs], reason="abort"))
            self._forget(request_id)
        self._scheduler.sent.clear()

    def _finished(self) -> list[Finished]:
        """Read the scheduler's messages to its clients."""
        finished = []
        for message in self._scheduler.sent:
            for rid, reason, tokens in zip(message.rids, message.finished_reasons, message.output_ids, strict=True):
                request_id = self._ids[rid]
                outputs = self._outputs.setdefault(request_id, [])
                outputs.extend(tokens)
                if reason is not None:
                    if request_id not in self._aborted and request_id not in self._doomed:
                        finished.append(Finished(request_id=request_id, outputs=[outputs], reason=reason["type"]))
                    self._forget(request_id)
        self._scheduler.sent.clear()
        return finished

    def reset_prefix_cache(self) -> bool:
        """Ask for a flush; with no request live the loop has turned by itself, meanwhile, until it was idle."""
        scheduler = self._enter()
        ended = self._aborted.union(rid for rid, reason in self._doomed.items() if not reason)
        if not self._requests.keys() - ended:
            step = self._step
            while self._flying or scheduler.current is not None:
                self.schedule()
                if self._flying and (scheduler.current is None or len(self._flying) > int(self._overlaps)):
                    self._process({})
            if scheduler.running_batch.reqs:
                self.schedule()  # finished ones leave it in the turn after
            scheduler.last_batch = scheduler.current  # as the loop leaves it
            self._step = step
        return bool(scheduler.flush_cache())

    # -- books -------------------------------------------------------------------------------------------

    def _free_pages(self) -> int:
        return int(self._pool.available_size() + self._tree.evictable_size()) // self._page_size

    def usage(self) -> Usage:
        """Free and evictable pages, and queue lengths; who is aborted or refused and runs out is not counted."""
        scheduler = self._scheduler
        running = {
            req.rid
            for batch in scheduler.batches()
            for req in batch.reqs
            if not (req.finished() or req.is_retracted or req.to_finish)
        }
        waiting = sum(self._doomed.get(self._ids[req.rid]) != "" for req in scheduler.waiting_queue)
        return Usage(free_blocks=self._free_pages(), running=len(running), waiting=waiting)

    def snapshot(self) -> Snapshot:
        """Free list, radix tree and the rows of requests, in pages. O(pool).

        A page of the tree is cached when no request has locked its node, and else has as many holders as the node
        has locks. Pages in which a refused prompt's one token is computed are shown as reserved.
        """
        size, scheduler = self._page_size, self._scheduler
        tables = {
            request_id: self._table(request_id, length)
            for request_id, length in self._lengths.items()
            if not self._requests[request_id].is_retracted
        }
        apart = {page for request_id in self._doomed.keys() & tables.keys() for page in tables.pop(request_id)}
        counts = dict.fromkeys((page for table in tables.values() for page in table), 1)
        cached = []
        for slots, locks in scheduler.tree_nodes():
            pages = [slot // size for slot in slots[::size]]
            if locks:
                counts.update((page, locks) for page in pages if page not in apart)
            else:
                cached += pages
        return Snapshot(
            free=scheduler.free_pages(),
            cached=cached,
            reserved=[*range(PAGES_RESERVED), *sorted(apart)],
            held={request_id: [table] for request_id, table in tables.items()},
            ref_counts=counts if scheduler.reads_tree_locks else None,
            waiting=[self._ids[req.rid] for req in scheduler.waiting_queue],
            running=list(tables),
        )

    def _table(self, request_id: RequestId, length: int) -> list[BlockId]:
        row = self._scheduler.row_of(self._requests[request_id])
        return [slot // self._page_size for slot in self._rows[row, : length : self._page_size].tolist()]

    def close(self) -> None:
        """There is nothing to release."""


def make(config: EngineConfig) -> SglangEngine:
    """An engine on the installed sglang.

    Raises `ConfigRefused` for what sglang's configuration refuses (in its words) and for what it does not have,
    ModuleNotFoundError when it, or what it needs, is not installed.
    """
    args = arguments_of(config)
    return SglangEngine(config, build(args), capabilities_of(config))
