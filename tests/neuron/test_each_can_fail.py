"""Each assertion of the Neuron suite fails when what it guards is broken, and passes when it is not."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import neuron_tests
from neuron_tests.assertions import ASSERTIONS
from neuron_tests.rig import Rig
from reference_engine.runners.neuron.device import DeviceError, DeviceUnavailableError
from reference_engine.runners.neuron.runner import PlanError

for library in ("torch", "transformers"):
    pytest.importorskip(library, reason="the emulated device needs the extra `torch`")

from neuron.broken import BROKEN, HEALTHY_MACHINE  # noqa: E402 - only where torch is

FAILURES = (AssertionError, pytest.fail.Exception, DeviceError, DeviceUnavailableError, PlanError)
"""What a test fails with; a TypeError, say, would be a mistake of ours."""

Body = Callable[..., None]


def bodies() -> dict[int, list[Body]]:
    """The functions of the suite by the number of their assertion."""
    found: dict[int, list[Body]] = {number: [] for number in ASSERTIONS}
    for path in sorted(Path(neuron_tests.__file__).parent.glob("test_*.py")):
        module = importlib.import_module(f"neuron_tests.{path.stem}")
        for name, body in vars(module).items():
            if name.startswith("test_"):
                (number,) = (mark.args[0] for mark in body.pytestmark if mark.name == "assertion")
                found[number].append(body)
    return found


BODIES = bodies()


def calls(number: int) -> Iterator[Callable[[Rig], None]]:
    """Each body of an assertion with each of its parameters, waiting for the rig."""
    for body in BODIES[number]:
        marks = [mark for mark in getattr(body, "pytestmark", []) if mark.name == "parametrize"]
        for combination in itertools.product(*(_arguments(mark) for mark in marks)):
            arguments = {name: value for part in combination for name, value in part.items()}
            yield lambda rig, body=body, arguments=arguments: body(rig=rig, **arguments)  # type: ignore[misc]


def _arguments(mark: pytest.Mark) -> list[dict[str, Any]]:
    names, values = mark.args
    if isinstance(names, str):
        return [{names: value} for value in values]
    return [dict(zip(names, value, strict=True)) for value in values]


def failure(rig: Rig, number: int) -> str | None:
    """What the bodies of an assertion fail with first."""
    for call in calls(number):
        try:
            call(rig)
        except FAILURES as error:
            return f"{type(error).__name__}: {error}"
    return None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the model is, saved once."""
    return tmp_path_factory.mktemp("neuron")


@pytest.mark.parametrize("number", ASSERTIONS)
def test_each_assertion_has_a_test_and_something_that_breaks_it(number: int) -> None:
    assert BODIES[number]
    assert ASSERTIONS[number].broken_by
    assert set(ASSERTIONS[number].broken_by) <= set(BROKEN)


def test_everything_that_is_broken_is_noticed_by_some_assertion() -> None:
    assert {name for row in ASSERTIONS.values() for name in row.broken_by} == set(BROKEN)


@pytest.mark.parametrize(
    ("number", "name"), [(row.number, name) for row in ASSERTIONS.values() for name in row.broken_by]
)
def test_the_assertion_fails_when_it_is_broken(number: int, name: str, folder: Path) -> None:
    rig = BROKEN[name](folder)
    try:
        assert failure(rig, number)
    finally:
        rig.close()


@pytest.mark.parametrize("number", [row.number for row in ASSERTIONS.values() if row.kinds == ("hardware",)])
def test_what_needs_hardware_passes_on_a_healthy_machine(number: int, folder: Path) -> None:
    rig = HEALTHY_MACHINE(folder)
    try:
        assert failure(rig, number) is None
    finally:
        rig.close()
