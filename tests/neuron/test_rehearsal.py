"""The hardware suite on a machine that only looks like one with a Neuron device."""

from __future__ import annotations

import json
from typing import Any

import pytest

from neuron import rehearsal
from neuron.sessions import Sessions
from neuron_tests.assertions import ASSERTIONS, HARDWARE_ORDER, LAST
from neuron_tests.probe import ALIASED
from reference_engine.runners.neuron.detect import PINS

for library in ("torch", "transformers"):
    pytest.importorskip(library, reason="the emulated device needs the extra `torch`")


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, int, dict[str, Any]]:
    """What the suite printed, its exit code, and its report."""
    folder = tmp_path_factory.mktemp("inf2")
    environment = rehearsal.build(folder)
    report = folder / "report.json"
    done = Sessions(folder).run(
        *("--pyargs", "neuron_tests", "-m", "neuron", "--neuron-destructive", "-v"),
        *("-p", "rehearsed", "--neuron-report", str(report)),
        **environment,
    )
    return done.stdout, done.returncode, json.loads(report.read_text(encoding="utf-8"))


def test_every_assertion_for_hardware_passes(session: tuple[str, int, dict[str, Any]]) -> None:
    shown, code, report = session
    assert code == 0, shown
    assert {row["assertion"] for row in report["results"]} == {
        row.number for row in ASSERTIONS.values() if "hardware" in row.kinds
    }
    assert {row["outcome"] for row in report["results"]} == {"passed"}


def test_they_come_in_the_order_in_which_failures_matter(session: tuple[str, int, dict[str, Any]]) -> None:
    _, _, report = session
    numbers = list(dict.fromkeys(row["assertion"] for row in report["results"]))
    others = [number for number in sorted(numbers) if number not in (*HARDWARE_ORDER, LAST)]
    assert numbers == [*HARDWARE_ORDER, *others, LAST]


def test_the_report_answers_what_is_open(session: tuple[str, int, dict[str, Any]]) -> None:
    _, _, report = session
    (device,) = report["devices"]
    assert device["kind"] == "hardware"
    assert device["instance_type"] == "inf2.xlarge"
    assert set(report["questions"]) <= set(device)
    assert device["versions"].items() >= PINS.items()
    assert (device["prefill_on_line_n"], device["row_order"]) == (ALIASED, "new")
    assert device["one_token_call_damages"] is device["omitted_line_damaged"] is True
    assert device["tokens_compared"] > 1000
    assert "NeuronCores are not available" in device["second_process"]
    assert len(device["compile_seconds"]) == 3
