"""The reference engine with its assertions taken out, so that nothing is found by them.

What ``python -O`` does to a whole process is done here to one package: its sources are compiled again without
assertions and every function is given the new code. The harness keeps its own.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

import reference_engine

_Place = tuple[str, int]
"""Name and first line: what tells the functions of one file apart."""


def without_assertions() -> int:
    """Take the assertions out of the reference engine for the rest of the process. Returns how many functions changed.

    Parts of `fuzz.bugbench.parts` inherit the functions, so engines with planted faults lose them too.
    """
    changed = 0
    for module in _modules():
        assert module.__file__ is not None, "the reference engine is made of files"
        source = Path(module.__file__).read_bytes()
        stripped = dict(_codes(compile(source, module.__file__, "exec", dont_inherit=True, optimize=1)))
        for function in _functions(module):
            code = stripped[function.__code__.co_name, function.__code__.co_firstlineno]
            changed += code.co_code != function.__code__.co_code
            function.__code__ = code
    return changed


def _modules() -> Iterator[ModuleType]:
    """The modules of the engine itself; its runners, which no fault concerns, need more than the standard library."""
    for found in pkgutil.iter_modules(reference_engine.__path__):
        if not found.ispkg:
            yield importlib.import_module(f"reference_engine.{found.name}")


def _codes(code: CodeType) -> Iterator[tuple[_Place, CodeType]]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield (constant.co_name, constant.co_firstlineno), constant
            yield from _codes(constant)


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    """The functions and methods written in the file of ``module``, not those that are generated or imported."""
    owners = [module, *(kind for kind in vars(module).values() if inspect.isclass(kind))]
    for member in [member for owner in owners for member in vars(owner).values()]:
        plain = member.fget if isinstance(member, property) else inspect.unwrap(getattr(member, "__func__", member))
        if isinstance(plain, FunctionType) and plain.__code__.co_filename == module.__file__:
            yield plain
