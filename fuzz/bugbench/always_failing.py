"""An engine that always fails, to prove that what runs the fuzzer reports failures."""

from __future__ import annotations

from conformance.protocol import EngineConfig, Usage
from fuzz.bugbench.parts import Seat, build
from fuzz.bugbench.probe import Counters


class _Canary(Seat):
    """Cannot show its figures, which every run asks for before it does anything."""

    def usage(self) -> Usage:
        raise RuntimeError("the canary sings")


def canary(config: EngineConfig) -> Seat:
    """Breaks PRG-8 in every run, whatever the configuration."""
    return build({Seat: _Canary}, config, Counters(), "canary")
