"""A model runner over a Neuron device: the plans of the reference engine, on a fixed batch of lines.

It keeps the requirements of the contract for devices: DEV-1 (lines exist and differ), DEV-2 (every live line is in
every decode call), DEV-3 (rows return to their requests), DEV-4 (a one-token prompt disturbs nobody) and DEV-5 (no
shape that was not compiled). Standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from reference_engine.config import ConfigError, EngineConfig
from reference_engine.engine import Engine, RequestError
from reference_engine.request import Request, Status
from reference_engine.runners.neuron.device import Device, DeviceConfig, Rows, best_token
from reference_engine.runners.neuron.lines import LineMap, LineOrder, lowest_first
from reference_engine.runners.serving import SequenceKey
from reference_engine.scheduler import Plan, ScheduledSequence

PREFILL_WIDTH_MIN = 2
"""Tokens of the narrowest call that the device takes for a prefill; narrower ones decode, on every line."""


class PlanError(RuntimeError):
    """A plan that would spoil the cache, or that the device has no graph for; nothing of it was run."""


class _Row(NamedTuple):
    """One sequence of a step: ``tokens`` at positions ``first`` onwards, on ``line``."""

    key: SequenceKey
    line: int
    first: int
    tokens: list[int]


class NeuronRunner:
    """Executes plans of the reference engine on ``device``, greedily. ``config`` is that of the engine.

    A request holds one line from its prefill until it ends or is preempted; a preempted one is prefilled again.
    ``line_order`` chooses among the free lines. Rows are handed over in the order of their lines and given back in
    that of the plan: before SDK 2.21 a full batch returned its rows by line, whatever the order asked for
    (transformers-neuronx issue 94).

    Raises `ConfigError` for an engine that the device cannot serve.
    """

    def __init__(self, device: Device, config: EngineConfig, *, line_order: LineOrder = lowest_first) -> None:
        self._check_config(config, device.config)
        self.device = device
        self.lines = LineMap(device.config.lines, line_order)
        self._holders: dict[str, Request] = {}

    # -- what the device cannot serve --------------------------------------------------------------------

    def _check_config(self, config: EngineConfig, device: DeviceConfig) -> None:
        for name, served, why in _limits(config, device):
            if not served:
                raise ConfigError(f"{name} = {getattr(config, name)!r}: {why}")

    def check(self, request: Request) -> None:
        """Refuse what would fail inside the device and take every other request with it.

        Raises `RequestError` for several sequences and for a prompt longer than the largest context bucket.
        """
        name, longest = request.request_id, self.device.config.prompt_max
        if request.n > 1:
            raise RequestError(f"request {name}: n = {request.n}: a line cannot be copied, so n must be 1")
        if request.prompt_len > longest:
            raise RequestError(
                f"request {name}: the prompt has {request.prompt_len} tokens and the largest context bucket {longest}"
            )

    # -- a step ------------------------------------------------------------------------------------------

    def execute(self, plan: Plan) -> dict[SequenceKey, int]:
        """Run a step and sample; returns the tokens by (request id, sequence).

        Decodes go first: they overwrite position 0 of lines that have no token in this step, so that of a prompt
        prefilled in the same step. Raises `PlanError`, and what the device raises.
        """
        if plan.moves:
            raise PlanError(f"step {plan.step}: {len(plan.moves)} block moves, and the device has no cache operations")
        self._release_ended()
        running = [one for one in plan.sequences if one.sequence.request.status is Status.RUNNING]
        decodes = [self._row(one) for one in running if one.first]
        sampled = self._decode(decodes) if decodes else {}
        prefills = [self._row(one) for one in running if not one.first]
        if prefills:
            sampled |= self._prefill(prefills)
        return sampled

    def settle(self, engine: Engine) -> None:
        """Free the lines of requests that the last commit has ended."""
        self._release_ended()

    def _release_ended(self) -> None:
        """Free the lines of requests that are done, aborted or preempted: nobody reads them again (ACC-7)."""
        for name, request in list(self._holders.items()):
            if request.status is not Status.RUNNING:
                del self._holders[name]
                self.lines.release(name)

    def _row(self, scheduled: ScheduledSequence) -> _Row:
        sequence, first, num_tokens, samples = scheduled
        name = sequence.request.request_id
        if not samples or (first and num_tokens > 1):
            raise PlanError(f"{name}: positions {first} to {first + num_tokens - 1} are a chunk, and there is no graph")
        return _Row((name, sequence.index), self._line(scheduled), first, sequence.tokens[first:])

    def _line(self, scheduled: ScheduledSequence) -> int:
        """The line of a sequence; a prefill takes one, unless its request has one yet."""
        request = scheduled.sequence.request
        name = request.request_id
        if name not in self.lines:
            if scheduled.first:
                raise PlanError(f"{name}: position {scheduled.first} is to be decoded and it was never prefilled")
            self.lines.assign(name)
            self._holders[name] = request
        return self.lines[name]

    def _prefill(self, rows: list[_Row]) -> dict[SequenceKey, int]:
        longest = self.device.config.prompt_max
        for row in rows:
            if len(row.tokens) > longest:
                raise PlanError(
                    f"{row.key[0]} was preempted and is to be prefilled again with {len(row.tokens)} tokens; "
                    f"the largest context bucket is {longest}"
                )
        order = self._order(rows)
        prompts = [row.tokens for row in order]
        given = self.device.prefill([row.line for row in order], prompts, self._width(prompts))
        return self._sampled(rows, order, given)

    def _decode(self, rows: list[_Row]) -> dict[SequenceKey, int]:
        self._check_all_live(rows)
        order = self._order(rows)
        given = self.device.decode(
            [row.line for row in order], [row.tokens[0] for row in order], [row.first for row in order]
        )
        return self._sampled(rows, order, given)

    def _check_all_live(self, rows: list[_Row]) -> None:
        """DEV-2: a live line that a decode leaves out loses its position 0."""
        omitted = sorted(set(self._holders) - {row.key[0] for row in rows})
        if omitted:
            raise PlanError(
                f"{', '.join(omitted)} hold lines {', '.join(str(self.lines[name]) for name in omitted)} and are not "
                f"in the decode of {', '.join(row.key[0] for row in rows)}, which would overwrite their position 0"
            )

    def _order(self, rows: list[_Row]) -> list[_Row]:
        """The order in which rows are handed over: that of their lines."""
        return sorted(rows, key=lambda row: row.line)

    def _width(self, prompts: Sequence[Sequence[int]]) -> int:
        """Tokens in a row of a prefill: those of the longest prompt, and enough to be a prefill at all (DEV-4)."""
        return max(PREFILL_WIDTH_MIN, *map(len, prompts))

    def _sampled(self, rows: list[_Row], order: list[_Row], given: Rows) -> dict[SequenceKey, int]:
        """The token of each row; ``given`` is in the order of ``order`` (DEV-3)."""
        if len(given) != len(rows):
            raise PlanError(f"{len(rows)} rows were asked for and {len(given)} came back")
        on_device = self.device.config.sample_on_device
        return {
            row.key: int(values[0]) if on_device else best_token(values)
            for row, values in zip(order, given, strict=True)
        }


def _limits(config: EngineConfig, device: DeviceConfig) -> list[tuple[str, bool, str]]:
    """Fields of the engine's configuration, whether the device can serve them, and why not."""
    return [
        (
            "max_num_seqs",
            config.max_num_seqs <= device.lines,
            f"the device was compiled for {device.lines} lines, and a sequence needs one of its own",
        ),
        (
            "block_size",
            config.block_size == config.max_model_len,
            f"must be max_model_len ({config.max_model_len}): a line holds a whole sequence, so a block does",
        ),
        (
            "max_model_len",
            config.max_model_len - 1 <= device.positions,
            f"must be at most {device.positions + 1}, one more than the positions of a line",
        ),
        (
            "max_num_batched_tokens",
            config.max_num_batched_tokens >= config.max_num_seqs,
            f"must be at least max_num_seqs ({config.max_num_seqs}): a decode runs every live sequence",
        ),
        ("enable_prefix_caching", not config.enable_prefix_caching, "must be false: lines share nothing"),
        ("enable_chunked_prefill", not config.enable_chunked_prefill, "must be false: a prompt is one graph"),
        ("preemption_mode", config.preemption_mode == "recompute", "must be recompute: the device cannot swap"),
        ("num_swap_blocks", not config.num_swap_blocks, "must be 0: the device cannot swap"),
        ("num_lookahead_slots", not config.num_lookahead_slots, "must be 0: no graph decodes several tokens"),
        ("sliding_window", config.sliding_window is None, "must be None: the graphs attend to the whole line"),
        ("pipeline_depth", config.pipeline_depth == 1, "must be 1: a step needs the tokens of the one before"),
    ]
