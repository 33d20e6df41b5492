"""The process at the other end of the wire: started, fed a line, read a line, bounded in all it does, and ended.

It has pipes for its standard streams and a process group of its own. Everything happens in the calling thread, in
one loop around ``poll``, so that what a watchdog raises in this thread arrives, and a process that neither reads
nor stops printing blocks nobody.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from conformance.wire.lines import LineBuffer, LineTooLong

LOOKS_AWAKE: Final = 300
"""How often to look for an answer, giving way each time, before going to sleep until there is one: to be woken on an
idle core takes longer than most answers."""
LOOK_SECONDS: Final = 0.25
"""How long to wait before looking at more than the pipes: the time, the process's memory, whether it lives."""
GROWTH_BYTES_MAX: Final = 4 << 30
"""Resident memory the process and its children may gain after the first look, as `conformance.watchdog` has it."""
END_SECONDS_MAX: Final = 2.0
"""For a process that is asked to end, or has closed its output, until it is killed."""
KILLED_SECONDS_MAX: Final = 4.0
"""For the system to take a killed process down; less than a watchdog's grace."""
_READ_BYTES: Final = 1 << 16
_TAIL_BYTES: Final = 1 << 13
_TAIL_LINES: Final = 6
_TAIL_COLUMNS: Final = 400
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


class CannotStart(Exception):  # noqa: N818 - named for what happened
    """There is no such command, or what it starts is no engine: what, and what to do."""


class ProcessFailed(Exception):  # noqa: N818 - named for what happened
    """The process gave no answer; the base of what can have happened to it."""


class Ended(ProcessFailed):
    """It ended: ``str()`` says how. ``rest``: of a line it did not get to the end of."""

    def __init__(self, how: str, rest: bytes) -> None:
        super().__init__(how)
        self.rest = rest


class TooSlow(ProcessFailed):
    """No answer within the seconds given."""


class TooLarge(ProcessFailed):
    """It, or the line that it prints, grew past the bound."""


class Process:
    """A command that runs, and the two lines of a call: `exchange`. Raises `CannotStart`.

    After anything but an answer the process is killed, with its children: what it might still say is not known.
    """

    def __init__(self, words: Sequence[str]) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONHOME"}  # it is ours alone
        try:
            self._process = subprocess.Popen(  # noqa: S603 - the user names the command
                list(words),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            hint = "; a script begins with a line such as #!/usr/bin/env python3" if error.errno == _NO_FORMAT else ""
            raise CannotStart(f"{words[0]} cannot be run: {error.strerror}{hint}") from None
        assert self._process.stdin is not None and self._process.stdout is not None and self._process.stderr is not None
        self._stdin = self._process.stdin.fileno()
        self._stdout = self._process.stdout.fileno()
        self._stderr = self._process.stderr.fileno()
        os.set_blocking(self._stdin, False)
        os.set_blocking(self._stderr, False)
        self._poll = select.poll()
        self._poll.register(self._stdout, select.POLLIN)
        self._poll.register(self._stderr, select.POLLIN)
        self._lines = LineBuffer()
        self._tail = bytearray()
        self._resident_bytes_at_first = 0
        self.alive = True
        self.exchanges = 0

    # -- a call ------------------------------------------------------------------------------------------

    def exchange(self, line: bytes, seconds_max: float | None = None) -> bytes:
        """Send ``line`` and return the next line that comes back, both as bytes.

        Waits for ``seconds_max``, or for as long as nothing is raised in this thread (see `conformance.watchdog`).
        Raises `Ended`, `TooSlow`, `TooLarge`.
        """
        if not self.alive:
            raise Ended("it was ended", b"")
        self.exchanges += 1
        try:
            return self._exchange(line, seconds_max)
        except BaseException:
            self.kill()
            raise

    def _exchange(self, line: bytes, seconds_max: float | None) -> bytes:
        unsent = self._send(memoryview(line))
        if unsent:
            self._poll.register(self._stdin, select.POLLOUT)
        began, looks = time.monotonic(), 1
        while True:
            answer = None if unsent else self._take()
            if answer is not None:
                return answer
            for descriptor, _ in self._awake() or self._poll.poll(LOOK_SECONDS * 1000):
                if descriptor == self._stdout:
                    data = os.read(descriptor, _READ_BYTES)
                    if not data:
                        raise self._ended()
                    self._lines.feed(data)
                elif descriptor == self._stderr:
                    self._drain_stderr()
                else:
                    unsent = self._send(unsent)
                    if not unsent:
                        self._poll.unregister(self._stdin)
            seconds = time.monotonic() - began
            if seconds > looks * LOOK_SECONDS:
                looks = 1 + int(seconds / LOOK_SECONDS)
                self._look(seconds, seconds_max)

    def _awake(self) -> list[tuple[int, int]]:
        """What there is to do within the next moment, if anything."""
        for _ in range(LOOKS_AWAKE):
            events = self._poll.poll(0)
            if events:
                return events
            os.sched_yield()
        return []

    def _send(self, unsent: memoryview) -> memoryview:
        """Send what the pipe takes. Returns the rest, for when it takes more."""
        try:
            return unsent[os.write(self._stdin, unsent) :]
        except BlockingIOError:
            return unsent
        except BrokenPipeError:
            return unsent[:0]  # what it printed before it ended is still to be read

    def _take(self) -> bytes | None:
        try:
            return self._lines.take()
        except LineTooLong as error:
            raise TooLarge(f"it prints {error}") from None

    def _look(self, seconds: float, seconds_max: float | None) -> None:
        if seconds_max is not None and seconds > seconds_max:
            raise TooSlow(f"no answer in {seconds_max:g} seconds")
        resident = _resident_bytes(self._process.pid)
        if not self._resident_bytes_at_first:
            self._resident_bytes_at_first = resident
        elif resident - self._resident_bytes_at_first > GROWTH_BYTES_MAX:
            raise TooLarge(f"its memory grew by more than {GROWTH_BYTES_MAX:,} bytes")
        if self._process.poll() is not None:  # and something it started keeps its output open
            raise self._ended()

    # -- its end -----------------------------------------------------------------------------------------

    def _ended(self) -> Ended:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS_MAX)
        self._drain_stderr()
        code = self._process.returncode
        if code is None:
            how = "it closed its output"
        elif code < 0:
            how = f"it ended by signal {-code} ({_signal_name(-code)})"
        else:
            how = f"it ended with exit code {code}"
        return Ended(how, self._lines.rest())

    def _drain_stderr(self) -> None:
        """Read what stands on its standard error, and keep the end of it."""
        for _ in range(16):
            try:
                data = os.read(self._stderr, _READ_BYTES)
            except BlockingIOError:
                return
            if not data:
                with contextlib.suppress(KeyError):
                    self._poll.unregister(self._stderr)
                return
            self._tail += data
            del self._tail[:-_TAIL_BYTES]

    def last_words(self) -> str:
        """The last lines on its standard error, as one line; "" when there are none."""
        text = _ESCAPES.sub("", self._tail.decode("utf-8", errors="replace"))
        lines = [" ".join("".join(c if c.isprintable() else " " for c in line).split()) for line in text.splitlines()]
        return " / ".join([line[:_TAIL_COLUMNS] for line in lines if line][-_TAIL_LINES:])

    @property
    def exit_code(self) -> int | None:
        """Its exit code, below 0 the signal that ended it; None while it runs."""
        return self._process.poll()

    def close(self) -> None:
        """Let it end by itself, which it does when its input ends; kill it when it does not."""
        if self.alive:
            assert self._process.stdin is not None
            self._process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_SECONDS_MAX)
            self.kill()

    def kill(self) -> None:
        """End it at once, and everything it started."""
        if not self.alive:
            return
        self.alive = False
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(KILLED_SECONDS_MAX)
        self._drain_stderr()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()


_NO_FORMAT: Final = 8  # ENOEXEC


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def _resident_bytes(pid: int) -> int:
    """Resident memory of a process and all that it started; 0 where the platform does not tell."""
    folder = Path(f"/proc/{pid}")
    try:
        pages = int((folder / "statm").read_text(encoding="ascii").split()[1])
        children = [
            int(word) for task in (folder / "task").iterdir() for word in (task / "children").read_text("ascii").split()
        ]
    except OSError:
        return 0
    return pages * _PAGE_BYTES + sum(_resident_bytes(child) for child in children)
