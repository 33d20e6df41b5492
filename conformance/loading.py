"""KV that comes from elsewhere: what a KV connector's loads mean for the ledger, as plans tell.

A late load holds blocks before its request runs. A load that fails leaves blocks without content, and the engine
hears of it only when the step is committed: until then whoever runs through such blocks (*is spoilt*) computes
nothing that is worth anything, and the engine is to drop what is sampled and to start over from the first block
that did not come.
"""

from __future__ import annotations

from conformance.ledger import Ledger
from conformance.protocol import AdapterError, BlockId, KVLoad, RequestId, SequenceKey
from conformance.records import RequestRecord, RequestState, Row, StepFacts


class Loads:
    """What is loaded, is under way, or failed in a step not committed yet."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._failed: dict[int, set[BlockId]] = {}
        """Step in flight -> blocks of its own loads that nothing came for."""
        self._spoilt: dict[int, set[SequenceKey]] = {}
        """Step in flight -> sequences whose tokens are to be dropped."""

    def begin(self, facts: StepFacts) -> None:
        """Enter the loads of a plan, before its sequences run. O(their tables)."""
        ledger, plan = self._ledger, facts.plan
        for rid in plan.unloaded:
            self._give_back(rid)
        for load in plan.loads:
            request = ledger.live.get(load.request_id)
            if request is None:
                raise AdapterError(f"step {plan.step} loads KV of {load.request_id!r}, which is not live")
            request.loads += 1
            if load.late:
                self._begin_late(request, load)
                continue
            ledger.saw("KV loaded in time")
            request.sequences[0].computed = load.first + load.num_tokens
            if load.failed_from is not None:
                ledger.saw("a load failed")
                request.load_failed = True
                self._failed.setdefault(plan.step, set()).update(self._blocks_missing(load))

    def _begin_late(self, request: RequestRecord, load: KVLoad) -> None:
        if load.num_tokens:
            self._ledger.saw("late load begun")
            self._ledger.set_tables(request.sequences[0], load.block_tables)
        else:
            self._ledger.saw("passed over until the connector knows")
        request.state = RequestState.LOADING

    def _give_back(self, rid: RequestId) -> None:
        request = self._ledger.live.get(rid)
        if request is not None and request.state is RequestState.LOADING:
            self._ledger.drop(request)
            request.sequences[0].computed = 0
            request.state = RequestState.PREEMPTED if rid in self._ledger.preempted else RequestState.WAITING

    def _blocks_missing(self, load: KVLoad) -> set[BlockId]:
        assert load.failed_from is not None, "asked of a failed load"
        missing: set[BlockId] = set()
        for size, table in zip(self._ledger.group_sizes, load.block_tables, strict=True):
            missing.update(table[load.failed_from // size : -(-(load.first + load.num_tokens) // size)])
        return missing - {self._ledger.capabilities.null_block}

    def mark(self, facts: StepFacts) -> None:
        """Find the rows that run through blocks that nothing came for. O(their tables), only while there are such."""
        ledger, failed = self._ledger, bool(self._failed)
        for row in facts.rows:
            request = row.record.request
            if failed and self._runs_through_missing(row):
                row.spoilt = True
                if all(load.request_id != request.spec.request_id for load in facts.plan.loads):
                    ledger.saw("a failed load is shared or run ahead of")
                request.load_failed = True
                self._spoilt.setdefault(facts.plan.step, set()).add(row.record.key)
            elif request.load_failed:
                ledger.saw("recomputed after a failed load")
                request.load_failed = False

    def _runs_through_missing(self, row: Row) -> bool:
        tables = [
            table[: -(-row.end // size)] for size, table in zip(self._ledger.group_sizes, row.tables, strict=True)
        ]
        return any(not missing.isdisjoint(table) for missing in self._failed.values() for table in tables)

    def arrive(self, facts: StepFacts) -> None:
        """The late loads that were to be there when the step is over."""
        for load in facts.plan.loaded:
            request = self._ledger.requests[load.request_id]
            if not request.live:
                self._ledger.saw("late load arrived after its request ended")
                continue
            failed = load.failed_from is not None
            self._ledger.saw("a late load failed" if failed else "late load arrived")
            request.load_failed = failed
            record = request.sequences[0]
            end = load.first + load.num_tokens if load.failed_from is None else load.failed_from
            record.computed = min(end, len(record.tokens) - 1)

    def commit(self, step: int) -> set[SequenceKey]:
        """The engine is told what failed in ``step``: the sequences whose tokens it is to drop."""
        self._failed.pop(step, None)
        return self._spoilt.pop(step, set())
