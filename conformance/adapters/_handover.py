"""An engine whose step is one call, stopped where it calls its model: two threads of which one runs at a time."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Generic, NamedTuple, TypeVar

from conformance.protocol import AdapterError

_LOOK_SECONDS = 0.2
"""How often a wait for the engine is interrupted, to let an exception raised in the waiting thread arrive."""

Answer = TypeVar("Answer")


class Turn(NamedTuple):
    """What the engine's thread hands over: what it gives its model, or, when ``over``, what its step returned."""

    over: bool
    value: Any
    error: Exception | None = None


class _Closed(BaseException):
    """Unwinds a step that is waiting for its model when the engine is closed; not for the engine to catch."""


class Handover(Generic[Answer]):
    """The thread in which an engine's steps run, and the strict hand-over between it and the harness."""

    def __init__(self, step: Callable[[], Any], name: str) -> None:
        self._step = step
        self._to_engine: SimpleQueue[tuple[Answer] | None] = SimpleQueue()
        self._to_harness: SimpleQueue[Turn] = SimpleQueue()
        self._lost = False
        """The engine did not come back to the harness: its thread may still run."""
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def resume(self, answer: Answer) -> Turn:
        """Let the engine run, a new step or on with the model's ``answer``, until it needs the harness again.

        Raises what the engine's step raised, and `AdapterError` once an earlier call has not returned.
        """
        if self._lost or not self._thread.is_alive():
            raise AdapterError("the engine is closed, or did not return from an earlier call")
        self._lost = True
        self._to_engine.put((answer,))
        turn = self._wait()
        self._lost = False
        if turn.error is not None:
            raise turn.error
        return turn

    def _wait(self) -> Turn:
        while True:
            try:
                return self._to_harness.get(timeout=_LOOK_SECONDS)
            except Empty:
                continue

    def exchange(self, value: Any) -> Answer:
        """Called in the engine's thread: give ``value`` to the harness, return what it answers with."""
        self._to_harness.put(Turn(over=False, value=value))
        answer = self._to_engine.get()
        if answer is None:
            raise _Closed
        return answer[0]

    def close(self) -> None:
        """End the thread. One that hangs in the engine is told to unwind and not waited for."""
        self._to_engine.put(None)
        if self._lost and self._thread.ident is not None:
            thread_id = ctypes.c_ulong(self._thread.ident)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread_id, ctypes.py_object(_Closed))
        else:
            self._thread.join()

    def _run(self) -> None:
        while self._to_engine.get() is not None:
            try:
                turn = Turn(over=True, value=self._step())
            except _Closed:
                return
            except Exception as error:  # noqa: BLE001 - it is raised again in the harness's thread
                turn = Turn(over=True, value=None, error=error)
            self._to_harness.put(turn)
