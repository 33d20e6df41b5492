"""The version of kvconform; one place for wheel, traces and reports."""

from __future__ import annotations

import importlib.util

__version__ = "0.1.0"


def as_built() -> str:
    """The version, and whether what runs in every step is compiled."""
    spec = importlib.util.find_spec("conformance.session")
    assert spec is not None and spec.origin is not None, "it is of this package"
    return __version__ if spec.origin.endswith(".py") else f"{__version__}, compiled"
