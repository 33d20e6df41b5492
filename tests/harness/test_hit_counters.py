"""ACC-10 holds for what an engine says of its prefix cache: tokens looked up and tokens found, once a request."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from conformance.adapters.reference import make
from conformance.operations import Add, Drain, Operation
from conformance.protocol import Engine, EngineConfig
from conformance.session import Session
from reference_engine.block_manager import BlockManager
from reference_engine.request import Sequence

CONFIG = EngineConfig(
    num_blocks=6, block_size=4, max_num_seqs=2, max_model_len=16, max_num_batched_tokens=16, enable_prefix_caching=True
)
FIRST = Add(prompt_len=9, max_tokens=2, shared_len=9)
PREEMPTING: list[Operation] = [Add(prompt_len=8, max_tokens=8), Add(prompt_len=9, max_tokens=7), Drain()]


class BooksRecomputesAsHits(BlockManager):
    """What a preempted request finds again of its own counts as found in the cache. Modelled on vLLM #25780."""

    __slots__ = ()

    def admit(self, starts: list[tuple[Sequence, list[int]]]) -> None:
        super().admit(starts)
        self.hit_tokens += sum(sequence.scheduled for sequence, _ in starts if sequence.request.preempted_in >= 0)


class LooksUpWhatMustBeComputed(BlockManager):
    """The last token of a prompt, which is always computed, is not counted as looked up."""

    __slots__ = ()

    def admit(self, starts: list[tuple[Sequence, list[int]]]) -> None:
        super().admit(starts)
        self.queried_tokens -= len(starts)


def with_books(kind: type[BlockManager]) -> Callable[[EngineConfig], Engine]:
    def factory(config: EngineConfig) -> Engine:
        adapter = make(config)
        adapter.engine.blocks.__class__ = kind  # type: ignore[attr-defined]
        return adapter

    return factory


def test_hits_are_counted_as_the_plans_show_them() -> None:
    engine = make(CONFIG)
    session = Session(engine, CONFIG)
    for operation in (FIRST, Drain(), FIRST, Drain()):
        session.apply(operation)
    usage = engine.usage()
    assert (usage.queried_tokens, usage.hit_tokens) == (18, 8)
    assert session.violations == []


def test_what_a_preempted_request_finds_again_is_no_hit() -> None:
    engine = make(CONFIG)
    session = Session(engine, CONFIG)
    assert session.run(PREEMPTING) == []
    assert session.ledger.behaviours["prefix hit after preemption"] == 1
    assert engine.usage().hit_tokens == 0


def test_without_a_prefix_cache_nothing_is_looked_up() -> None:
    config = EngineConfig(num_blocks=6, block_size=4, max_model_len=16, max_num_batched_tokens=16)
    engine = make(config)
    assert Session(engine, config).run([FIRST, Drain(), FIRST, Drain()]) == []
    assert (engine.usage().queried_tokens, engine.usage().hit_tokens) == (0, 0)


@pytest.mark.parametrize(
    ("kind", "operations", "what", "expected", "got"),
    [
        (BooksRecomputesAsHits, PREEMPTING, "found in the prefix cache after step", "0", "8"),
        (LooksUpWhatMustBeComputed, [FIRST, Drain()], "looked up in the prefix cache after step 0", "9", "8"),
    ],
)
def test_a_counter_that_is_off_is_reported(
    kind: type[BlockManager], operations: list[Operation], what: str, expected: str, got: str
) -> None:
    found = Session(with_books(kind)(CONFIG), CONFIG).run(operations)
    assert [one.requirement for one in found] == ["ACC-10"]
    assert what in found[0].message
    assert (found[0].expected, found[0].got) == (expected, got)
