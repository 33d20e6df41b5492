"""Is there a Neuron device here, and is what should drive it real? Cheap questions first. Standard library only.

1. Character devices ``/dev/neuron0`` … whose major number is the one the kernel lists for ``neuron``. A file of that
   name proves nothing.
2. ``neuron-ls -j``: how many cores they have.
3. The product name of the machine: the instance type, for reports alone.
4. Importing the packages for real, which `packages` does and `find` does not: the public index holds placeholders of
   the same names that install, have a spec, and raise ImportError when they are imported.

``python -m reference_engine.runners.neuron.detect`` says what was found.

Nothing here starts the runtime. A process that has started it owns its cores until it ends.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reference_engine.runners.neuron.device import DeviceUnavailableError

PINS: Mapping[str, str] = {
    "libneuronxla": "2.2.8201.0",
    "neuronx-cc": "2.20.9961.0",
    "torch-neuronx": "2.7.0.2.9.9357",
    "transformers-neuronx": "0.13.1216",
}
"""The packages of SDK 2.25.0 by distribution name, as the extra ``neuron`` pins them."""

_MODULES = {
    "libneuronxla": "libneuronxla",
    "neuronx-cc": "neuronxcc",
    "torch-neuronx": "torch_neuronx",
    "transformers-neuronx": "transformers_neuronx",
}


@dataclass(frozen=True)
class Host:
    """Where a machine is looked at; another one is made of other paths."""

    devices: Path = Path("/dev")
    majors: Path = Path("/proc/devices")
    product: Path = Path("/sys/devices/virtual/dmi/id/product_name")
    tools: tuple[str, ...] = ("neuron-ls", "/opt/aws/neuron/bin/neuron-ls")
    stat: Callable[[Path], os.stat_result] = os.stat


@dataclass(frozen=True, kw_only=True)
class Presence:
    """What was found. ``reason`` says why there is no device to be used, in one sentence; None: there is."""

    reason: str | None
    devices: tuple[str, ...] = ()
    cores: int | None = None
    """NeuronCores of all devices; None where ``neuron-ls`` is not installed."""
    instance_type: str | None = None


def find(host: Host | None = None) -> Presence:
    """Look for a device. Never raises, imports nothing, starts nothing but ``neuron-ls``."""
    host = host or Host()
    major = _major(host)
    if major is None:
        return Presence(reason=f"no Neuron device: the kernel lists no driver `neuron` in {host.majors}")
    devices = tuple(path.name for path in _nodes(host) if _is_device(host, path, major))
    if not devices:
        return Presence(
            reason=f"no Neuron device: the driver is loaded (major {major}), but {host.devices} has no character "
            "device neuron0 of its number"
        )
    instance_type = _text(host.product).strip() or None
    cores, reason = _cores(host)
    return Presence(reason=reason, devices=devices, cores=cores, instance_type=instance_type)


def _major(host: Host) -> int | None:
    """The major number of the driver, from the part of the table that lists character devices."""
    characters = _text(host.majors).partition("Block devices:")[0]
    match = re.search(r"^\s*(\d+) neuron$", characters, re.MULTILINE)
    return int(match[1]) if match else None


def _nodes(host: Host) -> list[Path]:
    named = [path for path in host.devices.glob("neuron*") if path.name[6:].isdigit()]
    return sorted(named, key=lambda path: int(path.name[6:]))


def _is_device(host: Host, path: Path, major: int) -> bool:
    try:
        found = host.stat(path)
    except OSError:
        return False
    return stat.S_ISCHR(found.st_mode) and os.major(found.st_rdev) == major


def _cores(host: Host) -> tuple[int | None, str | None]:
    """NeuronCores as ``neuron-ls`` counts them, or why there is no saying. A missing tool is no reason."""
    tool = next(filter(None, map(shutil.which, host.tools)), None)
    if tool is None:
        return None, None
    try:
        done = subprocess.run([tool, "-j"], capture_output=True, text=True, timeout=60, check=False)  # noqa: S603 - found on PATH, no shell
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"the Neuron driver is loaded, but {tool} -j does not run: {error}"
    if done.returncode:
        said = (done.stderr or done.stdout).strip().partition("\n")[0]
        return None, f"the Neuron driver is loaded, but {tool} -j ends with {done.returncode}: {said}"
    try:
        listed = json.loads(done.stdout)
        return sum(int(device["nc_count"]) for device in listed), None
    except (ValueError, TypeError, KeyError):
        return None, f"the Neuron driver is loaded, but {tool} -j does not list nc_count for each device"


def packages(import_module: Callable[[str], Any] = importlib.import_module) -> dict[str, str]:
    """Import the packages of the SDK for real; returns the releases, torch and transformers with them.

    Raises `DeviceUnavailableError` when one is missing, a placeholder, or emulated.
    """
    for name, module in _MODULES.items():
        try:
            found = import_module(module)
        except ImportError as error:
            raise DeviceUnavailableError(
                f"{name} cannot be imported (installed: {_version(name) or 'no'}): the public index holds placeholders "
                f"of this name, so install {name}=={PINS[name]} with PIP_EXTRA_INDEX_URL set to the Neuron index"
            ) from error
        if getattr(found, "EMULATED", False):
            raise DeviceUnavailableError(f"{name} is the emulated one, from {found.__file__}: take it off PYTHONPATH")
    return {name: _version(name) or "unknown" for name in (*_MODULES, "torch", "transformers")}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def main() -> int:
    """Print the packages and the device; returns 0 when both are there, else 1 with one sentence why not."""
    try:
        versions = packages()
    except DeviceUnavailableError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write("".join(f"{name} {version}\n" for name, version in versions.items()))
    found = find()
    if found.reason is not None:
        sys.stderr.write(f"{found.reason}\n")
        return 1
    sys.stdout.write(f"{found.instance_type or 'unknown machine'}: {', '.join(found.devices)}, {found.cores} cores\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
