"""The bug bench: how good the fuzzer is, measured on faults whose truth is known.

Every planted fault is an engine that can be named, as ``fuzz.bugbench:FAULT``, and so is `canary`, which always
fails; `fuzz.bugbench.registry.load` gives the records. The words reached, triggered and detected are those of
Magma (Hazimeh, Herrera and Payer, "Magma: A Ground-Truth Fuzzing Benchmark", SIGMETRICS 2021).
"""

from __future__ import annotations

from conformance.protocol import EngineFactory


def __getattr__(name: str) -> EngineFactory:
    """The engines with the fault ``name``; the reference engine is imported no sooner than here."""
    from fuzz.bugbench.always_failing import canary  # noqa: PLC0415 - only who asks for it pays for the import
    from fuzz.bugbench.registry import load  # noqa: PLC0415 - only who asks for it pays for the import

    if name == "canary":
        return canary
    fault = load().get(name)
    if fault is None:
        raise AttributeError(f"no planted fault {name!r}; `kvconform bench --list` names them")
    return fault.factory()
