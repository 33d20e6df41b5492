"""Where two runs part: each kind of difference is seen and said, names of blocks are none."""

from __future__ import annotations

from typing import Any

import pytest

from conformance.adapters.reference import make
from conformance.differential import (
    Divergence,
    Side,
    explain_divergence,
    first_divergence,
    run_side,
    shared_operations,
    shortened,
)
from conformance.need import PreemptionVerdict
from conformance.operations import Abort, Add, Drain, Operation, ResetPrefixCache, Step
from conformance.protocol import ConfigRefused, Engine, EngineConfig
from conformance.trace import Line, SequenceOutcome, StepOutcome

FULL = EngineConfig(num_blocks=4, block_size=16, max_num_seqs=4, max_model_len=16)
FOUR: list[Operation] = [Add(prompt_len=4, max_tokens=8)] * 4


def reference(label: str, operations: list[Operation] = FOUR, config: EngineConfig = FULL, **options: Any) -> Side:
    config = EngineConfig(
        **{**{name: getattr(config, name) for name in config.__struct_fields__}, "engine_options": options}
    )
    return run_side(label, "reference", make, config, operations)


def row(name: str = "r0", first: int = 0, tokens: int = 4, table: tuple[int, ...] = (0,)) -> SequenceOutcome:
    return SequenceOutcome(name=name, first=first, tokens=tokens, tables=[list(table)])


def victim(rid: str = "r1", mode: str = "recompute", **fields: Any) -> PreemptionVerdict:
    return PreemptionVerdict(request_id=rid, mode=mode, needed=1, free=0, needless=False, released=1, **fields)


def side(label: str, *steps: StepOutcome, outcome: dict[str, Any] | None = None) -> Side:
    line = Line(operation=Step(count=9), steps=list(steps), outcome=outcome or {})
    return Side(label=label, name=label, config=FULL, lines=[line], steps=len(steps))


def step(*rows: SequenceOutcome, number: int = 0, **fields: Any) -> StepOutcome:
    return StepOutcome(step=number, free=3, ran=list(rows), **fields)


def said(one: list[StepOutcome], other: list[StepOutcome]) -> list[str]:
    divergence = first_divergence(side("A", *one), side("B", *other))
    return [] if divergence is None else [difference.text for difference in divergence.differences]


NEED = "1 were needed and 0 free"
DIFFERENCES: dict[str, tuple[list[StepOutcome], list[StepOutcome], list[str]]] = {
    "an admission": (
        [step(row(), row("r1", table=(1, 2)))],
        [step(row())],
        ["only A begins r1, positions 0 to 3 with 2 blocks"],
    ),
    "a run": (
        [step(row()), step(row(first=4, tokens=1))],
        [step(row()), step()],
        ["only A runs r0, position 4 with 1 block"],
    ),
    "tokens": ([step(row())], [step(row(tokens=2))], ["r0 computes positions 0 to 3 on A, positions 0 to 1 on B"]),
    "blocks": ([step(row())], [step(row(table=(0, 1)))], ["r0 has 1 block on A, 2 blocks on B"]),
    "a table that changed": (
        [step(row(table=(5, 6))), step(row(table=(5, 6)))],
        [step(row(table=(0, 1))), step(row(table=(0, 2)))],
        ["r0 keeps 2 of its blocks on A, 1 of its blocks on B from its last step"],
    ),
    "a block that is shared": (
        [step(row(), row("r1", table=(0,)))],
        [step(row(), row("r1", table=(1,)))],
        ["r0 and r1 share 1 block on A, 0 blocks on B"],
    ),
    "a preemption": (
        [step(row())],
        [step(row(), preempted=[victim(counted=2, asked_by="r0")])],
        [f"only B preempts r1 by recompute to make way for r0, having counted 2 blocks as needed; {NEED}"],
    ),
    "the way of it": (
        [step(preempted=[victim()])],
        [step(preempted=[victim(mode="swap")])],
        ["r1 is preempted by recompute on A, by swap on B"],
    ),
    "the order of it": (
        [step(preempted=[victim("r1"), victim("r2")])],
        [step(preempted=[victim("r2"), victim("r1")])],
        ["victims are chosen r1, r2 on A, r2, r1 on B"],
    ),
    "a move": ([step(moves=[("copy", 0, 1)])], [step()], ["only A moves a block by copy"]),
    "a request given up": ([step()], [step(rejected=[("r3", "too long")])], ["only B gives up on r3"]),
    "an end": ([step(row(), finished=["r0"])], [step(row())], ["only A finishes r0"]),
    "the end of a run": ([step(row())], [step(row()), step(row(first=4))], ["A has ended, B has not"]),
}  # fmt: skip


@pytest.mark.parametrize(("one", "other", "differences"), DIFFERENCES.values(), ids=DIFFERENCES)
def test_each_difference_is_said(one: list[StepOutcome], other: list[StepOutcome], differences: list[str]) -> None:
    assert said(one, other) == differences
    assert said(one, one) == said(other, other) == []


def test_names_of_blocks_are_no_difference() -> None:
    again = step(row(first=4, tokens=1, table=(3, 1)), row("r1", first=4, tokens=1, table=(3, 2)))
    other = step(row(first=4, tokens=1, table=(9, 0)), row("r1", first=4, tokens=1, table=(9, 7)))
    begin, begin_other = step(row(table=(3,)), row("r1", table=(3,))), step(row(table=(9,)), row("r1", table=(9,)))
    assert said([begin, again], [begin_other, other]) == []


def test_what_returns_from_a_preemption_may_get_its_blocks_back_or_others() -> None:
    gone = step(preempted=[victim("r0")])
    assert said([step(row()), gone, step(row())], [step(row()), gone, step(row(table=(7,)))]) == []


def test_a_refusal_and_a_reset_are_compared_and_reasons_are_not() -> None:
    refused, other = side("A", outcome={"refused": "too long"}), side("B", outcome={"refused": "it is too long"})
    assert first_divergence(refused, other) is None
    divergence = first_divergence(refused, side("B"))
    assert divergence is not None
    assert divergence.differences == [("refusal", "only A refuses the request: too long")]
    divergence = first_divergence(side("A", outcome={"reset": True}), side("B", outcome={"reset": False}))
    assert divergence is not None
    assert divergence.differences[0].text == "the reset of the prefix cache is done on A, refused on B"


def test_the_seed_is_explained() -> None:
    one, other = reference("A", append_check="exact"), reference("B", append_check="touched")
    divergence = first_divergence(one, other)
    assert divergence is not None
    assert (divergence.operation, divergence.steps_alike, divergence.kind) == (3, 1, "preemption")
    text = "\n".join(explain_divergence(one, other, divergence))
    assert "configured apart: engine_options {'append_check': 'exact'} on A, {'append_check': 'touched'} on B" in text
    assert "1 step the same; they part as what is left is served, after operation 4, add prompt 4 + 8 tokens:" in text
    assert "only B preempts r3 by recompute to make way for r0, having counted 1 block as needed; 0 were needed" in text
    assert "step 1 on A: runs r0 from 4 (1 token, 1 block), r1" in text
    assert "A in all: 8 steps, 0 preemptions, 4 prefills" in text
    assert "B in all: " in text
    assert "PRE-1 broken in step 1: r3 is preempted" in text


def test_without_a_divergence_that_is_what_is_said() -> None:
    one, other = reference("A"), reference("B")
    assert first_divergence(one, other) is None
    assert "the same in all of 8 steps, up to the names of blocks" in explain_divergence(one, other, None)


def test_a_side_that_refuses_is_named() -> None:
    with pytest.raises(ConfigRefused, match="B, reference: num_speculative_tokens = 2"):
        run_side("B", "reference", make, EngineConfig(num_speculative_tokens=2), FOUR)


def test_operations_that_one_side_cannot_run_are_run_by_none() -> None:
    whole = make(FULL).capabilities
    fields = {name: getattr(whole, name) for name in type(whole).__struct_fields__}
    poor = type(whole)(**{**fields, "features": frozenset({"usage"})})
    plain: list[Operation] = [Add(prompt_len=1, max_tokens=1), Step(), Drain()]
    rich: list[Operation] = [
        Add(prompt_len=1, max_tokens=1, n=2),
        Add(prompt_len=1, max_tokens=1, salt=1),
        Add(prompt_len=1, max_tokens=1, stop_after=1),
        Abort(),
        ResetPrefixCache(),
    ]
    assert shared_operations([*plain, *rich], [whole, poor], [FULL, FULL]) == plain
    assert shared_operations([*plain, *rich], [whole, whole], [FULL, FULL]) == [*plain, *rich]


def test_what_the_divergence_does_not_need_is_left_out_within_bounds() -> None:
    noise: list[Operation] = [Step(), Add(prompt_len=1, max_tokens=1), Drain(), *FOUR, Step(), Step(3), Drain()]

    def compare(operations: list[Operation]) -> Divergence | None:
        return first_divergence(
            reference("A", operations, append_check="exact"), reference("B", operations, append_check="touched")
        )

    def counted(limit: int) -> tuple[list[Operation], int]:
        calls = 0

        def counting(operations: list[Operation]) -> Divergence | None:
            nonlocal calls
            calls += 1
            return compare(operations)

        divergence = compare(noise)
        assert divergence is not None
        return shortened(noise, divergence, counting, limit), calls

    assert counted(200)[0] == FOUR
    kept, calls = counted(3)
    assert calls <= 3
    assert compare(kept) is not None


def test_a_side_that_breaks_down_has_ended_and_it_is_told_why() -> None:
    def broken(config: EngineConfig) -> Engine:
        engine = make(config)
        engine.commit = _raise  # type: ignore[assignment,method-assign]
        return engine

    one, other = reference("A"), run_side("B", "broken", broken, FULL, FOUR)
    divergence = first_divergence(one, other)
    assert divergence is not None
    assert divergence.kind in {"end", "finish"}
    assert "PRG-8 broken in step 1: commit raised RuntimeError" in "\n".join(explain_divergence(one, other, divergence))


def _raise(*_: object) -> Any:
    raise RuntimeError("lost")
