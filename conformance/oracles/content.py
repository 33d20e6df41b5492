"""KV-*, ACC-3 and ID-1: every plan is executed on the shadow KV, and every read is checked."""

from __future__ import annotations

from collections.abc import Iterator

from conformance.ledger import Ledger
from conformance.oracles.base import Oracle, Report
from conformance.oracles.sharing import given_up, is_wrapped, merged_away, rewritten_alike
from conformance.protocol import BlockMove, KVLoad, SequenceKey
from conformance.records import RequestState, Row, StepFacts
from conformance.shadow_kv import EMPTY, Mismatch, ShadowKV


class ContentOracle(Oracle):
    """KV-1 to KV-6, ACC-3, ID-1. O(tokens of the step + blocks of the tables that are read)."""

    requirements = ("KV-1", "KV-2", "KV-3", "KV-4", "KV-5", "KV-6", "ACC-3", "ID-1")

    def __init__(self, ledger: Ledger, report: Report) -> None:
        super().__init__(ledger, report)
        groups = ledger.config.kv_cache_groups
        self._sizes = [group.block_size for group in groups] or [ledger.block_size]
        self._windows = [group.sliding_window for group in groups] or [ledger.config.sliding_window]
        self._state_groups = [group for group, state in enumerate(ledger.group_states) if state]
        self._kv_groups = [group for group, state in enumerate(ledger.group_states) if not state]
        self._shadows = [ShadowKV(1 if group in self._state_groups else size) for group, size in enumerate(self._sizes)]
        self._others = [[one for one in self._shadows if one is not shadow] for shadow in self._shadows]
        self._pipelined = ledger.config.pipeline_depth > 1 and not ledger.capabilities.steps_in_order
        self._in_flight: dict[int, dict[int, SequenceKey]] = {}
        self._rows: list[Row] = []

    # -- the step ----------------------------------------------------------------------------------------

    def on_step(self, facts: StepFacts) -> None:
        self._rows = facts.rows
        if facts.plan.moves or facts.plan.loads:
            self._bring(facts)
        sound = [row for row in facts.rows if not row.spoilt]
        for row in sound:
            self._check_span(row)
        for record, plan in facts.aborted:
            for group in self._kv_groups:
                end = plan.first + plan.num_tokens
                self._shadows[group].write(plan.block_tables[group], plan.first, record.nodes[plan.first : end])
        if self._state_groups:
            self._run_states(facts)
        written: dict[tuple[int, int, int], tuple[Row, int]] = {}
        for row in facts.rows:
            for group in self._kv_groups:
                self._write(row, group, row.tables[group], written)
        if facts.plan.moves:
            self._check_moved(facts)
        for row in sound:
            for group in self._kv_groups:
                self._read(row, group, row.tables[group])
        for load in facts.plan.loaded:
            self._load(load)
        if self._pipelined:
            self._in_flight[facts.plan.step] = {
                block: row.record.key for row in facts.rows for block in self._blocks_in_reach(row)
            }

    def _bring(self, facts: StepFacts) -> None:
        """Block moves, and loads that are there before the step runs."""
        for move in facts.plan.moves:
            self._move(move, facts)
        for load in facts.plan.loads:
            if not load.late:
                self._load(load)

    def on_commit(self, step: int, finished: object, ended: object) -> None:
        self._in_flight.pop(step, None)

    def _move(self, move: BlockMove, facts: StepFacts) -> None:
        """Do one move; ACC-2 when it names a block out of range."""
        high = self.ledger.config.num_blocks
        hosts = self.ledger.config.num_swap_blocks
        ends = {
            "copy": ((move.src, high), (move.dst, high)),
            "swap_out": ((move.src, high), (move.dst, hosts)),
            "swap_in": ((move.src, hosts), (move.dst, high)),
            "zero": ((move.dst, high),),
        }[move.kind]
        for block, bound in ends:
            if not 0 <= block < bound:
                self.report(
                    "ACC-2",
                    f"{move.kind} {move.src} -> {move.dst} in step {facts.plan.step} names block {block}",
                    expected=f"block ids 0 to {bound - 1}",
                    got=str(block),
                )
                return
        for shadow in self._shadows:
            match move.kind:
                case "copy":
                    shadow.copy(move.src, move.dst)
                case "swap_out":
                    shadow.swap_out(move.src, move.dst)
                case "swap_in":
                    shadow.swap_in(move.src, move.dst)
                case "zero":
                    shadow.zero(move.dst)

    def _load(self, load: KVLoad) -> None:
        """Write what a load brings, whoever holds the blocks by now; blocks that nothing came for are left empty."""
        null = self.ledger.capabilities.null_block
        nodes = self.ledger.requests[load.request_id].sequences[0].nodes
        end = load.first + load.num_tokens
        for group, table in enumerate(load.block_tables):
            shadow, size = self._shadows[group], self._sizes[group]
            for index in range(load.first // size, min(-(-end // size), len(table))):
                block = table[index]
                if block == null:
                    continue
                for other in self._others[group]:
                    other.zero(block)
                low, high = max(load.first, index * size), min(end, (index + 1) * size)
                if load.failed_from is not None and low >= load.failed_from:
                    shadow.zero(block)
                elif group in self._state_groups:
                    shadow.write([block], 0, [nodes[high - 1]])
                else:
                    shadow.write(table, low, nodes[low:high])

    def _check_moved(self, facts: StepFacts) -> None:
        """KV-4: what a move brought (or wiped) is what the step's sequences need of their earlier positions.

        A source with no content is no fault in itself: an engine may move blocks it has only set aside. Nor is a
        copy over a block in use, if the writes of the same pass put back what was there.
        """
        moved = {move.dst: move for move in facts.plan.moves if move.kind != "swap_out"}
        for row in facts.rows:
            for group in self._kv_groups:  # of a state, what is read is checked
                table, size = row.tables[group], self._sizes[group]
                end = min(row.plan.first, len(row.record.nodes))
                start = self._read_from(row, group, table)
                for index, block in enumerate(table[: -(-end // size)]):
                    if block in moved:
                        low, high = max(start, index * size), min(end, (index + 1) * size)
                        self._check_brought(facts.plan.step, row, group, moved[block], low, high)

    def _check_brought(self, step: int, row: Row, group: int, move: BlockMove, low: int, high: int) -> None:
        nodes, size = row.record.nodes, self._sizes[group]
        for position in range(low, high):
            found = self._shadows[group].holds(move.dst, position % size)
            if found != nodes[position]:
                wipes = move.kind == "zero"
                what = f"zero {move.dst} wipes" if wipes else f"{move.kind} {move.src} -> {move.dst} does not bring"
                self.report(
                    "KV-4",
                    f"step {step}: {what} what {row.record.name} needs at position {position}",
                    expected=self.ledger.tree.describe(nodes[position]),
                    got=self._described(found),
                )
                return

    def _check_span(self, row: Row) -> None:
        """KV-3: no position skipped or computed twice. KV-6: a resumed request runs all its tokens."""
        record, plan = row.record, row.plan
        expected = record.computed
        if plan.first != expected:
            skipped = plan.first > expected
            # What a later chunk skips may have come into the cache meanwhile, and who is preempted may keep its blocks;
            # that it is there is what is read below.
            kept = row.resumed and "preempted" in self.ledger.capabilities.keeps_blocks
            if not record.rewound and not (skipped and (kept or self.ledger.config.enable_prefix_caching)):
                self.report(
                    "KV-3",
                    f"{record.name} runs from position {plan.first}: "
                    + (f"positions {expected} to {plan.first - 1} are skipped" if skipped
                       else f"positions {plan.first} to {expected - 1} are computed twice"),
                    expected=f"first position {expected}",
                    got=str(plan.first),
                )  # fmt: skip
        known = row.end - len(plan.draft_tokens)
        length = len(record.tokens)
        if plan.token_ids is not None and plan.token_ids[: known - plan.first] != record.tokens[plan.first : known]:
            self.report(
                "KV-6" if record.request.preemptions else "PRG-5",
                f"{record.name} is run with input tokens that are not its own",
                expected=f"tokens {record.tokens[plan.first : known]} at positions {plan.first} to {known - 1}",
                got=f"tokens {plan.token_ids[: known - plan.first]}",
            )
        if known > length or plan.samples != (known == length):
            requirement = "KV-6" if record.request.preemptions else "PRG-5"
            self.report(
                requirement,
                f"{record.name} has {length} tokens (prompt and outputs) and is run up to {known}, "
                + ("expecting a token" if plan.samples else "expecting no token"),
                expected=f"a token is sampled after position {length - 1} and only there",
                got=f"positions {plan.first} to {known - 1}, samples = {plan.samples}",
            )

    # -- writes and reads --------------------------------------------------------------------------------

    def _nodes(self, row: Row) -> list[int]:
        """The node of every position up to the end of the row, draft tokens included."""
        nodes = row.record.nodes
        if row.spoilt:
            return [*nodes[: row.plan.first], *[EMPTY] * row.plan.num_tokens]
        if not row.plan.draft_tokens:
            return nodes
        tree = self.ledger.tree
        nodes = nodes[: row.end - len(row.plan.draft_tokens)]
        node = nodes[-1] if nodes else tree.root(row.record.request.spec)  # a row of drafts alone is said to be wrong
        for token in row.plan.draft_tokens:
            node = tree.extend(node, token)
            nodes.append(node)
        return nodes

    def _blocks_in_reach(self, row: Row) -> Iterator[int]:
        """The blocks that the row writes, or reads from within its window."""
        for size, window, table in zip(self._sizes, self._windows, row.tables, strict=True):
            start = 0 if window is None else max(0, row.plan.first - window + 1)
            yield from table[start // size : -(-row.end // size)]

    def _run_states(self, facts: StepFacts) -> None:
        """KV-1, ACC-3 for recurrent state: all rows read theirs before any of the step is left."""
        places = [(row, group) for row in facts.rows for group in self._state_groups]
        for row, group in places:
            first, size, table = row.plan.first, self._sizes[group], row.tables[group]
            if first and (first - 1) // size < len(table):
                block, node = table[(first - 1) // size], row.record.nodes[first - 1]
                found = self._shadows[group].holds(block, 0)
                if found != node:
                    self._report_mismatch(row, Mismatch(first - 1, block, node, found))
        for row, group in places:
            size, table = self._sizes[group], row.tables[group]
            index = (row.end - 1) // size
            if index >= len(table):
                continue
            block, node = table[index], self._nodes(row)[row.end - 1]
            if (
                self.ledger.holders.get(block, 0) > 1
                and self._shadows[group].holds(block, 0) != node
                and not (given_up(self.ledger, facts.rows, row, block) and not self._is_in_flight(row, block))
            ):
                self.report(
                    "ACC-3",
                    f"{row.record.name} leaves its state after position {row.end - 1} in block {block}, "
                    f"which {self.ledger.holders[block]} sequences hold",
                    expected="a block of its own (copy-on-write comes first)",
                    got=f"table {table}",
                )
            for other in self._others[group]:
                other.zero(block)
            self._shadows[group].write([block], 0, [node])

    def _write(
        self,
        row: Row,
        group: int,
        table: list[int],
        written: dict[tuple[int, int, int], tuple[Row, int]],
    ) -> None:
        """ACC-3: each slot by one sequence, and no block that somebody else reads. KV-5: none still in use."""
        shadow, size = self._shadows[group], self._sizes[group]
        nodes = self._nodes(row)
        first = row.plan.first
        end = min(row.end, len(nodes), len(table) * size)
        window = self._windows[group]
        if window is not None and self._wraps(table):
            first = max(first, end - window)  # what leaves the window within the pass is not kept
        if end <= first:
            return
        holders = self.ledger.holders
        for index in range(first // size, (end - 1) // size + 1):
            block = table[index]
            low, high = max(first, index * size), min(end, (index + 1) * size)
            if holders.get(block, 0) > 1 and not is_wrapped(self.ledger, table, block):
                self._check_shared(row, group, block, low, nodes[low:high])
                self._check_writers(row, group, block, range(low, high), written)
            if self._pipelined:
                self._check_in_flight(row, shadow, block, low, nodes[low:high], size)
            for other in self._others[group]:
                if other.is_written(block):
                    other.zero(block)  # the groups share one pool: what one writes the others had
        shadow.write(table, first, nodes[first:end])

    def _check_writers(
        self,
        row: Row,
        group: int,
        block: int,
        positions: range,
        written: dict[tuple[int, int, int], tuple[Row, int]],
    ) -> None:
        """A slot is written by one sequence in a step; only a block that several hold can have two writers."""
        nodes, size = self._nodes(row), self._sizes[group]
        for position in positions:
            slot = (group, block, position % size)
            other, node = written.setdefault(slot, (row, nodes[position]))
            if other is not row and node != nodes[position]:
                self.report(
                    "ACC-3",
                    f"slot {position % size} of block {block} is written by {other.record.name} "
                    f"and {row.record.name} in one step",
                    expected="one writer per slot",
                    got=f"tables {other.tables[group]} and {row.tables[group]}",
                )

    def _check_shared(self, row: Row, group: int, block: int, first: int, nodes: list[int]) -> None:
        shadow, size = self._shadows[group], self._sizes[group]
        for position, node in enumerate(nodes, first):
            # A write that leaves the slot as it was (a fully hit prompt computes its last token again) harms nobody.
            if (
                shadow.holds(block, position % size) != node
                and not rewritten_alike(self.ledger, group, block, position, node)
                and not merged_away(self.ledger, self._rows, row, block)
                and not given_up(self.ledger, self._rows, row, block)
            ):
                self.report(
                    "ACC-3",
                    f"{row.record.name} writes position {position} into block {block}, "
                    f"which {self.ledger.holders[block]} sequences hold",
                    expected="a block of its own (copy-on-write comes first)",
                    got=f"table {row.tables[0]}",
                )
                return

    def _is_in_flight(self, row: Row, block: int) -> bool:
        """Whether a step that is not committed uses the block for somebody else."""
        return any(users.get(block, row.record.key) != row.record.key for users in self._in_flight.values())

    def _check_in_flight(self, row: Row, shadow: ShadowKV, block: int, first: int, nodes: list[int], size: int) -> None:
        for step, users in self._in_flight.items():
            user = users.get(block)
            if user is None or user == row.record.key:
                continue
            if any(shadow.holds(block, position % size) != node for position, node in enumerate(nodes, first)):
                if self.ledger.holders.get(block, 0) > 1 and not given_up(self.ledger, self._rows, row, block):
                    continue  # shared, not freed: ACC-3 judges that
                self.report(
                    "KV-5",
                    f"{row.record.name} writes block {block} while step {step}, in flight, still uses it for {user[0]}",
                    expected=f"block {block} is not handed out before step {step} is committed",
                    got=f"table {row.tables[0]}",
                )
                return

    def _read(self, row: Row, group: int, table: list[int]) -> None:
        """KV-1: every position that attention reads holds the sequence's own prefix."""
        record = row.record
        nodes = self._nodes(row)
        size = self._sizes[group]
        end = min(row.end, len(nodes), len(table) * size)
        start = self._read_from(row, group, table)
        window = self._windows[group]
        if window is not None and end - row.plan.first >= window and self._wraps(table):
            start = end - window  # what leaves the window within the pass is not kept
        mismatch = self._shadows[group].verify(record.readers[group], table, nodes, start, end)
        if mismatch is not None:
            self._report_mismatch(row, mismatch)

    def _read_from(self, row: Row, group: int, table: list[int]) -> int:
        """The first position that the row's attention reads, and that the row does not come round over in a ring."""
        window = self._windows[group]
        if window is None:
            return 0
        start = max(0, row.plan.first - window + 1)
        if not self._wraps(table):
            return start
        return max(start, row.end - len(self._own(table)) * self._sizes[group])

    def _own(self, table: list[int]) -> set[int]:
        return set(table) - {self.ledger.capabilities.null_block}

    def _wraps(self, table: list[int]) -> bool:
        """Whether the table names a block twice: it wraps round the window (vLLM V0's block manager v1)."""
        null = self.ledger.capabilities.null_block
        return len(self._own(table)) < len(table) - (0 if null is None else table.count(null))

    def _report_mismatch(self, row: Row, mismatch: Mismatch) -> None:
        tree = self.ledger.tree
        record = row.record
        first = row.plan.first
        skipped = 0 < record.computed <= mismatch.position < first
        hit = mismatch.position < first and record.computed == 0
        requirement = "KV-3" if skipped else "KV-2" if hit else "KV-1"
        found = self._described(mismatch.found)
        if mismatch.found != EMPTY and not tree.same_identity(mismatch.found, mismatch.expected):
            self.report(
                "ID-1",
                f"{record.name} reads KV of another identity in block {mismatch.block}",
                expected="KV under its own cache salt, adapter and multimodal content",
                got=found,
            )
        self.report(
            requirement,
            (f"{record.name} skips positions {record.computed} to {first - 1}: " if skipped else "")
            + f"position {mismatch.position} of {record.name} reads block {mismatch.block}, which holds {found}"
            + (" (a prefix-cache hit)" if hit else ""),
            expected=tree.describe(mismatch.expected),
            got=found,
        )

    def _described(self, node: int) -> str:
        """What a slot holds, in words, and whose it is."""
        words = self.ledger.tree.describe(node)
        if node == EMPTY:
            return words
        owner = self._owner_of(node)
        return f"{owner}'s {words}" if owner else f"another prefix's {words}"

    def _owner_of(self, node: int) -> str:
        for request in self.ledger.requests.values():
            for record in request.sequences:
                if node in record.nodes:
                    return record.name
        return ""

    def on_reset(self, done: bool) -> None:  # noqa: FBT001 - the session's own signature
        """Nothing to do: what a reset leaves behind is judged by the hits that follow."""

    def before_step(self, facts: StepFacts) -> None:
        """Swapped and preempted requests keep their records; their tables are dropped by the ledger."""
        running = RequestState.RUNNING
        for row in facts.rows:
            if row.record.request.state is not running:
                for reader in row.record.readers:
                    reader.forget()
