"""A plan is matched with the books: every sequence it names is found, or what is wrong with naming it is said."""

from __future__ import annotations

from collections.abc import Collection

from conformance.ledger import Ledger
from conformance.oracles.base import Report
from conformance.protocol import AdapterError, SequenceKey, SequencePlan, StepPlan
from conformance.records import RequestRecord, RequestState, Row, SequenceRecord, StepFacts
from conformance.token_model import PADDING_TOKEN


class PlanMatcher:
    """Fills the facts of a step from its plan. ``in_flight``: the plans not committed yet, and what was sampled."""

    def __init__(self, ledger: Ledger, report: Report, in_flight: Collection[tuple[StepPlan, object]]) -> None:
        self._ledger = ledger
        self._capabilities = ledger.capabilities
        self._report = report
        self._in_flight = in_flight

    def match(self, facts: StepFacts) -> bool:
        """Find the record of everything the plan names. False when the plan names what it may not."""
        ledger, plan = self._ledger, facts.plan
        for preemption in plan.preempted:
            request = ledger.live.get(preemption.request_id)
            if request is None:
                return self._wrong_plan(preemption.request_id, "preempts", plan)
            if preemption.seq is not None and any(
                not record.settled for record in request.sequences if record.seq != preemption.seq
            ):
                self._set_aside(request.sequences[preemption.seq], preemption.mode, plan.step)
            else:
                facts.preempted.append((request, preemption))
        self._check_device_calls(plan)
        seen: set[SequenceKey] = set()
        for sequence in self._without_aborted(facts):
            request = ledger.live.get(sequence.request_id)
            if request is None:
                return self._wrong_plan(sequence.request_id, "runs", plan)
            if not self._is_whole(sequence, request, plan):
                return False
            key = (sequence.request_id, sequence.seq)
            if self._capabilities.sequences_apart and not request.forked and (sequence.seq or sequence.samples):
                ledger.fork_ahead(request)
            record = request.sequences[sequence.seq] if sequence.seq < len(request.sequences) else None
            if record is None or key in seen or (record.done and not self._still_in_flight(record)):
                what = "twice" if key in seen else "before its fork" if record is None else "after its last token"
                self._report(
                    "PRG-5",
                    f"step {plan.step} runs sequence {sequence.seq} of {sequence.request_id} {what}",
                    expected="each unfinished sequence at most once in a step",
                    got=span(sequence),
                )
                return False
            seen.add(key)
            if sequence.draft_tokens:
                self._settle_drafts(record, sequence)
            if sequence.seq and not record.tables and sequence.first < min(record.computed, record.len_min - 1):
                record.computed = 0  # there was no room to fork it: it starts anew
            if sequence.optimistic:
                sequence.first -= sum(record.rejected.values())
            facts.rows.append(self._row(record, sequence, facts))
        return True

    def _is_whole(self, sequence: SequencePlan, request: RequestRecord, plan: StepPlan) -> bool:
        """False when it takes a token without running a position. Raises `AdapterError` for what no engine can say."""
        if sequence.num_tokens == 0 and sequence.samples:
            self._report(
                "PRG-5",
                f"step {plan.step} takes a token for {sequence.request_id} and runs none of its positions",
                expected="a position to compute the token from; a hit on a whole prompt leaves none",
                got=f"{sequence.first} positions from the cache and 0 to run",
            )
            return False
        if (
            sequence.num_tokens < (0 if self._capabilities.sequences_apart else 1)
            or sequence.first < 0
            or not 0 <= sequence.seq < request.spec.n
            or len(sequence.block_tables) != max(1, len(self._ledger.config.kv_cache_groups))
        ):
            raise AdapterError(f"step {plan.step}: malformed {sequence!r}")
        return True

    def _without_aborted(self, facts: StepFacts) -> list[SequencePlan]:
        """The plan's sequences without those of aborted requests that may still be planned, which are set aside."""
        if not self._capabilities.aborted_steps:
            return facts.plan.sequences
        others = []
        for sequence in facts.plan.sequences:
            request = self._ledger.requests.get(sequence.request_id)
            if request is None or request.state is not RequestState.ABORTED or not request.aborted_steps:
                others.append(sequence)
                continue
            request.aborted_steps -= 1
            facts.aborted.append((request.sequences[sequence.seq], sequence))
        return others

    @staticmethod
    def _settle_drafts(record: SequenceRecord, sequence: SequencePlan) -> None:
        """What the model runner runs as drafts: its own, if the engine does not know them, and no token for padding."""
        known = record.drafts if sequence.optimistic else sequence.draft_tokens
        sequence.draft_tokens = [
            known[index] if index < len(known) and known[index] >= 0 else PADDING_TOKEN
            for index in range(len(sequence.draft_tokens))
        ]

    def _check_device_calls(self, plan: StepPlan) -> None:
        for call in plan.device_calls:
            known = all(key[0] in self._ledger.requests for key in [*call.rows, *(call.returned or ())])
            if not known or not len(call.rows) == len(call.lines) == len(call.positions) > 0:
                raise AdapterError(f"step {plan.step}: malformed {call!r}")

    def _row(self, record: SequenceRecord, sequence: SequencePlan, facts: StepFacts) -> Row:
        request = record.request
        resumed = request.spec.request_id in self._ledger.preempted
        if facts.preempted and not resumed and "preempted" in self._capabilities.keeps_blocks:  # back in the very step
            resumed = any(one is request for one, _ in facts.preempted)
        return Row(record, sequence, admitted=request.admitted_step is None, resumed=resumed)

    def _still_in_flight(self, record: SequenceRecord) -> bool:
        """A sequence that stopped in a step not yet committed: the engine could not know."""
        return any(plan.step == record.done_at_step for plan, _ in self._in_flight)

    def _wrong_plan(self, rid: str, verb: str, plan: StepPlan) -> bool:
        request = self._ledger.requests.get(rid)
        if request is None:
            raise AdapterError(f"step {plan.step} {verb} {rid!r}, a request that was never added")
        self._report(
            "PRG-6" if request.state is RequestState.ABORTED else "PRG-5",
            f"step {plan.step} {verb} {rid}, which was {request.state.value}",
            expected="live requests only",
            got=", ".join(span(s) for s in plan.sequences if s.request_id == rid) or verb,
        )
        return False

    def _set_aside(self, record: SequenceRecord, mode: str, step: int) -> None:
        """One of several sequences is off the running set before ``step`` runs; it does not count as a preemption."""
        self._ledger.saw("one of several sequences preempted")
        self._ledger.set_tables(record, [])
        record.set_aside_step = step
        record.len_min = min(record.len_min, len(record.tokens))
        if mode == "recompute":
            record.computed = 0


def span(sequence: SequencePlan) -> str:
    """The sequence and the positions that it is planned to run, as messages show them."""
    return (
        f"{sequence.request_id}/{sequence.seq} positions {sequence.first} to {sequence.first + sequence.num_tokens - 1}"
    )
