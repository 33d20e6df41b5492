"""The worker process: calls go through, errors come back as what they are, and nothing hangs or is left behind."""

from __future__ import annotations

import json
import os
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import reference_engine
from reference_engine.runners.neuron import worker as module
from reference_engine.runners.neuron.device import DeviceConfig, DeviceError, DeviceUnavailableError
from reference_engine.runners.neuron.worker import RemoteDevice, Worker, answer

ROOT = Path(reference_engine.__file__).resolve().parents[1]
CONFIG = DeviceConfig(model_path="m", lines=4, context_buckets=(8,), token_buckets=(8,))

# A package that fails in ways of its own; it stands first on the worker's path.
PACKAGE = """
import os
import time

print("Compiler status PASS", flush=True)
if os.environ["PACKAGE"] == "exits":
    os._exit(7)
if os.environ["PACKAGE"] == "hangs":
    time.sleep(600)
raise ImportError("a placeholder")
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    """Start a worker whose `libneuronxla` and `transformers_neuronx` fail in the way that is named."""
    for name in ("libneuronxla", "transformers_neuronx", "torch"):
        (tmp_path / f"{name}.py").write_text(PACKAGE if name != "torch" else "", encoding="utf-8")
    workers: list[Worker] = []

    def starter(way: str) -> Worker:
        paths = os.pathsep.join([str(tmp_path), str(ROOT)])
        workers.append(Worker(tmp_path / "log", {**os.environ, "PYTHONPATH": paths, "PACKAGE": way}))
        return workers[-1]

    yield starter
    for worker in workers:
        worker.close()


def ended(pid: int) -> bool:
    """Whether there is no process of this id any more."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_an_error_of_the_packages_is_raised_here_as_what_it_is(start: Any, tmp_path: Path) -> None:
    worker = start("raises")
    with pytest.raises(DeviceUnavailableError, match="libneuronxla cannot be imported"):
        worker.versions()
    with pytest.raises(DeviceUnavailableError, match="transformers-neuronx cannot be imported: a placeholder"):
        worker.device(CONFIG).build()
    assert "Compiler status PASS" in (tmp_path / "log").read_text(encoding="utf-8"), "printing spoils no message"


def test_the_worker_outlives_an_error_and_ends_when_it_is_closed(start: Any) -> None:
    worker = start("raises")
    device = worker.device(CONFIG)
    for _ in range(2):
        with pytest.raises(DeviceError, match=r"^the device is not built: call build\(\) first$"):
            device.decode([0], [1], [1])
    assert device.stats.calls == []
    worker.close()
    assert ended(worker.pid)


def test_a_worker_that_ends_is_said_with_its_code_and_its_last_words(start: Any) -> None:
    worker = start("exits")
    with pytest.raises(
        DeviceError, match=r"versions: the worker has ended with 7; the end of .*\nCompiler status PASS"
    ):
        worker.versions()


def test_a_worker_that_hangs_is_killed(start: Any) -> None:
    worker = start("hangs")
    with pytest.raises(DeviceError, match="versions: no answer within 0 s; the worker was killed"):
        worker.call("versions", seconds_max=0.0)
    assert ended(worker.pid)


def test_an_error_nobody_expected_keeps_its_name(start: Any) -> None:
    with pytest.raises(DeviceError, match=r"^IndexError: list index out of range$"):
        start("raises").call("build", 5)


# --------------------------------------------------------------------------------- both ends, without a process


class _Double:
    """A device in the worker that answers what is in it."""

    def __init__(self, config: DeviceConfig) -> None:
        self.config = config
        self.stats = types.SimpleNamespace(calls=[])
        self.log: list[Any] = []

    def build(self) -> None:
        self.log.append("build")

    def prefill(self, *arguments: Any) -> Any:
        self.log.append(arguments)
        self.stats.calls.append(["prefill", [2, 0], [2, 0], 3, 0.25])
        return [[0.1, float("inf")], [1e-45, -0.0]]

    decode = prefill

    def reset(self) -> None:
        self.log.append("reset")

    def close(self) -> None:
        self.log.append("close")


class _Local(Worker):
    """A worker without a process: messages are answered here, as bytes."""

    def __init__(self) -> None:
        self.served = module._Served()

    def call(self, name: str, *arguments: Any, seconds_max: float = 0.0) -> Any:
        return json.loads(answer(self.served, json.dumps([name, *arguments]).encode()))["result"]


def test_arguments_and_rows_survive_the_way_there_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TransformersNeuronxDevice", _Double)
    local = _Local()
    device = RemoteDevice(local, CONFIG)
    inside: Any = local.served._devices[0]
    assert inside.config == CONFIG
    device.build()
    rows = device.prefill((2, 0), [(7, 8, 9), (5,)], width=3)
    assert rows == [[0.1, float("inf")], [1e-45, -0.0]]
    assert device.decode([1], [2], [3]) == rows
    device.reset()
    device.close()
    assert inside.log == ["build", ([2, 0], [[7, 8, 9], [5]], 3), ([1], [2], [3]), "reset", "close"]
    assert device.stats.prefills == 4
    assert device.stats.calls[0].lines == (2, 0)
    assert device.stats.calls[0].seconds == 0.25


def test_only_known_calls_are_answered() -> None:
    with pytest.raises(ValueError, match="call '__class__': expected one of versions, new, build"):
        answer(module._Served(), b'["__class__"]')
