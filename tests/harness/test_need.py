"""Real need: exactly the blocks that the next step takes, and what a preemption is worth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
import pytest

from conformance.ledger import Ledger
from conformance.need import blocks_released, judge_preemptions, real_need
from conformance.operations import Add
from conformance.protocol import Capabilities, EngineConfig, Feature, Preemption, SequencePlan, StepPlan, Usage
from conformance.records import RequestRecord, Row, StepFacts
from conformance.token_model import request_from

CONFIG = EngineConfig(num_blocks=16, block_size=4, max_num_batched_tokens=8, max_model_len=32)
FEATURES: frozenset[Feature] = frozenset({"length_limit", "token_budget"})
CAPABILITIES = Capabilities(engine="none", version="0", features=FEATURES)


class Books:
    """A ledger of running requests, each with a table and so many tokens of which all but the last are computed."""

    def __init__(self, **config: object) -> None:
        self.ledger = Ledger(msgspec.structs.replace(CONFIG, **config), CAPABILITIES)

    def run(self, tokens: int, table: list[int], *, computed: int | None = None, priority: int = 0) -> RequestRecord:
        add = Add(tokens, 32, priority=priority)
        request = self.ledger.add(request_from(add, len(self.ledger.requests)), None, 0)
        self.ledger.resume(request)
        self.ledger.set_tables(request.sequences[0], [table])
        request.sequences[0].computed = tokens - 1 if computed is None else computed
        return request

    def forked(self, prompt: int, tables: list[list[int]]) -> RequestRecord:
        """A request whose sequences have computed their prompt and hold ``tables``."""
        add = Add(prompt, 16, n=len(tables))
        request = self.ledger.add(request_from(add, len(self.ledger.requests)), None, 0)
        self.ledger.resume(request)
        self.ledger.set_tables(request.sequences[0], [tables[0]])
        request.sequences[0].computed = prompt
        self.ledger.fork(request)
        for record, table in zip(request.sequences, tables, strict=True):
            self.ledger.set_tables(record, [table])
            record.tokens.append(7)
        return request

    def need(self) -> int:
        return real_need(self.ledger, list(self.ledger.running.values()))


@pytest.mark.parametrize(("tokens", "table", "need"), [(4, [1], 0), (5, [1], 1), (8, [1, 2], 0), (9, [1, 2], 1)])
def test_a_decode_needs_a_block_only_when_its_token_begins_one(tokens: int, table: list[int], need: int) -> None:
    books = Books()
    books.run(tokens, table)
    assert books.need() == need


def test_a_prefill_needs_the_blocks_of_the_chunk_that_the_budget_allows() -> None:
    books = Books()
    books.run(20, [], computed=0)
    assert books.need() == 2
    books.ledger.running["r0"].sequences[0].computed = 6
    books.ledger.set_tables(books.ledger.running["r0"].sequences[0], [[1, 2]])
    assert books.need() == 2  # up to position 13: four blocks, two of them owned


def test_the_budget_counts_from_where_the_engine_believes_the_request_to_be() -> None:
    books = Books(num_speculative_tokens=3, max_num_batched_tokens=4)
    record = books.run(6, [1, 2]).sequences[0]
    record.drafts = [3, 3, 3]
    assert books.need() == 1  # tokens and drafts, up to position 8
    record.rejected = {5: 3}
    assert books.need() == 1  # three more that are not known to be rejected, up to position 11
    books.ledger.set_tables(record, [[1, 2, 3]])
    record.computed = 5
    record.rejected = {5: 3, 6: 3}
    assert books.need() == 1  # up to position 14, of which the budget allows as many: it counts from 11 on


def test_lookahead_slots_are_needed_too() -> None:
    books = Books(num_lookahead_slots=3)
    books.run(6, [1, 2])
    assert books.need() == 1


def test_a_sequence_at_the_models_length_needs_no_more_than_that() -> None:
    books = Books(max_model_len=8)
    books.run(8, [1, 2])
    assert books.need() == 0


def test_the_last_holder_of_a_shared_block_writes_in_place() -> None:
    books = Books()
    books.forked(6, [[1, 2], [1, 2], [1, 2]])
    assert books.need() == 2


def test_every_writer_copies_when_somebody_else_holds_the_block_as_well() -> None:
    books = Books()
    books.forked(6, [[1, 2], [1, 2]])
    other = books.run(3, [2], computed=2)
    other.sequences[0].computed = 4  # reads the block, and writes behind it
    assert real_need(books.ledger, [books.ledger.running["r0"]]) == 2


def test_a_fork_at_the_end_of_a_block_copies_nothing() -> None:
    books = Books()
    books.forked(8, [[1, 2], [1, 2]])
    assert books.need() == 2  # a new block each


def test_only_what_nobody_else_holds_is_released() -> None:
    books = Books()
    first, second = books.run(9, [1, 2, 3]), books.run(9, [1, 2, 4])
    gone: Counter[int] = Counter()
    assert blocks_released(books.ledger, first, gone) == 1
    assert blocks_released(books.ledger, second, gone) == 3, "with the first gone the shared ones are its own"


def judge(
    books: Books, *victims: str, free: int, rows: Sequence[Row] = (), in_flight: int = 0
) -> list[tuple[str, int, int, bool, int]]:
    running = list(books.ledger.running.values())
    facts = StepFacts(StepPlan(step=3), running, free, Usage())
    facts.rows, facts.in_flight = list(rows), in_flight
    facts.preempted = [(books.ledger.requests[rid], Preemption(request_id=rid, mode="recompute")) for rid in victims]
    verdicts = judge_preemptions(books.ledger, facts)
    return [(one.request_id, one.needed, one.free, one.needless, one.released) for one in verdicts]


def test_a_preemption_is_needless_when_the_need_can_be_met() -> None:
    books = Books()
    books.run(8, [1, 2])
    books.run(9, [3, 4])
    assert judge(books, "r1", free=1) == [("r1", 1, 1, True, 2)]
    assert judge(books, "r1", free=0) == [("r1", 1, 0, False, 2)]


def test_the_second_victim_is_judged_after_the_first_has_given_its_blocks() -> None:
    books = Books()
    books.run(9, [1, 2])
    books.run(9, [3, 4])
    books.run(9, [5, 6])
    assert judge(books, "r2", "r1", free=0) == [("r2", 3, 0, False, 2), ("r1", 2, 2, True, 2)]


@pytest.mark.parametrize(("in_flight", "free"), [(0, 2), (1, 1)])
def test_what_a_step_in_flight_reads_is_not_sure_to_be_free_with_its_last_holder(in_flight: int, free: int) -> None:
    books = Books(sliding_window=4)
    runs_on = books.run(9, [1, 2]).sequences[0]
    books.run(9, [1, 3], priority=1)  # shares a block that the window of r0 leaves in this step
    books.run(9, [4, 5], priority=1)
    plan = SequencePlan(request_id="r0", first=8, num_tokens=1, block_tables=[[0, 2, 6]], samples=True)
    row = Row(runs_on, plan, admitted=False, resumed=False)
    verdicts = judge(books, "r1", "r2", free=0, rows=[row], in_flight=in_flight)
    assert [one[2] for one in verdicts] == [0, free]
    assert verdicts[0][4] == 2, "it frees two blocks, or is not to be blamed"


@pytest.mark.parametrize(("declares", "needless"), [(True, False), (False, True)])
def test_who_gives_way_to_a_more_urgent_one_is_not_preempted_needlessly(declares: bool, needless: bool) -> None:  # noqa: FBT001
    books = Books(scheduling_policy="priority")
    books.run(8, [1, 2], priority=2)
    urgent = books.run(4, [3], priority=1)
    books.ledger.preempt(urgent, "recompute")
    books.ledger.capabilities = msgspec.structs.replace(CAPABILITIES, preempts_for_priority=declares)
    assert judge(books, "r0", free=5) == [("r0", 0, 5, needless, 2)]
