"""Puts the stand-in `transformers_neuronx` where Python finds it, and takes it away again. Standard library only."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from reference_engine.runners.neuron.emulated.behaviour import Behaviour

PACKAGE = "transformers_neuronx"
SITE = Path(__file__).resolve().parent / "site"


class AlreadyInstalledError(RuntimeError):
    """The real package, or another stand-in, is importable: it must not be shadowed."""


class Installation:
    """The stand-in while it is installed: its behaviour, and the models made through it, first to last."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self.models: list[Any] = []


_stack: list[Installation] = []


def current() -> Installation:
    """The innermost installation; outside of any, a fresh one with the default behaviour."""
    return _stack[-1] if _stack else Installation(Behaviour())


def site_path() -> Path:
    """The folder to put on ``sys.path`` (or PYTHONPATH of another process) to import the stand-in."""
    return SITE


@contextlib.contextmanager
def installed(behaviour: Behaviour | None = None) -> Iterator[Installation]:
    """Make ``import transformers_neuronx`` find the stand-in while the context lasts.

    Models made meanwhile take ``behaviour`` and are listed in the installation. Inside another `installed`, only
    the behaviour changes. Modules that imported names from the stand-in keep them afterwards.

    Raises `AlreadyInstalledError` when a real package of that name can be imported. The placeholder of the
    public index, which raises ImportError, does not count.
    """
    installation = Installation(behaviour or Behaviour())
    outermost = not _stack
    if outermost:
        _refuse_the_real_one()
        sys.path.insert(0, str(SITE))
        importlib.invalidate_caches()
    _stack.append(installation)
    try:
        yield installation
    finally:
        _stack.remove(installation)
        if outermost:
            sys.path.remove(str(SITE))
            _forget()
            importlib.invalidate_caches()


def _forget() -> None:
    for name in [name for name in sys.modules if name == PACKAGE or name.startswith(f"{PACKAGE}.")]:
        del sys.modules[name]


def _refuse_the_real_one() -> None:
    found = sys.modules.get(PACKAGE) or importlib.util.find_spec(PACKAGE)
    origin = getattr(found, "__file__", None) or getattr(found, "origin", None)
    if found is None or (origin is not None and SITE in Path(origin).resolve().parents):
        return  # not there, or it is this one: site_path() is on sys.path already
    try:
        importlib.import_module(PACKAGE)
    except ImportError:  # the placeholder
        _forget()
        return
    raise AlreadyInstalledError(
        f"{PACKAGE} can be imported from {origin}: the emulated device does not stand in where the real package is. "
        f"Use the device, or an environment without the Neuron SDK"
    )
