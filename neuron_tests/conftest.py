"""Runs each assertion on the emulated device, and with ``-m neuron`` on the hardware.

Nothing is looked for and nothing of the SDK is imported before the first test asks for its device.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from neuron_tests import emulated
from neuron_tests.assertions import ASSERTIONS, LAST, Assertion, Kind, hardware_rank
from neuron_tests.hardware import HardwareRig
from neuron_tests.report import Recorder
from neuron_tests.rig import Rig
from reference_engine.runners.neuron import detect
from reference_engine.runners.neuron.device import DeviceUnavailableError

HERE = Path(__file__).resolve().parent
REQUIRE: dict[Kind, str] = {"hardware": "KVCONFORM_REQUIRE_NEURON", "emulated": "KVCONFORM_REQUIRE_EMULATED"}
"""Environment variables: set to 1, a missing device is a failure."""
_RECORDER: pytest.StashKey[Recorder] = pytest.StashKey()


def pytest_configure(config: pytest.Config) -> None:
    """Register what writes the report."""
    config.stash[_RECORDER] = Recorder(config.getoption("neuron_report", None))
    config.pluginmanager.register(config.stash[_RECORDER], "kvconform-neuron-recorder")


def _of(definition: pytest.Item | pytest.Function) -> Assertion | None:
    marker = definition.get_closest_marker("assertion")
    return None if marker is None else ASSERTIONS[marker.args[0]]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each kind of device on which the assertion can be seen."""
    assertion = _of(metafunc.definition)
    if assertion is None or "rig" not in metafunc.fixturenames:
        return
    marker = metafunc.definition.get_closest_marker("assertion")
    only = marker.kwargs.get("only") if marker else None
    kinds = [kind for kind in assertion.kinds if only in (None, kind)]
    marks = {"hardware": [pytest.mark.neuron], "emulated": []}
    metafunc.parametrize("rig", [pytest.param(kind, marks=marks[kind], id=kind) for kind in kinds], indirect=True)


def _is_hardware(item: pytest.Item) -> bool:
    return item.path.is_relative_to(HERE) and item.get_closest_marker("neuron") is not None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the hardware alone unless ``-m`` speaks of it; put its tests in their order, the destructive one last."""
    hardware = [item for item in items if _is_hardware(item)]
    others = [item for item in items if not _is_hardware(item)]
    if "neuron" not in config.getoption("markexpr"):
        if hardware:
            config.hook.pytest_deselected(items=hardware)
            config.stash[_RECORDER].deselected = len(hardware)
        hardware = []
    ranked = {item: hardware_rank(assertion.number) for item in hardware if (assertion := _of(item))}
    items[:] = [*others, *sorted(hardware, key=ranked.__getitem__)]
    for item in items:
        assertion = _of(item) if item.path.is_relative_to(HERE) else None
        if assertion is not None:
            item.user_properties.append(("assertion", assertion.number))


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    """Say what was left out."""
    count = config.stash[_RECORDER].deselected
    return [f"kvconform: {count} tests of the Neuron device are left out; -m neuron runs them"] if count else []


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what has no device here, with the reason; where a device is required, end the session with it."""
    assertion = _of(item) if item.path.is_relative_to(HERE) else None
    if assertion is None:
        return
    kind: Kind = "hardware" if _is_hardware(item) else "emulated"
    reason, variable = _absent(kind), REQUIRE[kind]
    if reason is not None and os.environ.get(variable, "0") not in ("", "0"):
        pytest.exit(f"{variable} is set: {reason}", returncode=1)
    if reason is not None:
        pytest.skip(reason)
    if (
        kind == "hardware"
        and assertion.number == LAST
        and not item.config.getoption("neuron_destructive", default=False)
    ):
        pytest.skip("may wedge a NeuronCore: --neuron-destructive runs it")


@functools.cache
def _absent(kind: Kind) -> str | None:
    """Why there is no device of this kind here, in one sentence, or None. Asked by the first test that wants one."""
    return detect.find().reason if kind == "hardware" else emulated.missing()


@pytest.fixture(scope="session")
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """The device under test, emulated or hardware, with an engine and a runner to put on it."""
    folder = tmp_path_factory.mktemp("neuron")
    made: Rig
    if request.param == "hardware":
        made = hardware = HardwareRig(folder, detect.find())
        try:
            hardware.versions()
        except DeviceUnavailableError as error:
            hardware.close()
            pytest.exit(str(error), returncode=1)
    else:
        made = emulated.EmulatedRig(folder)
    request.config.stash[_RECORDER].watch(made)
    yield made
    made.close()
