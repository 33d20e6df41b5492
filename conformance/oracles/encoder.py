"""ENC-1: the encoder cache keeps the same books as the block pool. Unit: embedding slots (``EncoderItem.size``)."""

from __future__ import annotations

from conformance.ledger import Ledger
from conformance.oracles.base import Oracle, Report
from conformance.protocol import Capabilities, EngineConfig
from conformance.records import RequestRecord, StepFacts


class EncoderOracle(Oracle):
    """O(encoder items of the step's requests); nothing when no request has any."""

    requirements = ("ENC-1",)

    @classmethod
    def concerns(cls, config: EngineConfig, capabilities: Capabilities) -> bool:  # noqa: ARG003 - asked alike of all
        return config.encoder_cache_size > 0

    def __init__(self, ledger: Ledger, report: Report) -> None:
        super().__init__(ledger, report)
        self._cached: dict[str, int] = {}
        """Key -> size of what the encoder cache holds."""

    def on_add(self, request: RequestRecord) -> None:
        size = self.ledger.config.encoder_cache_size
        for item in request.spec.encoder_items:
            if size and item.size > size:
                self.report(
                    "ENC-1",
                    f"{request.spec.request_id} is accepted with an encoder item of {item.size}",
                    expected=f"refused: the encoder cache holds {size}",
                    got="queued",
                )

    def on_step(self, facts: StepFacts) -> None:
        plan = facts.plan
        for key in plan.encoder_freed:
            self._free(facts, key)
        for rid, index in plan.encoder_run:
            request = self.ledger.requests.get(rid)
            if request is None or index >= len(request.spec.encoder_items):
                self.report(
                    "ENC-1",
                    f"step {plan.step} encodes item {index} of {rid}",
                    expected="an item of a live request",
                    got="no such item",
                )
                continue
            item = request.spec.encoder_items[index]
            self._cached[item.key] = item.size
        if self._cached:
            used, size = sum(self._cached.values()), self.ledger.config.encoder_cache_size
            if used > size:
                self.report(
                    "ENC-1",
                    f"the encoder cache holds {used} after step {plan.step}",
                    expected=f"at most {size}",
                    got=", ".join(f"{key}: {item}" for key, item in sorted(self._cached.items())),
                )
        for row in facts.rows:
            for item in row.record.request.spec.encoder_items:
                reached = item.first < row.end and row.plan.first < item.first + item.size
                if reached and item.key not in self._cached:
                    self.report(
                        "ENC-1",
                        f"{row.record.name} computes positions of encoder item {item.key}, which is not cached",
                        expected="the item is encoded before the positions that need it",
                        got=f"cached: {', '.join(sorted(self._cached)) or 'nothing'}",
                    )

    def _free(self, facts: StepFacts, key: str) -> None:
        """An item may go only when no running request has positions of it still to compute."""
        if self._cached.pop(key, None) is None:
            self.report(
                "ENC-1",
                f"step {facts.plan.step} frees encoder item {key}",
                expected="an item that is cached",
                got="it is not",
            )
        if self._encodes(facts, key):
            return  # encoded again before anybody needs it
        for request in self.ledger.running.values():
            for record in request.unfinished():
                for item in request.spec.encoder_items:
                    if item.key != key or not item.first < record.computed < item.first + item.size:
                        continue
                    self.report(
                        "ENC-1",
                        f"encoder item {key} is evicted while {record.name} still needs it",
                        expected=f"kept until position {item.first + item.size - 1} is computed",
                        got=f"{record.computed} positions computed",
                    )

    def _encodes(self, facts: StepFacts, key: str) -> bool:
        """Whether the step's plan encodes the item, for whichever request."""
        for rid, index in facts.plan.encoder_run:
            request = self.ledger.requests.get(rid)
            items = () if request is None else request.spec.encoder_items
            if index < len(items) and items[index].key == key:
                return True
        return False
