"""LIM-*: sequences on the running set, tokens per step, length of a sequence, speculative tokens."""

from __future__ import annotations

from conformance.ledger import Ledger
from conformance.oracles.base import Oracle, Report
from conformance.records import Row, StepFacts


class LimitsOracle(Oracle):
    """LIM-1 to LIM-4. O(sequences of the step)."""

    requirements = ("LIM-1", "LIM-2", "LIM-3", "LIM-4")

    def __init__(self, ledger: Ledger, report: Report) -> None:
        super().__init__(ledger, report)
        config = ledger.config
        self._length_max = config.max_model_len if ledger.has_length_limit else None
        ahead = config.num_lookahead_slots or config.num_speculative_tokens
        self._reaches_ahead = ledger.has_length_limit and bool(ahead)

    def on_step(self, facts: StepFacts) -> None:
        config, length_max = self.ledger.config, self._length_max
        tokens = 0
        for row in facts.rows:
            plan = row.plan
            tokens += plan.num_tokens
            drafts = len(plan.draft_tokens)
            if length_max is not None and row.end > length_max:
                self.report(
                    "LIM-4" if row.end - drafts <= length_max else "LIM-3",
                    f"{row.record.name} computes position {row.end - 1}, past the model's length",
                    expected=f"positions below max_model_len = {length_max}",
                    got=f"positions {plan.first} to {row.end - 1}",
                )
            if drafts > config.num_speculative_tokens:
                self.report(
                    "LIM-4",
                    f"{row.record.name} runs {drafts} draft tokens",
                    expected=f"at most num_speculative_tokens = {config.num_speculative_tokens}",
                    got=str(drafts),
                )
            if self._reaches_ahead:
                self._check_ahead(row)
        if tokens > config.max_num_batched_tokens and self.ledger.has_token_budget:
            self.report(
                "LIM-2",
                f"step {facts.plan.step} schedules {tokens} tokens",
                expected=f"at most max_num_batched_tokens = {config.max_num_batched_tokens}",
                got=" + ".join(str(row.plan.num_tokens) for row in facts.rows),
            )

    def _check_ahead(self, row: Row) -> None:
        """LIM-4: no slot is set aside past the model's length; a runner's row of block ids ends there."""
        ledger, table = self.ledger, row.tables[0]
        tokens = max(ledger.tokens_max, len(row.record.tokens), row.end)
        most = ledger.blocks_for(tokens) + ledger.capabilities.preallocated_blocks
        if len(table) > most:
            self.report(
                "LIM-4",
                f"{row.record.name} holds {len(table)} blocks, past the model's length",
                expected=f"at most {most} blocks of {ledger.block_size} tokens, for {tokens} tokens",
                got=f"table {table}",
            )

    def after_step(self, facts: StepFacts) -> None:
        running = self.ledger.running_sequences
        limit = self.ledger.config.max_num_seqs
        if running > limit:
            self.report(
                "LIM-1",
                f"the running set holds {running} sequences after step {facts.plan.step}",
                expected=f"at most max_num_seqs = {limit}",
                got=", ".join(self.ledger.running),
            )
