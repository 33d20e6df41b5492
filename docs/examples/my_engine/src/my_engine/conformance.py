"""The seat that kvconform takes: its calls in the words of the engine, and back. Nothing is decided here."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version

from kvconform import (
    Capabilities,
    CommitResult,
    ConfigRefused,
    EngineConfig,
    Finished,
    Preemption,
    Request,
    RequestRefused,
    Sampled,
    SequencePlan,
    Snapshot,
    StepPlan,
    Usage,
)
from my_engine.scheduler import NoRoom, Scheduler, Sequence

CAPABILITIES = Capabilities(
    engine="my-engine",
    version=version("my-engine"),
    features=frozenset({"abort", "length_limit", "recompute", "snapshot", "stop_token", "token_budget", "usage"}),
)


class MyEngine:
    """Fulfils `kvconform.Engine`."""

    def __init__(self, config: EngineConfig) -> None:
        self._scheduler = Scheduler(
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
        )
        self._in_flight: list[Sequence] = []
        self._steps = 0

    @property
    def capabilities(self) -> Capabilities:
        return CAPABILITIES

    def add_request(self, request: Request) -> None:
        if request.n > 1:
            raise RequestRefused(f"n = {request.n}: one sequence a request")
        try:
            self._scheduler.add(request.request_id, request.prompt, request.max_tokens, request.stop_token)
        except NoRoom as reason:
            raise RequestRefused(str(reason)) from None

    def abort_request(self, request_id: str) -> None:
        self._scheduler.abort(request_id)

    def schedule(self) -> StepPlan:
        step = self._scheduler.step()
        plan = StepPlan(step=self._steps)
        self._steps += 1
        for victim in step.victims:
            plan.preempted.append(
                Preemption(
                    request_id=victim.sequence.request_id,
                    mode="recompute",
                    blocks_counted=victim.lacking,
                    blocks_free=victim.free,
                    asked_by=victim.asked_by.request_id,
                )
            )
        for sequence, first, count in step.run:
            plan.sequences.append(
                SequencePlan(
                    request_id=sequence.request_id, first=first, num_tokens=count, block_tables=[list(sequence.table)]
                )
            )
        self._in_flight = [sequence for sequence, _, _ in step.run]
        return plan

    def commit(self, step: int, sampled: Mapping[tuple[str, int], Sampled]) -> CommitResult:
        result = CommitResult()
        for sequence in self._in_flight:
            # Who was aborted while the step ran has no token.
            answer = sampled.get((sequence.request_id, 0))
            if answer is not None and self._scheduler.take(sequence, answer.tokens[0]):
                outputs = sequence.tokens[sequence.prompt_len :]
                result.finished.append(Finished(request_id=sequence.request_id, outputs=[outputs]))
        return result

    def reset_prefix_cache(self) -> bool:
        return True

    def usage(self) -> Usage:
        scheduler = self._scheduler
        return Usage(
            free_blocks=len(scheduler.free),
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            preemptions=scheduler.preemptions,
        )

    def snapshot(self) -> Snapshot:
        scheduler = self._scheduler
        return Snapshot(
            free=list(scheduler.free),
            held={one.request_id: [list(one.table)] for one in scheduler.running},
            waiting=[one.request_id for one in scheduler.waiting],
            running=[one.request_id for one in scheduler.running],
        )

    def close(self) -> None:
        """Nothing to release."""


def make(config: EngineConfig) -> MyEngine:
    """The factory that the entry point names. Raises `ConfigRefused`."""
    missing = sorted(config.features_needed() - CAPABILITIES.features)
    if missing or config.engine_options:
        raise ConfigRefused(f"my-engine does not have: {', '.join([*missing, *config.engine_options])}")
    longest = max(config.max_model_len, config.max_num_seqs)
    if config.max_num_batched_tokens < longest:
        raise ConfigRefused(
            f"max_num_batched_tokens = {config.max_num_batched_tokens}: a prompt is not cut into chunks and everybody "
            f"decodes in one step, so it must be at least max_model_len and max_num_seqs, {longest}"
        )
    return MyEngine(config)
