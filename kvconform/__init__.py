"""kvconform: does this engine's scheduler and KV-cache block manager keep the books right?

Everything public is here; the other packages are how it is built.
"""

from __future__ import annotations

from conformance.engines import EngineNotFound, EngineSource, installed, load, load_recorded
from conformance.execute import Execution, Replay, execute, open_session, replay
from conformance.explain import explain
from conformance.operations import Abort, AbortEnded, Add, Drain, Operation, ResetPrefixCache, Step
from conformance.protocol import (
    AdapterError,
    BlockMove,
    Capabilities,
    CommitResult,
    ConfigRefused,
    DeviceCall,
    DeviceShape,
    EncoderItem,
    Engine,
    EngineConfig,
    EngineFactory,
    Finished,
    KVCacheGroup,
    OwnModel,
    Preemption,
    Rejection,
    Request,
    RequestRefused,
    Sampled,
    SequencePlan,
    Snapshot,
    StepPlan,
    Taken,
    Usage,
)
from conformance.requirements import Requirement
from conformance.session import Session
from conformance.trace import Trace, TraceError, read_trace, write_trace
from conformance.version import __version__
from conformance.violations import Violation
from conformance.watchdog import Watchdog

__all__ = [
    "Abort",
    "AbortEnded",
    "AdapterError",
    "Add",
    "BlockMove",
    "Capabilities",
    "CommitResult",
    "ConfigRefused",
    "DeviceCall",
    "DeviceShape",
    "Drain",
    "EncoderItem",
    "Engine",
    "EngineConfig",
    "EngineFactory",
    "EngineNotFound",
    "EngineSource",
    "Execution",
    "Finished",
    "KVCacheGroup",
    "Operation",
    "OwnModel",
    "Preemption",
    "Rejection",
    "Replay",
    "Request",
    "RequestRefused",
    "Requirement",
    "ResetPrefixCache",
    "Sampled",
    "SequencePlan",
    "Session",
    "Snapshot",
    "Step",
    "StepPlan",
    "Taken",
    "Trace",
    "TraceError",
    "Usage",
    "Violation",
    "Watchdog",
    "__version__",
    "execute",
    "explain",
    "installed",
    "load",
    "load_recorded",
    "open_session",
    "read_trace",
    "replay",
    "write_trace",
]
