"""Stand-ins for modules that an engine imports and never runs here.

A stand-in may be named, subscripted, inherited from and used as a decorator, which is all that importing asks; a call
raises and names it.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any


class _Absent:
    """A name of a module that is stood in for."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name

    def __getattr__(self, name: str) -> _Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self.__name__}.{name}")

    def __call__(self, *args: Any, **options: Any) -> Any:
        if len(args) == 1 and callable(args[0]) and not options:
            return args[0]
        raise RuntimeError(f"{self.__name__} is stood in for: the adapter does not expect it to be called")

    def __getitem__(self, _: Any) -> _Absent:
        return self

    def __or__(self, _: Any) -> _Absent:
        return self

    __ror__ = __or__

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[Any, ...]:
        return ()

    def __instancecheck__(self, _: object) -> bool:
        return False


class AbsentModule(ModuleType):
    """A module that is stood in for: it has every name."""

    __path__ = []  # noqa: RUF012 - a package, whose modules are looked for

    def __getattr__(self, name: str) -> _Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self.__name__}.{name}")


class _AbsentFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a stand-in for each module that ``absent`` names, installed or not."""

    def __init__(self, absent: Collection[str], given: Mapping[str, Mapping[str, Any]]) -> None:
        self._absent = absent
        self._given = given

    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if any((name + ".").startswith(absent + ".") for absent in self._absent):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return AbsentModule(spec.name, "A stand-in: no model is run and nothing is served.")

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(self._given.get(module.__name__, {}))


@contextmanager
def stood_in(absent: Collection[str], given: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """Import with stand-ins for ``absent``, modules of the engine and whole packages beside it.

    ``given``: what a stand-in has besides, by module. Nothing is compiled that torch would compile on import, and
    the stand-ins of packages are gone afterwards.
    """
    torch: Any = importlib.import_module("torch")
    finder = _AbsentFinder(absent, given)
    shadowed = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in absent}
    compiled = torch.compile
    torch.compile = lambda function=None, **_: (lambda it: it) if function is None else function
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        torch.compile = compiled
        for name in [name for name in sys.modules if name.partition(".")[0] in absent]:
            del sys.modules[name]
        sys.modules.update(shadowed)
