"""The ledger against a naive recount, and the lives of its requests."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.ledger import Ledger
from conformance.operations import Add
from conformance.protocol import Capabilities, EngineConfig, Feature
from conformance.records import RequestRecord, RequestState
from conformance.token_model import request_from

CONFIG = EngineConfig(num_blocks=8, block_size=4, max_model_len=16)
FEATURES: frozenset[Feature] = frozenset({"length_limit", "token_budget"})
CAPABILITIES = Capabilities(engine="none", version="0", features=FEATURES, null_block=0, reserved_blocks=1)

TABLE = st.lists(st.integers(0, 7), max_size=5)
CHANGE = st.tuples(st.integers(0, 3), st.lists(TABLE, max_size=2))


def ledger_with(*adds: Add, config: EngineConfig = CONFIG) -> Ledger:
    ledger = Ledger(config, CAPABILITIES)
    for number, add in enumerate(adds):
        ledger.add(request_from(add, number), add.stop_after, 0)
    return ledger


def running(ledger: Ledger, number: int, table: list[int]) -> RequestRecord:
    """Request ``number``, running through ``table`` with its prompt computed."""
    request = ledger.requests[f"r{number}"]
    ledger.resume(request)
    first = request.sequences[0]
    ledger.set_tables(first, [table])
    first.computed = len(first.tokens)
    return request


# ----------------------------------------------------------------------------------------------------- holders


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(CHANGE, max_size=30))
def test_holders_are_what_a_recount_finds(changes: list[tuple[int, list[list[int]]]]) -> None:
    ledger = ledger_with(*[Add(4, 4)] * 4)
    for number, tables in changes:
        record = ledger.requests[f"r{number}"].sequences[0]
        before = [list(table) for table in record.tables]
        added = ledger.set_tables(record, tables)
        recount = Counter(
            block
            for request in ledger.live.values()
            for one in request.sequences
            for table in one.tables
            for block in table
            if block != 0
        )
        assert ledger.holders == dict(recount)
        assert ledger.distinct_held == len(recount)
        assert ledger.free_blocks == 7 - len(recount)
        assert added == [
            block
            for group, table in enumerate(tables)
            for index, block in enumerate(table)
            if block != 0 and (group >= len(before) or before[group][index : index + 1] != [block])
        ]


def test_who_ends_or_is_preempted_holds_nothing() -> None:
    ledger = ledger_with(Add(4, 4), Add(4, 4))
    first, second = running(ledger, 0, [1, 2]), running(ledger, 1, [1, 3])
    assert ledger.holders == {1: 2, 2: 1, 3: 1}
    ledger.preempt(second, "recompute")
    assert ledger.holders == {1: 1, 2: 1}
    assert (second.state, second.sequences[0].computed) == (RequestState.PREEMPTED, 0)
    ledger.end(first, RequestState.FINISHED)
    assert ledger.holders == {}
    assert (list(ledger.live), list(ledger.running), list(ledger.preempted)) == (["r1"], [], ["r1"])


def test_a_swapped_request_keeps_what_it_has_computed() -> None:
    ledger = ledger_with(Add(6, 4))
    request = running(ledger, 0, [1, 2])
    ledger.preempt(request, "swap")
    assert (request.state, request.sequences[0].computed) == (RequestState.SWAPPED, 6)
    ledger.resume(request)
    assert list(ledger.preempted) == []


# --------------------------------------------------------------------------------------------------- sequences


def test_a_fork_shares_the_blocks_that_the_prompt_fills_and_no_more() -> None:
    ledger = ledger_with(Add(6, 4, n=3))
    request = running(ledger, 0, [1, 2, 3])
    ledger.fork(request)
    assert [record.tables for record in request.sequences] == [[[1, 2, 3]], [[1, 2]], [[1, 2]]]
    assert ledger.holders == {1: 3, 2: 3, 3: 1}
    assert [record.computed for record in request.sequences] == [6, 6, 6]
    assert [record.name for record in request.sequences] == ["r0/0", "r0/1", "r0/2"]


def test_a_request_that_has_not_forked_counts_all_its_sequences() -> None:
    ledger = ledger_with(Add(4, 4, n=3), Add(4, 4))
    request = running(ledger, 0, [1])
    running(ledger, 1, [2])
    assert ledger.running_sequences == 4
    ledger.fork(request)
    request.sequences[1].settled = True
    assert ledger.running_sequences == 3


# ----------------------------------------------------------------------------------------------------- figures


def test_a_sequence_ends_at_the_models_length() -> None:
    assert ledger_with(Add(10, 99)).requests["r0"].full_len == 16


@pytest.mark.parametrize(
    ("add", "blocks"), [(Add(4, 4), 2), (Add(5, 4), 3), (Add(15, 9), 4), (Add(5, 4, n=2), 6)], ids=str
)
def test_full_blocks_are_those_of_all_tokens_of_all_sequences(add: Add, blocks: int) -> None:
    ledger = ledger_with(add)
    assert ledger.full_blocks(ledger.requests["r0"]) == blocks


def test_between_what_surely_fits_and_what_never_fits_an_engine_may_do_as_it_likes() -> None:
    config = msgspec.structs.replace(CONFIG, num_blocks=3)  # 2 of them usable
    ledger = ledger_with(Add(4, 4), Add(4, 5), Add(4, 6), config=config)
    requests = ledger.requests.values()
    assert [ledger.surely_fits(request) for request in requests] == [True, False, False]
    assert [ledger.can_never_fit(request) for request in requests] == [False, False, True]


def test_the_watermark_is_withheld_from_what_surely_fits() -> None:
    ledger = ledger_with(Add(4, 4), config=msgspec.structs.replace(CONFIG, num_blocks=3, watermark=0.5))
    assert ledger.watermark_blocks == 1
    assert not ledger.surely_fits(ledger.requests["r0"])
