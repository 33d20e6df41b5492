"""What the commit of a step means for the ledger: whose tokens the engine has taken, and who is over by them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from conformance.ledger import Ledger
from conformance.loading import Loads
from conformance.protocol import CommitResult, Sampled, SequenceKey
from conformance.records import RequestRecord, RequestState, SequenceRecord


class Commits:
    """Settles commits one after the other. ``on_end`` is told who is over, and as what."""

    def __init__(self, ledger: Ledger, loads: Loads, on_end: Callable[[RequestRecord, RequestState], None]) -> None:
        self._ledger = ledger
        self._loads = loads
        self._on_end = on_end

    def take(
        self, step: int, sampled: Mapping[SequenceKey, Sampled], result: CommitResult, *, last: bool
    ) -> list[RequestRecord]:
        """The tokens of ``step`` are the engine's. Returns who has all outputs asked for.

        ``last``: no other step is in flight. Requests whose load failed end here, where the engine declares that.
        """
        ledger = self._ledger
        ended: list[RequestRecord] = []
        spoilt = self._loads.commit(step)
        self._end_failed(result)
        for key in sampled:
            request = ledger.live.get(key[0])
            if request is None or key in spoilt:
                continue
            record = request.sequences[key[1]]
            record.rejected.pop(step, None)
            if _dropped(record, step, result):
                if record.done_at_step == step:
                    record.forget(record.len_min)
                continue
            if last:
                record.len_min = len(record.tokens)
            else:
                record.len_min = max(record.len_min, min(len(record.tokens), record.len_min + len(sampled[key].tokens)))
            if record.done and record.done_at_step == step:
                if not request.spec.streamed:
                    ledger.set_tables(record, [])
                    record.settled = True
                if request.spec.streamed or (request.forked and all(one.settled for one in request.sequences)):
                    ended.append(request)
        return ended

    def end(self, ended: list[RequestRecord], step: int) -> None:
        """Requests that have the outputs asked for are over, or go on with their next input from ``step`` on."""
        for request in ended:
            if request.spec.streamed:
                self._ledger.go_on(request, step)
            else:
                self._on_end(request, RequestState.FINISHED)

    def _end_failed(self, result: CommitResult) -> None:
        """Requests that the engine ends, as it declares, because KV they need did not come."""
        if self._ledger.capabilities.load_failures != "fail":
            return
        for report in result.finished:
            request = self._ledger.live.get(report.request_id)
            if request is not None and request.load_failed:
                self._ledger.saw("ended by a failed load")
                self._on_end(request, RequestState.FAILED)


def _dropped(record: SequenceRecord, step: int, result: CommitResult) -> bool:
    """Whether the tokens of ``step`` count as dropped: the engine took the sequence off the running set meanwhile.

    It may compute them again. Of several sequences the end of one is not reported, so that nothing can be told.
    """
    if record.set_aside_step is not None and record.set_aside_step > step:
        return True
    request = record.request
    away = request.preempted_step is not None and request.preempted_step > step
    return away and request.spec.n == 1 and all(one.request_id != record.key[0] for one in result.finished)
