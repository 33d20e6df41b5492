"""Finding a device: on machines made of paths, and with packages that are not what they are called."""

from __future__ import annotations

import os
import stat
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from reference_engine.runners.neuron import detect
from reference_engine.runners.neuron.detect import PINS, Host, Presence
from reference_engine.runners.neuron.device import DeviceUnavailableError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MAJORS = """Character devices:
  1 mem
245 neuron
250 neuron_other

Block devices:
 99 neuron
"""
TWO_CORES = '[{"neuron_device": 0, "nc_count": 2, "memory_size": 34359738368, "neuron_processes": []}]'


class Machine:
    """Files under ``root`` that make up a machine; `host` is how it is looked at."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.numbers: dict[str, int] = {}
        for folder in ("dev", "bin"):
            (root / folder).mkdir()

    def has(self, name: str, text: str) -> None:
        (self.root / name).write_text(text, encoding="utf-8")

    def node(self, name: str, major: int = 245) -> None:
        self.has(f"dev/{name}", "")
        self.numbers[name] = major

    def tool(self, body: str) -> None:
        path = self.root / "bin" / "neuron-ls"
        path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
        path.chmod(0o755)

    def _stat(self, path: Path) -> os.stat_result:
        found = list(path.stat())
        if path.name in self.numbers:
            found[0] = stat.S_IFCHR | 0o600
        extra = {"st_rdev": os.makedev(self.numbers.get(path.name, 0), 0)}
        return os.stat_result(found[:10], extra)

    def find(self) -> Presence:
        return detect.find(
            Host(
                devices=self.root / "dev",
                majors=self.root / "devices",
                product=self.root / "product_name",
                tools=(str(self.root / "bin" / "neuron-ls"),),
                stat=self._stat,
            )
        )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """An inf2.xlarge; tests take away from it."""
    made = Machine(tmp_path)
    made.has("devices", MAJORS)
    made.has("product_name", "inf2.xlarge\n")
    made.node("neuron0")
    made.tool(f"echo '{TWO_CORES}'")
    return made


def test_a_device_is_found_with_its_cores_and_the_kind_of_machine(machine: Machine) -> None:
    assert machine.find() == Presence(reason=None, devices=("neuron0",), cores=2, instance_type="inf2.xlarge")


def test_several_devices_come_in_order_and_their_cores_are_added(machine: Machine) -> None:
    for number in (10, 2):
        machine.node(f"neuron{number}")
    machine.node("neuron_monitor")
    machine.tool("""echo '[{"nc_count": 2}, {"nc_count": 2}, {"nc_count": 8}]'""")
    found = machine.find()
    assert (found.devices, found.cores) == (("neuron0", "neuron2", "neuron10"), 12)


def test_no_driver_is_no_device(machine: Machine) -> None:
    machine.has("devices", MAJORS.replace("245 neuron\n", ""))
    assert machine.find().reason == f"no Neuron device: the kernel lists no driver `neuron` in {machine.root}/devices"


def test_a_machine_without_the_table_has_no_device(machine: Machine) -> None:
    (machine.root / "devices").unlink()
    assert "the kernel lists no driver" in str(machine.find().reason)


def test_a_driver_without_a_node_is_no_device(machine: Machine) -> None:
    (machine.root / "dev" / "neuron0").unlink()
    assert "the driver is loaded (major 245), but" in str(machine.find().reason)


def test_a_file_of_the_name_is_no_device(machine: Machine) -> None:
    machine.numbers.clear()
    assert "has no character device neuron0 of its number" in str(machine.find().reason)


def test_a_character_device_of_another_driver_is_no_device(machine: Machine) -> None:
    machine.node("neuron0", major=99)
    assert "has no character device neuron0 of its number" in str(machine.find().reason)


def test_without_the_tool_there_is_a_device_of_unknown_size(machine: Machine) -> None:
    (machine.root / "bin" / "neuron-ls").unlink()
    found = machine.find()
    assert (found.reason, found.devices, found.cores) == (None, ("neuron0",), None)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("echo 'no driver' >&2; exit 3", "-j ends with 3: no driver"),
        ("echo 'instance-type: inf2'", "-j does not list nc_count for each device"),
        ("echo '[{}]'", "-j does not list nc_count for each device"),
    ],
)
def test_a_tool_that_fails_says_why(machine: Machine, body: str, said: str) -> None:
    machine.tool(body)
    reason = machine.find().reason
    assert reason is not None and said in reason and "\n" not in reason


def test_this_machine_can_be_looked_at() -> None:
    assert isinstance(detect.find(), Presence)


# ---------------------------------------------------------------------------------------------------- packages


def _module(name: str, **fields: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    vars(module).update(fields)
    return module


def test_every_package_is_really_imported() -> None:
    imported: list[str] = []

    def import_module(name: str) -> types.ModuleType:
        imported.append(name)
        return _module(name)

    assert set(PINS) < set(detect.packages(import_module))
    assert imported == ["libneuronxla", "neuronxcc", "torch_neuronx", "transformers_neuronx"]


def test_a_placeholder_is_told_in_one_sentence() -> None:
    def import_module(name: str) -> types.ModuleType:
        if name == "torch_neuronx":
            raise ImportError("\n\nThis package is a placeholder\n")
        return _module(name)

    with pytest.raises(DeviceUnavailableError) as caught:
        detect.packages(import_module)
    said = str(caught.value)
    assert said.startswith("torch-neuronx cannot be imported")
    assert "install torch-neuronx==2.7.0.2.9.9357 with PIP_EXTRA_INDEX_URL set" in said
    assert "\n" not in said


def test_the_emulated_package_is_no_device() -> None:
    def import_module(name: str) -> types.ModuleType:
        return _module(name, EMULATED=name == "transformers_neuronx", __file__="/emulated/__init__.py")

    with pytest.raises(DeviceUnavailableError, match="transformers-neuronx is the emulated one, from /emulated"):
        detect.packages(import_module)


def test_the_command_names_what_was_found(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = machine.find()
    monkeypatch.setattr(detect, "packages", lambda: {"torch-neuronx": "2.7"})
    monkeypatch.setattr(detect, "find", lambda: found)
    assert detect.main() == 0
    assert capsys.readouterr().out == "torch-neuronx 2.7\ninf2.xlarge: neuron0, 2 cores\n"


def test_the_command_fails_with_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(detect, "find", lambda: Presence(reason="no Neuron device: none"))
    monkeypatch.setitem(sys.modules, "libneuronxla", None)
    assert detect.main() == 1
    assert capsys.readouterr().err.startswith("libneuronxla cannot be imported (installed: ")
    monkeypatch.setattr(detect, "packages", dict)
    assert detect.main() == 1
    assert capsys.readouterr().err == "no Neuron device: none\n"


def test_the_pins_are_those_of_the_extra() -> None:
    file = Path(__file__).resolve().parents[3] / "pyproject.toml"
    project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
    lines = project["optional-dependencies"]["neuron"]
    assert dict(line.split("==") for line in lines if "==" in line) == dict(PINS)
