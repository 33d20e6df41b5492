"""The hand-traced step: the same numbers however it is run, and inactive lines left alone."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="the traced step needs the extra `torch`")

from reference_engine.runners.neuron.traced import DecodeStep, Step, run  # noqa: E402 - only where torch is

LINES, LENGTH = 3, 8
STEPS = [
    Step([5, 6, 7], [0, 0, 0], [True, True, True]),
    Step([8, 0, 9], [1, 0, 1], [True, False, True]),
    Step([1, 2, 3], [2, 1, 2], [True, True, True]),
]


def test_tracing_changes_no_number() -> None:
    module = DecodeStep(LINES, LENGTH)
    assert run(module, STEPS, "jit") == run(module, STEPS, "eager")


def test_a_line_that_is_not_live_keeps_its_cache_bit_by_bit() -> None:
    first, second, _ = run(DecodeStep(LINES, LENGTH), STEPS, "jit")
    assert second.keys[1] == first.keys[1]
    assert second.values[1] == first.values[1]
    assert second.keys[0] != first.keys[0]


def test_a_live_line_writes_its_own_position_alone() -> None:
    (first, *_) = run(DecodeStep(LINES, LENGTH), STEPS, "eager")
    written = [[any(slot) for slot in line] for line in first.keys]
    assert written == [[True] + [False] * (LENGTH - 1)] * LINES


def test_what_lies_ahead_is_not_seen() -> None:
    module = DecodeStep(1, LENGTH).eval()
    keys, values = torch.zeros(1, LENGTH, 32), torch.zeros(1, LENGTH, 32)
    inputs = [torch.tensor([number], dtype=torch.int32) for number in (5, 2, 1)]
    with torch.no_grad():
        plain = module(*inputs, keys, values)[0]
        keys[:, 3:], values[:, 3:] = 9.0, 9.0
        ahead = module(*inputs, keys, values)[0]
        keys[:, :2], values[:, :2] = 9.0, 9.0
        behind = module(*inputs, keys, values)[0]
    assert torch.equal(plain, ahead)
    assert not torch.equal(plain, behind)


def test_on_the_device_it_is_traced_by_torch_neuronx_with_exact_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def trace(module: Any, example: tuple[Any, ...], **keywords: Any) -> Any:
        seen.append(([(tuple(part.shape), str(part.dtype)) for part in example], keywords))
        return module

    monkeypatch.setitem(sys.modules, "torch_neuronx", types.SimpleNamespace(trace=trace))
    module = DecodeStep(LINES, LENGTH)
    assert run(module, STEPS, "neuron") == run(module, STEPS, "eager")
    whole, cache = ((LINES,), "torch.int32"), ((LINES, LENGTH, 32), "torch.float32")
    assert seen == [([whole] * 3 + [cache] * 2, {"compiler_args": ["--auto-cast", "none", "-O1"]})]


def test_the_weights_are_a_function_of_the_seed() -> None:
    one, same, other = (DecodeStep(LINES, LENGTH, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one.head.weight, same.head.weight)
    assert not torch.equal(one.head.weight, other.head.weight)
