"""Notable behaviours of a step, counted so that a campaign can tell what it has reached and what it has not."""

from __future__ import annotations

from conformance.ledger import Ledger
from conformance.records import StepFacts


def note_step(ledger: Ledger, facts: StepFacts) -> None:
    """Count what a step shows by its plan alone. O(its sequences), and O(live requests) when somebody is admitted."""
    plan, saw = facts.plan, ledger.saw
    if facts.in_flight and facts.rows:
        saw("ran with steps in flight")
        if facts.preempted:
            saw("preempted with steps in flight")
    for move in plan.moves:
        saw("copied on write" if move.kind == "copy" else f"block {move.kind}")
    if plan.encoder_run:
        saw("encoder item computed")
    if plan.encoder_freed:
        saw("encoder item evicted")
    null = ledger.capabilities.null_block
    for row in facts.rows:
        if row.plan.draft_tokens and min(row.plan.draft_tokens) < 0:
            saw("drafts padded")
        if null is not None:
            for table in row.tables:
                if null in table:
                    saw("block behind the window")
                    break
        if row.admitted and ledger.config.scheduling_policy == "priority":
            _note_overtaking(ledger, row.record.request.spec.arrival)


def _note_overtaking(ledger: Ledger, arrival: int) -> None:
    first = next(iter(ledger.live.values()))
    if first.spec.arrival < arrival and first.admitted_step is None:
        ledger.saw("more urgent one admitted first")
