"""Who has encoder items may find no room for them in the encoder cache, and be passed over: plans written by hand."""

from __future__ import annotations

from collections.abc import Mapping

from by_hand import ScriptedEngine
from conformance.operations import Add, Operation, Step
from conformance.protocol import (
    CommitResult,
    EngineConfig,
    Finished,
    Preemption,
    Sampled,
    SequenceKey,
    SequencePlan,
    StepPlan,
)
from conformance.session import Session

CONFIG = EngineConfig(
    num_blocks=7, block_size=2, max_num_seqs=3, max_model_len=10, max_num_batched_tokens=10,
    enable_chunked_prefill=True, encoder_cache_size=7,
)  # fmt: skip


class Scripted(ScriptedEngine):
    """``r0`` ends with its first token, if it has one."""

    def __init__(self, *plans: list[SequencePlan], preempts: dict[int, str]) -> None:
        super().__init__(
            *(
                StepPlan(
                    step=number,
                    sequences=rows,
                    preempted=[Preemption(request_id=preempts[number], mode="recompute")] if number in preempts else [],
                )
                for number, rows in enumerate(plans)
            ),
            features=frozenset({"chunked_prefill", "encoder_cache", "recompute"}),
        )

    def commit(self, step: int, sampled: Mapping[SequenceKey, Sampled]) -> CommitResult:
        ended = sampled.get(("r0", 0))
        return CommitResult([Finished(request_id="r0", outputs=[ended.tokens], reason="length")] if ended else [])


def row(name: str, first: int, count: int, table: list[int], *, samples: bool = True) -> SequencePlan:
    return SequencePlan(request_id=name, first=first, num_tokens=count, block_tables=[table], samples=samples)


def broken(judged: str, adds: list[Add], *plans: list[SequencePlan], preempts: dict[int, str]) -> bool:
    session = Session(Scripted(*plans, preempts=preempts), CONFIG, judge={judged})
    operations: list[Operation] = [*adds, *[Step()] * len(plans)]
    return bool(session.run(operations))


def test_a_preempted_request_may_wait_for_room_in_the_encoder_cache() -> None:
    def overtaken(*encoder_sizes: int) -> bool:
        return broken(
            "PRE-4",
            [Add(9, 1, encoder_sizes=encoder_sizes), Add(3, 3, encoder_sizes=(3,)), Add(1, 1)],
            [row("r0", 0, 1, [0], samples=False), row("r1", 0, 1, [1], samples=False)],
            [row("r0", 1, 1, [0], samples=False)],
            [row("r0", 2, 1, [0, 2], samples=False), row("r2", 0, 1, [3])],
            preempts={1: "r1"},
        )

    assert overtaken(), "nobody else has anything in the encoder cache"
    assert not overtaken(4, 5)


def test_who_returns_in_the_very_step_takes_room_too() -> None:
    def overtaken(*encoder_sizes: int) -> bool:
        return broken(
            "PRE-4",
            [Add(5, 3, encoder_sizes=encoder_sizes), Add(1, 3, encoder_sizes=(1,)), Add(1, 1)],
            [row("r0", 0, 4, [0, 1], samples=False), row("r1", 0, 1, [2])],
            [],
            [],
            [row("r0", 0, 4, [0, 1], samples=False), row("r2", 0, 1, [3])],
            preempts={1: "r1", 2: "r0"},
        )

    assert overtaken(), "nobody else has anything in the encoder cache"
    assert not overtaken(5)


def test_who_passed_over_it_meanwhile_returns_before_it() -> None:
    assert not broken(
        "PRG-7",
        [Add(3, 1, encoder_sizes=(1, 2)), Add(1, 5), Add(6, 1, encoder_sizes=(6,)), Add(6, 4)],
        [row("r0", 0, 3, [4, 5]), row("r1", 0, 1, [0]), row("r3", 0, 6, [1, 2, 3])],
        [row("r1", 1, 1, [0]), row("r3", 6, 1, [1, 2, 3, 4])],
        [row("r1", 2, 1, [0, 5])],
        [row("r1", 3, 1, [0, 5])],
        preempts={2: "r3"},
    )
