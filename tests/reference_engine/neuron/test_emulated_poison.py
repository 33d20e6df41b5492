"""Poison mode: silent while a device is used as it should be; else it names line and position."""

from __future__ import annotations

from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="the emulated device needs the extra `torch`")

from emulation import Requests, alone, build, decode, prefill, prompt  # noqa: E402 - only where torch is
from reference_engine.runners.neuron.emulated import Behaviour, StaleReadError  # noqa: E402

SHORT, MIDDLE, LONG = prompt("short", 3), prompt("middle", 17), prompt("long", 30)


@pytest.mark.parametrize("amp", ["bf16", "f16"])
def test_poison_does_not_show_in_results_of_narrower_types(amp: str) -> None:
    poisoned, plain = (build(Behaviour(poison=poison), amp=amp) for poison in (True, False))
    runs = [Requests(model).start({0: LONG, 1: SHORT}).go(9).tokens for model in (poisoned, plain)]
    assert runs[0] == runs[1]


def test_poison_is_silent_where_a_device_is_used_as_it_should_be() -> None:
    model = build(Behaviour(poison=True), tokens=(32, 64, 128))
    requests = Requests(model).start({0: LONG, 1: SHORT, 2: [77]}).go(20)
    requests.start({1: MIDDLE, 3: SHORT}).go(20)
    assert requests.output(0) == alone(LONG, 41)
    assert requests.output(1) == alone(MIDDLE, 21)
    model.reset()
    assert Requests(model).start({2: SHORT}).go(9).output(2) == alone(SHORT, 10)


def poisoned() -> Any:
    return build(Behaviour(poison=True))


def left_out(model: Any) -> None:
    requests = Requests(model).start({0: SHORT, 2: MIDDLE})
    requests.go(1, lines=[0])
    requests.go(1)


def skipped_a_position(model: Any) -> None:
    prefill(model, [1], [SHORT])
    decode(model, [1], [5], [4])


def read_past_the_prompt_of_a_reused_line(model: Any) -> None:
    Requests(model).start({1: LONG}).go(20)
    prefill(model, [1], [prompt("full", 32)])
    decode(model, [1], [5], [45])


def read_after_reset(model: Any) -> None:
    Requests(model).start({1: LONG})
    model.reset()
    decode(model, [1], [5], [30])


def overwritten_by_line_n(model: Any) -> None:
    prefill(model, [0], [MIDDLE])
    prefill(model, [4], [SHORT])
    decode(model, [0], [5], [17])


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (left_out, r"line 2 reads position 0, but a decode step .* wrote token 0 there \(call 2\)"),
        (skipped_a_position, r"line 1 reads position 3, but its prefill wrote padding there \(call 0\)"),
        (read_past_the_prompt_of_a_reused_line, r"line 1 reads position 32, but nothing of its sequence was written"),
        (read_after_reset, r"line 1 reads position 0, but nothing of its sequence was written there$"),
        (overwritten_by_line_n, r"line 0 reads position 1, but a prefill on a line that does not exist .*\(call 1\)"),
    ],
)
def test_poison_names_line_and_position_of_a_stale_read(misuse: Any, message: str) -> None:
    misuse(build())  # a faithful device says nothing
    with pytest.raises(StaleReadError, match=message):
        misuse(poisoned())
