"""ACC-*: every block is in exactly one place, tables are as long as their tokens, nothing is kept or lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TypeAlias

from conformance.ledger import Ledger
from conformance.oracles.base import Oracle, Report
from conformance.protocol import Finished, RequestId, Snapshot, Usage
from conformance.records import RequestRecord, RequestState, Row, StepFacts

Problem: TypeAlias = tuple[str, str, str, str]
"""Requirement, message, expected, got."""


class AccountingOracle(Oracle):
    """ACC-1, 2, 4 to 10 on plans and figures per step, and on the whole books in an audit."""

    requirements = ("ACC-1", "ACC-2", "ACC-4", "ACC-5", "ACC-6", "ACC-7", "ACC-8", "ACC-9", "ACC-10")

    def __init__(self, ledger: Ledger, report: Report) -> None:
        super().__init__(ledger, report)
        self._preemptions = 0
        self._queried = self._hit = 0
        """Prompt tokens looked up in the prefix cache, and found there, by requests that started."""
        self._commits = 0
        self._released_at_commit = -(1 << 30)
        """Commit number at which blocks were last released early, for engines that defer frees."""
        capabilities = ledger.capabilities
        self._exact = not capabilities.keeps_blocks
        self._grace = capabilities.deferred_free_steps
        self._ahead = max(ledger.config.num_lookahead_slots, ledger.config.num_speculative_tokens)
        """Tokens for which slots may be set aside beyond those of a sequence."""
        self._aborting: set[RequestId] = set()
        """Requests aborted while they ran, which hold what they held until they have run once more."""
        self._difference: int | None = None
        self._in_flight = 0
        self._is_reset = False
        """Nothing was added since the prefix cache of the idle engine was reset."""
        self._held_blocks = 0
        """Blocks in tables of live requests after the last step."""
        self.unsettled: Problem | None = None
        """A free figure that does not add up, kept back until an audit has had its say."""

    # -- per step ----------------------------------------------------------------------------------------

    def before_step(self, facts: StepFacts) -> None:
        moved: dict[int, int] = {}
        if facts.plan.moves:
            moved = {move.dst: move.src for move in facts.plan.moves if move.kind == "copy"}
        for row in facts.rows:
            stays = not row.resumed and row.record.request.state is RequestState.RUNNING
            if stays and row.previous and row.tables != row.previous:
                self._check_growth(row, moved)
            if row.admitted and self.ledger.config.enable_prefix_caching:
                self._queried += len(row.record.tokens)
                self._hit += row.plan.first
        self._preemptions += len(facts.preempted)
        if facts.preempted:
            self._released_at_commit = self._commits

    def _check_growth(self, row: Row, moved: dict[int, int]) -> None:
        """ACC-9: the known part of the table is unchanged, but for copy-on-write and the window's null block."""
        null = self.ledger.capabilities.null_block
        for group, old in enumerate(row.previous):
            window, size = self.ledger.group_windows[group], self.ledger.group_sizes[group]
            new = row.tables[group] if group < len(row.tables) else []
            if new[: len(old)] == old:
                continue
            for index, block in enumerate(old):
                now = new[index] if index < len(new) else None
                if now == block or (now is not None and moved.get(now) == block):
                    continue
                left_window = window is not None and (index + 1) * size <= row.plan.first - window + 1
                left_window |= self.ledger.group_states[group] and index < (row.plan.first - 1) // size
                if now is not None and left_window and now == null:
                    continue
                if window is not None and now in new[:index]:
                    continue  # a table that wraps round the window
                whole = (index + 1) * size <= row.end
                if now is not None and whole and self.ledger.capabilities.merges_equal_blocks:
                    continue  # that the content is the same is what KV-1 checks
                self.report(
                    "ACC-9",
                    f"{row.record.name}'s table changed under it at logical block {index}",
                    expected=f"block {block} as before",
                    got="the table is shorter" if now is None else f"block {now} with no copy from {block}",
                )
                return

    def on_step(self, facts: StepFacts) -> None:
        for record, _ in facts.aborted:
            self._aborting.discard(record.key[0])
            self._released_at_commit = self._commits
        low, high = 0, self.ledger.config.num_blocks
        null = self.ledger.capabilities.null_block
        for row in facts.rows:
            for block in row.added:
                if not low <= block < high:
                    self.report(
                        "ACC-2",
                        f"{row.record.name}'s table names block {block}",
                        expected=f"block ids 0 to {high - 1}",
                        got=f"block {block} in table {row.tables[0]}",
                    )
            for group, table in enumerate(row.tables):
                self._check_cover(row, group, table, null)

    def _check_cover(self, row: Row, group: int, table: list[int], null: int | None) -> None:
        """ACC-5: the table covers the step's tokens and holds no more than tokens plus lookahead need."""
        ledger = self.ledger
        size = ledger.group_sizes[group]
        need = -(-row.end // size)
        if len(table) < need:
            self.report(
                "ACC-5",
                f"{row.record.name} computes positions {row.plan.first} to {row.end - 1} "
                f"through a table of {len(table)} blocks",
                expected=f"at least ceil({row.end} / {size}) = {need} blocks",
                got=f"table {table}",
            )
        known = max(len(row.record.tokens), row.end)
        ahead = self._ahead
        most = -(-(known + ahead) // size) + ledger.capabilities.preallocated_blocks
        if len(table) > most:
            self.report(
                "ACC-5",
                f"{row.record.name} with {known} tokens holds {len(table)} blocks",
                expected=f"at most {most} blocks of {size} tokens (lookahead {ahead}, preallocated "
                f"{ledger.capabilities.preallocated_blocks} blocks)",
                got=f"table {table}",
            )
        if null is not None:
            window = ledger.group_windows[group]
            reads_from = 0 if window is None else max(0, row.plan.first - window + 1)
            in_reach = table[reads_from // size : need]
            if ledger.group_states[group]:
                before = [table[(row.plan.first - 1) // size]] if 0 < row.plan.first <= len(table) * size else []
                in_reach = [*before, *table[need - 1 : need]]
            if null in in_reach:
                self.report(
                    "ACC-2",
                    f"{row.record.name} reads or writes through the null block {null}",
                    expected="a block of its own for every position in reach",
                    got=f"table {table}",
                )

    def after_step(self, facts: StepFacts) -> None:
        usage = facts.usage_after
        self._held_blocks = self.ledger.distinct_held
        if facts.rows or facts.aborted:
            self._in_flight += 1
        elif not self._in_flight:
            self._commits += 1  # nothing is in flight that could hold a block
        self._check_counters(facts)
        self._check_queues(facts)
        if usage.free_blocks is None or not self._exact:
            return
        expected = self.ledger.free_blocks
        if usage.free_blocks == expected:
            self._difference = None
            return
        if usage.free_blocks < expected and self._is_given_time():
            return
        if self._difference != usage.free_blocks - expected:  # else reported at an earlier step
            self._difference = usage.free_blocks - expected
            self.unsettled = self._judge_free(facts, usage.free_blocks, expected)

    def _check_counters(self, facts: StepFacts) -> None:
        """ACC-10: what the engine counts up: preemptions, and what the prefix cache was asked for and had."""
        usage = facts.usage_after
        for name, figure, count in (
            ("preemption counter", usage.preemptions, self._preemptions),
            ("count of prompt tokens looked up in the prefix cache", usage.queried_tokens, self._queried),
            ("count of prompt tokens found in the prefix cache", usage.hit_tokens, self._hit),
        ):
            self._compare(facts, name, figure, count)

    def _check_queues(self, facts: StepFacts) -> None:
        """ACC-10: who runs, waits and is swapped out, by the engine's figures and by what its plans have shown."""
        ledger, usage = self.ledger, facts.usage_after
        swapped = 0
        if ledger.preempted:
            swapped = sum(request.state is RequestState.SWAPPED for request in ledger.preempted.values())
        self._compare(
            facts, "figure of what is waiting", usage.waiting, len(ledger.live) - len(ledger.running) - swapped
        )
        self._compare(facts, "figure of what is swapped", usage.swapped, swapped)
        for request in ledger.running.values():
            if self._is_forking(request, facts):
                return
        self._compare(facts, "figure of what is running", usage.running, ledger.running_sequences)

    def _compare(self, facts: StepFacts, name: str, figure: int | None, count: int) -> None:
        """ACC-10 when a figure that the engine shows is not what was counted."""
        if figure is not None and figure != count:
            self.report(
                "ACC-10",
                f"the engine's {name} after step {facts.plan.step}",
                expected=str(count),
                got=str(figure),
            )

    @staticmethod
    def _is_forking(request: RequestRecord, facts: StepFacts) -> bool:
        """Whether the engine may not know yet that a request of several sequences has become several."""
        since = request.first_token_step
        return request.spec.n > 1 and (since is None or since >= facts.plan.step - facts.in_flight)

    def _judge_free(self, facts: StepFacts, got: int, expected: int) -> Problem:
        """The engine's free figure is not what its own tables leave: requirement, message, expected, got."""
        step = facts.plan.step
        changed = any(row.added or not row.previous for row in facts.rows)
        waiting = any(request.state is RequestState.WAITING for request in self.ledger.live.values())
        holding = f"{self.ledger.distinct_held} blocks are in tables of live requests"
        if got < expected and waiting and not changed and not facts.preempted:
            return (
                "ACC-8",
                f"a postponed admission took {expected - got} blocks in step {step}",
                f"{expected} blocks free, as before: {holding}",
                f"{got} free",
            )
        off = f"{expected - got} in no class" if got < expected else f"{got - expected} counted twice"
        return (
            "ACC-1",
            f"after step {step} the blocks do not add up: {off}",
            f"{expected} free of {self.ledger.usable_blocks} usable: {holding}",
            f"{got} free by the engine's own figure",
        )

    def settle(self, snapshot: Snapshot | None, usage: Usage) -> None:
        """Judge a free figure that is off, with the engine's whole books at hand if it can show them.

        Books that add up clear it: a running request may hold what no plan has shown yet.
        """
        assert self.unsettled is not None, "there is something to settle"
        requirement, message, expected, got = self.unsettled
        self.unsettled = None
        if snapshot is None:
            self.report(requirement, message, expected=expected, got=got)
            return
        problems = list(self._problems(snapshot, usage))
        if problems and requirement == "ACC-8":
            self.report(requirement, message, expected=expected, got=got)
        for requirement, message, expected, got in problems:
            self.report(requirement, message, expected=expected, got=got)

    def on_commit(self, step: int, finished: list[Finished], ended: list[RequestRecord]) -> None:
        self._commits += 1
        self._in_flight = max(0, self._in_flight - 1)
        if self.ledger.distinct_held < self._held_blocks:  # one of several sequences has ended
            self._released_at_commit = self._commits

    def on_add(self, request: RequestRecord) -> None:
        self._is_reset = False

    def on_refused(self, request: RequestRecord, reason: str) -> None:
        self._released_at_commit = self._commits

    def on_reset(self, done: bool) -> None:  # noqa: FBT001 - the engine's one-word answer
        self._is_reset = done and not self.ledger.live

    def on_end(self, request: RequestRecord) -> None:
        self._released_at_commit = self._commits
        if request.aborted_steps:
            self._aborting.add(request.spec.request_id)

    def _is_given_time(self) -> bool:
        """Whether somebody may still hold what is no longer in any plan, as the engine declares."""
        if self._aborting and self.ledger.live:
            return True
        return self._commits - self._released_at_commit <= self._grace > 0

    # -- audit -------------------------------------------------------------------------------------------

    def audit(self, snapshot: Snapshot, usage: Usage) -> None:
        """O(pool): every block in exactly one class, counts equal to holders, nobody dead holds anything."""
        if self._is_given_time():
            return
        for requirement, message, expected, got in self._problems(snapshot, usage):
            self.report(requirement, message, expected=expected, got=got)

    def _problems(self, snapshot: Snapshot, usage: Usage) -> Iterator[Problem]:
        yield from self._dead_holders(snapshot)
        yield from self._wrong_counts(snapshot)
        yield from self._wrong_classes(snapshot)
        yield from self._wrong_figure(snapshot, usage)
        yield from self._too_much_held(snapshot)
        if not self.ledger.live:
            yield from self._not_idle(snapshot)

    def _held(self, snapshot: Snapshot) -> Counter[int]:
        """Block -> number of tables that name it, null block aside."""
        held: Counter[int] = Counter()
        for tables in snapshot.held.values():
            for table in tables:
                held.update(set(table))
        if self.ledger.capabilities.null_block is not None:
            held.pop(self.ledger.capabilities.null_block, None)
        return held

    def _wrong_classes(self, snapshot: Snapshot) -> Iterator[Problem]:
        """ACC-1: exactly one of free, held, cached, reserved. ACC-4: what is held is not also free or cached."""
        total = self.ledger.config.num_blocks
        classes = {
            "free": Counter(snapshot.free),
            "held": Counter(set(self._held(snapshot))),
            "cached": Counter(snapshot.cached),
            "reserved": Counter(snapshot.reserved),
        }
        for block in range(total):
            where = [name for name, blocks in classes.items() for _ in range(blocks[block])]
            if len(where) != 1:
                owners = [rid for rid, tables in snapshot.held.items() if any(block in table for table in tables)]
                yield (
                    "ACC-4" if "held" in where and len(where) > 1 else "ACC-1",
                    f"block {block} is {' and '.join(where) if where else 'in no class'}"
                    + (f" (held by {', '.join(owners)})" if owners else ""),
                    "exactly one of free, held, cached, reserved",
                    ", ".join(where) or "none",
                )
                return
        strangers = sorted({block for blocks in classes.values() for block in blocks if not 0 <= block < total})
        if strangers:
            yield (
                "ACC-1",
                f"the engine's books name blocks {strangers} outside the pool",
                f"0 to {total - 1}",
                str(strangers),
            )

    @staticmethod
    def _wrong_figure(snapshot: Snapshot, usage: Usage) -> Iterator[Problem]:
        """ACC-10: the cheap figure says what the books say."""
        figure = usage.free_blocks
        if figure is not None and figure != len(snapshot.free) + len(snapshot.cached):
            yield (
                "ACC-10",
                "the engine's figure of free blocks is not what its own books hold",
                f"{len(snapshot.free)} free + {len(snapshot.cached)} cached",
                str(figure),
            )

    def _wrong_counts(self, snapshot: Snapshot) -> Iterator[Problem]:
        """ACC-4: a reference count is the number of holders."""
        if snapshot.ref_counts is None:
            return
        null = self.ledger.capabilities.null_block
        holders = self._held(snapshot)
        for block in sorted(set(snapshot.ref_counts) | set(holders)):
            count = snapshot.ref_counts.get(block, 0)
            if block != null and count != holders[block]:
                yield (
                    "ACC-4",
                    f"block {block} has reference count {count}",
                    f"{holders[block]}, the number of tables that name it",
                    str(count),
                )
                return

    def _dead_holders(self, snapshot: Snapshot) -> Iterator[Problem]:
        """ACC-7: finished, aborted and recompute-preempted requests hold nothing; ACC-8: waiting ones neither."""
        keeps = self.ledger.capabilities.keeps_blocks
        for rid, tables in snapshot.held.items():
            if not any(tables):
                continue
            request = self.ledger.requests.get(rid)
            state = None if request is None else request.state
            if state is RequestState.WAITING and "waiting" not in keeps:
                requirement, who = "ACC-8", f"{rid}, which waits and was never admitted,"
            elif state is RequestState.PREEMPTED and "preempted" not in keeps:
                requirement, who = "ACC-7", f"{rid}, which was preempted by recompute,"
            elif (request is None or not request.live) and "finished" not in keeps:
                requirement, who = (
                    "ACC-7",
                    f"{rid}, which {'is unknown' if state is None else f'was {state.value}'},",
                )
            else:
                continue
            yield requirement, f"{who} holds blocks", "no block", f"tables {tables}"
            return

    def _too_much_held(self, snapshot: Snapshot) -> Iterator[Problem]:
        """ACC-5 for what no plan has shown: a running request holds no more than its tokens need."""
        ledger = self.ledger
        if ledger.config.kv_cache_groups:
            return
        for rid, tables in snapshot.held.items():
            request = ledger.running.get(rid)
            if request is None:
                continue
            longest = max(len(record.tokens) for record in request.sequences)
            most = ledger.blocks_for(longest + self._ahead) + ledger.capabilities.preallocated_blocks
            for table in tables:
                if len(table) > most:
                    yield (
                        "ACC-5",
                        f"{rid} with {longest} tokens holds a table of {len(table)} blocks",
                        f"at most {most} blocks of {ledger.block_size} tokens",
                        f"table {table}",
                    )
                    return

    def _not_idle(self, snapshot: Snapshot) -> Iterator[Problem]:
        """ACC-6: with no request live every usable block is free or cached-evictable."""
        if "finished" in self.ledger.capabilities.keeps_blocks:
            return
        free, cached = len(set(snapshot.free)), len(set(snapshot.cached))
        if free + cached != self.ledger.usable_blocks:
            yield (
                "ACC-6",
                "no request is live and the pool is not empty",
                f"{self.ledger.usable_blocks} blocks free or cached",
                f"{free} free, {cached} cached",
            )
        elif cached and self._is_reset:
            yield (
                "ACC-6",
                f"the prefix cache was reset with no request live and {cached} blocks are still cached",
                f"{self.ledger.usable_blocks} blocks free",
                f"{free} free, cached blocks {', '.join(map(str, sorted(set(snapshot.cached))))}",
            )
        hosts = self.ledger.config.num_swap_blocks
        if snapshot.swap_free is not None and len(set(snapshot.swap_free)) != hosts:
            yield (
                "ACC-6",
                "no request is live and the host pool is not empty",
                f"{hosts} host blocks free",
                f"{len(set(snapshot.swap_free))} free",
            )
