"""Real need: the blocks that sequences must get in a step, exactly, and what that says of a preemption.

Real need of a set of running requests = sum over their sequences of
``ceil((tokens + new tokens + lookahead) / block_size) - blocks owned``, in each KV-cache group, plus one block for
every sequence that must copy a shared block before it writes (the last holder may write in place). The engine's own
arithmetic may count more than that; the difference is what vLLM issue 8007 is about.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from conformance.ledger import Ledger
from conformance.protocol import BlockId, RequestId
from conformance.records import RequestRecord, RequestState, SequenceRecord, StepFacts


class PreemptionVerdict(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One preemption, judged. Units: blocks. ``needless``: the real need could be met without it."""

    request_id: RequestId
    mode: str
    needed: int
    free: int
    needless: bool
    released: int
    counted: int | None = None
    engine_free: int | None = None
    asked_by: RequestId | None = None
    full_need: int = 0
    """Blocks of all running requests at their full length."""
    usable: int = 0
    tokens_recomputed: int = 0
    """Positions whose KV is thrown away (0 for swap)."""
    block_ids: list[BlockId] = []
    """The victim's blocks, in the engine's own numbering."""


def real_need(ledger: Ledger, requests: list[RequestRecord]) -> int:
    """Blocks that ``requests``, all running, must get to run their next step. O(their sequences)."""
    config = ledger.config
    total = 0
    writers: Counter[BlockId] = Counter()
    for request in requests:
        for record in _to_run(request, pipelined=config.pipeline_depth > 1):
            length = _next_length(record, config.max_num_batched_tokens if ledger.has_token_budget else None)
            if ledger.has_length_limit:
                length = min(length, config.max_model_len)
            length += config.num_lookahead_slots + ledger.capabilities.lookahead_tokens
            for group, size in enumerate(ledger.group_sizes):
                table = record.tables[group] if record.tables else []
                total += max(0, -(-length // size) - len(table))
                if ledger.group_states[group] and ledger.capabilities.copies_cached_states:
                    total += 1
                index = record.computed // size
                if index < len(table) and ledger.holders.get(table[index], 0) > 1:
                    writers[table[index]] += 1
    for block, count in writers.items():
        total += count if ledger.holders[block] > count else count - 1
    return total


def _to_run(request: RequestRecord, *, pipelined: bool) -> list[SequenceRecord]:
    """A sequence that stopped in a step still in flight runs on until the engine hears of it."""
    return request.sequences if pipelined else request.unfinished()


def _next_length(record: SequenceRecord, budget: int | None) -> int:
    """Length up to which the next step computes: one token and its drafts in decode, at most the budget in prefill."""
    taken_for_accepted = sum(record.rejected.values())  # by an engine that has not been told
    length = len(record.tokens) + len(record.drafts) + taken_for_accepted
    return length if budget is None else min(length, record.computed + taken_for_accepted + budget)


def blocks_released(ledger: Ledger, request: RequestRecord, gone: Counter[BlockId]) -> int:
    """Blocks that become free when ``request`` lets go of its tables; ``gone`` counts holders already removed."""
    own: Counter[BlockId] = Counter()
    null = ledger.null_before
    for record in request.sequences:
        for table in record.tables:
            own.update(block for block in table if block != null)
    released = sum(1 for block, count in own.items() if ledger.holders[block] - gone[block] == count)
    gone.update(own)
    return released


def judge_preemptions(ledger: Ledger, facts: StepFacts) -> list[PreemptionVerdict]:
    """Judge each preemption of a step in the order chosen, on the state before it. O(running sequences) each."""
    remaining = list(facts.running_before)
    free = facts.free_before
    gone = _slid_off(ledger, facts)
    # What a step in flight still reads, an engine may keep for whom its window has left: not sure to be free.
    surely_gone = Counter[BlockId]() if facts.in_flight else gone
    full_need = sum(ledger.full_blocks(request) for request in remaining)
    verdicts = []
    for request, preemption in facts.preempted:
        need = real_need(ledger, remaining)
        released = blocks_released(ledger, request, gone)
        verdicts.append(
            PreemptionVerdict(
                request_id=request.spec.request_id,
                mode=preemption.mode,
                needed=need,
                free=free,
                needless=need <= free and not _gives_way(ledger, request),
                released=released,
                counted=preemption.blocks_counted,
                engine_free=preemption.blocks_free,
                asked_by=preemption.asked_by,
                full_need=full_need,
                usable=ledger.usable_blocks,
                tokens_recomputed=0
                if preemption.mode == "swap"
                else sum(record.computed for record in request.unfinished()),
                block_ids=[block for record in request.sequences for table in record.tables for block in table],
            )
        )
        free += released if surely_gone is gone else blocks_released(ledger, request, surely_gone)
        if request in remaining:
            remaining.remove(request)
    return verdicts


def _slid_off(ledger: Ledger, facts: StepFacts) -> Counter[BlockId]:
    """Holders that a block loses in the step because windows move on: whoever else has it may be the last."""
    gone: Counter[BlockId] = Counter()
    if any(ledger.group_windows):
        for row in facts.rows:
            for before, now in zip(row.record.tables, row.plan.block_tables, strict=False):
                gone.update(Counter(block for block in before if block != ledger.null_before) - Counter(now))
    return gone


def _gives_way(ledger: Ledger, victim: RequestRecord) -> bool:
    """Whether the engine declares that a more urgent waiting request may take the victim's place."""
    return ledger.capabilities.preempts_for_priority and any(
        other.state is not RequestState.RUNNING and other.spec.priority < victim.spec.priority
        for other in ledger.live.values()
    )
