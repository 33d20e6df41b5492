"""The harness's own books: what every request and every block must look like, kept from plans alone.

The ledger is written by `conformance.session` and read by the oracles. It keeps, per sequence, its tokens
and how far they are computed, and, per block, how many live sequences hold it. Costs follow what changes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import msgspec

from conformance.protocol import BlockId, Capabilities, EngineConfig, Request, RequestId, SequenceKey
from conformance.records import RequestRecord, RequestState, SequenceRecord
from conformance.shadow_kv import Reader
from conformance.token_model import Model, PrefixTree


class Ledger:
    """All requests of a session and the holders of every block."""

    __slots__ = (
        "behaviours",
        "block_size",
        "capabilities",
        "config",
        "distinct_held",
        "ended",
        "group_sizes",
        "group_states",
        "group_windows",
        "holders",
        "live",
        "null_before",
        "preempted",
        "requests",
        "running",
        "tree",
        "usable_blocks",
    )

    def __init__(self, config: EngineConfig, capabilities: Capabilities, model: Model | None = None) -> None:
        self.config = config
        self.null_before = capabilities.null_block
        """The null block of the tables as they are kept here: what was set aside in this step is not in them."""
        self.declare(capabilities)
        self.block_size = config.block_size
        groups = config.kv_cache_groups
        self.group_sizes = tuple(group.block_size for group in groups) or (config.block_size,)
        """Tokens of a block in each KV-cache group."""
        self.group_windows = tuple(group.sliding_window for group in groups) or (config.sliding_window,)
        self.group_states = tuple(group.state for group in groups) or (False,)
        """Whether each holds recurrent state."""
        self.tree = PrefixTree(model)
        self.requests: dict[RequestId, RequestRecord] = {}
        self.live: dict[RequestId, RequestRecord] = {}
        """Live requests in order of arrival."""
        self.running: dict[RequestId, RequestRecord] = {}
        """The running set, in the order in which the requests (re)entered it."""
        self.preempted: dict[RequestId, RequestRecord] = {}
        """Requests taken off the running set, by recompute or swap, and not yet back."""
        self.ended: list[RequestId] = []
        self.holders: dict[BlockId, int] = {}
        """Block -> number of live sequences whose table names it (null block aside)."""
        self.distinct_held = 0
        self.behaviours: dict[str, int] = {}
        """How often each notable behaviour was seen; a campaign that never reaches one says so."""

    def declare(self, capabilities: Capabilities) -> None:
        """Take note of what the engine declares; it may set a null block aside later than at its start."""
        self.capabilities = capabilities
        self.usable_blocks = self.config.num_blocks - capabilities.reserved_blocks

    # -- requests ----------------------------------------------------------------------------------------

    def add(self, spec: Request, stop_after: int | None, step: int) -> RequestRecord:
        """Enter a request as waiting. O(prompt)."""
        request = RequestRecord(spec, stop_after, self._full_len(spec), step)
        request.sequences.append(SequenceRecord(request, 0, list(spec.prompt), self.tree.walk(spec, spec.prompt)))
        assert spec.request_id not in self.requests, "request ids are the harness's and unique"
        self.requests[spec.request_id] = request
        self.live[spec.request_id] = request
        return request

    def _full_len(self, spec: Request) -> int:
        full_len = len(spec.prompt) + spec.max_tokens
        return min(full_len, self.tokens_max) if self.has_length_limit else full_len

    def fork_ahead(self, request: RequestRecord) -> None:
        """Give what there is of sequence 0's prompt to the others; which blocks they share, their tables will tell."""
        first = request.sequences[0]
        for seq in range(1, request.spec.n):
            child = SequenceRecord(request, seq, list(first.tokens), list(first.nodes))
            child.computed = child.high_water = first.computed
            request.sequences.append(child)

    def conversation(self, index: int | None) -> list[int]:
        """Prompt and outputs of the ended request number ``index`` modulo those; nothing when there is none."""
        if index is None or not self.ended:
            return []
        return self.requests[self.ended[index % len(self.ended)]].sequences[0].tokens

    def fork(self, request: RequestRecord) -> None:
        """Give sequence 0's prompt, and the blocks it fills, to the other n - 1 sequences."""
        assert not request.forked, "a request forks once, when its prompt is computed"
        first = request.sequences[0]
        # What lies ahead of the prompt is sequence 0's own.
        filled = [-(-first.computed // size) for size in self.group_sizes]
        for seq in range(1, request.spec.n):
            child = SequenceRecord(request, seq, list(first.tokens), list(first.nodes))
            child.computed = child.high_water = first.computed
            child.readers = [Reader() for _ in first.tables]
            request.sequences.append(child)
            self.set_tables(child, [table[:count] for table, count in zip(first.tables, filled, strict=True)])

    def go_on(self, request: RequestRecord, step: int) -> None:
        """The outputs asked for are there, and another input follows. What ``step`` and later ones compute is apart.

        The last output is dropped, which is not computed yet; whoever ran on keeps its blocks and waits for its turn.
        """
        record, spec = request.sequences[0], request.spec
        assert record.final_len is not None, "its outputs are there"
        kept, following = record.final_len - 1, spec.streamed[0]
        prompt = [*record.tokens[:kept], *following.prompt]
        request.spec = msgspec.structs.replace(
            spec, prompt=prompt, max_tokens=following.max_tokens, streamed=spec.streamed[1:]
        )
        request.stop_after = None
        request.full_len = self._full_len(request.spec)
        record.tokens, record.nodes = list(prompt), self.tree.walk(request.spec, prompt)
        record.computed = record.high_water = min(record.computed, kept)
        record.drafts, record.rejected = [], {}
        record.final_len = record.done_at_step = None
        record.len_min = len(prompt)
        record.set_aside_step = step
        request.loads += 1
        request.inputs_run += 1
        request.state = RequestState.BETWEEN
        self.running.pop(spec.request_id, None)
        self.preempted.pop(spec.request_id, None)
        self.saw("went on with more input")

    def end(self, request: RequestRecord, state: RequestState) -> None:
        """The request is over: it must hold nothing any more."""
        assert request.live, "a request ends once"
        self.drop(request)
        request.state = state
        del self.live[request.spec.request_id]
        self.running.pop(request.spec.request_id, None)
        self.preempted.pop(request.spec.request_id, None)
        self.ended.append(request.spec.request_id)

    def preempt(self, request: RequestRecord, mode: str) -> None:
        """Take a request off the running set; recompute forgets what was computed, swap keeps it."""
        self.drop(request)
        self.running.pop(request.spec.request_id, None)
        self.preempted[request.spec.request_id] = request
        request.preemptions += 1
        if mode == "swap":
            request.state = RequestState.SWAPPED
        else:
            request.state = RequestState.PREEMPTED
            for record in request.sequences:
                record.computed = 0
                record.drafts = []
                record.rejected = {}

    def resume(self, request: RequestRecord) -> None:
        """The request runs: for the first time, or again."""
        request.state = RequestState.RUNNING
        self.running[request.spec.request_id] = request
        self.preempted.pop(request.spec.request_id, None)

    def drop(self, request: RequestRecord) -> None:
        """The request's sequences hold no device block."""
        for record in request.sequences:
            self.set_tables(record, [])

    # -- blocks ------------------------------------------------------------------------------------------

    def set_tables(self, record: SequenceRecord, tables: list[list[BlockId]]) -> list[BlockId]:
        """Make ``tables`` the sequence's; returns the blocks that are new at their place. O(changed + compare)."""
        added: list[BlockId] = []
        before, record.tables = record.tables, tables
        if not tables:
            record.readers = []
        elif tables == before:
            return added
        elif not record.readers:
            record.readers = [Reader() for _ in tables]
        for group in range(max(len(tables), len(before))):
            old = before[group] if group < len(before) else []
            new = tables[group] if group < len(tables) else []
            self._replace(old, new, added)
        return added

    def _replace(self, old: list[BlockId], new: list[BlockId], added: list[BlockId]) -> None:
        """One group's table in place of another. What begins alike is neither let go nor taken."""
        null, null_before, holders = self.capabilities.null_block, self.null_before, self.holders
        same = len(old)
        if new[:same] != old:
            same = 0
            for one, other in zip(old, new):  # noqa: B905 - the common prefix of unequal lengths
                if one != other:
                    break
                same += 1
            for index in range(same, len(old)):
                if index >= len(new) or new[index] != old[index]:
                    self._release(old[index], null_before)
        for index in range(same, len(new)):
            if index >= len(old) or new[index] != old[index]:
                self._hold(new[index], null, holders, added)

    def _hold(self, block: BlockId, null: BlockId | None, holders: dict[BlockId, int], added: list[BlockId]) -> None:
        if block == null:
            return
        count = holders.get(block, 0)
        if count == 0:
            self.distinct_held += 1
        holders[block] = count + 1
        added.append(block)

    def _release(self, block: BlockId, null: BlockId | None) -> None:
        if block == null:
            return
        count = self.holders[block]
        assert count > 0, "the ledger never releases what nobody holds"
        if count == 1:
            del self.holders[block]
            self.distinct_held -= 1
        else:
            self.holders[block] = count - 1

    # -- figures -----------------------------------------------------------------------------------------

    @property
    def free_blocks(self) -> int:
        """Blocks nobody holds, cached ones included, as the harness counts them."""
        return self.usable_blocks - self.distinct_held

    @property
    def running_sequences(self) -> int:
        """Sequences on the running set: all n of a request, each until its end is committed."""
        total = 0
        for request in self.running.values():
            n = request.spec.n
            total += n if n == 1 or not request.forked else sum(not one.settled for one in request.sequences)
        return total

    def blocks_for(self, tokens: int) -> int:
        """ceil(tokens / block_size), summed over the KV-cache groups."""
        if len(self.group_sizes) == 1:
            return -(-tokens // self.block_size)
        return sum([-(-tokens // size) for size in self.group_sizes])

    def full_blocks(self, request: RequestRecord) -> int:
        """Blocks that hold all tokens of the request when its sequences have run to their end, sharing nothing."""
        return self.blocks_for(self._capped(request.full_len) + self.config.num_lookahead_slots) * request.spec.n

    def _capped(self, length: int) -> int:
        return min(length, self.config.max_model_len) if self.has_length_limit else length

    @property
    def has_length_limit(self) -> bool:
        return "length_limit" in self.capabilities.features

    @property
    def tokens_max(self) -> int:
        """Tokens a sequence may reach, outputs included, by what the engine says max_model_len limits."""
        most = self.config.max_model_len + (1 if self.capabilities.length_cap == "computed" else 0)
        own = self.capabilities.sequence_tokens_max
        return most if own is None else min(most, own)

    @property
    def has_token_budget(self) -> bool:
        return "token_budget" in self.capabilities.features

    @property
    def running_max(self) -> int:
        """Sequences that the engine admits to its running set."""
        fewer = self.capabilities.running_max
        return self.config.max_num_seqs if fewer is None else min(fewer, self.config.max_num_seqs)

    @property
    def watermark_blocks(self) -> int:
        """Blocks that admission leaves free, as the configuration says."""
        return int(self.config.watermark * self.config.num_blocks)

    def may_lack_encoder_room(self, request: RequestRecord, coming: Iterable[RequestRecord] = ()) -> bool:
        """Whether the encoder cache may hold items of others who run, or are ``coming``, in the place of its own."""
        others = itertools.chain(self.running.values(), coming)
        return bool(request.spec.encoder_items) and any(other.spec.encoder_items for other in others)

    def surely_fits(self, request: RequestRecord) -> bool:
        """Whether all tokens of the request fit the usable pool, watermark aside: then it must be served (PRG-2)."""
        return self.full_blocks(request) <= self.usable_blocks - self.watermark_blocks

    def can_never_fit(self, request: RequestRecord) -> bool:
        """Whether the pool cannot even hold what must be computed: then it must be refused (PRG-3).

        The last token sampled is never computed; the sequences of a request share its prompt's full blocks;
        behind a sliding window a sequence may give blocks back.
        """
        length = self._capped(request.full_len - 1)
        groups = zip(self.group_sizes, self.group_windows, self.group_states, strict=True)
        blocks = sum(-(-min(length, 1 if state else window or length) // size) for size, window, state in groups)
        if self.capabilities.sequences_apart:
            return blocks > self.usable_blocks
        shared = min(blocks, len(request.spec.prompt) // self.block_size)
        return blocks * request.spec.n - shared * (request.spec.n - 1) > self.usable_blocks

    def name_of(self, key: SequenceKey) -> str:
        """As `SequenceRecord.name`, of a sequence that may not be forked yet."""
        return key[0] if self.requests[key[0]].spec.n == 1 else f"{key[0]}/{key[1]}"

    def saw(self, behaviour: str) -> None:
        """Count one occurrence of a notable behaviour."""
        self.behaviours[behaviour] = self.behaviours.get(behaviour, 0) + 1
