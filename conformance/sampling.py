"""The forward pass, as far as tokens go: compute a plan's positions, sample, accept or reject drafts.

Everything is decided by the prefix (`conformance.token_model`), so it happens when the step is planned, whatever
is in flight; the engine is told at the commit.
"""

from __future__ import annotations

from conformance.ledger import Ledger
from conformance.protocol import Sampled, SequenceKey
from conformance.records import SequenceRecord, StepFacts
from conformance.token_model import STOP_TOKEN


def execute_step(ledger: Ledger, facts: StepFacts, step: int) -> dict[SequenceKey, Sampled]:
    """Compute the plan's positions and sample where a sequence has reached its end. O(sequences of the step)."""
    sampled: dict[SequenceKey, Sampled] = {}
    for row in facts.rows:
        record, plan = row.record, row.plan
        drafts = plan.draft_tokens
        length = len(record.tokens)
        if row.spoilt:
            record.computed = min(record.computed, plan.first)
            record.rewound = True
            if plan.samples:
                sampled[record.key] = Sampled([ledger.tree.next_token(record.nodes[-1], record.seq) ^ 1])
            continue
        record.rewound = False
        record.computed = min(row.end - len(drafts), length)
        if record.computed < length:
            ledger.saw("prefill in chunks")
        else:
            request = record.request
            if request.first_token_step is None:
                request.first_token_step = step
            if not request.forked:
                ledger.fork(request)
                for sequence in request.sequences:
                    sampled[sequence.key] = _sample(ledger, sequence, [], step)
            else:
                sample = sampled[record.key] = _sample(ledger, record, drafts, step)
                if drafts:
                    rejected = record.rejected[facts.plan.step] = len(drafts) + 1 - len(sample.tokens)
                    if rejected:
                        ledger.saw("draft rejected")
        record.high_water = max(record.high_water, record.computed)
    return sampled


def _sample(ledger: Ledger, record: SequenceRecord, drafts: list[int], step: int) -> Sampled:
    """Sample after the sequence's last token; accept the drafts that agree with what comes out."""
    tree = ledger.tree
    request = record.request
    prompt_len = len(request.spec.prompt)
    tokens: list[int] = []
    while True:
        outputs = len(record.tokens) - prompt_len
        stops = request.stop_after is not None and outputs + 1 == request.stop_after + record.seq
        token = STOP_TOKEN if stops else tree.next_token(record.nodes[-1], record.seq)
        tokens.append(token)
        record.tokens.append(token)
        record.nodes.append(tree.extend(record.nodes[-1], token))
        ended = stops or len(record.tokens) >= request.full_len
        if ended and record.final_len is None:
            if stops:
                ledger.saw("stopped by its token")
            record.final_len = len(record.tokens)
            record.done_at_step = step
        # The model knows of no end: it samples on as far as drafts agree, and the engine is to cut that off.
        if len(tokens) > len(drafts) or drafts[len(tokens) - 1] != token:
            break
        record.computed += 1
        ledger.saw("draft accepted")
    width = ledger.config.num_speculative_tokens
    if not width:
        return Sampled(tokens)
    record.drafts = _propose(ledger, record, width)
    return Sampled(tokens, list(record.drafts))


def _propose(ledger: Ledger, record: SequenceRecord, width: int) -> list[int]:
    """Drafts for the next step: right for a while, then wrong, as the prefix decides."""
    tree, node = ledger.tree, record.nodes[-1]
    right = tree.next_token(node, record.seq + 1) % (width + 1)
    drafts = []
    for number in range(width):
        token = tree.next_token(node, record.seq)
        drafts.append(token if number < right else token ^ 1)
        node = tree.extend(node, drafts[-1])
    return drafts
