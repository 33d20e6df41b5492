"""Rigs that are broken in one way each, by the names under which the table of assertions lists them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from neuron_tests.emulated import HEALTHY, EmulatedRig
from neuron_tests.hardware import HardwareRig
from neuron_tests.rig import Rig, Shape
from reference_engine.config import EngineConfig
from reference_engine.engine import Engine
from reference_engine.request import Request, Status
from reference_engine.runners.neuron.detect import PINS, Presence, packages
from reference_engine.runners.neuron.device import Device, DeviceCall, DeviceConfig, Rows
from reference_engine.runners.neuron.emulated import Behaviour, Fault
from reference_engine.runners.neuron.runner import NeuronRunner, _Row
from reference_engine.runners.neuron.traced import DecodeStep, Step, run
from reference_engine.runners.serving import SequenceKey
from reference_engine.scheduler import ScheduledSequence

# ------------------------------------------------------------------------------------------------- runners, engines


class Unsorted(NeuronRunner):
    """Hands rows over as the plan has them."""

    def _order(self, rows: list[_Row]) -> list[_Row]:
        return rows


class Misrouted(NeuronRunner):
    """Gives each row to the next request of the call."""

    def _sampled(self, rows: list[_Row], order: list[_Row], given: Rows) -> dict[SequenceKey, int]:
        return super()._sampled(rows, [*order[1:], order[0]], given)


class Narrow(NeuronRunner):
    """Does not widen one-token prompts."""

    def _width(self, prompts: Sequence[Sequence[int]]) -> int:
        return max(map(len, prompts))


class BlockIsLine(NeuronRunner):
    """Uses the block id for the line, as vLLM did."""

    def _line(self, scheduled: ScheduledSequence) -> int:
        super()._line(scheduled)
        return scheduled.sequence.table[0]


class Forgetful(NeuronRunner):
    """Leaves the first row out of every third decode and makes its token up."""

    _decodes = 0

    def _decode(self, rows: list[_Row]) -> dict[SequenceKey, int]:
        self._decodes += 1
        if self._decodes % 3 or len(rows) == 1:
            return super()._decode(rows)
        return {rows[0].key: 1, **super()._decode(rows[1:])}

    def _check_all_live(self, rows: list[_Row]) -> None:
        pass


class NeverFreeing(NeuronRunner):
    """Frees no line at all."""

    def _release_ended(self) -> None:
        self._holders = {name: one for name, one in self._holders.items() if one.status is Status.RUNNING}


class Unchecked(NeuronRunner):
    """Takes every configuration and every request."""

    def _check_config(self, config: EngineConfig, device: DeviceConfig) -> None:
        pass

    def check(self, request: Request) -> None:
        pass


class OneTooMany(Engine):
    """Takes a prompt of max_model_len tokens, and lets a sequence have one token more."""

    def __init__(self, config: EngineConfig) -> None:
        longer = config.max_model_len + 1
        super().__init__(dataclasses.replace(config, max_model_len=longer, block_size=longer))


# ---------------------------------------------------------------------------------------------------- the machine


class WritesAll(DecodeStep):
    """Writes the line whether it is live or not."""

    def written(self, positions: Any, live: Any) -> Any:
        return super().written(positions, live | 1)


class WritesInactive(EmulatedRig):
    """Its traced step is `WritesAll`."""

    def traced(self, lines: int, length: int, steps: Sequence[Any]) -> list[Any]:
        outcomes: list[Any] = list(run(WritesAll(lines, length), [Step(*step) for step in steps], "jit"))
        return outcomes


class Machine(HardwareRig):
    """A machine with a device that is emulated in this process, and figures of its own making.

    Healthy as it is; each field is one thing to be wrong.
    """

    second: str | None = "no NeuronCores are available"
    found: Callable[[], dict[str, str]] = staticmethod(lambda: dict(PINS))
    row_seconds = 0.0
    modules_after_restart: frozenset[str] = frozenset()

    def __init__(self, folder: Path, cores: int = 2) -> None:
        super().__init__(folder, Presence(reason=None, devices=("neuron0",), cores=cores, instance_type="inf2.xlarge"))
        self.inner = EmulatedRig(folder)
        self._modules = frozenset({"MODULE_1/model.neff"})

    def versions(self) -> dict[str, str]:
        return self.found()

    def new_device(self, shape: Shape) -> Device:
        return Timed(self.inner.new_device(shape), self.row_seconds)

    def second_process(self) -> str | None:
        return self.second

    def restart(self) -> None:
        self._modules |= self.modules_after_restart

    def compiled(self) -> frozenset[str]:
        return self._modules

    def close(self) -> None:
        self.inner.close()


class Timed:
    """A device whose calls take 1 second, and ``row_seconds`` more for each row."""

    def __init__(self, device: Device, row_seconds: float) -> None:
        self._device = device
        self._row_seconds = row_seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def decode(self, lines: Sequence[int], tokens: Sequence[int], positions: Sequence[int]) -> Rows:
        rows = self._device.decode(lines, tokens, positions)
        calls: list[DeviceCall] = self._device.stats.calls
        calls[-1] = calls[-1]._replace(seconds=1.0 + self._row_seconds * len(lines))
        return rows


def _placeholder(name: str) -> None:
    if name == "transformers_neuronx":
        raise ImportError(name)


# ------------------------------------------------------------------------------------------------------- the table

Make = Callable[[Path], Rig]


def _emulated(
    *,
    runner: type[NeuronRunner] = NeuronRunner,
    engine: type[Engine] = Engine,
    behaviour: Behaviour = HEALTHY,
    kind: type[EmulatedRig] = EmulatedRig,
    **forced: Any,
) -> Make:
    def make(folder: Path) -> Rig:
        rig = kind(folder, behaviour, **forced)
        rig.runner_type, rig.engine_type = runner, engine
        return rig

    return make


def _machine(cores: int = 2, **fields: Any) -> Make:
    def make(folder: Path) -> Rig:
        rig = Machine(folder, cores)
        for name, value in fields.items():
            setattr(rig, name, value)
        return rig

    return make


def _faulty(fault: Fault) -> Make:
    return _emulated(behaviour=dataclasses.replace(HEALTHY, faults=[fault]))


LOOSE = dataclasses.replace(HEALTHY, strict_interface=False)

HEALTHY_MACHINE = _machine()

BROKEN: dict[str, Make] = {
    **{fault.value: _faulty(fault) for fault in Fault},
    "touched blocks counted": _emulated(append_check="touched"),
    "watermark of 1 %": _emulated(watermark=0.01),
    "rows not sorted on a device of the old order": _emulated(
        runner=Unsorted, behaviour=dataclasses.replace(HEALTHY, row_order="old")
    ),
    "rows given to the wrong requests": _emulated(runner=Misrouted),
    "one-token prompts not widened": _emulated(runner=Narrow),
    "block ids as lines": _emulated(runner=BlockIsLine, behaviour=LOOSE),
    "a live line left out": _emulated(runner=Forgetful),
    "lines never freed": _emulated(runner=NeverFreeing),
    "prompts not checked": _emulated(runner=Unchecked),
    "configuration not checked": _emulated(runner=Unchecked),
    "one position too many": _emulated(engine=OneTooMany, runner=Unchecked),
    "inactive line written": _emulated(kind=WritesInactive),
    "time grows with rows": _machine(row_seconds=0.1),
    "cache not shared": _machine(modules_after_restart=frozenset({"MODULE_2/model.neff"})),
    "too few cores": _machine(cores=1),
    "cores shared": _machine(second=None),
    "another release": _machine(found=lambda: {**PINS, "neuronx-cc": "2.21.33363.0"}),
    "a placeholder": _machine(found=lambda: packages(_placeholder)),
}
"""How to make each. Faults of the emulated device are there by their own names."""
