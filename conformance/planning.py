"""How many blocks an engine needs for a batch size, measured on the engine itself.

``max_num_seqs`` requests are added at once, each as long as max_model_len allows, and run to their end with pools of
different sizes. A pool is *enough* when nobody is preempted, every prompt is prefilled once and all of them run at
once (PRE-2 and PRE-6). The least such pool is found by search; the difference to the blocks that the tokens need is
told apart into the null block and other reserved blocks, what admission keeps back, and what the append check counts
without need (vLLM issue 8007).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from conformance.execute import open_session
from conformance.ledger import Ledger
from conformance.need import PreemptionVerdict, judge_preemptions
from conformance.operations import Add, Drain
from conformance.protocol import Capabilities, ConfigRefused, EngineConfig, EngineFactory
from conformance.records import StepFacts
from conformance.violations import CORRUPTING
from conformance.watchdog import Watchdog
from conformance.wording import some

OUTPUTS_MAX = 32
"""Tokens each request produces, at most: they are the last ones before max_model_len."""
SPARE_MAX = 4
"""The search gives up at this many times the blocks the tokens need."""


class Point(msgspec.Struct, kw_only=True, frozen=True):
    """One pool, measured. ``refused``: the engine will not run with it; the other figures are then 0."""

    num_blocks: int
    requests: int
    preemptions: int = 0
    prefills: int = 0
    steps: int = 0
    concurrency: int = 0
    """Most sequences that ran at once."""
    finished: int = 0
    first_preemption: PreemptionVerdict | None = None
    refused: str = ""
    broken: str = ""
    """A violation that ended the run, in one sentence."""

    @property
    def enough(self) -> bool:
        """No preemption, every prompt prefilled once, all at once, all to their end."""
        return (
            not self.refused
            and not self.broken
            and self.preemptions == 0
            and self.prefills == self.requests == self.finished
            and self.concurrency >= self.requests
        )


class BlockPlan(msgspec.Struct, kw_only=True, frozen=True):
    """What the search came to. ``needed``: the least pool that is enough; None when none was found."""

    config: EngineConfig
    capabilities: Capabilities
    per_sequence: int
    """Blocks of one sequence at its full length."""
    needed: int | None
    curve: tuple[Point, ...]
    """Every pool that was measured, by size."""
    rule: tuple[str, ...]
    """Where the blocks go, one line each, and the reason."""

    @property
    def tokens_need(self) -> int:
        """Blocks that the tokens of a full batch need, counted exactly."""
        return self.per_sequence * self.config.max_num_seqs


def plan_blocks(
    factory: EngineFactory,
    config: EngineConfig,
    *,
    watchdog: Watchdog | None = None,
    on_point: Callable[[Point], None] | None = None,
) -> BlockPlan:
    """Search for the least ``num_blocks`` of ``config`` under which a full batch runs undisturbed.

    ``config.num_blocks`` is ignored. Raises `ConfigRefused` when the engine refuses every pool.
    """
    return _Search(factory, config, watchdog, on_point).run()


class _Watch:
    """Counts who ran at once, and keeps the first preemption with its arithmetic."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.peak = 0
        self.first: PreemptionVerdict | None = None

    def before_step(self, facts: StepFacts) -> None:
        if facts.preempted and self.first is None:
            self.first = judge_preemptions(self.ledger, facts)[0]

    def after_step(self, facts: StepFacts) -> None:
        self.peak = max(self.peak, self.ledger.running_sequences)


class _Search:
    def __init__(
        self,
        factory: EngineFactory,
        config: EngineConfig,
        watchdog: Watchdog | None,
        on_point: Callable[[Point], None] | None,
    ) -> None:
        self.factory = factory
        self.config = config
        self.watchdog = watchdog
        self.on_point = on_point
        self.per_sequence = -(-config.max_model_len // config.block_size)
        self.outputs = max(1, min(OUTPUTS_MAX, config.max_model_len - 1))
        self.points: dict[int, Point] = {}
        self.capabilities: Capabilities | None = None

    def run(self) -> BlockPlan:
        exact = self.per_sequence * self.config.max_num_seqs
        needed = self._least_from(exact)
        if self.capabilities is None:
            raise ConfigRefused(next(iter(self.points.values())).refused)
        for num_blocks in self._around(exact, needed):
            self.point(num_blocks)
        return BlockPlan(
            config=self.config,
            capabilities=self.capabilities,
            per_sequence=self.per_sequence,
            needed=needed,
            curve=tuple(self.points[size] for size in sorted(self.points)),
            rule=tuple(self._rule(exact, needed)),
        )

    def _least_from(self, exact: int) -> int | None:
        """The least pool that is enough, from ``exact`` upwards: nothing smaller can hold a full batch."""
        low, high, stride = exact - 1, exact, 1
        while not self.point(high).enough:
            low, high, stride = high, high + stride, stride * 2
            if high > SPARE_MAX * exact + SPARE_MAX:
                return None
        while high - low > 1:
            middle = (low + high) // 2
            if self.point(middle).enough:
                high = middle
            else:
                low = middle
        return high

    def _around(self, exact: int, needed: int | None) -> list[int]:
        """More of the curve: fewer sequences than asked for, and one block beside the answer."""
        one = self.per_sequence
        sizes = {max(one, exact * part // 8) for part in (1, 2, 4, 6, 7)} | {exact - 1, exact}
        if needed is not None:
            sizes |= {needed - 1, needed, needed + 1}
        return sorted(size for size in sizes if size >= 1)

    def point(self, num_blocks: int) -> Point:
        """Measure one pool, once."""
        if num_blocks not in self.points:
            self.points[num_blocks] = self._measure(num_blocks)
            if self.on_point is not None:
                self.on_point(self.points[num_blocks])
        return self.points[num_blocks]

    def _measure(self, num_blocks: int) -> Point:
        config = msgspec.structs.replace(self.config, num_blocks=num_blocks)
        requests = config.max_num_seqs
        try:
            # Waste is what is measured here, and ends no run; after what is judged, a figure would mean nothing.
            session = open_session(self.factory, config, judge=CORRUPTING, watchdog=self.watchdog)
        except ConfigRefused as refusal:
            return Point(num_blocks=num_blocks, requests=requests, refused=str(refusal))
        self.capabilities = session.capabilities
        watch = _Watch(session.ledger)
        session.listen(watch)
        add = Add(prompt_len=config.max_model_len - self.outputs, max_tokens=self.outputs)
        session.run([*[add] * requests, Drain()])
        finished = sum(request.state.value == "finished" for request in session.ledger.requests.values())
        return Point(
            num_blocks=num_blocks,
            requests=requests,
            preemptions=session.preemptions,
            prefills=session.prefills,
            steps=session.steps,
            concurrency=watch.peak,
            finished=finished,
            first_preemption=watch.first,
            broken="" if not session.violations else str(session.violations[0].message),
        )

    # -- the reason --------------------------------------------------------------------------------------

    def _rule(self, exact: int, needed: int | None) -> Iterator[str]:
        config, capabilities = self.config, self.capabilities
        assert capabilities is not None
        yield (
            f"{exact} = {some(config.max_num_seqs, 'sequence')} x {some(self.per_sequence, 'block')} "
            f"(max_model_len {config.max_model_len} / block_size {config.block_size}, rounded up)"
        )
        if needed is None:
            yield f"no pool up to {max(self.points)} blocks is enough: {self._why(max(self.points))}"
            return
        rest = needed - exact
        reserved = min(rest, capabilities.reserved_blocks)
        if reserved:
            null = (
                f", block {capabilities.null_block} being the null block" if capabilities.null_block is not None else ""
            )
            yield f"+ {reserved} that never {'serves' if reserved == 1 else 'serve'} a request{null}"
            rest -= reserved
        if rest > 0:
            yield f"+ {rest} more: with {needed - 1} blocks {self._why(needed - 1)}"

    def _why(self, num_blocks: int) -> str:
        """What goes wrong with a pool that is not enough."""
        point = self.point(num_blocks)
        if point.refused:
            return f"the engine refuses to run: {point.refused}"
        if point.broken:
            return f"the run breaks: {point.broken}"
        verdict = point.first_preemption
        if verdict is not None:
            counted = "" if verdict.counted is None else f", because the append check counts {verdict.counted}"
            kind = "without need" if verdict.needless else "for want of room"
            return (
                f"{some(point.preemptions, 'preemption')}, the first {kind}: the running set needs "
                f"{some(verdict.needed, 'block')} and has {verdict.free} free{counted}"
            )
        if point.concurrency < point.requests:
            return f"only {point.concurrency} of {point.requests} run at once: admission keeps blocks back (watermark)"
        return f"{point.finished} of {point.requests} finish"
