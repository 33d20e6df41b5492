"""An engine that always fails, to prove that what runs the fuzzer reports failures."""

from __future__ import annotations

import msgspec

from conformance.protocol import EngineConfig, Usage
from fuzz.bugbench.parts import Seat, build
from fuzz.bugbench.probe import Counters


class _Canary(Seat):
    """Says from the first step on that it has preempted one request more than it has."""

    def usage(self) -> Usage:
        usage = super().usage()
        assert usage.preemptions is not None, "the reference engine counts them"
        return msgspec.structs.replace(usage, preemptions=usage.preemptions + 1)


def canary(config: EngineConfig) -> Seat:
    """Breaks ACC-10 in the first step of every run, whatever the configuration."""
    return build({Seat: _Canary}, config, Counters(), "canary")
