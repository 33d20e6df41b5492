"""What a bench does: which faults, which fuzzers, how many seeds, how many steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from fuzz.bugbench.results import Header, code_digest

BUDGETS: Final[dict[str, int]] = {"swarm": 100_000, "machine": 5_000, "uniform": 20_000}
"""Steps after which a hunt is cut off; a step of the Hypothesis machine costs several of the others."""
SEEDS: Final = 20
SHRINK_SEEDS: Final = 5


class Plan(msgspec.Struct, kw_only=True, frozen=True):
    """What a bench does.

    ``seeds``: that many, from ``first_seed`` on. ``shrink_seeds``: of seeds up to this the swarm's trace is shrunk.
    """

    faults: tuple[str, ...]
    fuzzers: tuple[str, ...] = tuple(BUDGETS)
    seeds: int = SEEDS
    first_seed: int = 1
    shrink_seeds: int = SHRINK_SEEDS
    budgets: dict[str, int] = msgspec.field(default_factory=lambda: dict(BUDGETS))
    assertions: bool = False

    def cells(self) -> Iterator[tuple[str, str, int]]:
        """(fault, fuzzer, seed) of every cell, those of one seed before those of the next."""
        for seed in range(self.first_seed, self.first_seed + self.seeds):
            for fault in self.faults:
                for fuzzer in self.fuzzers:
                    yield fault, fuzzer, seed

    def header(self) -> Header:
        """What the results of this bench begin with."""
        return Header(code=code_digest(), budgets=dict(self.budgets), assertions=self.assertions)
