"""The processes of one command: each serves one engine at a time, and many one after another.

Importing an engine's framework can take a quarter of a minute, so a process that answers is kept for the next
engine; one that hung, died or answered nonsense is replaced. A process more is started only while one more engine
is in use at the same time.
"""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Sequence
from typing import Final

from conformance.calls import EngineFailed
from conformance.protocol import AdapterError, Engine, EngineConfig
from conformance.wire.peer import Peer, WireEngine
from conformance.wire.process import CannotStart


class Fleet:
    """Makes engines of the command ``words``: its `make` is an engine factory."""

    def __init__(self, words: Sequence[str], *, strict: bool = False) -> None:
        self._words = tuple(words)
        self._strict = strict
        self._idle: list[Peer] = []
        self._in_use: set[Peer] = set()
        self.started = 0
        """Processes started so far."""

    def start(self) -> None:
        """See to it that a process is there. Raises `CannotStart`."""
        if not self._idle:
            self._idle.append(self._started())

    def make(self, config: EngineConfig) -> Engine:
        """Build an engine. Raises `ConfigRefused`, `EngineFailed`, and `AdapterError` when no process can be had."""
        while True:
            peer, used = self._taken()
            self._in_use.add(peer)
            try:
                engine = WireEngine(peer, config)
            except BaseException as error:
                self._released(peer)
                if isinstance(error, EngineFailed) and used and peer.process.exit_code == 0:
                    continue  # it serves one engine and ends, which is as good
                raise
            engine.released = weakref.finalize(engine, self._released, peer)  # also of one that nobody closes
            engine.released.atexit = False
            return engine

    def _taken(self) -> tuple[Peer, bool]:
        """A process that is free, and whether it has served before."""
        while self._idle:
            peer = self._idle.pop()
            if peer.process.exit_code is None:
                return peer, peer.process.exchanges > 1
            peer.process.kill()
        try:
            return self._started(), False
        except CannotStart as error:
            raise AdapterError(f"{' '.join(self._words)}: {error}") from None

    def _started(self) -> Peer:
        self.started += 1
        return Peer(self._words, strict=self._strict)

    def _released(self, peer: Peer) -> None:
        """``peer`` is free for another engine, if it lives."""
        self._in_use.discard(peer)
        if peer.process.alive:
            self._idle.append(peer)

    def close(self) -> None:
        """End every process."""
        for peer in (*self._idle, *self._in_use):
            peer.process.close()
        self.forget()

    def forget(self) -> None:
        """Leave the processes alone: they belong to the process that this one was forked from."""
        self._idle.clear()
        self._in_use.clear()


_fleets: Final[dict[tuple[tuple[str, ...], bool, str], Fleet]] = {}


def fleet_of(words: Sequence[str], *, strict: bool = False) -> Fleet:
    """The fleet of a command in the current directory; the same one for whoever asks in this process."""
    key = (tuple(words), strict, os.getcwd())  # noqa: PTH109 - a key, not a path
    if key not in _fleets:
        _fleets[key] = Fleet(words, strict=strict)
    return _fleets[key]


def _close_all() -> None:
    for fleet in _fleets.values():
        fleet.close()


def _forget_all() -> None:
    for fleet in _fleets.values():
        fleet.forget()


atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
