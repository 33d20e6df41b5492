"""Calls into the engine under test: watched, and whatever comes of one but its answer is a finding."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar

import msgspec

from conformance.protocol import AdapterError
from conformance.watchdog import EngineHung, MemoryExhausted, Watchdog

T = TypeVar("T")

ENGINE_RAISES: Final = (Exception, SystemExit, GeneratorExit)
"""What an engine may raise; an interrupt is the user's."""
NONSENSE: Final = (TypeError, AttributeError, LookupError, ValueError, OverflowError)
"""What the harness runs into when an answer has a part of the wrong type."""


_HERE: Final = __file__ if __file__.endswith(".py") else "conformance/calls.py"
"""This file as tracebacks name it, compiled or not."""


class EngineFailed(Exception):  # noqa: N818 - named for what the engine did
    """An engine in another process failed at a call, told as a finding tells it.

    ``told`` completes the sentence that begins with the call's name. ``requirement``: the one that is broken,
    where it is not the one that the call is judged by.
    """

    def __init__(self, told: str, *, expected: str, got: str, requirement: str = "") -> None:
        super().__init__(f"{told} ({got})")
        self.told = told
        self.expected = expected
        self.got = got
        self.requirement = requirement


class EngineCalls:
    """Makes the calls of one session. ``failed(requirement, message, expected, got)`` hears of what goes wrong."""

    __slots__ = ("_answers", "_failed", "_watchdog")

    def __init__(self, failed: Callable[[str, str, str, str], None], watchdog: Watchdog | None) -> None:
        self._failed = failed
        self._watchdog = watchdog
        self._answers: dict[str, Any] = {}
        """The last answer to each call, to be looked at when the harness cannot make sense of one."""

    def make(
        self,
        name: str,
        function: Callable[..., T],
        *arguments: Any,
        answers: tuple[type[Exception], ...] = (),
        expects: type | None = None,
        requirement: str = "PRG-8",
    ) -> T | None:
        """The engine's answer; None when it raised or answered another type than ``expects``.

        Exceptions in ``answers``, and `AdapterError`, are raised.
        """
        watchdog = self._watchdog
        if watchdog is not None:
            watchdog.begin(name)
        try:
            result = function(*arguments) if arguments else function()
            if watchdog is not None:
                watchdog.arrive()
        except answers:
            raise
        except AdapterError:
            raise
        except ENGINE_RAISES as error:
            self.raised(name, error, requirement)
            return None
        finally:
            if watchdog is not None:
                watchdog.end()
        if expects is not None:
            if not isinstance(result, expects):
                self._malformed(name, f"{type(result).__name__}, not {expects.__name__}")
                return None
            self._answers[name] = result
        return result

    def raised(self, name: str, error: BaseException, requirement: str = "PRG-8") -> None:
        """A call raised ``error``."""
        if not isinstance(error, EngineFailed):
            kind, message, place = raised_by(error, _HERE)
            if self._watchdog is not None and isinstance(error, (EngineHung, MemoryExhausted)):
                self._watchdog.stopped_at = self._watchdog.stopped_at or place
                place = ""
            error = raised(kind, message, place)
        self._failed(error.requirement or requirement, f"{name} {error.told}", error.expected, error.got)

    def find_malformed(self) -> bool:
        """Whether a part of the engine's last answers is not of the type its interface declares; reports it."""
        for name, answer in self._answers.items():
            try:
                msgspec.convert(msgspec.to_builtins(answer), type(answer))
            except NONSENSE as error:
                self._malformed(name, str(error))
                return True
            problem = _unlike(answer, "")
            if problem:
                self._malformed(name, problem)
                return True
        return False

    def _malformed(self, name: str, problem: str) -> None:
        self.raised(name, malformed(problem))


def _unlike(value: object, where: str) -> str:
    """The first part of an answer that only looks like what its interface declares, such as a tuple for a list."""
    parts: Iterable[tuple[str, object]] = ()
    if isinstance(value, msgspec.Struct):
        parts = ((f"{where}.{name}", getattr(value, name)) for name in value.__struct_fields__)
    elif type(value) is list:
        parts = ((f"{where}[{index}]", part) for index, part in enumerate(value))
    elif type(value) is dict:
        parts = ((f"{where}[{key!r}]", part) for key, part in value.items())
    elif value is not None and type(value) not in (bool, int, str):
        return f"{type(value).__name__} at {where or 'its top'}"
    return next((problem for place, part in parts if (problem := _unlike(part, place))), "")


def raised_by(error: BaseException, caller: str) -> tuple[str, str, str]:
    """The type of ``error``, its first line, and where it was raised: deepest, and outside the file ``caller``."""
    frames = traceback.extract_tb(error.__traceback__)
    where = next((frame for frame in reversed(frames) if frame.filename != caller), None)
    place = "" if where is None else f"{_short(where.filename)}:{where.lineno} in {where.name}"
    return type(error).__name__, (str(error).splitlines() or ["(no message)"])[0], place


def raised(kind: str, message: str, place: str) -> EngineFailed:
    """An exception of the engine, as a finding tells it."""
    at = f" at {place}" if place else ""
    return EngineFailed(f"raised {kind}: {message}{at}", expected="the call returns", got=kind)


def malformed(problem: str) -> EngineFailed:
    """An answer that is not of the type its interface declares."""
    return EngineFailed(
        "answers what its interface does not allow", expected="data as declared", got=problem, requirement="PRG-8"
    )


def _short(filename: str) -> str:
    """The last two parts of a path: enough to find the line, nothing of this machine."""
    return "/".join(filename.replace("\\", "/").split("/")[-2:])
