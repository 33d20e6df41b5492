"""PRE-1 to PRE-5: nobody is preempted without need, in the wrong order, for nothing, or for ever."""

from __future__ import annotations

from collections import Counter

from conformance.need import PreemptionVerdict, blocks_released, judge_preemptions
from conformance.oracles.base import Oracle
from conformance.records import HOLDING, StepFacts


class PreemptionOracle(Oracle):
    """Works only in steps with a preemption or an admission. PRE-6 and PRE-7 are scenarios."""

    requirements = ("PRE-1", "PRE-2", "PRE-3", "PRE-4", "PRE-5")

    def before_step(self, facts: StepFacts) -> None:
        if facts.preempted:
            for verdict in judge_preemptions(self.ledger, facts):
                self._judge(facts, verdict)
            self._judge_order(facts)
        self._judge_return(facts)

    def _judge(self, facts: StepFacts, verdict: PreemptionVerdict) -> None:
        who, step = verdict.request_id, facts.plan.step
        request = self.ledger.requests[who]
        if verdict.needless:
            counted = "" if verdict.counted is None else f"; the engine counted {verdict.counted}"
            self.report(
                "PRE-1",
                f"{who} is preempted in step {step} although the running set needs {verdict.needed} "
                f"blocks and {verdict.free} are free",
                expected="no preemption",
                got=f"preemption {request.preemptions + 1} of {who} by {verdict.mode}{counted}",
            )
        running = len(facts.running_before)
        if verdict.full_need <= verdict.usable and verdict.needless:
            self.report(
                "PRE-2",
                f"{who} is recomputed in step {step} although the pool holds all {running} running "
                f"requests at their full length",
                expected="every prompt prefilled once, no preemption",
                got=f"preemption {request.preemptions + 1} of {who}; {verdict.full_need} of "
                f"{verdict.usable} usable blocks would serve everybody to the end",
            )
        holding = any(other.state in HOLDING for other in self.ledger.live.values())
        if verdict.released == 0 and not holding:  # who shares its blocks cannot be made to let go
            self.report(
                "PRE-5",
                f"the preemption of {who} in step {step} frees no block",
                expected="at least one block freed, or no preemption",
                got=f"blocks {verdict.block_ids}, each held by others too" if verdict.block_ids else "no block held",
            )

    def _judge_order(self, facts: StepFacts) -> None:
        policy = self.ledger.config.scheduling_policy
        victims = {request.spec.request_id for request, _ in facts.preempted}
        # Who was loaded, or had its items find no room, was passed over then or may have come out of turn.
        keeping = [
            r for r in facts.running_before if r.spec.request_id not in victims and r.unfinished() and not r.loads
        ]
        for request, _ in facts.preempted:
            if request.spec.encoder_items or request.loads:
                continue
            for other in keeping:
                if other.rank(policy) > request.rank(policy) and blocks_released(self.ledger, other, Counter()):
                    later = "arrived later" if other.spec.priority == request.spec.priority else "is less urgent"
                    self.report(
                        "PRE-3",
                        f"{request.spec.request_id} is preempted in step {facts.plan.step} while "
                        f"{other.spec.request_id}, which {later}, keeps running",
                        expected=f"{other.spec.request_id} goes first",
                        got=f"victims {', '.join(victims_in_order(facts))}",
                    )
                    return

    def _judge_return(self, facts: StepFacts) -> None:
        """PRE-4: nobody who arrived later, at the same priority, is admitted before a preempted request is back."""
        if not self.ledger.preempted and not facts.preempted:
            return
        away = [*self.ledger.preempted.values(), *(request for request, _ in facts.preempted)]
        # Who was loaded may have had its blocks before anybody was preempted.
        admitted = [row.record.request for row in facts.rows if row.admitted and not row.record.request.loads]
        if not admitted:
            return
        back = {row.record.request.spec.request_id for row in facts.rows}
        back.update(rejection.request_id for rejection in facts.plan.rejected)
        back.update(load.request_id for load in facts.plan.loads)
        for request in away:
            if (
                request.spec.request_id in back
                or request.state in HOLDING
                or self.ledger.may_lack_encoder_room(request, (row.record.request for row in facts.rows))
            ):
                continue
            since = facts.plan.step if request.preempted_step is None else request.preempted_step
            for newcomer in admitted:
                if newcomer.spec.priority == request.spec.priority and newcomer.spec.arrival > request.spec.arrival:
                    self.report(
                        "PRE-4",
                        f"{newcomer.spec.request_id} is admitted in step {facts.plan.step} while "
                        f"{request.spec.request_id}, preempted in step {since}, still waits",
                        expected=f"{request.spec.request_id} returns first",
                        got=f"{newcomer.spec.request_id} runs",
                    )
                    return


def victims_in_order(facts: StepFacts) -> list[str]:
    """Ids of the step's victims, in the order chosen."""
    return [request.spec.request_id for request, _ in facts.preempted]
