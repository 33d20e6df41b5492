"""Drafts, steps planned ahead of their outcome, KV-cache groups and resets that preempt, on plans written by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from by_hand import ScriptedEngine
from conformance.operations import Add, ResetPrefixCache, Step
from conformance.protocol import (
    CommitResult,
    EncoderItem,
    EngineConfig,
    Feature,
    Finished,
    KVCacheGroup,
    Preemption,
    Request,
    Sampled,
    SequenceKey,
    SequencePlan,
    StepPlan,
)
from conformance.session import Session
from conformance.token_model import PADDING_TOKEN, PrefixTree

FEATURES: frozenset[Feature] = frozenset(
    {"prefix_caching", "speculation", "pipeline", "recompute", "reset_prefix_cache", "sliding_window"}
)


class Scripted(ScriptedEngine):
    """Each step is made by a function of the tokens that were committed so far."""

    def __init__(self, *steps: Callable[[Scripted], list[SequencePlan]], **declared: Any) -> None:
        super().__init__(features=FEATURES, **declared)
        self._steps = steps
        self.sampled: list[Sampled] = []
        self.victims: list[Preemption] = []
        self.wanted = 0

    def add_request(self, request: Request) -> None:
        self.wanted = request.max_tokens

    def schedule(self) -> StepPlan:
        plan = super().schedule()
        if plan.step < len(self._steps):
            plan.sequences = self._steps[plan.step](self)
            plan.preempted, self.victims = self.victims, []
        return plan

    def commit(self, step: int, sampled: Mapping[SequenceKey, Sampled]) -> CommitResult:
        self.sampled += sampled.values()
        outputs = [token for sample in self.sampled for token in sample.tokens]
        if not self.wanted or len(outputs) < self.wanted:
            return CommitResult()
        finished = Finished(request_id="r0", outputs=[outputs[: self.wanted]])
        self.wanted = 0
        return CommitResult([finished])

    def reset_prefix_cache(self) -> bool:
        return True


def row(first: int, count: int, *tables: list[int], **fields: Any) -> SequencePlan:
    return SequencePlan(request_id="r0", first=first, num_tokens=count, block_tables=list(tables), **fields)


def session_of(engine: Scripted, **fields: Any) -> Session:
    given = {"num_blocks": 12, "block_size": 2, "max_model_len": 24, "num_speculative_tokens": 2} | fields
    return Session(engine, EngineConfig(**given))


def broken(session: Session) -> dict[str, str]:
    return {violation.requirement: violation.message for violation in session.violations}


TABLE = [0, 1, 2, 3, 4, 5, 6, 7]


# -- drafts --------------------------------------------------------------------------------------------------------


def with_drafts(engine: Scripted) -> list[SequencePlan]:
    """A decode step with the drafts that the model proposed last, as far as the tokens have come."""
    tokens = 3 + sum(len(sample.tokens) for sample in engine.sampled)
    drafts = engine.sampled[-1].drafts
    return [row(tokens - 1, 1 + len(drafts), TABLE[: (tokens + len(drafts) + 1) // 2], draft_tokens=drafts)]


def test_accepted_drafts_are_outputs_and_what_comes_after_the_end_is_cut_off() -> None:
    engine = Scripted(lambda _: [row(0, 3, TABLE[:2])], *[with_drafts] * 12)
    session = session_of(engine)
    session.run([Add(prompt_len=3, max_tokens=8)])
    assert broken(session) == {}
    assert session.ledger.behaviours["draft accepted"]
    assert any(len(sample.tokens) < 3 for sample in engine.sampled), "some draft is rejected"
    assert sum(len(sample.tokens) for sample in engine.sampled) >= 8


def test_padding_is_never_accepted() -> None:
    engine = Scripted(
        lambda _: [row(0, 3, TABLE[:2])],
        lambda _: [row(3, 3, TABLE[:3], draft_tokens=[-1, -1])],
        lambda _: [row(4, 1, TABLE[:3])],
    )
    session = session_of(engine)
    session.run([Add(prompt_len=3, max_tokens=3)])
    assert broken(session) == {}
    assert [len(sample.tokens) for sample in engine.sampled] == [1, 1, 1]


def test_a_token_dropped_with_its_victim_is_sampled_again_beside_drafts() -> None:
    def victim(engine: Scripted) -> list[SequencePlan]:
        engine.victims = [Preemption(request_id="r0", mode="recompute")]
        return []

    def again(_: Scripted) -> list[SequencePlan]:  # as if the token in flight at the preemption had never been
        return [row(0, 4, TABLE[:2], draft_tokens=[-1])]

    engine = Scripted(lambda _: [row(0, 3, TABLE[:2])], victim, again)
    session = session_of(engine, pipeline_depth=2)
    session.apply(Add(prompt_len=3, max_tokens=4))
    session.apply(Step(3))
    assert broken(session).keys() <= {"PRE-1", "PRE-2"}
    record = session.ledger.requests["r0"].sequences[0]
    assert len(record.tokens) == 4 and [record.tokens[-1]] == engine.sampled[0].tokens


def test_a_first_step_of_drafts_alone_is_a_finding() -> None:
    session = session_of(Scripted(lambda _: [row(0, 2, TABLE[:1], draft_tokens=[5, 6])]))
    session.apply(Add(prompt_len=3, max_tokens=3))
    session.step()
    assert "is run up to 0, expecting a token" in broken(session)["PRG-5"]


def test_a_step_that_takes_drafts_for_accepted_begins_after_those_that_were() -> None:
    """The engine plans positions 6 to 8 before it knows that the model went no further than it did."""
    seen: list[SequencePlan] = []

    def ahead(_: Scripted) -> list[SequencePlan]:
        seen.append(row(6, 3, TABLE[:5], draft_tokens=[-1, -1], optimistic=True))
        return seen

    engine = Scripted(
        lambda _: [row(0, 3, TABLE[:2])],
        lambda _: [row(3, 3, TABLE[:3], draft_tokens=[-1, -1], optimistic=True)],
        ahead,
    )
    session = session_of(engine, pipeline_depth=2)
    session.apply(Add(prompt_len=3, max_tokens=12))
    session.apply(Step(3))
    record = session.ledger.requests["r0"].sequences[0]
    accepted = len(engine.sampled[1].tokens) - 1
    assert broken(session) == {}
    assert seen[0].first == 4 + accepted
    assert all(token != PADDING_TOKEN for token in seen[0].draft_tokens), "they are the model's own"
    assert record.rejected.keys() == {2}


# -- groups --------------------------------------------------------------------------------------------------------

GROUPS = (KVCacheGroup("full", 2), KVCacheGroup("wide", 4, 3))


def grouped(*tables: list[int], **fields: Any) -> Session:
    engine = Scripted(lambda _: [row(0, 7, *tables)], lambda _: [row(7, 1, *tables)])
    session = session_of(engine, kv_cache_groups=GROUPS, num_speculative_tokens=0, **fields)
    session.run([Add(prompt_len=7, max_tokens=2)])
    return session


def test_each_group_has_blocks_of_its_own_size() -> None:
    assert broken(grouped([0, 1, 2, 3], [4, 5])) == {}
    assert "table of 1 blocks" in broken(grouped([0, 1, 2, 3], [4]))["ACC-5"]
    assert "holds 3 blocks" in broken(grouped([0, 1, 2, 3], [4, 5, 6]))["ACC-5"]


def test_what_one_group_writes_the_others_have_lost() -> None:
    """Two groups that are given one block do not both find there what they wrote."""
    assert "KV-1" in broken(grouped([0, 1, 2, 3], [4, 3]))


def test_need_is_summed_over_the_groups() -> None:
    session = grouped([0, 1, 2, 3], [4, 5])
    assert session.ledger.blocks_for(9) == 5 + 3


# -- resets --------------------------------------------------------------------------------------------------------


def test_a_reset_that_preempts_sends_everybody_back() -> None:
    for declared in ("refused", "preempts"):
        engine = Scripted(lambda _: [row(0, 3, TABLE[:2])], lambda _: [row(0, 4, TABLE[:2])], reset_with_live=declared)
        session = session_of(engine, num_speculative_tokens=0, enable_prefix_caching=True)
        session.run([Add(prompt_len=3, max_tokens=2), Step(), ResetPrefixCache(), Step()])
        assert session.preemptions == (declared == "preempts")
        assert set(broken(session)) == (set() if declared == "preempts" else {"CCH-3", "KV-3"})


def test_a_prefix_filled_in_the_same_pass_is_no_hit_on_what_was_reset() -> None:
    def both(_: Scripted) -> list[SequencePlan]:
        return [row(0, 3, [0, 1]), SequencePlan(request_id="r1", first=2, num_tokens=1, block_tables=[[0, 2]])]

    session = session_of(Scripted(both), num_speculative_tokens=0, enable_prefix_caching=True)
    session.apply(ResetPrefixCache())
    for _ in range(2):
        session.apply(Add(prompt_len=3, max_tokens=1, shared_len=2, family=1))
    session.apply(Step())
    assert "CCH-3" not in broken(session)


# -- identity ------------------------------------------------------------------------------------------------------


def test_what_precedes_an_encoder_item_does_not_know_of_it() -> None:
    tree = PrefixTree()

    def nodes(*items: EncoderItem) -> list[int]:
        return tree.walk(Request(request_id="r", prompt=[5, 6, 7, 8], max_tokens=1, encoder_items=items), [5, 6, 7, 8])

    plain, one, other = nodes(), nodes(EncoderItem("a", 2, 2)), nodes(EncoderItem("b", 2, 2))
    assert plain[:2] == one[:2] == other[:2]
    assert len({plain[2], one[2], other[2], plain[3], one[3], other[3]}) == 6
    assert tree.same_identity(one[1], plain[3])
    assert not tree.same_identity(one[2], other[2])
    assert tree.describe(one[3]) == "token 8 of position 3"
