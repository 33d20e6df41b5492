"""The device, its compiler and its packages by themselves: cores, time, compilation, a line that does not exist."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from neuron_tests.hardware import HardwareRig, median_seconds
from neuron_tests.probe import ALIASED, RAISED, prefill_on_line_n
from neuron_tests.rig import BUCKETS, MAIN, Rig, prompt
from reference_engine.runners.neuron.detect import PINS


@pytest.mark.assertion(34)
def test_the_packages_are_the_pinned_ones(rig: HardwareRig) -> None:
    versions = rig.versions()
    assert {name: versions[name] for name in PINS} == dict(PINS)


@pytest.mark.assertion(29)
def test_cores_belong_to_one_process(rig: HardwareRig) -> None:
    cores, needed = rig.visible_cores(), MAIN.config(rig.model_path).tp_degree
    assert cores is None or cores >= needed, f"{cores} NeuronCores are visible, and the suite needs {needed}"
    before = rig.device().prefill([0], [prompt("x", 9)])
    said = rig.second_process()
    rig.notes["second_process"] = said
    assert said is not None, "a second process got the cores of the first"
    assert rig.device().prefill([0], [prompt("x", 9)]) == before


LINES, LENGTH = 4, 16
STEPS: list[tuple[list[int], list[int], list[bool]]] = [
    ([5, 6, 7, 8], [0, 0, 0, 0], [True, True, True, True]),
    ([9, 0, 11, 0], [1, 0, 1, 0], [True, False, True, False]),
    ([12, 13, 14, 15], [2, 1, 2, 1], [True, True, True, True]),
    ([0, 0, 0, 16], [0, 0, 0, 2], [False, False, False, True]),
]


@pytest.mark.assertion(33)
def test_a_step_traced_by_hand_keeps_inactive_lines_and_computes_what_the_cpu_does(rig: Rig) -> None:
    traced = importlib.import_module("reference_engine.runners.neuron.traced")
    expected = traced.run(traced.DecodeStep(LINES, LENGTH), [traced.Step(*step) for step in STEPS], "eager")
    keys: Any = [[[0.0] * 32] * LENGTH] * LINES
    values: Any = keys
    for (_, _, live), (logits, new_keys, new_values), truth in zip(
        STEPS, rig.traced(LINES, LENGTH, STEPS), expected, strict=True
    ):
        inactive = [line for line in range(LINES) if not live[line]]
        assert [new_keys[line] for line in inactive] == [keys[line] for line in inactive]
        assert [new_values[line] for line in inactive] == [values[line] for line in inactive]
        for line in range(LINES):
            if live[line]:
                assert logits[line] == pytest.approx(truth.logits[line], abs=1e-3)
        keys, values = new_keys, new_values


@pytest.mark.assertion(20)
def test_a_decode_takes_as_long_with_one_row_as_with_all(rig: HardwareRig) -> None:
    seconds: dict[int, float] = {}
    for rows in (1, MAIN.lines):
        device, lines = rig.device(), list(range(rows))
        for step in range(40):
            if step == 10:
                device.stats.clear()  # the first ones warm up
            device.decode(lines, [7] * rows, [step] * rows)
        seconds[rows] = median_seconds(device)
    rig.notes["decode_seconds"] = seconds
    assert seconds[MAIN.lines] == pytest.approx(seconds[1], rel=0.2)


@pytest.mark.assertion(21)
def test_nothing_is_compiled_in_service(rig: Rig) -> None:
    runs = [rig.run(shape) for shape in (MAIN, BUCKETS)]
    before = rig.compiled()
    compilers: list[str] = []
    for run, lengths in zip(runs, [(1, 2, 77, 128, 30), (1, 63, 64, 65, 120, 128)], strict=True):
        for number, length in enumerate(lengths):
            run.ask(f"r{number}", length, 12)
        while run.busy:
            run.step()
            compilers += rig.compiling()
        assert run.wrong() == []
    assert rig.compiled() == before
    assert compilers == []


@pytest.mark.assertion(22)
def test_another_process_starts_without_compiling(rig: HardwareRig) -> None:
    rig.device()
    before = rig.compiled()
    rig.restart()
    assert rig.compiled() == before
    assert before, "the compile cache is empty, although a model was built"


@pytest.mark.assertion(28)
def test_a_prefill_on_a_line_that_does_not_exist_fails_or_overwrites_line_0_alone(rig: Rig) -> None:
    found = prefill_on_line_n(rig.device_to_lose())
    rig.notes["prefill_on_line_n"] = found
    assert found in (ALIASED, RAISED)
