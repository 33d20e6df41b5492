"""The model runner's input batch, kept from `SchedulerOutput` diffs alone.

vLLM V1's scheduler tells its model runner only what has changed: new requests in full, for the others the blocks
that are appended (or, after a preemption, the table that replaces theirs), how far they are computed, and who has
finished. Two model runners read it differently: v1 keeps the state of a preempted request until it is resumed, v2
drops it and is sent the request anew. A scheduler that gets a diff wrong shows here as it would on the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conformance.protocol import BlockId, BlockMove, EngineFault, RequestId, Sampled, SequenceKey, SequencePlan

IN_FLIGHT = -1
"""Stands in for a token that a step under way has yet to sample, as in the model runner's own buffers."""


class _State:
    """One request as the model runner caches it."""

    __slots__ = ("blocks", "computed", "prompt_len", "sampling", "tokens")

    def __init__(self, tokens: list[int], prompt_len: int, blocks: list[list[BlockId]], computed: int) -> None:
        self.tokens = tokens
        self.prompt_len = prompt_len
        self.blocks = [list(group) for group in blocks]
        self.computed = computed
        """Positions computed when the step at hand begins, as the scheduler says."""
        self.sampling: list[Sampling] = []
        """What is under way, in the order of the steps."""


class Sampling:
    """A request that samples in a step: where its tokens go when the step is over."""

    __slots__ = ("index", "request_id", "state", "width")

    def __init__(self, request_id: RequestId, state: _State, width: int) -> None:
        self.request_id = request_id
        self.state = state
        self.index = len(state.tokens)
        self.width = width
        """Tokens taken for granted: one, and those drafts that cannot be rejected in time."""


class InputBatch:
    """What a model runner knows.

    ``runner``: v1 or v2. ``windows``, ``sizes``: the sliding window and the tokens of a block of each KV-cache group;
    ``order``: its place among the scheduler's.
    """

    def __init__(
        self,
        *,
        runner: str,
        is_async: bool,
        null_block: BlockId,
        windows: tuple[int | None, ...],
        sizes: tuple[int, ...],
        order: tuple[int, ...] = (0,),
    ) -> None:
        self._order = order if len(order) > 1 else None
        self._v2 = runner == "v2"
        self._async = is_async
        self._null = null_block
        self._windows = [
            (group, window, size) for group, (window, size) in enumerate(zip(windows, sizes, strict=True)) if window
        ]
        self._states: dict[RequestId, _State] = {}
        self._told: dict[RequestId, list[int]] = {}
        """Input tokens that the step at hand is told: in a pipeline, the first stage has sampled none itself."""
        self._last: frozenset[RequestId] = frozenset()
        """Requests in the last step: v1's persistent batch holds their tokens."""

    # -- a step is told ----------------------------------------------------------------------------------

    def take(self, output: Any, plans: list[SequencePlan], moves: list[BlockMove]) -> list[Sampling]:
        """Follow one scheduler output; append the sequences to run to ``plans`` and the block moves to ``moves``.

        Raises `EngineFault` where the model runner would: a row for a request it was never told of.
        """
        states = self._states
        for request_id in output.finished_req_ids:
            states.pop(request_id, None)
        if self._v2:
            for request_id in output.preempted_req_ids or ():
                states.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            prompt = new.prompt_token_ids
            tokens = new.prefill_token_ids if self._v2 else prompt
            states[new.req_id] = _State(list(tokens), len(prompt), new.block_ids, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        self._told = dict(zip(cached.req_ids, cached.new_token_ids, strict=True)) if cached.new_token_ids else {}
        if cached.req_ids:
            self._update(cached)
        zeroed = getattr(output, "new_block_ids_to_zero", None)
        if zeroed:
            moves += [BlockMove("zero", block, block) for block in zeroed]
        copies = getattr(output, "kv_cache_block_copies", None)
        if copies:
            moves += [BlockMove("copy", copy.src_block_id, copy.dst_block_id) for copy in copies]
        return self._rows(output, plans)

    def _state(self, request_id: RequestId) -> _State:
        state = self._states.get(request_id)
        if state is None:
            raise EngineFault(f"the model runner is told to run {request_id}, which it does not know")
        return state

    def _update(self, cached: Any) -> None:
        resumed = getattr(cached, "resumed_req_ids", None)
        if resumed is None:
            flags = zip(cached.req_ids, cached.resumed_from_preemption, strict=True)
            resumed = {request_id for request_id, flag in flags if flag}
        num_outputs = getattr(cached, "num_output_tokens", None)
        for index, request_id in enumerate(cached.req_ids):
            state = self._state(request_id)
            state.computed = cached.num_computed_tokens[index]
            blocks = cached.new_block_ids[index]
            if request_id in resumed:
                if blocks is None:
                    raise EngineFault(f"the model runner is told to resume {request_id} without a block table")
                state.blocks = [list(group) for group in blocks]
            elif blocks is not None:
                for table, more in zip(state.blocks, blocks, strict=True):
                    table.extend(more)
            if num_outputs is not None:
                self._settle_tokens(state, request_id, num_outputs[index], cached)

    def _settle_tokens(self, state: _State, request_id: RequestId, num_outputs: int, cached: Any) -> None:
        """What is done about outputs that were dropped, or, by model runner v1, missed while it was ahead."""
        length = state.prompt_len + num_outputs
        if length < len(state.tokens):
            del state.tokens[length:]
            state.sampling = [row for row in state.sampling if row.index < length]
        if self._async and not self._v2 and num_outputs and request_id not in self._last:
            state.tokens[state.prompt_len :] = cached.all_token_ids[request_id][-num_outputs:]
            state.sampling = []

    def _rows(self, output: Any, plans: list[SequencePlan]) -> list[Sampling]:
        drafts_of = output.scheduled_spec_decode_tokens
        sampling = []
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            state = self._state(request_id)
            if num_tokens < 1:
                raise EngineFault(f"the model runner is told to run {num_tokens} tokens of {request_id}")
            first, tokens = state.computed, state.tokens
            end = first + num_tokens
            drafts = list(drafts_of.get(request_id, ()))
            known = end - len(drafts)
            samples = known >= len(tokens)
            inputs = self._told.get(request_id) or tokens[first:known]
            plans.append(
                SequencePlan(
                    request_id=request_id,
                    first=first,
                    num_tokens=num_tokens,
                    block_tables=self._tables(state, first - sum([row.width - 1 for row in state.sampling])),
                    samples=samples,
                    token_ids=None if IN_FLIGHT in inputs or len(inputs) < known - first else inputs,
                    draft_tokens=drafts,
                    optimistic=self._async and bool(state.sampling),
                )
            )
            if samples:
                row = Sampling(request_id, state, 1 + len(drafts) if self._async else 1)
                sampling.append(row)
                state.sampling.append(row)
                tokens += [IN_FLIGHT] * row.width
        self._last = frozenset(output.num_scheduled_tokens)
        return sampling

    def _tables(self, state: _State, first: int) -> list[list[BlockId]]:
        """Copies of the tables, with the null block for blocks that lie wholly before the window of ``first``.

        The step may begin as early as that, if all drafts under way are rejected.
        """
        blocks = state.blocks if self._order is None else [state.blocks[place] for place in self._order]
        tables = [table[:] for table in blocks]
        for group, window, size in self._windows:
            gone = min(max(0, first - window + 1) // size, len(tables[group]))
            tables[group][:gone] = [self._null] * gone
        return tables

    # -- a step is over ----------------------------------------------------------------------------------

    @staticmethod
    def commit(sampling: list[Sampling], sampled: Mapping[SequenceKey, Sampled]) -> dict[RequestId, list[int]]:
        """The tokens of each request that sampled, put where they belong in the model runner's buffers."""
        tokens_of = {}
        for row in sampling:
            sample = sampled.get((row.request_id, 0))
            tokens = [] if sample is None else sample.tokens
            tokens_of[row.request_id] = list(tokens)
            state = row.state
            if row in state.sampling:  # else what was under way was given up
                state.sampling.remove(row)
                state.tokens[row.index : row.index + row.width] = tokens
                for later in state.sampling:
                    later.index += len(tokens) - row.width
        return tokens_of
