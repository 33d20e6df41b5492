"""May the running sequences append? Four ways to count the blocks a step needs; only one of them is exact.

The others are the heuristics of real block managers. They ask for blocks that nobody will take, and at the
brim of the pool they preempt without need (vLLM issue 8007): they are here to be compared with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .block_manager import BlockManager
from .config import AppendCheckName
from .request import Sequence


class AppendCheck(NamedTuple):
    """A way to decide whether the granted ``sequences`` of one request may append."""

    blocks: Callable[[BlockManager, list[Sequence]], int]
    """Blocks counted as needed; never fewer than appending takes."""
    strict: bool = False
    """Demand more free blocks than counted, not just as many."""
    counts_lookahead: bool = False
    """The count includes the lookahead slots, so they are allocated with the tokens."""

    def passes(self, counted: int, free: int) -> bool:
        """Whether ``free`` blocks are enough for ``counted``."""
        return counted < free or (counted == free and not self.strict)


def exact_blocks(manager: BlockManager, sequences: list[Sequence]) -> int:
    """Real need: blocks for the tokens, minus those owned, plus copies before writing.

    Upholds PRE-1, PRE-2 and PRE-6.
    """
    return manager.real_need(sequences)


def touched_blocks(manager: BlockManager, sequences: list[Sequence]) -> int:
    """Blocks in which the new and lookahead slots lie, the partly filled one that is owned already included.

    This is how vLLM V0's block manager v2 counts; it breaks PRE-1, PRE-2 and PRE-6.
    """
    size = manager.block_size
    counted = 0
    for sequence in sequences:
        touched = 0
        if sequence.table:  # the first blocks of a sequence are counted as its admission counts them
            new = 1 if sequence.remaining == 1 else 0  # the slots of a prompt are there since its admission
            left_in_block = size - (sequence.total - new) % size
            touched = max(0, 1 - (left_in_block - new - manager.lookahead) // size)
        counted += max(touched, manager.real_need([sequence]))
    return counted


def one_block_each(manager: BlockManager, sequences: list[Sequence]) -> int:
    """One block for each running sequence, whatever it holds.

    This is how vLLM V0's block manager v1 counts; it breaks PRE-1, PRE-2 and PRE-6.
    """
    return max(sum(1 for sequence in sequences if sequence.table), manager.real_need(sequences))


APPEND_CHECKS: dict[AppendCheckName, AppendCheck] = {
    "exact": AppendCheck(exact_blocks),
    "touched": AppendCheck(touched_blocks, counts_lookahead=True),
    "per_sequence": AppendCheck(one_block_each),
    "strict": AppendCheck(touched_blocks, strict=True, counts_lookahead=True),
}
