"""A process of its own for the device: it owns the cores, and gives them back by ending. Standard library only.

The runtime keeps its cores until the process that started it ends, and what goes badly wrong inside it takes that
process along. With the device in a worker, tests can hold it, lose it, and take it again from another process.

Parent and worker exchange JSON, one message each way for a call; nothing is pickled. What the compiler and the
runtime print goes to the worker's log file.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from reference_engine.runners.neuron import detect
from reference_engine.runners.neuron.device import (
    DeviceCall,
    DeviceConfig,
    DeviceError,
    DeviceStats,
    DeviceUnavailableError,
    Rows,
)
from reference_engine.runners.neuron.driver import TransformersNeuronxDevice

CALL_SECONDS_MAX = 300.0
BUILD_SECONDS_MAX = 3600.0
"""A call that takes longer hangs: the worker is killed and `DeviceError` raised. Compiling is slow."""


class Worker:
    """The parent's end of a worker process. ``log`` gets what it prints; ``environment`` None: that of the parent."""

    def __init__(self, log: Path, environment: dict[str, str] | None = None) -> None:
        self.log = log
        self._connection, end = Pipe()
        with log.open("ab") as output:
            self._process = subprocess.Popen(  # noqa: S603 - ourselves
                [sys.executable, "-m", __name__, str(end.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[end.fileno()],
                env=environment,
            )
        end.close()

    @property
    def pid(self) -> int:
        """The process id of the worker."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process is still there."""
        return self._process.poll() is None

    def versions(self) -> dict[str, str]:
        """`detect.packages` in the worker."""
        answer: dict[str, str] = self.call("versions")
        return answer

    def device(self, config: DeviceConfig) -> RemoteDevice:
        """A device in the worker; it is to be built."""
        return RemoteDevice(self, config)

    def call(self, name: str, *arguments: Any, seconds_max: float = CALL_SECONDS_MAX) -> Any:
        """Have the worker do ``name``; returns its answer.

        Raises what the worker raised when that is an error of a device, and `DeviceError` for everything else: the
        worker has ended, or did not answer in time and was killed.
        """
        try:
            self._connection.send_bytes(json.dumps([name, *arguments]).encode())
            if not self._connection.poll(seconds_max):
                self.kill()
                raise DeviceError(f"{name}: no answer within {seconds_max:.0f} s; the worker was killed{self._tail()}")
            answer = json.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            code = self._process.wait()
            raise DeviceError(f"{name}: the worker has ended with {code}{self._tail()}") from None
        if "error" in answer:
            errors = {kind.__name__: kind for kind in (DeviceError, DeviceUnavailableError)}
            raise errors.get(answer["error"], DeviceError)(answer["message"])
        return answer["result"]

    def close(self, seconds_max: float = 60.0) -> float:
        """End the worker; returns the seconds it took. Killed when it does not go by itself."""
        began = time.perf_counter()
        self._connection.close()
        try:
            self._process.wait(seconds_max)
        except subprocess.TimeoutExpired:
            self.kill()
        return time.perf_counter() - began

    def kill(self) -> None:
        """End the worker at once."""
        self._process.kill()
        self._process.wait()

    def _tail(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").split("\n")
        shown = [line for line in lines if line.strip()][-5:]
        return f"; the end of {self.log}:\n" + "\n".join(shown) if shown else f"; {self.log} is empty"


class RemoteDevice:
    """A device that a `Worker` has; see `Device`."""

    def __init__(self, worker: Worker, config: DeviceConfig) -> None:
        self._worker = worker
        self._config = config
        self._stats = DeviceStats()
        self._number: int = worker.call("new", asdict(config))

    @property
    def config(self) -> DeviceConfig:
        return self._config

    @property
    def stats(self) -> DeviceStats:
        return self._stats

    def build(self) -> None:
        self._worker.call("build", self._number, seconds_max=BUILD_SECONDS_MAX)

    def prefill(self, lines: Sequence[int], prompts: Sequence[Sequence[int]], width: int | None = None) -> Rows:
        return self._rows("prefill", list(lines), [list(prompt) for prompt in prompts], width)

    def decode(self, lines: Sequence[int], tokens: Sequence[int], positions: Sequence[int]) -> Rows:
        return self._rows("decode", list(lines), list(tokens), list(positions))

    def reset(self) -> None:
        self._worker.call("reset", self._number)

    def close(self) -> None:
        self._worker.call("close", self._number)

    def _rows(self, name: str, *arguments: Any) -> Rows:
        call, rows = self._worker.call(name, self._number, *arguments)
        route, lines, positions, width, seconds = call
        self._stats.calls.append(DeviceCall(route, tuple(lines), tuple(positions), width, seconds))
        answer: Rows = rows
        return answer


# ------------------------------------------------------------------------------------------- the worker's end


class _Served:
    """What the worker does, by the name of the call."""

    def __init__(self) -> None:
        self._devices: list[TransformersNeuronxDevice] = []

    def versions(self) -> dict[str, str]:
        return detect.packages()

    def new(self, config: dict[str, Any]) -> int:
        for name in ("context_buckets", "token_buckets"):
            config[name] = tuple(config[name])
        self._devices.append(TransformersNeuronxDevice(DeviceConfig(**config)))
        return len(self._devices) - 1

    def build(self, number: int) -> None:
        self._devices[number].build()

    def prefill(self, number: int, *arguments: Any) -> Any:
        device = self._devices[number]
        rows = device.prefill(*arguments)
        return device.stats.calls.pop(), rows

    def decode(self, number: int, *arguments: Any) -> Any:
        device = self._devices[number]
        rows = device.decode(*arguments)
        return device.stats.calls.pop(), rows

    def reset(self, number: int) -> None:
        self._devices[number].reset()

    def close(self, number: int) -> None:
        self._devices[number].close()

    def traced(self, lines: int, length: int, steps: list[list[Any]], backend: Any) -> Any:
        from reference_engine.runners.neuron import traced  # noqa: PLC0415 - imports torch

        return traced.run(traced.DecodeStep(lines, length), [traced.Step(*step) for step in steps], backend)


_CALLS = ("versions", "new", "build", "prefill", "decode", "reset", "close", "traced")


def answer(served: _Served, message: bytes) -> bytes:
    """Do one call; an error becomes an answer, as the caller has to know of it and the process goes on."""
    name, *arguments = json.loads(message)
    if name not in _CALLS:
        raise ValueError(f"call {name!r}: expected one of {', '.join(_CALLS)}")
    method: Callable[..., Any] = getattr(served, name)
    try:
        return json.dumps({"result": method(*arguments)}).encode()
    except Exception as error:  # noqa: BLE001 - whatever it is, the other end is told
        kind = type(error).__name__
        known = isinstance(error, DeviceError | DeviceUnavailableError)
        return json.dumps({"error": kind, "message": str(error) if known else f"{kind}: {error}"}).encode()


def main(descriptor: int) -> None:
    """Answer calls on the connection ``descriptor`` until the parent closes it or is gone."""
    connection, served = Connection(descriptor), _Served()
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(answer(served, message))


if __name__ == "__main__":
    main(int(sys.argv[1]))
