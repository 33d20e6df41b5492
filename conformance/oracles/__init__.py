"""The oracles: each judges one family of requirements from plans, commits and snapshots."""

from __future__ import annotations

from conformance.oracles.accounting import AccountingOracle
from conformance.oracles.base import Oracle, Report
from conformance.oracles.caching import CachingOracle
from conformance.oracles.content import ContentOracle
from conformance.oracles.device import DeviceOracle
from conformance.oracles.encoder import EncoderOracle
from conformance.oracles.fairness import FairnessOracle
from conformance.oracles.limits import LimitsOracle
from conformance.oracles.preemption import PreemptionOracle
from conformance.oracles.progress import ProgressOracle

ORACLES: tuple[type[Oracle], ...] = (
    LimitsOracle,
    AccountingOracle,
    ContentOracle,
    PreemptionOracle,
    FairnessOracle,
    ProgressOracle,
    CachingOracle,
    EncoderOracle,
    DeviceOracle,
)
"""In the order in which they judge a step: what makes later judgements meaningless comes first."""

__all__ = ["ORACLES", "Oracle", "Report"]
