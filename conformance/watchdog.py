"""A bound on every call into an engine, so that a hanging or memory-eating engine becomes a finding.

One daemon thread looks at the call in progress a few times a second. Past the bound it raises `EngineHung`
(or `MemoryExhausted`) inside the calling thread, which ends any Python loop; the session reports it like any
other exception, with the trace up to there. If the call still does not return, it is stuck in native code
where nothing can be raised: then ``last_words`` is called, which saves what was found, and the process ends
with `EXIT_STUCK`. The bound is in seconds because only the outside world is measured in seconds; nothing of
it reaches a trace but the fact that the call did not return.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

EXIT_STUCK: Final = 1
"""Exit code of a process whose engine hangs in native code: the contract is violated, and that was saved."""
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


class EngineHung(Exception):  # noqa: N818 - named for what the engine did
    """A call into the engine did not return within the bound."""

    def __str__(self) -> str:
        return super().__str__() or "no answer within the bound on a call"


class MemoryExhausted(Exception):  # noqa: N818 - named for what the engine did
    """The process grew past the bound during a call into the engine."""

    def __str__(self) -> str:
        return super().__str__() or "the process grew past the bound on its memory"


def resident_bytes() -> int:
    """Resident memory of this process; 0 where the platform does not tell."""
    try:
        with Path("/proc/self/statm").open(encoding="ascii") as statm:
            return int(statm.read().split()[1]) * _PAGE_BYTES
    except OSError:
        return 0


class Watchdog:
    """Watches the calls of one thread at a time; `begin` and `end` cost well under a microsecond.

    ``call_seconds_max`` bounds one call; ``growth_bytes_max`` bounds how much the process may grow since the
    watchdog was started. Both 0: nothing is watched.
    """

    def __init__(
        self,
        call_seconds_max: float = 10.0,
        growth_bytes_max: int = 4 << 30,
        grace_seconds: float = 5.0,
        last_words: Callable[[str], None] | None = None,
    ) -> None:
        self.call_seconds_max = call_seconds_max
        self.growth_bytes_max = growth_bytes_max
        self.grace_seconds = grace_seconds
        self.last_words = last_words
        self.stopped_at = ""
        """Where the first call that was stopped had got to: for people, since it says when the watchdog came."""
        self._call: str | None = None
        self._serial = 0
        self._seconds_max = call_seconds_max
        self._raised = False
        self._thread_id = 0
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._baseline_bytes = 0

    def start(self) -> None:
        """Start watching the calling thread (idempotent)."""
        self._thread_id = threading.get_ident()
        if self._thread is None:
            self._baseline_bytes = resident_bytes()
            self._thread = threading.Thread(target=self._watch, name="kvconform-watchdog", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop watching; the thread ends within one look."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._stop.clear()

    def begin(self, call: str, seconds_max: float | None = None) -> None:
        """The calling thread enters the engine, for at most ``seconds_max``, or as long as any call may take."""
        self._seconds_max = self.call_seconds_max if seconds_max is None else seconds_max
        self._serial += 1
        self._call = call

    def arrive(self) -> None:
        """Where `EngineHung` comes up at the latest: what is raised in a native call waits for the next line of Python.

        Called inside the ``try`` that is to see it; this module is never compiled.
        """

    def end(self) -> None:
        """The calling thread is back. A raise that came too late to stop the call is dropped."""
        with self._lock:
            self._call = None
            if self._raised:
                self._raised = False
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread_id), None)

    def _watch(self) -> None:
        look_seconds = max(0.01, min(0.25, self.call_seconds_max / 4 or 0.25))
        seen_serial, seen_at, raised_at = -1, 0.0, 0.0
        while not self._stop.wait(look_seconds):
            call, serial, now = self._call, self._serial, time.monotonic()
            if call is None or serial != seen_serial:
                seen_serial, seen_at, raised_at = (serial if call is not None else -1), now, 0.0
                continue
            if raised_at and now - raised_at > self.grace_seconds:
                self._give_up(call)
            if raised_at:
                continue
            if self.call_seconds_max and now - seen_at > self._seconds_max:
                raised_at = now
                self._raise(EngineHung, serial)
            elif self.growth_bytes_max and resident_bytes() - self._baseline_bytes > self.growth_bytes_max:
                raised_at = now
                self._raise(MemoryExhausted, serial)

    def _raise(self, kind: type[Exception], serial: int) -> None:
        with self._lock:
            if self._call is not None and self._serial == serial:
                self._raised = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread_id), ctypes.py_object(kind))

    def _give_up(self, call: str) -> None:
        message = f"{call} did not return and cannot be interrupted (native code)"
        if self.last_words is not None:
            self.last_words(message)
        sys.stderr.write(f"kvconform: {message}; the process ends here\n")
        sys.stderr.flush()
        os._exit(EXIT_STUCK)
