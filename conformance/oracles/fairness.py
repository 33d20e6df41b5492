"""FAIR-*: who may overtake whom at admission."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from conformance.ledger import Ledger
from conformance.oracles.base import Oracle, Report
from conformance.records import RequestRecord, RequestState, Row, StepFacts

OVERTAKEN_MAX: Final = 64
"""How many later arrivals may pass a waiting request before "without bound" is said, per running sequence."""


PASSED_OVER_MAX: Final = 2
"""Steps in a row in which later arrivals may run and a running request not, for each request that runs."""


class FairnessOracle(Oracle):
    """FAIR-1, FAIR-2. Works only in steps that leave somebody out, on the running set or in the queue."""

    requirements = ("FAIR-1", "FAIR-2")

    def __init__(self, ledger: Ledger, report: Report) -> None:
        super().__init__(ledger, report)
        self._overtaken: dict[str, int] = {}
        self._passed_over: dict[str, int] = {}
        """Running requests -> steps in a row that ran later arrivals of the running set and not them."""

    def before_step(self, facts: StepFacts) -> None:
        fcfs = self.ledger.config.scheduling_policy == "fcfs"
        # Under priority it makes no difference whether somebody comes, or waits, for the first time or again.
        admitted = [row for row in facts.rows if row.admitted or (row.resumed and not fcfs)]
        if fcfs and (self._passed_over or len(facts.running_before) != len(facts.rows)):
            self._judge_turns(facts)
        if not admitted or len(self.ledger.live) == len(facts.rows):
            return
        queued = (RequestState.WAITING,) if fcfs else (RequestState.WAITING, RequestState.PREEMPTED)
        in_plan = {row.record.request.spec.request_id for row in facts.rows}
        in_plan.update(rejection.request_id for rejection in facts.plan.rejected)
        in_plan.update(load.request_id for load in facts.plan.loads)
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
                if not row.record.request.loads:  # else it may hold its blocks already
                    self._judge_priority(facts, row, waiting)
                if row.record.request.state is RequestState.SWAPPED:
                    self._judge_swapped(facts, row.record.request, in_plan)

    def _judge_turns(self, facts: StepFacts) -> None:
        """FAIR-1 on the running set: who is on it gets a turn, sooner or later, while later arrivals get theirs."""
        running = [request for request in facts.running_before if request.state is RequestState.RUNNING]
        served = {row.record.request.spec.request_id for row in facts.rows}
        last = max((r.spec.arrival for r in running if r.spec.request_id in served), default=-1)
        before, self._passed_over = self._passed_over, {}
        for request in running:
            rid = request.spec.request_id
            if rid in served or request.spec.arrival > last or not request.unfinished() or request.spec.encoder_items:
                continue
            if request.loads:
                continue  # it may have been passed over while its KV was loaded, and so be the newcomer
            count = self._passed_over[rid] = before.get(rid, 0) + 1
            if count > PASSED_OVER_MAX * (1 + len(running)):
                self.report(
                    "FAIR-1",
                    f"{rid} is on the running set and gets nothing for {count} steps in which later arrivals run",
                    expected="a turn for everybody who runs",
                    got=f"step {facts.plan.step} runs {', '.join(sorted(served))}",
                )

    def _judge_arrivals(self, facts: StepFacts, row: Row, waiting: list[RequestRecord]) -> None:
        newcomer = row.record.request.spec
        hit = row.plan.first
        for request in waiting:
            spec = request.spec
            if spec.arrival > newcomer.arrival or not self.ledger.surely_fits(request):
                continue
            count = self._overtaken[spec.request_id] = self._overtaken.get(spec.request_id, 0) + 1
            # Whose encoder items find no room now is passed over.
            alike = not spec.encoder_items and len(spec.prompt) <= len(newcomer.prompt) - hit and spec.n <= newcomer.n
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

    def _judge_swapped(self, facts: StepFacts, back: RequestRecord, in_plan: Collection[str]) -> None:
        """FAIR-2 among those swapped out: of two that need as much, the more urgent one comes back first."""
        if any(self.ledger.group_windows):
            return  # how many blocks one needs does not follow from its length
        for request in self.ledger.preempted.values():
            spec = request.spec
            if (
                request.state is RequestState.SWAPPED
                and spec.request_id not in in_plan
                and spec.priority < back.spec.priority
                and spec.n == back.spec.n == 1
                and len(request.sequences[0].tokens) <= len(back.sequences[0].tokens)
            ):
                self.report(
                    "FAIR-2",
                    f"{back.spec.request_id} of priority {back.spec.priority} is swapped in in step "
                    f"{facts.plan.step} while {spec.request_id} of priority {spec.priority} waits and fits",
                    expected=f"{spec.request_id} first (smaller is more urgent)",
                    got=f"{back.spec.request_id} runs",
                )
                return

    def _would_fit_instead(self, facts: StepFacts, row: Row, request: RequestRecord) -> bool:
        """Whether ``request`` would have fitted in the very place that the admitted row took."""
        if request.spec.encoder_items:
            return False  # they may find no room now
        tokens = sum(len(record.tokens) for record in request.unfinished())
        places = row.record.request.spec.n
        needs_no_more = tokens <= len(row.record.tokens) - row.plan.first and request.spec.n <= places
        return needs_no_more and self.ledger.surely_fits(request)
