"""A small engine: first come, first served; nobody starts before the blocks of its whole life are there."""

from __future__ import annotations

from collections.abc import Mapping

from kvconform import (
    Capabilities,
    CommitResult,
    EngineConfig,
    Finished,
    Request,
    RequestRefused,
    Sampled,
    SequencePlan,
    Snapshot,
    StepPlan,
    Usage,
)


class Life:
    """A request, its tokens so far, how many of them are computed, and its blocks."""

    def __init__(self, request: Request, longest: int, need: int) -> None:
        self.request = request
        self.longest = longest
        self.need = need
        self.tokens = list(request.prompt)
        self.computed = 0
        self.table: list[int] = []


class MyEngine:
    """Fulfils `kvconform.Engine`."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.free = list(range(config.num_blocks))
        self.waiting: list[Life] = []
        self.running: list[Life] = []
        self.reserved = 0
        self.steps = 0

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            engine="my-engine",
            version="0.1",
            features=frozenset({"abort", "stop_token", "length_limit"}),
        )

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold ``tokens`` positions."""
        return -(-tokens // self.config.block_size)

    def add_request(self, request: Request) -> None:
        longest = min(len(request.prompt) + request.max_tokens, self.config.max_model_len)
        need = self.blocks_for(longest - 1)  # the last token is sampled and never computed
        if request.n > 1 or longest <= len(request.prompt) or need > self.config.num_blocks:
            raise RequestRefused("more sequences or tokens than there is room for")
        self.waiting.append(Life(request, longest, need))

    def abort_request(self, request_id: str) -> None:
        self.waiting = [life for life in self.waiting if life.request.request_id != request_id]
        for life in list(self.running):
            if life.request.request_id == request_id:
                self.end(life)

    def end(self, life: Life) -> None:
        """Take a request off the running set and its blocks back."""
        self.running.remove(life)
        self.reserved -= life.need
        self.free += life.table

    def schedule(self) -> StepPlan:
        while self.waiting and len(self.running) < self.config.max_num_seqs:
            if self.reserved + self.waiting[0].need > self.config.num_blocks:
                break
            self.reserved += self.waiting[0].need
            self.running.append(self.waiting.pop(0))
        plan = StepPlan(step=self.steps)
        self.steps += 1
        for life in self.running:
            end = len(life.tokens)
            while len(life.table) < self.blocks_for(end):
                life.table.append(self.free.pop())
            plan.sequences.append(
                SequencePlan(
                    request_id=life.request.request_id,
                    first=life.computed,
                    num_tokens=end - life.computed,
                    block_tables=[list(life.table)],
                )
            )
            life.computed = end
        return plan

    def commit(self, step: int, sampled: Mapping[tuple[str, int], Sampled]) -> CommitResult:
        result = CommitResult()
        for life in list(self.running):
            request = life.request
            if (request.request_id, 0) not in sampled:
                continue
            life.tokens += sampled[request.request_id, 0].tokens
            if len(life.tokens) == life.longest or life.tokens[-1] == request.stop_token:
                self.end(life)
                outputs = life.tokens[len(request.prompt) :]
                result.finished.append(Finished(request_id=request.request_id, outputs=[outputs]))
        return result

    def reset_prefix_cache(self) -> bool:
        return True

    def usage(self) -> Usage:
        return Usage()

    def snapshot(self) -> Snapshot:
        held = {life.request.request_id: [list(life.table)] for life in self.running}
        return Snapshot(free=list(self.free), held=held)

    def close(self) -> None:
        """Nothing to release."""


make = MyEngine
