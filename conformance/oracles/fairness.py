"""FAIR-*: who may overtake whom at admission."""

from __future__ import annotations

from conformance.ledger import Ledger, RequestRecord, RequestState, Row, StepFacts
from conformance.oracles.base import Oracle, Report

OVERTAKEN_MAX = 64
"""How many later arrivals may pass a waiting request before "without bound" is said, per running sequence."""


class FairnessOracle(Oracle):
    """FAIR-1, FAIR-2. Works only in steps that admit somebody while somebody waits."""

    requirements = ("FAIR-1", "FAIR-2")

    def __init__(self, ledger: Ledger, report: Report) -> None:
        super().__init__(ledger, report)
        self._overtaken: dict[str, int] = {}

    def before_step(self, facts: StepFacts) -> None:
        fcfs = self.ledger.config.scheduling_policy == "fcfs"
        # Under priority it makes no difference whether somebody comes, or waits, for the first time or again.
        admitted = [row for row in facts.rows if row.admitted or (row.resumed and not fcfs)]
        if not admitted or len(self.ledger.live) == len(facts.rows):
            return
        queued = (RequestState.WAITING,) if fcfs else (RequestState.WAITING, RequestState.PREEMPTED)
        in_plan = {row.record.request.spec.request_id for row in facts.rows}
        in_plan.update(rejection.request_id for rejection in facts.plan.rejected)
        waiting = [
            request
            for request in self.ledger.live.values()
            if request.state in queued and request.spec.request_id not in in_plan
        ]
        if not waiting:
            return
        if fcfs:
            for row in admitted:
                self._judge_arrivals(facts, row, waiting)
        else:
            for row in admitted:
                self._judge_priority(facts, row, waiting)

    def _judge_arrivals(self, facts: StepFacts, row: Row, waiting: list[RequestRecord]) -> None:
        newcomer = row.record.request.spec
        hit = row.plan.first
        for request in waiting:
            spec = request.spec
            if spec.arrival > newcomer.arrival or not self.ledger.surely_fits(request):
                continue
            count = self._overtaken[spec.request_id] = self._overtaken.get(spec.request_id, 0) + 1
            alike = len(spec.prompt) <= len(newcomer.prompt) - hit and spec.n <= newcomer.n
            if alike or count > OVERTAKEN_MAX * self.ledger.config.max_num_seqs:
                self.report(
                    "FAIR-1",
                    f"{newcomer.request_id} is admitted in step {facts.plan.step} before {spec.request_id}, "
                    + ("which arrived earlier and asks for no more" if alike else f"overtaken {count} times"),
                    expected=f"{spec.request_id} (prompt {len(spec.prompt)}) first",
                    got=f"{newcomer.request_id} (prompt {len(newcomer.prompt)}, {hit} of it cached)",
                )
                return

    def _judge_priority(self, facts: StepFacts, row: Row, waiting: list[RequestRecord]) -> None:
        newcomer = row.record.request.spec
        for request in waiting:
            spec = request.spec
            if spec.priority < newcomer.priority and self._would_fit_instead(facts, row, request):
                self.report(
                    "FAIR-2",
                    f"{newcomer.request_id} of priority {newcomer.priority} is admitted in step "
                    f"{facts.plan.step} while {spec.request_id} of priority {spec.priority} waits and fits",
                    expected=f"{spec.request_id} first (smaller is more urgent)",
                    got=f"{newcomer.request_id} runs",
                )
                return

    def _would_fit_instead(self, facts: StepFacts, row: Row, request: RequestRecord) -> bool:
        """Whether ``request`` would have fitted in the very place that the admitted row took."""
        tokens = sum(len(record.tokens) for record in request.unfinished())
        places = row.record.request.spec.n
        needs_no_more = tokens <= len(row.record.tokens) - row.plan.first and request.spec.n <= places
        return needs_no_more and self.ledger.surely_fits(request)
