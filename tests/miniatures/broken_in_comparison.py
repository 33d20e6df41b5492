"""Miniatures that only a comparison of several runs, or a workload of a certain kind, shows to be wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from conformance.protocol import CommitResult, EngineConfig, Sampled, SequenceKey

from .clean import Miniature
from .jobs import Job, Sequence


class KeepsBlockInReserve(Miniature):
    """Admits only with a block to spare, undeclared. Modelled on vLLM PR 8008, one block more than the batch needs."""

    breaks = "PRE-6"

    def admission_need(self, job: Job) -> int:
        return super().admission_need(job) + (1 if self.running else 0)


class SlowWhenFull(Miniature):
    """Decodes a full batch in every other step only. Modelled on the collapse in upstreaming-to-vllm PR 17."""

    breaks = "PRE-7"

    def go_on(self, job: Job) -> bool:
        full = len(self.running) == self.config.max_num_seqs
        return not (full and self.steps % 2) and super().go_on(job)


class DropsLastHit(Miniature):
    """Hits one block fewer than it could. Modelled on vLLM #42258, a mask that drops what another feature needs."""

    breaks = "CCH-1"

    def hits(self, job: Job, sequence: Sequence) -> list[int]:
        return super().hits(job, sequence)[:-1]


class CountsCachedAsUsed(Miniature):
    """Admits into free blocks alone and evicts one a step. Modelled on lmdeploy PR 4100, cached counted as used."""

    breaks = "CCH-2"

    def fits(self, job: Job) -> bool:
        if self.admission_need(job) <= len(self.pool.free):
            return super().fits(job)
        if self.pool.cached:
            block = next(iter(self.pool.cached))
            del self.pool.cached[block]
            self.pool.forget(block)
            self.pool.free.append(block)
        return False


class DiffersFromOneToTheNext(Miniature):
    """Counts the engines of the process, and every second one admits one request a step (class-level state)."""

    breaks = "DET-1"
    built: ClassVar[int] = 0

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        DiffersFromOneToTheNext.built += 1
        self.hesitates = bool(self.built % 2)

    def fits(self, job: Job) -> bool:
        return not (self.hesitates and self.plan.sequences) and super().fits(job)


class GarblesThePreempted(Miniature):
    """Reports other tokens for a request that was preempted. Modelled on vLLM #15763, other output after recompute."""

    breaks = "DET-2"

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.garbled: set[str] = set()

    def preempt(self, job: Job, need: int, asked_by: Job) -> None:
        super().preempt(job, need, asked_by)
        self.garbled.add(job.rid)

    def commit(self, step: int, sampled: Mapping[SequenceKey, Sampled]) -> CommitResult:
        result = super().commit(step, sampled)
        for report in result.finished:
            if report.request_id in self.garbled:
                report.outputs = [[*outputs[:-1], 0] for outputs in report.outputs]
        return result
