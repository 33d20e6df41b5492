"""The Hypothesis machine finds what the driver finds, and ends with the same kind of file."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import settings

from conformance.adapters.reference import make
from conformance.operations import Add
from conformance.protocol import Engine, EngineConfig
from fuzz.machine import PROFILES, EngineMachine, Failure, machine_for, run_machine

FEW = settings(PROFILES["kvconform-ci"], max_examples=25)
ONE_BLOCK = {
    "num_blocks": 1,
    "block_size": 4,
    "max_num_seqs": 1,
    "max_model_len": 4,
    "max_num_batched_tokens": 4,
    "enable_chunked_prefill": False,
    "enable_prefix_caching": False,
    "preemption_mode": "recompute",
    "num_swap_blocks": 0,
    "num_lookahead_slots": 0,
    "sliding_window": None,
    "pipeline_depth": 1,
    "watermark": 0.0,
}
"""Where there is one shortest sequence: which examples Hypothesis draws depends on the modules that are imported."""


def touched(config: EngineConfig) -> Engine:
    return make(msgspec.structs.replace(config, engine_options={"append_check": "touched"}))


def test_the_reference_engine_holds() -> None:
    run_machine(machine_for("reference", make), FEW)


def test_the_fault_of_the_seed_is_found_and_shrunk_further() -> None:
    machine = machine_for("touched", touched, judged={"PRE-1"}, pinned=ONE_BLOCK)
    with pytest.raises(Failure) as caught:
        run_machine(machine, FEW)
    shrunk = caught.value.shrunk
    assert shrunk.violation.requirement == "PRE-1"
    assert shrunk.operations == [Add(prompt_len=1, max_tokens=2)]
    assert shrunk.stable == 3


def test_a_fault_that_is_there_once_and_not_again_is_no_less_of_a_finding() -> None:
    def fickle(config: EngineConfig) -> Engine:
        seen = machine is not None and machine.last_failure is not None
        return (make if seen else touched)(config)

    machine: type[EngineMachine] | None = None
    machine = machine_for("fickle", fickle, judged={"PRE-1"}, pinned=ONE_BLOCK)
    with pytest.raises(Failure) as caught:
        run_machine(machine, FEW)
    assert caught.value.shrunk.violation.requirement == "PRE-1"
    assert caught.value.shrunk.stable == 0


def test_each_engine_has_a_machine_of_its_own() -> None:
    one, other = machine_for("my.module:make", make), machine_for("reference", make)
    assert one is not other
    assert one.__name__ == "MyModuleMakeMachine"
    assert one.last_failure is None
