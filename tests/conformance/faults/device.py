"""Faults in what an engine hands to a device of fixed batch: DEV-*."""

from __future__ import annotations

from conformance.protocol import DeviceCall, EngineConfig, StepPlan

from .base import Faulty


class OnDevice(Faulty):
    """Changes the calls of a plan."""

    def twist(self, plan: StepPlan) -> None:
        plan.device_calls = [changed for call in plan.device_calls for changed in self.change(call, plan)]

    def change(self, call: DeviceCall, plan: StepPlan) -> list[DeviceCall]:
        """What becomes of one call."""
        raise NotImplementedError


class TakesBlockForLine(OnDevice):
    """vLLM PR 8008: right for as long as the pool has no more blocks than the device has lines."""

    breaks = "DEV-1"

    def change(self, call: DeviceCall, plan: StepPlan) -> list[DeviceCall]:
        blocks = {sequence.request_id: sequence.block_tables[0][0] for sequence in plan.sequences}
        call.lines = [blocks[rid] for rid, _ in call.rows]
        return [call]


class DecodesByHalves(OnDevice):
    """Makes two calls of a decode of more than two rows, each of which leaves the other's lines out."""

    breaks = "DEV-2"

    def change(self, call: DeviceCall, plan: StepPlan) -> list[DeviceCall]:
        if call.route == "prefill" or len(call.rows) <= 2:
            return [call]
        return [
            DeviceCall(route="decode", rows=call.rows[part], lines=call.lines[part],
                       positions=call.positions[part], width=1)
            for part in (slice(2), slice(2, None))
        ]  # fmt: skip


class TakesRowsByArrival(OnDevice):
    """The device returns a full batch in the order of lines, and the engine takes it for that of its requests."""

    breaks = "DEV-3"

    def change(self, call: DeviceCall, plan: StepPlan) -> list[DeviceCall]:
        if len(call.rows) == self.config.max_num_seqs:
            call.returned = [(sequence.request_id, sequence.seq) for sequence in plan.sequences]
        return [call]


class NeverWidens(OnDevice):
    """Hands a prompt of one token over as it is, which is a decode to the device."""

    breaks = "DEV-4"

    def change(self, call: DeviceCall, plan: StepPlan) -> list[DeviceCall]:
        if not any(call.positions):
            call.route, call.width = "decode", 1
        return [call]


class CompilesEachWidth(OnDevice):
    """Pads to the longest prompt of the step and not to a bucket."""

    breaks = "DEV-5"

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.widths = set(self.capabilities.device.context_buckets) if self.capabilities.device else set()

    def change(self, call: DeviceCall, plan: StepPlan) -> list[DeviceCall]:
        if call.route == "prefill" and self.steps > 1 and call.width not in self.widths:
            self.widths.add(call.width)
            call.compiled = 1
        return [call]
