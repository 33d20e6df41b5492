"""What the harness costs, in CPU time.

    python benchmarks/cost.py driver    [--engine NAME] [--steps N]   steps per second, harness apart from engine
    python benchmarks/cost.py running   [--engine NAME] [--steps N]   the same for 4 requests that do nothing but decode
    python benchmarks/cost.py pool      [--steps N]                   the same workload on 64 and on 16,384 blocks
    python benchmarks/cost.py machine   [--examples N]                Hypothesis machine against an empty one
    python benchmarks/cost.py wire      [--engine NAME] [--steps N]   the same steps in process and over the wire

Best of three, because shared machines are noisy; of the wire, where two processes take turns, elapsed time, best of
many for each short stretch. Benchmarks measure; they assert nothing.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from conformance.engines import load
from conformance.execute import open_session
from conformance.operations import Add, Operation, Step
from conformance.protocol import (
    Capabilities,
    CommitResult,
    Engine,
    EngineConfig,
    EngineFactory,
    Request,
    Sampled,
    SequenceKey,
    Snapshot,
    StepPlan,
    Usage,
)
from conformance.requirements import load as load_requirements
from fuzz.driver import Driver, campaign
from fuzz.machine import machine_for

REPEATS = 3
WIRE_STEPS = 400
STRETCH = 8
"""Operations timed at a time: a millisecond or two, which other work on the machine does not always disturb."""
clock = time.process_time


class Timed:
    """An engine whose calls are timed: what is left of a run is the harness."""

    def __init__(self, engine: Engine, meter: dict[str, float]) -> None:
        self._engine = engine
        self._meter = meter
        self.capabilities: Capabilities = engine.capabilities

    def _time(self, call: Callable[..., Any], *arguments: Any) -> Any:
        begin = clock()
        try:
            return call(*arguments)
        finally:
            self._meter["engine"] += clock() - begin
            self._meter["calls"] += 1

    def add_request(self, request: Request) -> None:
        self._time(self._engine.add_request, request)

    def abort_request(self, request_id: str) -> None:
        self._time(self._engine.abort_request, request_id)

    def schedule(self) -> StepPlan:
        plan: StepPlan = self._time(self._engine.schedule)
        return plan

    def commit(self, step: int, sampled: Mapping[SequenceKey, Sampled]) -> CommitResult:
        result: CommitResult = self._time(self._engine.commit, step, sampled)
        return result

    def reset_prefix_cache(self) -> bool:
        done: bool = self._time(self._engine.reset_prefix_cache)
        return done

    def usage(self) -> Usage:
        usage: Usage = self._time(self._engine.usage)
        return usage

    def snapshot(self) -> Snapshot:
        snapshot: Snapshot = self._time(self._engine.snapshot)
        return snapshot

    def close(self) -> None:
        self._time(self._engine.close)


def timed(factory: EngineFactory, meter: dict[str, float]) -> EngineFactory:
    """Engines whose calls are timed into ``meter``."""
    return lambda config: Timed(factory(config), meter)


def driver(engine: str, steps: int, pinned: dict[str, Any]) -> None:
    """Steps per CPU second of the driver with all oracles on, and how much of a step is the harness."""
    factory = load(engine).factory
    judged = frozenset(load_requirements())
    probe = factory(EngineConfig(**pinned))
    capabilities = probe.capabilities
    probe.close()

    def run(make: EngineFactory) -> tuple[float, int]:
        begin = clock()
        state = campaign(Driver(make, capabilities, seed=1, pinned=pinned), steps_max=steps, judged=judged)
        return clock() - begin, state.steps

    plain = min(run(factory) for _ in range(REPEATS))
    best: tuple[float, float] | None = None
    for _ in range(REPEATS):
        meter = {"engine": 0.0, "calls": 0.0}
        total, _ = run(timed(factory, meter))
        # The clock's own cost is in both figures; taken off once a call.
        overhead = meter["calls"] * _clock_seconds()
        sample = (total - overhead, meter["engine"] - overhead / 2)
        best = sample if best is None or sample < best else best
    assert best is not None
    total, inside = best
    harness = max(0.0, plain[0] - inside)
    print(f"{engine} {capabilities.version}, {plain[1]:,} steps, all oracles on")
    print(f"  {plain[1] / plain[0]:,.0f} steps per CPU second ({1e6 * plain[0] / plain[1]:.1f} us a step)")
    print(f"  engine  {1e6 * inside / plain[1]:6.1f} us a step")
    print(f"  harness {1e6 * harness / plain[1]:6.1f} us a step ({100 * harness / plain[0]:.0f} % of the whole)")


def running(engine: str, steps: int) -> None:
    """What the harness adds to a step of an engine that serves 4 requests: no request comes or goes but at the ends."""
    factory = load(engine).factory
    count = 395
    config = EngineConfig(
        num_blocks=256, block_size=16, max_num_seqs=4, max_model_len=512, max_num_batched_tokens=512,
    )  # fmt: skip
    operations: list[Operation] = [Add(prompt_len=64, max_tokens=count + 5)] * 4 + [Step()] * count
    plain = inside = float("inf")
    for _ in range(max(1, steps // count)):  # in turns, so that what disturbs one disturbs the other
        plain = min(plain, _session_seconds(factory, config, operations))
        meter = {"engine": 0.0, "calls": 0.0}
        _session_seconds(timed(factory, meter), config, operations)
        inside = min(inside, meter["engine"] - meter["calls"] * _clock_seconds() / 2)
    print(f"{engine}, 4 running requests, {count} steps, all oracles on, in us a step")
    print(
        f"  engine {1e6 * inside / count:.1f}, harness {1e6 * (plain - inside) / count:.1f}: "
        f"{100 * (plain - inside) / inside:.0f} % of the engine's own time"
    )


def _clock_seconds() -> float:
    begin = clock()
    for _ in range(10000):
        clock()
    return (clock() - begin) / 10000 * 2


def pool(steps: int) -> None:
    """The same requests on a small and on a large pool: what a step costs must not follow the pool."""
    factory = load("reference").factory
    for blocks in (64, 16384):
        config = EngineConfig(
            num_blocks=blocks, block_size=4, max_num_seqs=6, max_model_len=64, max_num_batched_tokens=64,
            enable_chunked_prefill=True, enable_prefix_caching=True,
        )  # fmt: skip
        operations = _workload(steps)
        best = min(_session_seconds(factory, config, operations) for _ in range(REPEATS))
        print(f"{blocks:6,} blocks: {1e6 * best / steps:.1f} us a step (harness and engine, audits apart)")


def _workload(steps: int) -> list[Operation]:
    rng = Random(1)
    operations: list[Operation] = []
    for _ in range(steps):
        if rng.random() < 0.2:
            operations.append(Add(prompt_len=rng.randint(1, 30), max_tokens=rng.randint(1, 20), shared_len=8))
        operations.append(Step())
    return operations


def _session_seconds(factory: EngineFactory, config: EngineConfig, operations: list[Operation]) -> float:
    session = open_session(factory, config)
    session.audit_every_steps = 1 << 30  # the audit is O(pool) by design, every 64 steps
    begin = clock()
    for operation in operations:
        session.apply(operation)
    spent = clock() - begin
    assert not session.violations, session.violations
    return spent


def wire(engine: str, steps: int) -> None:
    """What a step costs more when the engine is in another process.

    Elapsed time, since the two processes take turns. The same workload is run again and again, and of each stretch of
    it the best time counts, which is one that other work on the machine did not disturb.
    """
    here, there = load(engine), load(f"{engine}@{sys.executable}")
    operations = _workload(WIRE_STEPS)
    repeats = max(1, steps // WIRE_STEPS)
    best = [_best_stretches(source.factory, operations, repeats) / WIRE_STEPS for source in (here, there)]
    print(f"{engine}, {WIRE_STEPS} steps run {repeats} times, all oracles on, in us a step")
    print(
        f"  in process {1e6 * best[0]:.1f}, over the wire {1e6 * best[1]:.1f}: it adds {1e6 * (best[1] - best[0]):.1f}"
    )


def _best_stretches(factory: EngineFactory, operations: list[Operation], repeats: int) -> float:
    """Elapsed seconds of the workload, of each stretch the best; building and closing the engine apart."""
    config = EngineConfig(num_blocks=14, max_num_seqs=6)
    best = [float("inf")] * -(-len(operations) // STRETCH)
    for _ in range(repeats):
        session = open_session(factory, config)
        for index in range(len(best)):
            begin = time.perf_counter()
            for operation in operations[index * STRETCH : (index + 1) * STRETCH]:
                session.apply(operation)
            best[index] = min(best[index], time.perf_counter() - begin)
        session.finish()
    return sum(best)


class EmptyMachine(RuleBasedStateMachine):
    """The shape of the engine machine with nothing in it."""

    @initialize(random=st.randoms(use_true_random=False))
    def build(self, random: Any) -> None:
        """As many draws as a configuration takes."""
        for _ in range(20):
            random.random()

    @rule(
        prompt=st.integers(1, 40),
        outputs=st.integers(1, 40),
        shared=st.integers(0, 40),
        family=st.integers(0, 1),
        priority=st.integers(0, 2),
        n=st.sampled_from((1, 1, 1, 2)),
        stop_after=st.none() | st.integers(1, 8),
        identity=st.integers(0, 2),
    )
    def add(self, **_: Any) -> None:
        """Nothing."""

    @rule(prompt_len=st.integers(1, 80), max_tokens=st.integers(1, 80))
    def add_oversize(self, **_: Any) -> None:
        """Nothing."""

    @rule()
    def again(self) -> None:
        """Nothing."""

    @rule(count=st.sampled_from((1, 1, 2, 3, 8)))
    def step(self, count: int) -> None:
        """Nothing."""

    @rule(index=st.integers(0, 5))
    def abort(self, index: int) -> None:
        """Nothing."""

    @rule(index=st.integers(0, 5))
    def abort_ended(self, index: int) -> None:
        """Nothing."""

    @rule()
    def reset_prefix_cache(self) -> None:
        """Nothing."""

    @invariant()
    def nothing(self) -> None:
        """Nothing."""


def machine(examples: int) -> None:
    """CPU seconds of the Hypothesis machine: empty, and on the reference engine."""
    profile = settings(
        max_examples=examples, stateful_step_count=30, derandomize=True, database=None, deadline=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip

    def run(kind: type[RuleBasedStateMachine]) -> float:
        begin = clock()
        run_state_machine_as_test(kind, settings=profile)  # type: ignore[no-untyped-call]  # of Hypothesis
        return clock() - begin

    meter = {"engine": 0.0, "calls": 0.0}
    factory = load("reference").factory
    kind = machine_for("timed", timed(factory, meter))
    empty = min(run(EmptyMachine) for _ in range(REPEATS))
    full, inside = min(_with_meter(run, kind, meter) for _ in range(REPEATS))
    print(f"{examples} examples of up to 30 rules")
    print(f"  empty machine            {empty:.2f} s")
    print(f"  reference engine machine {full:.2f} s, {inside:.2f} s of it inside the engine")
    print(f"  without the engine: {(full - inside) / empty:.2f} times the empty machine")


def _with_meter(
    run: Callable[[type[RuleBasedStateMachine]], float],
    kind: type[RuleBasedStateMachine],
    meter: dict[str, float],
) -> tuple[float, float]:
    meter["engine"] = 0.0
    full = run(kind)
    return full, meter["engine"]


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("driver", "running", "pool", "machine", "wire"))
    parser.add_argument("--engine", default="reference")
    parser.add_argument("--steps", type=int, default=30000)
    parser.add_argument("--examples", type=int, default=200)
    arguments = parser.parse_args()
    if arguments.what == "driver":
        small = {"max_num_seqs": 6, "num_blocks": 14} if arguments.engine == "reference" else {}
        driver(arguments.engine, arguments.steps, small)
    elif arguments.what == "running":
        running(arguments.engine, arguments.steps)
    elif arguments.what == "pool":
        pool(min(arguments.steps, 5000))
    elif arguments.what == "wire":
        wire(arguments.engine, arguments.steps)
    else:
        machine(arguments.examples)


if __name__ == "__main__":
    main()
