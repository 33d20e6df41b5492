"""A block that several hold is written: when that harms none of the others. O(tables of all who live), seldom asked."""

from __future__ import annotations

from collections.abc import Collection

from conformance.ledger import Ledger
from conformance.protocol import BlockId
from conformance.records import Row, SequenceRecord


def is_wrapped(ledger: Ledger, table: list[BlockId], block: BlockId) -> bool:
    """Whether one sequence's table names the block several times (a table that wraps round the window)."""
    return ledger.config.sliding_window is not None and table.count(block) == ledger.holders[block]


def rewritten_alike(ledger: Ledger, group: int, block: BlockId, position: int, node: int) -> bool:
    """Whether every holder of the block has this very prefix at this position, so that all write the same."""
    index = position // ledger.group_sizes[group]
    for request in ledger.running.values():
        for record in request.sequences:
            for place, table in enumerate(record.tables):
                if place == group and index < len(table) and table[index] == block:
                    if position >= len(record.nodes) or record.nodes[position] != node:
                        return False
                elif block in table:
                    return False
    return True


def merged_away(ledger: Ledger, rows: Collection[Row], row: Row, block: BlockId) -> bool:
    """Whether everybody else may have given the block up for one of equal content since they last ran.

    If not, what they read when they run again is not theirs.
    """
    if not ledger.capabilities.merges_equal_blocks:
        return False
    here = {other.record.key for other in rows}
    return not any(
        block in table and (record.key in here or (table.index(block) + 1) * ledger.block_size > record.computed)
        for request in ledger.running.values()
        for record in request.sequences
        if record is not row.record
        for table in record.tables
    )


def given_up(ledger: Ledger, rows: Collection[Row], row: Row, block: BlockId) -> bool:
    """Whether everybody else may have given the block up since a plan last showed it, because it lies behind them.

    Whoever tries to get on and finds no room is in no plan, and yet may have lost what its window has left.
    """
    if sum(block in table for table in row.tables) > 1:
        return False  # it is the sequence's own, in two groups
    here = {other.record.key for other in rows}
    return all(
        record.key not in here and _lies_behind(ledger, record, group, index)
        for request in ledger.live.values()
        for record in request.sequences
        if record is not row.record
        for group, table in enumerate(record.tables)
        for index, one in enumerate(table)
        if one == block
    )


def _lies_behind(ledger: Ledger, record: SequenceRecord, group: int, index: int) -> bool:
    """Whether nothing that the sequence still computes reads its logical block ``index``."""
    size, window = ledger.group_sizes[group], ledger.group_windows[group]
    if ledger.group_states[group]:
        return index < (record.computed - 1) // size
    return window is not None and (index + 1) * size <= record.computed - window + 1
