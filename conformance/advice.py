"""What to do next after an error: the last part of every message that a person meets."""

from __future__ import annotations

import re
from typing import Final

from conformance.engines import EngineNotFound
from conformance.expectations import ExpectationsError
from conformance.protocol import AdapterError, ConfigRefused
from conformance.reports.events import EventsError
from conformance.trace import TraceError

_ABOUT_ENGINES: Final = ("engine_options", "declare", "does not have")
_INSTALL: Final = re.compile(r"pip install \S+(?: \S+)*?(?=$|[;,)])")


_ENGINES: Final = "kvconform engines, which lists what each engine takes and declares"
_BY_KIND: Final[tuple[tuple[type[Exception], str], ...]] = (
    (EngineNotFound, _ENGINES),
    (AdapterError, _ENGINES),
    (EventsError, "kvconform check ENGINE --events FILE, which writes such a file"),
    (TraceError, "kvconform record ENGINE 4x10+30 --out FILE, or kvconform fuzz ENGINE, which write such a file"),
    (ExpectationsError, "pytest --pyargs conformance.suite --kv-expectations FILE, once the file is mended"),
)


def installing(text: str) -> str:
    """The command in ``text`` that installs what is missing; "" without one."""
    found = _INSTALL.search(text)
    return found[0] if found is not None else ""


def next_command(error: Exception, command: str = "") -> str:
    """The command that leads on from ``error``, met in ``kvconform COMMAND``, and what it is for."""
    text = str(error)
    if installing(text):
        return installing(text)
    if isinstance(error, EngineNotFound) and " --engine " in text:
        return f"kvconform {command} FILE{text[text.index(' --engine ') :]}"
    if (
        isinstance(error, ConfigRefused)
        and any(word in text for word in _ABOUT_ENGINES)
        and "no such field" not in text
    ):
        return _ENGINES
    found = next((advice for kind, advice in _BY_KIND if isinstance(error, kind)), None)
    return found or " ".join(["kvconform", *([command] if command else []), "--help"])
