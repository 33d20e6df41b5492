"""CCH-3: after a reset of the prefix cache nothing of before is hit. CCH-1 and CCH-2 are scenarios."""

from __future__ import annotations

from conformance.ledger import Ledger
from conformance.oracles.base import Oracle, Report
from conformance.protocol import Capabilities, EngineConfig
from conformance.records import RequestRecord, StepFacts


class CachingOracle(Oracle):
    """O(blocks of the requests that start), and only once a reset has succeeded on an idle engine."""

    requirements = ("CCH-3",)

    @classmethod
    def concerns(cls, config: EngineConfig, capabilities: Capabilities) -> bool:  # noqa: ARG003 - asked alike of all
        return config.enable_prefix_caching

    def __init__(self, ledger: Ledger, report: Report) -> None:
        super().__init__(ledger, report)
        self._fresh: set[int] | None = None
        """Blocks written since the last reset of an idle engine; None before the first."""
        self._steps_quiet = 1 << 30
        """Steps since a request ended, which may leave blocks behind for a while."""

    def on_end(self, request: RequestRecord) -> None:
        self._steps_quiet = 0

    def on_reset(self, done: bool) -> None:  # noqa: FBT001 - the session's own signature
        if not self.ledger.live:
            if done:
                self._fresh = set()
            elif self._steps_quiet >= self.ledger.capabilities.deferred_free_steps:
                self.report(
                    "CCH-3",
                    "reset_prefix_cache fails with no request live",
                    expected="the cache is emptied",
                    got="refused",
                )
        elif done and self.ledger.running and self.ledger.capabilities.reset_with_live == "refused":
            self.report(
                "CCH-3",
                "reset_prefix_cache succeeds with requests running, though the engine declares that it refuses",
                expected="refused",
                got="done",
            )

    def on_step(self, facts: StepFacts) -> None:
        self._steps_quiet += 1
        if self._fresh is None:
            return
        size = self.ledger.group_sizes[0]
        self._fresh.update(move.dst for move in facts.plan.moves if move.kind in {"copy", "swap_in"})
        for load in facts.plan.loads:
            self._fresh.update(load.block_tables[0] if load.block_tables else ())
        for row in facts.rows:  # what one request fills another may hit in the same pass
            self._fresh.update(row.tables[0][-(-row.plan.first // size) :])
        for row in facts.rows:
            table = row.tables[0]
            if row.record.computed == 0 and row.plan.first:
                hit = set(table[: -(-row.plan.first // size)]) - {self.ledger.capabilities.null_block}
                stale = sorted(hit - self._fresh)
                if stale:
                    self.report(
                        "CCH-3",
                        f"{row.record.name} hits block {stale[0]}, cached before the prefix cache was reset",
                        expected="no hit on what was there before the reset",
                        got=f"{row.plan.first} positions taken from the cache",
                    )
        for row in facts.rows:
            self._fresh.update(row.tables[0][row.plan.first // size :])
