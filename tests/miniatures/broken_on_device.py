"""Miniatures that do a device of fixed batch wrong: one or more for each DEV requirement."""

from __future__ import annotations

from conformance.protocol import DeviceCall, DeviceShape, StepPlan

from .on_device import OnDevice


class CountsLinesFromOne(OnDevice):
    """Leaves line 0 out, as if it were the null block. Modelled on vLLM PR 8008: with one block more, line N comes."""

    breaks = "DEV-1"

    def line(self) -> int:
        return min(set(range(1, self.config.max_num_seqs + 1)) - set(self.line_of.values()))


class ForgetsWhoHasLine(OnDevice):
    """Gives every job the line of its number: two jobs have one line when there were more jobs than lines."""

    breaks = "DEV-1"

    def line(self) -> int:
        return (len(self.jobs) + len(self.line_of)) % self.config.max_num_seqs


class PrefillsBeforeDecodes(OnDevice):
    """Prefills and decodes in one step, in that order: the decode leaves the new lines out."""

    breaks = "DEV-2"

    def calls(self, plan: StepPlan) -> list[DeviceCall]:
        return super().calls(plan)[::-1]


class DecodesWhoReturns(OnDevice):
    """Decodes a preempted job when it comes back. Modelled on vllm-neuron 0.2.0, which looks at its last token."""

    breaks = "DEV-2"

    def calls(self, plan: StepPlan) -> list[DeviceCall]:
        calls = []
        for call in super().calls(plan):
            back = [len(self.jobs[rid].sequences[0].tokens) > len(self.jobs[rid].spec.prompt) for rid, _ in call.rows]
            if call.route == "prefill" and any(back):
                call.route, call.width = "decode", 1
            calls.append(call)
        return calls


class DecodesPastWhatItHas(OnDevice):
    """Prefills all of a prompt but its last token."""

    breaks = "DEV-2"

    def calls(self, plan: StepPlan) -> list[DeviceCall]:
        calls = super().calls(plan)
        for call in calls:
            if call.route == "prefill":
                call.positions = [max(0, position - 1) for position in call.positions]
        return calls


class TakesRowsInOrderOfLines(OnDevice):
    """Modelled on transformers-neuronx issue 94: a full batch comes back by line, whatever was asked for."""

    breaks = "DEV-3"

    def call(self, route: str, positions: dict[str, int], width: int) -> DeviceCall:
        call = super().call(route, positions, width)
        if len(call.rows) == self.config.max_num_seqs:
            call.returned = [key for _, key in sorted(zip(call.lines, call.rows, strict=True))]
        return call


class HandsOverOneToken(OnDevice):
    """Does not widen a prompt of one token."""

    breaks = "DEV-4"

    def width(self, prefills: dict[str, int]) -> int:
        return 1 + max(prefills.values())


class CompiledTooLittle(OnDevice):
    """Was started for half the model's length."""

    breaks = "DEV-5"

    @property
    def shape(self) -> DeviceShape:
        buckets = (self.config.max_model_len // 2,)
        return DeviceShape(batch=self.config.max_num_seqs, context_buckets=buckets, token_buckets=buckets)


class CompilesOnDemand(OnDevice):
    """Makes the device compile a prefill of three tokens, which start-up did not foresee."""

    breaks = "DEV-5"

    def call(self, route: str, positions: dict[str, int], width: int) -> DeviceCall:
        call = super().call(route, positions, width)
        call.compiled = int(width == 3)
        return call
