"""The reference engine behind a proxy, for tests that change one of its answers."""

from __future__ import annotations

from collections.abc import Mapping

from conformance.adapters.reference import ReferenceAdapter, make
from conformance.protocol import (
    Capabilities,
    CommitResult,
    EngineConfig,
    Request,
    Sampled,
    SequenceKey,
    Snapshot,
    StepPlan,
    Usage,
)


class PassedOn:
    """Passes every call on to a reference engine, ``inner``."""

    def __init__(self, config: EngineConfig) -> None:
        inner = make(config)
        assert isinstance(inner, ReferenceAdapter)
        self.inner = inner
        self.capabilities: Capabilities = inner.capabilities

    def add_request(self, request: Request) -> None:
        self.inner.add_request(request)

    def abort_request(self, request_id: str) -> None:
        self.inner.abort_request(request_id)

    def schedule(self) -> StepPlan:
        return self.inner.schedule()

    def commit(self, step: int, sampled: Mapping[SequenceKey, Sampled]) -> CommitResult:
        return self.inner.commit(step, sampled)

    def reset_prefix_cache(self) -> bool:
        return self.inner.reset_prefix_cache()

    def usage(self) -> Usage:
        return self.inner.usage()

    def snapshot(self) -> Snapshot:
        return self.inner.snapshot()

    def close(self) -> None:
        self.inner.close()
