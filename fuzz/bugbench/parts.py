"""The parts of the reference engine that a fault may replace, and how an engine is put together from them.

A fault is a subclass of one of these (or of several) that overrides the method in which the decision is taken. The
sound engine knows nothing of it: its finished parts are moved into the subclasses, whose methods then run on the
very same state. Each part has the `Probe` of its engine at hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import msgspec

from conformance.adapters.reference import ReferenceAdapter, make
from conformance.protocol import CommitResult, EngineConfig, Sampled, SequenceKey, StepPlan
from fuzz.bugbench.probe import Counters, Probe
from reference_engine.block_manager import BlockManager
from reference_engine.block_pool import BlockPool
from reference_engine.engine import Engine
from reference_engine.prefix_cache import PrefixCache
from reference_engine.runners.neuron.runner import NeuronRunner
from reference_engine.scheduler import Scheduler


class Pool(BlockPool):
    """The device pool of block ids."""

    __slots__ = ("probe",)
    probe: Probe


class Cache(PrefixCache):
    """The prefix cache; None of them without prefix caching."""

    __slots__ = ("probe",)
    probe: Probe


class Blocks(BlockManager):
    """The block manager."""

    __slots__ = ("probe",)
    probe: Probe


class Queues(Scheduler):
    """The scheduler."""

    __slots__ = ("probe",)
    probe: Probe

    def rig(self) -> None:
        """Called once, on the finished engine."""


class Core(Engine):
    """The engine's front."""

    probe: Probe


class Runner(NeuronRunner):
    """The runner of a fixed-batch device; none without ``fixed_batch``."""

    probe: Probe


class Seat(ReferenceAdapter):
    """The adapter, where the harness sits: what the model runner is told and what the engine is given back."""

    probe: Probe

    def schedule(self) -> StepPlan:
        self.probe.counters.steps += 1
        plan = super().schedule()
        self.twist(plan)
        return plan

    def twist(self, plan: StepPlan) -> None:
        """Where a fault changes what the model runner is told."""

    def commit(self, step: int, sampled: Mapping[SequenceKey, Sampled]) -> CommitResult:
        return super().commit(step, self.route(step, sampled))

    def route(self, step: int, sampled: Mapping[SequenceKey, Sampled]) -> Mapping[SequenceKey, Sampled]:
        """Where a fault changes which sequence is given which token."""
        return sampled


KINDS: tuple[type, ...] = (Pool, Cache, Blocks, Queues, Core, Runner, Seat)
"""What a fault can be a subclass of."""

_Part = TypeVar("_Part")
_Moved = TypeVar("_Moved", Pool, Cache, Blocks, Queues)


def build(parts: Mapping[type, type], config: EngineConfig, counters: Counters, name: str) -> Seat:
    """The reference engine with some of its parts replaced: kind (one of `KINDS`) -> subclass of it.

    Raises `conformance.protocol.ConfigRefused` as the reference engine does.
    """
    probe = Probe(counters)
    seat = make(config)
    assert isinstance(seat, ReferenceAdapter), "the reference engine is the one that faults are planted in"
    engine = seat.engine
    blocks = _moved(engine.blocks, _part(parts, Blocks), probe)
    pool = blocks.pool = _moved(blocks.pool, _part(parts, Pool), probe)
    if blocks.cache is not None:
        cache = blocks.cache = _moved(blocks.cache, _part(parts, Cache), probe)
        cache._pool = pool  # noqa: SLF001 - parts know each other as the constructors made them
        pool.on_evict(cache._evicted)  # noqa: SLF001 - planted from inside
    queues = _moved(engine.scheduler, _part(parts, Queues), probe)
    queues.blocks = engine.blocks = blocks
    engine.scheduler = queues
    queues.rig()
    engine.__class__ = _part(parts, Core)
    seat.__class__ = _part(parts, Seat)
    assert isinstance(engine, Core) and isinstance(seat, Seat)
    engine.probe = seat.probe = probe
    runner = seat.runner
    if runner is not None:
        runner.__class__ = _part(parts, Runner)
        assert isinstance(runner, Runner)
        runner.probe = probe
    seat._capabilities = msgspec.structs.replace(seat.capabilities, engine=name)  # noqa: SLF001 - planted from inside
    return seat


def _part(parts: Mapping[type, type], kind: type[_Part]) -> type[_Part]:
    part = parts.get(kind, kind)
    assert issubclass(part, kind), f"{part.__name__} replaces no {kind.__name__}"
    return part


def _moved(part: object, kind: type[_Moved], probe: Probe) -> _Moved:
    """The state of ``part``, which has slots, under the methods of ``kind``."""
    moved = object.__new__(kind)
    for slotted in type(part).__mro__[:-1]:
        for name in vars(slotted).get("__slots__", ()):
            setattr(moved, name, getattr(part, name))
    moved.probe = probe
    return moved
