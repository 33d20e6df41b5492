"""Calls into a device in traces and explanations; calls that make no sense are the adapter's fault."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from conformance.adapters.reference import ReferenceAdapter, make
from conformance.execute import execute, replay, trace_of
from conformance.explain import DEVICE_CALLS_SHOWN, explain
from conformance.operations import Add, Drain, Operation, Step
from conformance.protocol import AdapterError, ConfigRefused, DeviceCall, Engine, EngineConfig, StepPlan
from conformance.session import Session
from conformance.trace import DeviceOutcome, Trace, read_trace, write_trace
from miniatures import broken_on_device as broken
from miniatures.on_device import OnDevice

CONFIG = EngineConfig(
    num_blocks=2, block_size=16, max_num_seqs=2, max_num_batched_tokens=32, max_model_len=16, fixed_batch=True
)
OPERATIONS: list[Operation] = [Add(3, 4), Step(2), Add(1, 2), Drain()]


def recorded(
    factory: Callable[[EngineConfig], Engine], operations: list[Operation] | None = None, config: EngineConfig = CONFIG
) -> Trace:
    execution = execute(factory, config, operations or OPERATIONS, stop_at_first=False, record=True)
    return trace_of("here", config, execution)


def calls(trace: Trace) -> list[DeviceOutcome]:
    return [call for line in trace.lines for step in line.steps for call in step.device]


# -- traces ----------------------------------------------------------------------------------------------


def test_a_trace_keeps_every_call_with_its_lines(tmp_path: Path) -> None:
    trace = recorded(make)
    write_trace(tmp_path / "trace.jsonl", trace)
    again = read_trace(tmp_path / "trace.jsonl")
    assert again == trace
    assert calls(again)[:3] == [
        DeviceOutcome(route="prefill", width=3, rows=[("r0", 0, 2)]),
        DeviceOutcome(route="decode", width=1, rows=[("r0", 0, 3)]),
        DeviceOutcome(route="prefill", width=2, rows=[("r1", 1, 0)]),
    ]


class FromTheTop(OnDevice):
    """Hands out the highest free line."""

    def line(self) -> int:
        return max(set(range(self.config.max_num_seqs)) - set(self.line_of.values()))


def test_which_line_it_is_does_not_reach_the_digest_and_what_is_asked_of_it_does() -> None:
    clean = recorded(OnDevice)
    assert calls(recorded(FromTheTop)) != calls(clean)
    assert recorded(FromTheTop).footer.digest == clean.footer.digest
    assert recorded(broken.HandsOverOneToken).footer.digest != clean.footer.digest


def test_a_finding_fails_again_and_holds_on_a_right_engine() -> None:
    trace = recorded(broken.HandsOverOneToken)
    assert replay(broken.HandsOverOneToken, trace).status == "FAILED"
    assert replay(OnDevice, trace).status == "FIXED"
    assert replay(make, trace).status == "FIXED"


# -- explanations ----------------------------------------------------------------------------------------


def test_the_last_calls_are_told() -> None:
    told = explain(recorded(broken.HandsOverOneToken))
    assert told[0].endswith("one block holds a whole sequence, on a device of fixed batch.")
    assert "The device ran 4 decodes and prefilled 1 prompt; its last calls:" in told
    assert "Step 0, prefill of width 3: r0 on line 0 to position 2." in told
    assert "Step 2, decode: r1 on line 1 at position 0." in told
    assert told[-1].startswith("DEV-4 is broken in step 3: in step 3 r0 decodes at position 5 on line 0, ")


def test_rows_that_went_astray_and_graphs_compiled_are_told() -> None:
    rows = explain(recorded(broken.TakesRowsInOrderOfLines, [Add(3, 2), Add(4, 6), Step(2), Add(5, 3), Drain()]))
    assert any(one.endswith("What came back was given to r2, r1.") for one in rows)
    compiled = explain(recorded(broken.CompilesOnDemand))
    assert any(one.endswith("1 graph had to be compiled.") for one in compiled)


def test_of_many_calls_the_last_ones_are_told() -> None:
    told = explain(recorded(make, [Add(3, 13), Drain(), Add(3, 13), Drain()]))
    assert sum(one.startswith("Step ") for one in told) == DEVICE_CALLS_SHOWN
    assert "The device ran 24 decodes and prefilled 2 prompts; its last calls:" in told


def test_an_engine_without_a_device_is_explained_without_one() -> None:
    assert not any("device" in one for one in explain(recorded(make, config=EngineConfig())))


# -- adapters --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        DeviceCall(route="decode", rows=[], lines=[], positions=[], width=1),
        DeviceCall(route="decode", rows=[("r0", 0)], lines=[0, 1], positions=[3], width=1),
        DeviceCall(route="decode", rows=[("r0", 0)], lines=[0], positions=[], width=1),
        DeviceCall(route="decode", rows=[("r7", 0)], lines=[0], positions=[3], width=1),
        DeviceCall(route="decode", rows=[("r0", 0)], lines=[0], positions=[3], width=1, returned=[("r7", 0)]),
    ],
    ids=["no-rows", "lines", "positions", "unknown", "returned-to-unknown"],
)
def test_a_call_that_makes_no_sense_is_the_adapters_fault(call: DeviceCall) -> None:
    class Nonsense(OnDevice):
        def calls(self, plan: StepPlan) -> list[DeviceCall]:
            return [call]

    with pytest.raises(AdapterError, match="malformed DeviceCall"):
        Session(Nonsense(CONFIG), CONFIG).run(OPERATIONS)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"block_size": 8}, "block_size = 8"),
        ({"enable_prefix_caching": True}, "enable_prefix_caching = True"),
        ({"pipeline_depth": 2}, "pipeline_depth = 2"),
        ({"max_num_seqs": 40}, "max_num_batched_tokens = 32"),
    ],
)
def test_the_reference_engine_refuses_what_its_device_cannot_serve(fields: dict[str, int], said: str) -> None:
    values = {name: getattr(CONFIG, name) for name in CONFIG.__struct_fields__}
    with pytest.raises(ConfigRefused, match=said):
        make(EngineConfig(**{**values, **fields}))


def test_the_reference_engine_declares_its_device_where_it_runs_on_it() -> None:
    assert make(EngineConfig()).capabilities.device is None
    engine = make(CONFIG)
    assert isinstance(engine, ReferenceAdapter)
    shape = engine.capabilities.device
    assert shape is not None
    assert (shape.batch, shape.context_buckets, shape.token_buckets) == (2, (4, 8, 16), (4, 8, 16))
    assert "fork" not in engine.capabilities.features
