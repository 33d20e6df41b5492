"""The Neuron device of this machine, in a worker process of its own."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from neuron_tests.model import SIZES
from neuron_tests.rig import MAIN, Rig, Shape
from reference_engine.runners.neuron.detect import Presence
from reference_engine.runners.neuron.device import Device, DeviceError, DeviceUnavailableError
from reference_engine.runners.neuron.worker import BUILD_SECONDS_MAX, Worker

DEFAULT_CACHE = Path("/var/tmp/neuron-compile-cache")  # noqa: S108 - where the compiler puts it
WORKER_LOG = "worker.log"
LOG_LINES_MAX = 100
"""How many lines of the log, the last ones, go into the report."""
RELEASE_SECONDS_MAX = 30.0
"""How long cores may take to come free when a process has ended."""


class HardwareRig(Rig):
    """One worker at a time holds the cores; what it prints goes to `WORKER_LOG` in ``folder``."""

    kind = "hardware"

    def __init__(self, folder: Path, presence: Presence, **forced: Any) -> None:
        super().__init__(folder, **forced)
        self.presence = presence
        self._worker: Worker | None = None
        self.notes |= {
            "instance_type": presence.instance_type,
            "devices": list(presence.devices),
            "cores": presence.cores,
            "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith("NEURON")},
            "model": SIZES,
            "compile_seconds": {},
        }

    def _new_worker(self) -> Worker:
        return Worker(self.folder / WORKER_LOG)

    @property
    def worker(self) -> Worker:
        """The worker that holds the cores, started when it is first wanted."""
        if self._worker is None:
            self._worker = self._new_worker()
        return self._worker

    def versions(self) -> dict[str, str]:
        """Versions of the packages, which the worker has imported. Raises `DeviceUnavailableError`."""
        versions = self.worker.versions()
        self.notes["versions"] = versions
        return versions

    def device(self, shape: Shape = MAIN) -> Device:
        if self._worker is not None and not self._worker.alive:  # one test may lose it, and the others go on
            self._give_up()
        return super().device(shape)

    def new_device(self, shape: Shape) -> Device:
        began = time.perf_counter()
        device = self._built_in(self.worker, shape)
        self.notes["compile_seconds"][str(shape)] = round(time.perf_counter() - began, 1)
        return device

    def _built_in(self, worker: Worker, shape: Shape) -> Device:
        device = worker.device(shape.config(self.model_path))
        device.build()
        return device

    def visible_cores(self) -> int | None:
        """NeuronCores this process may use, or None where nothing says how many there are."""
        chosen = os.environ.get("NEURON_RT_VISIBLE_CORES", "").strip()
        if chosen:
            ends = [part.partition("-") for part in chosen.split(",")]
            return sum(int(last or first) - int(first) + 1 for first, _, last in ends)
        return int(os.environ.get("NEURON_RT_NUM_CORES", "") or 0) or self.presence.cores

    def second_process(self) -> str | None:
        """What another process is told that wants the same cores; None: it got them."""
        with contextlib.closing(Worker(self.folder / "second-worker.log")) as second:
            try:
                self._built_in(second, MAIN)
            except (DeviceError, DeviceUnavailableError) as error:
                return str(error)
        return None

    def restart(self) -> None:
        """End the worker and build the main shape in another one, as soon as the cores are free."""
        self._give_up()
        began = time.perf_counter()
        while True:
            try:
                self.device()
            except DeviceError:
                self._give_up()
                if time.perf_counter() - began > RELEASE_SECONDS_MAX:
                    raise
                time.sleep(1.0)
            else:
                self.notes["restart_seconds"] = round(time.perf_counter() - began, 1)
                return

    def compiled(self) -> frozenset[str]:
        """The modules in the compile cache. Raises ValueError for a cache that is no folder of this machine."""
        place = os.environ.get("NEURON_COMPILE_CACHE_URL") or str(DEFAULT_CACHE)
        if "://" in place.removeprefix("file://"):
            raise ValueError(f"NEURON_COMPILE_CACHE_URL = {place}: only a folder can be listed")
        folder = Path(place.removeprefix("file://"))
        return frozenset(str(path.relative_to(folder)) for path in folder.rglob("*.neff"))

    def compiling(self) -> list[str]:
        commands: list[str] = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:  # it has ended
                continue
            if "neuronx-cc" in command:
                commands.append(command.strip())
        return commands

    def traced(self, lines: int, length: int, steps: Sequence[Any]) -> list[Any]:
        outcomes: list[Any] = self.worker.call(
            "traced", lines, length, list(steps), "neuron", seconds_max=BUILD_SECONDS_MAX
        )
        return outcomes

    def device_to_lose(self) -> Device:
        self._give_up()
        return self.device()

    def _give_up(self) -> None:
        self._devices.clear()
        if self._worker is not None:
            self.notes.setdefault("worker_exit_seconds", []).append(round(self._worker.close(), 2))
            self._worker = None

    def learned(self) -> dict[str, Any]:
        log = self.folder / WORKER_LOG
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
        return super().learned() | {"worker_log": lines[-LOG_LINES_MAX:]}

    def close(self) -> None:
        self._give_up()


def median_seconds(device: Device) -> float:
    """The median time of the calls a device was asked for since its statistics were cleared."""
    return statistics.median(call.seconds for call in device.stats.calls)
