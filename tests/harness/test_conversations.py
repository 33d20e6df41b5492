"""The next turn of a chat: a prompt that begins with what an ended request was asked and has answered."""

from __future__ import annotations

from conformance.adapters.reference import make
from conformance.execute import open_session
from conformance.operations import Abort, Add, Drain
from conformance.protocol import EngineConfig
from conformance.session import Session
from conformance.token_model import prompt_tokens, request_from

CACHED = EngineConfig(enable_prefix_caching=True, block_size=2)


def session_with(*operations: Add | Abort | Drain) -> Session:
    session = open_session(make, CACHED)
    for operation in operations:
        session.apply(operation)
    return session


def test_the_prompt_begins_with_the_conversation_and_goes_on_with_tokens_of_its_own() -> None:
    session = session_with(Add(3, 4), Drain(), Add(10, 1, continues=0))
    first, second = (session.ledger.requests[name] for name in ("r0", "r1"))
    talk = first.sequences[0].tokens
    assert len(talk) == 7
    assert second.spec.prompt[:7] == talk
    assert second.spec.prompt[7:] == prompt_tokens(Add(10, 1), 1)[7:]


def test_a_shorter_prompt_is_the_beginning_of_the_conversation() -> None:
    session = session_with(Add(3, 4), Drain(), Add(5, 1, continues=0))
    assert session.ledger.requests["r1"].spec.prompt == session.ledger.requests["r0"].sequences[0].tokens[:5]


def test_ended_requests_are_counted_round_and_round() -> None:
    session = session_with(Add(3, 4), Add(2, 2), Abort(1), Drain(), Add(6, 1, continues=3))
    assert session.ledger.ended == ["r1", "r0"]
    assert session.ledger.requests["r2"].spec.prompt[:3] == session.ledger.requests["r0"].spec.prompt


def test_with_nothing_ended_it_is_a_prompt_like_any_other() -> None:
    session = session_with(Add(6, 1, continues=2))
    assert session.ledger.requests["r0"].spec == request_from(Add(6, 1), 0)


def test_generated_blocks_are_hit() -> None:
    session = session_with(Add(3, 6), Drain(), Add(10, 1, continues=0), Drain())
    assert session.ledger.behaviours["prefix hit"] == 1
    session.finish()
    assert not session.violations
