"""The records of the planted faults: what each one corrupts, which report it is modelled on, how it is built."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec

from conformance.protocol import EngineConfig, EngineFactory, Feature
from fuzz.bugbench.parts import KINDS, Seat, build
from fuzz.bugbench.probe import Counters

VLLM = "https://github.com/vllm-project/vllm/issues/"
"""Issues and pull requests of vLLM share one numbering, and this address leads to either."""

_T = TypeVar("_T")
_RECORDS: dict[str, PlantedFault] = {}


class PlantedFault(msgspec.Struct, frozen=True, kw_only=True):
    """One fault that can be planted in the reference engine.

    ``breaks``: the requirements it may be seen to break, the most telling one first. ``source``: the report it is
    modelled on. ``needs``: features a configuration must turn on (or requests must use) for it to matter.
    ``deep``: why it is hard to reach, "" when it is not.
    """

    id: str
    family: str
    breaks: tuple[str, ...]
    description: str
    source: str
    needs: tuple[Feature, ...] = ()
    deep: str = ""
    hangs: bool = False
    """A call into the engine may not return: it is watched with a short bound."""
    parts: Mapping[type, type]

    def factory(self, counters: Counters | None = None) -> EngineFactory:
        """Engines with this fault, which count for ``counters``."""
        counted = Counters() if counters is None else counters

        def make(config: EngineConfig) -> Seat:
            return build(self.parts, config, counted, self.id)

        return make


def planted(
    family: str,
    *breaks: str,
    source: str,
    needs: tuple[Feature, ...] = (),
    deep: str = "",
    hangs: bool = False,
) -> Callable[[type[_T]], type[_T]]:
    """Register the class as a fault: itself a part of the engine, or a holder of several such classes.

    Its docstring is the description, its name the id: ``FreesTwice`` becomes ``frees_twice``.
    """

    def register(fault: type[_T]) -> type[_T]:
        name = re.sub(r"(?<!^)(?=[A-Z])", "_", fault.__name__).lower()
        assert name not in _RECORDS, f"two faults are called {name}"
        assert fault.__doc__ is not None, f"{name}: its docstring is its description"
        parts = {kind: part for part in (fault, *vars(fault).values()) if (kind := _kind_of(part)) is not None}
        assert parts, f"{name} replaces no part of the engine"
        _RECORDS[name] = PlantedFault(
            id=name,
            family=family,
            breaks=breaks,
            description=" ".join(fault.__doc__.split()),
            source=source,
            needs=tuple(sorted(needs)),
            deep=deep,
            hangs=hangs,
            parts=parts,
        )
        return fault

    return register


def _kind_of(part: object) -> type | None:
    """Which part of the engine the class replaces, None when it is no such class."""
    if not isinstance(part, type):
        return None
    return next((kind for kind in KINDS if issubclass(part, kind)), None)


def load() -> dict[str, PlantedFault]:
    """Every planted fault by id, family by family. Raises nothing: the records are part of this package."""
    package = importlib.import_module("fuzz.bugbench.planted")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    return {fault.id: fault for fault in sorted(_RECORDS.values(), key=lambda fault: fault.family)}
