"""A driver for the reference engine with books of its own: what every slot holds, and who holds every block."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import pytest

from reference_engine.config import EngineConfig
from reference_engine.engine import Engine, FinishedRequest
from reference_engine.request import Request, Sequence
from reference_engine.scheduler import Plan

DEFAULTS: dict[str, Any] = {
    "num_blocks": 8,
    "block_size": 4,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "max_model_len": 32,
}
Content = tuple[tuple[str, str], tuple[int, ...]]
"""What a slot holds: the KV of the last token of this prefix under this identity."""


class Driver:
    """Runs an engine as a model runner would, and checks after every step that the plan was right.

    The model's next token is a function of the prefix and of the index of the sequence.
    """

    def __init__(self, **fields: Any) -> None:
        self.config = EngineConfig(**{**DEFAULTS, **fields})
        self.engine = Engine(self.config)
        self.pool = self.engine.blocks.pool
        self.finished: dict[str, FinishedRequest] = {}
        self.plans: list[Plan] = []
        self.preempted: list[str] = []
        self.num_tokens = 0
        self.tables: dict[tuple[str, int], list[int]] = {}
        """Block table of every sequence the last time it ran."""
        self._tokens: dict[tuple[str, int], list[int]] = {}
        self._device: dict[tuple[int, int], Content] = {}
        self._host: dict[tuple[int, int], Content] = {}
        self._in_flight: deque[tuple[Plan, dict[tuple[str, int], int]]] = deque()

    def add(self, name: str, prompt: int | list[int], max_tokens: int, **fields: Any) -> Request:
        """Add a request; a prompt given as a length gets tokens that no other request has."""
        if isinstance(prompt, int):
            start = 1000 * (1 + sum(map(ord, name)))
            prompt = list(range(start, start + prompt))
        request = Request(name, prompt, max_tokens, **fields)
        self.engine.add_request(request)
        self._tokens = {key: tokens for key, tokens in self._tokens.items() if key[0] != name}
        self._tokens[name, 0] = list(prompt)
        return request

    def step(self) -> Plan:
        """Schedule and run one step; commit the oldest when the pipeline is full or nothing was scheduled."""
        plan = self.engine.schedule()
        self.plans.append(plan)
        self.preempted += [preemption.request.request_id for preemption in plan.preempted]
        self._run(plan)
        if plan.sequences:
            self._in_flight.append((plan, self._sample(plan)))
        if self._in_flight and (len(self._in_flight) == self.config.pipeline_depth or not plan.sequences):
            self.commit()
        self.audit()
        return plan

    def commit(self) -> None:
        plan, tokens = self._in_flight.popleft()
        for finished in self.engine.commit(plan.step, tokens):
            self.finished[finished.request_id] = finished

    def drain(self, limit: int = 5000) -> None:
        """Step until no request is live and nothing is in flight."""
        for _ in range(limit):
            if not self.engine.requests and not self._in_flight:
                return
            self.step()
        raise AssertionError(f"not finished after {limit} steps: {list(self.engine.requests)}")

    # -- the model ---------------------------------------------------------------------------------------

    def _run(self, plan: Plan) -> None:
        """Do the moves, write what the plan computes, then read what attention reads."""
        config, size = self.config, self.config.block_size
        for kind, source, target in plan.moves:
            for offset in range(size):
                here = self._host if kind == "swap_in" else self._device
                there = self._host if kind == "swap_out" else self._device
                there.pop((target, offset), None)
                if (source, offset) in here:
                    there[target, offset] = here[source, offset]
        budget = 0
        for sequence, first, num_tokens, samples in plan.sequences:
            tokens = self._tokens[_key(sequence)]
            end = first + num_tokens
            budget += num_tokens
            assert end <= len(tokens)
            assert samples == (end == len(tokens))
            assert len(sequence.table) * size >= end
            for position in range(first, end):
                block = sequence.table[position // size]
                assert self.pool.reserved <= block < config.num_blocks
                assert self.pool.refs[block] == 1, "a block that is written has one holder"
                self._device[block, position % size] = _content(sequence, tokens, position)
        assert budget <= config.max_num_batched_tokens
        victims = {preemption.request for preemption in plan.preempted}
        assert not any(sequence.request in victims for sequence, _, _, _ in plan.sequences)
        self.num_tokens += budget
        for sequence, first, num_tokens, _ in plan.sequences:
            tokens = self._tokens[_key(sequence)]
            start = 0 if config.sliding_window is None else max(0, first - config.sliding_window + 1)
            for position in range(start, first + num_tokens):
                slot = (sequence.table[position // size], position % size)
                assert self._device.get(slot) == _content(sequence, tokens, position)
            self.tables[_key(sequence)] = sequence.table[:]

    def _sample(self, plan: Plan) -> dict[tuple[str, int], int]:
        sampled: dict[tuple[str, int], int] = {}
        for sequence, _, _, samples in plan.sequences:
            request = sequence.request
            for index in range(request.n) if not request.forked else [sequence.index]:
                if samples:
                    name = request.request_id
                    tokens = self._tokens.setdefault((name, index), self._tokens[name, 0][: request.prompt_len])
                    token = (sum(tokens) * 31 + len(tokens) + index) % 50 + 2
                    tokens.append(token)
                    sampled[name, index] = token
        return sampled

    # -- the books ---------------------------------------------------------------------------------------

    def audit(self) -> None:
        """Every block in one class, counts equal to holders, queues disjoint, limits kept."""
        pool, scheduler = self.pool, self.engine.scheduler
        holders: Counter[int] = Counter()
        holding = [sequence for request in scheduler.running for sequence in request.live]
        holding += self.engine.blocks.deferred
        for sequence in holding:
            holders.update(block for block in sequence.table if block >= pool.reserved)
        assert pool.refs == [holders[block] for block in range(pool.num_blocks)]
        classes = [*pool.free, *pool.evictable, *holders, *range(pool.reserved)]
        assert sorted(classes) == list(range(pool.num_blocks))
        for request in scheduler.waiting:
            assert not any(sequence.table or sequence.host_table for sequence in request.live)
        for request in scheduler.swapped:
            assert not any(sequence.table for sequence in request.live)
        hosted = {b for r in scheduler.swapped for s in r.live for b in s.host_table if b >= 0}
        host = self.engine.blocks.host
        assert sorted([*host.free, *hosted]) == list(range(host.num_blocks))
        queued = [r.request_id for r in (*scheduler.waiting, *scheduler.running, *scheduler.swapped)]
        assert sorted(queued) == sorted(self.engine.requests)
        assert scheduler.running_sequences == sum(request.width for request in scheduler.running)
        if not self.engine.requests and not self._in_flight:
            assert pool.available == self.config.usable_blocks


def _key(sequence: Sequence) -> tuple[str, int]:
    return (sequence.request.request_id, sequence.index)


def _content(sequence: Sequence, tokens: list[int], position: int) -> Content:
    return (sequence.request.identity, tuple(tokens[: position + 1]))


@pytest.fixture
def drive() -> Callable[..., Driver]:
    """Make a `Driver`: ``drive(num_blocks=4, …)``."""
    return Driver
