"""Which sizes are compiled, and which of them serves a request. Standard library only.

Rules of transformers-neuronx (its bucket.py and decoder.py).
"""

from __future__ import annotations

SMALLEST = 128


def token_buckets(n_positions: int | list[int]) -> list[int]:
    """Buckets of decode graphs: a list as it is, sorted; an integer: powers of two from 128, and itself."""
    if isinstance(n_positions, list):
        return sorted(n_positions)
    buckets = []
    size = SMALLEST
    while size < n_positions:
        buckets.append(size)
        size *= 2
    return [*buckets, n_positions]


def context_buckets(estimate: int | list[int] | None, tokens: list[int]) -> list[int]:
    """Buckets of prefill graphs: a list sorted; an integer alone; 0 none; None half of each decode bucket."""
    if estimate is None:
        return [size // 2 for size in tokens]
    if isinstance(estimate, list):
        return sorted(estimate)
    return [estimate] if estimate > 0 else []


def batch_sizes(batch_size: int | list[int]) -> list[int]:
    """Batch sizes of decode graphs, ascending."""
    return sorted(batch_size) if isinstance(batch_size, list) else [batch_size]


def covering(buckets: list[int], size: int) -> int:
    """The smallest bucket of at least ``size``, else the largest one. ``buckets`` is sorted and not empty."""
    return next((bucket for bucket in buckets if bucket >= size), buckets[-1])


def holding(buckets: list[int], position: int) -> int:
    """The smallest bucket with this position in it. Raises StopIteration when there is none."""
    return next(bucket for bucket in buckets if bucket >= position + 1)
