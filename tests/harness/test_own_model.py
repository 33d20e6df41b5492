"""Engines that take their tokens from a model of their own: what they took is held against the reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest

from by_hand import ScriptedEngine
from conformance.operations import Add, Drain, Operation, Step
from conformance.protocol import (
    AdapterError,
    CommitResult,
    EngineConfig,
    Request,
    Sampled,
    SequenceKey,
    StepPlan,
    Taken,
)
from conformance.session import Session
from conformance.smoke import smoke
from conformance.token_model import STOP_TOKEN
from conformance.violations import Violation
from passed_on import PassedOn

DEVICE = EngineConfig(
    num_blocks=3, block_size=32, max_num_seqs=3, max_num_batched_tokens=96, max_model_len=32, fixed_batch=True
)
PAGED = EngineConfig()
VOCABULARY_SIZE = 512


def model(tokens: list[int]) -> int:
    """A "real" model: its vocabulary is larger than that of prompts, and it may say what is a stop token to others."""
    return STOP_TOKEN if len(tokens) % 5 == 0 else (sum(tokens) * 31 + len(tokens) * 97) % VOCABULARY_SIZE


Lie = Callable[[int, dict[SequenceKey, int]], None]
"""Changes the tokens that came of a step, given its number."""


class OwnModel(PassedOn):
    """The reference engine over `model`; the tokens it takes in a step go through ``lie`` first."""

    def __init__(
        self, config: EngineConfig, lie: Lie | None = None, reference: Callable[[list[int]], int] = model
    ) -> None:
        super().__init__(config)
        self.lie = lie
        self.reference = reference
        self.asked: list[tuple[int, ...]] = []
        self.tokens: dict[SequenceKey, list[int]] = {}
        self.capabilities = msgspec.structs.replace(
            self.capabilities, features=self.capabilities.features - {"stop_token", "fork"}, own_model=True
        )

    def reference_token(self, tokens: list[int]) -> int:
        self.asked.append(tuple(tokens))
        return self.reference(tokens)

    def add_request(self, request: Request) -> None:
        self.inner.add_request(request)
        self.tokens[request.request_id, 0] = list(request.prompt)

    def schedule(self) -> StepPlan:
        self.plan = self.inner.schedule()
        return self.plan

    def commit(self, step: int, sampled: Mapping[SequenceKey, Sampled]) -> CommitResult:
        keys = [(row.request_id, row.seq) for row in self.plan.sequences if row.samples]
        came = {key: model(self.tokens[key]) for key in keys}
        if self.lie is not None:
            self.lie(step, came)
        for key, token in came.items():
            self.tokens[key].append(token)
        result = self.inner.commit(step, {key: Sampled([token]) for key, token in came.items()})
        result.taken = [Taken(request_id=key[0], tokens=[token]) for key, token in came.items()]
        return result


def found(config: EngineConfig, lie: Lie, *operations: Operation) -> Violation:
    """The only violation."""
    (violation,) = Session(OwnModel(config, lie), config).run([*operations, Drain()])
    return violation


def wrong(step: int, rid: str) -> Lie:
    """In that step the request takes a token that nobody was to get."""

    def lie(now: int, came: dict[SequenceKey, int]) -> None:
        if now == step:
            came[rid, 0] = VOCABULARY_SIZE

    return lie


@pytest.mark.parametrize("config", [DEVICE, PAGED], ids=["device", "paged"])
def test_the_truth_is_what_the_engines_own_reference_says(config: EngineConfig) -> None:
    engine = OwnModel(config)
    session = Session(engine, config)
    assert session.run([Add(3, 9), Add(4, 6), Step(2), Add(5, 4), Drain()]) == []
    for key, tokens in engine.tokens.items():
        assert session.ledger.requests[key[0]].sequences[0].tokens == tokens
    assert max(max(tokens) for tokens in engine.tokens.values()) > 61
    assert any(STOP_TOKEN in tokens for tokens in engine.tokens.values())


def test_the_reference_is_asked_once_for_each_prefix() -> None:
    engine = OwnModel(PAGED)
    Session(engine, PAGED).run([Add(6, 8, shared_len=6), Add(6, 8, shared_len=6), Drain()])
    assert len(engine.asked) == len(set(engine.asked)) == 8


def test_a_wrong_token_that_nothing_explains_is_the_request_not_getting_its_tokens() -> None:
    violation = found(DEVICE, wrong(2, "r0"), Add(3, 6), Add(5, 6))
    assert violation.requirement == "PRG-5"
    assert violation.message == "in step 2 r0 takes a token that is not its own, which no call explains"
    assert violation.got == "tokens [512]"
    assert found(PAGED, wrong(2, "r0"), Add(3, 6)).requirement == "PRG-5"


def test_two_tokens_in_each_others_hands_are_rows_that_went_astray() -> None:
    def swap(step: int, came: dict[SequenceKey, int]) -> None:
        if step == 2:
            came["r0", 0], came["r1", 0] = came["r1", 0], came["r0", 0]

    violation = found(DEVICE, swap, Add(3, 6), Add(5, 6))
    assert violation.requirement == "DEV-3"
    assert violation.message == "in step 2 r0 takes a token that is not its own, which the same call computed for r1"


@pytest.mark.parametrize(
    ("prompt", "why"),
    [
        (8, "after the prompt of r1, exactly as long as a bucket"),
        (1, "after the one-token prompt of r1"),
        (7, "which no call explains"),
    ],
)
def test_a_wrong_token_after_an_odd_prompt_is_its_doing(prompt: int, why: str) -> None:
    violation = found(DEVICE, wrong(3, "r0"), Add(9, 6), Step(2), Add(prompt, 1))
    assert violation.message == f"in step 3 r0 takes a token that is not its own, {why}"
    assert violation.requirement == ("PRG-5" if prompt == 7 else "DEV-4")


def test_a_wrong_token_in_the_decode_that_passes_to_another_bucket_is_its_doing() -> None:
    violation = found(DEVICE, wrong(2, "r0"), Add(7, 9))
    assert violation.requirement == "DEV-4"
    assert violation.message.endswith("after the decode in another bucket")


def test_what_came_out_right_since_is_no_excuse() -> None:
    violation = found(DEVICE, wrong(4, "r0"), Add(9, 6), Add(8, 1))
    assert violation.requirement == "PRG-5"


@pytest.mark.parametrize("answer", ["7", None, -1, 1 << 20])
def test_a_reference_that_gives_no_token_is_the_adapters_fault(answer: Any) -> None:
    engine = OwnModel(PAGED, reference=lambda _: answer)
    with pytest.raises(AdapterError, match="reference_token answers"):
        Session(engine, PAGED).run([Add(3, 2), Drain()])


def test_an_engine_that_declares_a_model_and_has_none_is_the_adapters_fault() -> None:
    with pytest.raises(AdapterError, match="there is no reference_token"):
        Session(ScriptedEngine(own_model=True, features=frozenset()), PAGED)


def test_a_reference_that_raises_is_the_adapters_fault() -> None:
    def broken(tokens: list[int]) -> int:
        raise RuntimeError(f"no weights for {len(tokens)} tokens")

    with pytest.raises(AdapterError, match="reference_token raised RuntimeError: no weights for 3 tokens"):
        Session(OwnModel(PAGED, reference=broken), PAGED).run([Add(3, 2), Drain()])


# -- the smoke test ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [DEVICE, PAGED], ids=["device", "paged"])
def test_the_smoke_test_hands_out_the_references_tokens(config: EngineConfig) -> None:
    assert smoke(OwnModel, config).status == "ok"


def test_an_adapter_that_says_such_an_engine_stops_at_a_token_is_red() -> None:
    class Stops(OwnModel):
        def __init__(self, config: EngineConfig) -> None:
            super().__init__(config)
            features = self.capabilities.features | {"stop_token"}
            self.capabilities = msgspec.structs.replace(self.capabilities, features=features)

    light = smoke(Stops, PAGED)
    assert (light.status, light.reason) == (
        "red", "capabilities: own_model: nobody can make it emit a stop token, so stop_token must not be declared"
    )  # fmt: skip


def test_an_adapter_that_does_not_tell_what_was_taken_is_red() -> None:
    class Silent(OwnModel):
        def commit(self, step: int, sampled: Mapping[SequenceKey, Sampled]) -> CommitResult:
            return CommitResult(super().commit(step, sampled).finished)

    assert "commit() does not say which tokens were taken" in smoke(Silent, PAGED).reason


def test_an_adapter_that_declares_a_device_and_shows_no_calls_is_red() -> None:
    class Silent(OwnModel):
        def schedule(self) -> StepPlan:
            plan = super().schedule()
            plan.device_calls = []
            return plan

    light = smoke(Silent, DEVICE)
    assert light.status == "red"
    assert "declares a device and names 0 calls of one" in light.reason


def test_an_adapter_that_forgets_the_device_it_was_asked_for_is_red() -> None:
    class Forgets(OwnModel):
        def __init__(self, config: EngineConfig) -> None:
            super().__init__(config)
            self.capabilities = msgspec.structs.replace(self.capabilities, device=None)

    light = smoke(Forgets, DEVICE)
    assert "a fixed-batch device is declared and was asked for, and none is named" in light.reason
