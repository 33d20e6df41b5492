"""PRG-1 to PRG-7: what can run runs, what fits finishes, what cannot is refused, each gets its own tokens."""

from __future__ import annotations

from typing import Final

from conformance.ledger import Ledger
from conformance.oracles.base import Oracle, Report
from conformance.protocol import Finished
from conformance.records import RequestRecord, RequestState, StepFacts

STALLED_STEPS_MAX: Final = 8
"""Steps in a row without a scheduled token, for each live request, before it is a stall."""
CHURN_STEPS_MIN: Final = 32
CHURN_FACTOR: Final = 4
"""How often everything live may be computed again without anybody getting further."""


class ProgressOracle(Oracle):
    """Counts steps without progress; judges refusals, finishes and outputs; PRG-7 while somebody waits."""

    requirements = ("PRG-1", "PRG-2", "PRG-3", "PRG-4", "PRG-5", "PRG-7")

    def __init__(self, ledger: Ledger, report: Report) -> None:
        super().__init__(ledger, report)
        self.idle_steps = 0
        self.churn_steps = 0
        self.stuck = False
        """Nothing will change any more unless a request comes or goes: there is no use in going on."""

    # -- admission and refusal ---------------------------------------------------------------------------

    def on_add(self, request: RequestRecord) -> None:
        self._restart()

    def on_refused(self, request: RequestRecord, reason: str) -> None:
        self._restart()
        if self._is_full():
            return
        if not self._why_not_servable(request) and self.ledger.surely_fits(request):
            spec = request.spec
            self.report(
                "PRG-2",
                f"{spec.request_id} is refused though it fits",
                expected=f"prompt {len(spec.prompt)} + {spec.max_tokens} tokens, n = {spec.n}, needs "
                f"{self.ledger.full_blocks(request)} of {self.ledger.usable_blocks} usable blocks: served",
                got=f"refused: {reason}",
            )

    def _is_full(self) -> bool:
        """Whether the engine declares that it takes no further request now. It hears of first tokens at commits."""
        capabilities, live = self.ledger.capabilities, self.ledger.live.values()
        waits = [len(other.spec.prompt) for other in live if other.state is not RequestState.RUNNING or other.is_new]
        if capabilities.queue_tokens_max is not None and sum(waits) >= capabilities.queue_tokens_max:
            self.ledger.saw("refused for prompt tokens in the queue")
            return True
        if capabilities.queue_max is not None and len(live) >= capabilities.queue_max:
            self.ledger.saw("refused for requests in the queue")
            return True
        return False

    def _why_not_servable(self, request: RequestRecord) -> str:
        """Why no state of the engine would let the request finish, "" when one would. What PRG-3 wants refused."""
        ledger, config, spec = self.ledger, self.ledger.config, request.spec
        if ledger.has_length_limit and len(spec.prompt) >= ledger.tokens_max:
            return "no room for an output token under max_model_len"
        if spec.n > config.max_num_seqs and not ledger.capabilities.sequences_apart:
            return "more sequences than max_num_seqs"
        if ledger.can_never_fit(request):
            return "outgrows the pool"
        longest = request.full_len - 1 if config.preemption_mode == "recompute" else len(spec.prompt)
        if ledger.has_token_budget and not config.enable_chunked_prefill and longest > config.max_num_batched_tokens:
            return "a prefill longer than the token budget, without chunked prefill"
        if any(item.size > config.encoder_cache_size for item in spec.encoder_items):
            return "an encoder item larger than the encoder cache"
        return ""

    # -- progress ----------------------------------------------------------------------------------------

    def _restart(self) -> None:
        self.idle_steps = self.churn_steps = 0
        self.stuck = False

    def _is_churning(self) -> bool:
        """Whether everything live could have been computed `CHURN_FACTOR` times since anybody got further."""
        if self.churn_steps <= CHURN_STEPS_MIN:
            return False
        full = sum(request.full_len * request.spec.n for request in self.ledger.live.values())
        return self.churn_steps > CHURN_STEPS_MIN + CHURN_FACTOR * full

    def on_end(self, request: RequestRecord) -> None:
        self._restart()

    def on_step(self, facts: StepFacts) -> None:
        if not self.ledger.live:
            return
        if facts.plan.paused:
            self.ledger.saw("a step was paused")
            return
        # A step that schedules nothing still gets on with what is in flight.
        self.idle_steps = 0 if facts.rows or facts.in_flight else self.idle_steps + 1
        if any(row.end > row.record.high_water for row in facts.rows):
            self.churn_steps = 0
        else:
            self.churn_steps += 1

    def after_step(self, facts: StepFacts) -> None:
        live = self.ledger.live
        if not live:
            return
        if self.idle_steps > STALLED_STEPS_MAX * (1 + len(live)):
            self._report_stuck("PRG-1", facts, f"{self.idle_steps} steps in a row schedule nothing")
        elif self._is_churning():
            self._report_stuck(
                "PRG-4", facts, f"in {self.churn_steps} steps nobody got further than they had been before"
            )
        elif facts.preempted:
            self._judge_preemption_count(facts)
        self._judge_work_conserving(facts)

    def _report_stuck(self, requirement: str, facts: StepFacts, what: str) -> None:
        live = list(self.ledger.live.values())
        impossible = [request for request in live if self._why_not_servable(request)]
        if impossible:
            requirement = "PRG-3"
            first = impossible[0]
            what += f"; {first.spec.request_id} can never finish ({self._why_not_servable(first)}) and was not refused"
        elif len(live) == 1 and requirement == "PRG-1" and self.ledger.surely_fits(live[0]):
            requirement = "PRG-2"
            what += f"; {live[0].spec.request_id} is alone and fits"
        states = ", ".join(
            f"{request.spec.request_id} {request.state.value} {request.sequences[0].computed}/{request.full_len}"
            for request in live[:6]
        )
        self.report(
            requirement,
            f"after step {facts.plan.step}: {what}",
            expected="some request runs and gets further" if requirement != "PRG-3" else "refused with a reason",
            got=f"{states}; {self.ledger.free_blocks} of {self.ledger.usable_blocks} blocks free",
        )
        self._restart()
        self.stuck = True

    def _judge_preemption_count(self, facts: StepFacts) -> None:
        """PRG-4: recomputations are bounded by the lengths of the requests that lived at the same time."""
        for request, _ in facts.preempted:
            bound = 16 + sum(
                other.full_len * other.spec.n
                for other in self.ledger.requests.values()
                if other.live or other.arrived_step >= request.arrived_step
            )
            if request.preemptions > bound:
                self.report(
                    "PRG-4",
                    f"{request.spec.request_id} is preempted {request.preemptions} times",
                    expected=f"at most {bound} times, given the requests it lived with",
                    got=str(request.preemptions),
                )

    def _judge_work_conserving(self, facts: StepFacts) -> None:
        """PRG-7: the head of the queue is not left waiting with room for it in every respect."""
        ledger, config = self.ledger, self.ledger.config
        if len(ledger.running) == len(ledger.live) or self._owes_no_admission(facts):
            return
        head = self._head()
        if head is None or self._why_not_servable(head) or head.arrived_step > facts.plan.step:
            return
        # Whoever has passed it over, when there was no room for its encoder items, returns before it.
        passed_over = head.spec.encoder_items and any(request is not head for request in ledger.preempted.values())
        if passed_over or ledger.may_lack_encoder_room(head):
            return
        free = min(ledger.free_blocks, facts.free_before)  # what the step itself gave back came too late
        if facts.usage_after.free_blocks is not None:
            free = min(free, facts.usage_after.free_blocks)
        lengths = [len(record.tokens) for record in head.unfinished()]
        ahead = config.num_lookahead_slots + config.num_speculative_tokens + ledger.capabilities.lookahead_tokens
        blocks = sum(ledger.blocks_for(length + ahead) for length in lengths)
        blocks += ledger.capabilities.preallocated_blocks * len(lengths) * len(ledger.group_sizes)
        scheduled = sum(row.plan.num_tokens for row in facts.rows)
        budget = config.max_num_batched_tokens - scheduled if ledger.has_token_budget else 1 << 30
        wanted = self._tokens_to_start(lengths) + config.num_speculative_tokens
        if blocks <= free < blocks + ledger.watermark_blocks:
            ledger.saw("held back by the watermark")
        if ledger.running_max < ledger.running_sequences + head.spec.n <= config.max_num_seqs:
            ledger.saw("held back below max_num_seqs")
        if (
            blocks + ledger.watermark_blocks <= free
            and ledger.running_sequences + head.spec.n <= ledger.running_max
            and wanted <= budget
        ):
            self.report(
                "PRG-7",
                f"{head.spec.request_id} heads the queue, fits, and is not admitted in step {facts.plan.step}",
                expected=f"admitted: it needs {blocks} blocks and {wanted} tokens of the budget",
                got=f"{free} blocks free, {ledger.running_max - ledger.running_sequences} sequences free, "
                f"{budget if ledger.has_token_budget else 'unlimited'} tokens of the budget left",
            )

    def _owes_no_admission(self, facts: StepFacts) -> bool:
        """Whether something else than room may have kept the head of the queue out of the step."""
        ledger = self.ledger
        if facts.preempted or facts.plan.paused or ledger.config.pipeline_depth > 1:
            return True
        if ledger.capabilities.prefill_interval > 1 and facts.running_before:
            if self._head() is not None:
                ledger.saw("waited for its turn to prefill")
            return True  # newcomers wait for their turn
        return (
            bool(facts.aborted)  # whose places are not free yet
            or any(move.kind == "swap_in" for move in facts.plan.moves)  # who was swapped out goes first, and decodes
            or any(ledger.group_states)  # a chunk ends where a state is kept; a hit on a state waits for the next step
            # Who loads is let in only beside all that others on their way will need.
            or "kv_connector" in ledger.capabilities.features
        )

    def _tokens_to_start(self, lengths: list[int]) -> int:
        """Tokens of the budget that the head's first step takes at least."""
        config = self.ledger.config
        if not config.enable_chunked_prefill:
            return max(lengths)
        if config.enable_prefix_caching and self.ledger.capabilities.chunks_whole_blocks:
            return min(max(lengths), config.block_size)
        return 1

    def _head(self) -> RequestRecord | None:
        """Who is to run next: None if nobody waits, or somebody is swapped out (who goes first) or out of turn."""
        ledger = self.ledger
        if any(request.state is RequestState.SWAPPED for request in ledger.preempted.values()):
            return None
        queued = [request for request in ledger.live.values() if request.state is not RequestState.RUNNING]
        if any(request.loads for request in queued):
            return None
        if ledger.config.scheduling_policy == "fcfs":
            return queued[0] if queued else None  # live requests are in order of arrival
        return min(queued, key=lambda request: request.rank("priority"), default=None)

    # -- outputs -----------------------------------------------------------------------------------------

    def on_commit(self, step: int, finished: list[Finished], ended: list[RequestRecord]) -> None:
        reported = {report.request_id: report for report in finished}
        for request in ended:
            report = reported.pop(request.spec.request_id, None)
            if report is None:
                self.report(
                    "PRG-5",
                    f"{request.spec.request_id} has all its tokens after step {step} and is not reported as finished",
                    expected="finished",
                    got=f"outputs {[len(record.tokens) - len(request.spec.prompt) for record in request.sequences]}",
                )
                continue
            expected = [record.tokens[len(request.spec.prompt) : record.final_len] for record in request.sequences]
            if report.outputs != expected:
                self.report(
                    "PRG-5",
                    f"{request.spec.request_id} finished with tokens that are not its own",
                    expected=f"outputs {expected}",
                    got=f"outputs {report.outputs}",
                )
        for rid, early in reported.items():
            known = self.ledger.requests.get(rid)
            if known is not None and known.state is RequestState.FINISHED:
                self.report(
                    "PRG-5",
                    f"{rid} is reported as finished after step {step}, and was before",
                    expected="one report of its end",
                    got=f"outputs {early.outputs}",
                )
            elif known is not None and known.live:
                produced = [len(record.tokens) - len(known.spec.prompt) for record in known.sequences]
                self.report(
                    "PRG-5",
                    f"{rid} is reported as finished after step {step} before it has its tokens",
                    expected=f"{known.full_len - len(known.spec.prompt)} outputs each",
                    got=f"{produced} outputs, reason {early.reason!r}",
                )
