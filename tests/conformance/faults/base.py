"""The reference engine, passed through a proxy whose methods a fault overrides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from conformance.protocol import (
    CommitResult,
    EngineConfig,
    Request,
    Sampled,
    SequenceKey,
    StepPlan,
)
from passed_on import PassedOn


class Faulty(PassedOn):
    """Passes everything on to a reference engine; a fault overrides one method, or ``inner_config``."""

    breaks: ClassVar[str] = ""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(self.inner_config(config))
        self.config = config
        self.live: list[str] = []
        self.steps = 0

    def inner_config(self, config: EngineConfig) -> EngineConfig:
        return config

    def add_request(self, request: Request) -> None:
        self.inner.add_request(request)
        self.live.append(request.request_id)

    def abort_request(self, request_id: str) -> None:
        self.inner.abort_request(request_id)
        if request_id in self.live:
            self.live.remove(request_id)

    def schedule(self) -> StepPlan:
        plan = self.inner.schedule()
        self.steps += 1
        self.twist(plan)
        return plan

    def twist(self, plan: StepPlan) -> None:
        """Where a fault changes the plan."""

    def commit(self, step: int, sampled: Mapping[SequenceKey, Sampled]) -> CommitResult:
        result = self.inner.commit(step, sampled)
        for report in result.finished:
            if report.request_id in self.live:
                self.live.remove(report.request_id)
        return result


def changed(config: EngineConfig, **fields: Any) -> EngineConfig:
    return msgspec.structs.replace(config, **fields)
