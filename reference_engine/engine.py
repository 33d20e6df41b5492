"""The engine: takes requests, hands out steps, takes their tokens. The executable specification's front."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Literal, NamedTuple

from .block_manager import BlockManager
from .config import EngineConfig
from .request import Request, Sequence, Status
from .scheduler import Plan, ScheduledSequence, Scheduler


class RequestError(ValueError):
    """A request the engine will not serve; the message says why."""


class FinishedRequest(NamedTuple):
    """A complete request, with the output tokens of each of its n sequences."""

    request_id: str
    outputs: list[list[int]]
    reason: Literal["length", "stop"]


class Engine:
    """Continuous batching over a paged KV cache, with up to ``pipeline_depth`` steps scheduled ahead.

    `schedule` and `commit` alternate; with a pipeline several steps may be scheduled before the oldest of
    them is committed. Nothing is known between the two of tokens still to come: the scheduler counts them.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.blocks = BlockManager(config)
        self.scheduler = Scheduler(config, self.blocks)
        self.requests: dict[str, Request] = {}
        """Live requests in order of arrival."""
        self._in_flight: deque[Plan] = deque()
        self._next_step = 0
        self._next_serial = 0

    # -- requests ----------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Queue ``request``. Raises `RequestError` for one that is malformed or could never finish.

        What cannot ever fit is refused here and parks nowhere (PRG-3); everything else is served (PRG-2).
        """
        self._check_request(request)
        request.max_len = min(request.prompt_len + request.max_tokens, self.config.max_model_len)
        self._check_fit(request)
        priority = request.priority if self.config.scheduling_policy == "priority" else 0
        request.rank = (priority, request.arrival, self._next_serial)
        self._next_serial += 1
        self.requests[request.request_id] = request
        self.scheduler.add(request)

    def _check_request(self, request: Request) -> None:
        name, config = request.request_id, self.config
        if name in self.requests:
            raise RequestError(f"request {name}: a request of this id is live")
        if request.prompt_len < 1:
            raise RequestError(f"request {name}: the prompt is empty")
        if request.max_tokens < 1 or request.n < 1:
            raise RequestError(
                f"request {name}: max_tokens = {request.max_tokens} and n = {request.n} must be at least 1"
            )
        if request.prompt_len >= config.max_model_len:
            raise RequestError(
                f"request {name}: a prompt of {request.prompt_len} tokens leaves no room for an output token "
                f"under max_model_len = {config.max_model_len}"
            )
        if request.n > config.max_num_seqs:
            raise RequestError(f"request {name}: n = {request.n} is more than max_num_seqs = {config.max_num_seqs}")

    def _check_fit(self, request: Request) -> None:
        """After a recompute each sequence may have to be prefilled alone, up to the token before its last."""
        config = self.config
        blocks = request.n * self.blocks.blocks_for(request.max_len - 1)
        most = config.usable_blocks - config.watermark_blocks
        if blocks > most:
            raise RequestError(
                f"request {request.request_id}: {request.n} x {request.max_len} tokens can need {blocks} "
                f"blocks of {config.block_size}, and one request can have {most} of {config.num_blocks} "
                f"(null block {int(config.null_block)}, watermark {config.watermark_blocks})"
            )

    def abort_request(self, request_id: str) -> None:
        """Drop a request in whatever state it is; unknown and ended ids are ignored (PRG-6).

        Blocks that a step in flight uses are freed when it is committed (KV-5), the others at once (ACC-7).
        """
        request = self.requests.pop(request_id, None)
        if request is None:
            return
        self.scheduler.remove(request)
        for sequence in request.live:
            self._retire(sequence)
        request.live = []
        request.status = Status.ABORTED

    # -- steps -------------------------------------------------------------------------------------------

    def schedule(self) -> Plan:
        """Decide the next step. A plan without sequences need not be committed.

        Raises RuntimeError when ``pipeline_depth`` steps are in flight already.
        """
        if len(self._in_flight) >= self.config.pipeline_depth:
            raise RuntimeError(
                f"{len(self._in_flight)} steps are in flight, pipeline_depth = {self.config.pipeline_depth}"
            )
        plan = self.scheduler.schedule(self._next_step)
        self._next_step += 1
        if plan.sequences:
            self._in_flight.append(plan)
        return plan

    def commit(self, step: int, tokens: Mapping[tuple[str, int], int]) -> list[FinishedRequest]:
        """Take the tokens that step ``step`` sampled, by (request id, sequence); returns what is complete.

        Steps are committed in the order they were scheduled. Tokens of sequences that have ended meanwhile
        are dropped. Raises ValueError for a step out of order and KeyError for a missing token.
        Upholds PRG-5, KV-2 and KV-5.
        """
        if not self._in_flight or self._in_flight[0].step != step:
            if step < self._next_step and all(plan.step != step for plan in self._in_flight):
                return []
            raise ValueError(f"step {step} is committed out of order")
        finished: list[FinishedRequest] = []
        for scheduled in self._in_flight.popleft().sequences:
            sequence = scheduled.sequence
            sequence.in_flight -= 1
            if sequence.ended:
                if not sequence.in_flight:
                    self.blocks.release_deferred(sequence)
                continue
            self._take(scheduled, tokens)
            if not sequence.request.live:
                finished.append(self._finish(sequence.request))
        return finished

    def _take(self, scheduled: ScheduledSequence, tokens: Mapping[tuple[str, int], int]) -> None:
        """One sequence's part of a commit: publish, fork, append its token or end it."""
        sequence = scheduled.sequence
        blocks, request = self.blocks, sequence.request
        sequence.done = scheduled.first + scheduled.num_tokens
        if blocks.cache is not None and sequence.done // blocks.block_size > sequence.published:
            blocks.publish(sequence)
        if not scheduled.samples:
            return
        sequence.pending -= 1
        sampled = [sequence]
        if not request.forked:
            children = request.fork()
            for child in children:
                blocks.fork(sequence, child)
            sampled += children
        for member in sampled:
            token = tokens[request.request_id, member.index]
            member.tokens.append(token)
            if token == request.stop_token or len(member.tokens) >= request.max_len:
                self.scheduler.end_sequence(member)
                self._retire(member)

    def _retire(self, sequence: Sequence) -> None:
        """End a sequence. Without a pipeline nothing can reuse its blocks before the step is committed."""
        sequence.ended = True
        self.blocks.retire(sequence, defer=sequence.in_flight > 0 and self.config.pipeline_depth > 1)

    def _finish(self, request: Request) -> FinishedRequest:
        assert request.status is Status.RUNNING
        self.scheduler.remove(request)
        del self.requests[request.request_id]
        request.status = Status.FINISHED
        stopped = all(sequence.tokens[-1] == request.stop_token for sequence in request.sequences)
        return FinishedRequest(
            request.request_id,
            [sequence.output for sequence in request.sequences],
            "stop" if stopped else "length",
        )

    # -- prefix cache ------------------------------------------------------------------------------------

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix; false, and nothing done, while requests are live (CCH-3).

        A live request would publish what it computed before the reset again.
        """
        if self.requests:
            return False
        if self.blocks.cache is not None:
            self.blocks.cache.clear()
        return True
