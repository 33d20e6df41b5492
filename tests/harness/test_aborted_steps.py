"""Engines that run an aborted request once more: declared, it is no fault, and what it writes counts."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest

from conformance.operations import Abort, Add, Operation, Step
from conformance.protocol import CommitResult, EngineConfig, Sampled, SequenceKey, StepPlan, Usage
from conformance.session import Session
from passed_on import PassedOn


class RunsOn(PassedOn):
    """Lets go of an aborted request when it has run ``runs`` more steps, of which it declares ``declared``."""

    def __init__(self, config: EngineConfig, runs: int = 1, declared: int = 1) -> None:
        super().__init__(config)
        self.capabilities = msgspec.structs.replace(
            self.inner.capabilities, aborted_steps=declared, deferred_free_steps=1
        )
        self._runs = runs
        self._leaving: dict[str, int] = {}
        self._rows: list[SequenceKey] = []

    def abort_request(self, request_id: str) -> None:
        if request_id in self.inner.snapshot().running:
            self._leaving[request_id] = self._runs
        else:
            self.inner.abort_request(request_id)

    def schedule(self) -> StepPlan:
        plan = self.inner.schedule()
        self._rows = [(one.request_id, one.seq) for one in plan.sequences if one.samples]
        return plan

    def commit(self, step: int, sampled: Mapping[SequenceKey, Sampled]) -> CommitResult:
        result = self.inner.commit(step, {row: sampled.get(row, Sampled([9])) for row in self._rows})
        for request_id in list(self._leaving):
            self._leaving[request_id] -= 1
            if not self._leaving[request_id]:
                del self._leaving[request_id]
                self.inner.abort_request(request_id)
        return result

    def usage(self) -> Usage:
        usage = self.inner.usage()
        assert usage.running is not None
        return msgspec.structs.replace(usage, running=usage.running - len(self._leaving))


OPERATIONS: list[Operation] = [Add(5, 9), Add(5, 9), Step(2), Abort(1), Step(3), Add(5, 2)]


def broken(config: EngineConfig, operations: list[Operation], **habits: int) -> set[str]:
    return {violation.requirement for violation in Session(RunsOn(config, **habits), config).run(operations)}


def test_one_step_more_is_no_fault_where_it_is_declared() -> None:
    assert broken(EngineConfig(), OPERATIONS) == set()


@pytest.mark.parametrize(("runs", "declared"), [(1, 0), (2, 1)])
def test_more_than_declared_is_a_fault(runs: int, declared: int) -> None:
    assert broken(EngineConfig(), OPERATIONS, runs=runs, declared=declared) == {"PRG-6"}


def test_what_the_last_step_writes_may_be_hit_by_who_goes_on_with_the_conversation() -> None:
    config = EngineConfig(block_size=1, num_blocks=64, enable_prefix_caching=True)
    session = Session(RunsOn(config), config)
    assert session.run([Add(5, 9), Step(2), Abort(0), Step(), Add(2, 2, continues=0)]) == []
    assert session.ledger.behaviours["prefix hit"] == 1
