"""What the hunts came to, pair by pair: the figures that are checked in as ``measured.json``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from fuzz.bugbench.releases.records import ReleasePair
from fuzz.bugbench.releases.runner import Result, Results

MEASURED: Final = Path(__file__).with_name("measured.json")


class BadHunt(msgspec.Struct, frozen=True, kw_only=True):
    """A hunt on the bad release. ``steps``: until the fault was seen, or until the hunt was cut off."""

    seed: int
    steps: int
    seen_as: str = ""
    """The requirement; "" when it was not seen."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one pair. ``digests``: of the hunts as they were ordered, bad and good."""

    pair: str
    digests: tuple[str, str]
    kvconform: str
    bad: tuple[BadHunt, ...]
    good_steps: int
    good_sights: int
    others: dict[str, int] = {}
    """Violations of the good release that are not the fault, by requirement."""

    @property
    def found(self) -> bool:
        """Seen in the bad release with every seed."""
        return bool(self.bad) and all(hunt.seen_as for hunt in self.bad)

    @property
    def holds(self) -> bool:
        """Seen in the bad release with every seed, and not in the good one."""
        return self.found and self.good_steps > 0 and not self.good_sights


def measured_of(pair: ReleasePair, results: Results) -> Measured:
    """What ``results`` holds of the pair as it is now."""
    bad, good = results.of(pair, "bad"), results.of(pair, "good")
    others: dict[str, int] = {}
    for result in good:
        for kind, count in result.outcome.others.items():
            requirement = kind.split(" ", 1)[0]
            others[requirement] = others.get(requirement, 0) + count
    return Measured(
        pair=pair.id,
        digests=(pair.digest("bad"), pair.digest("good")),
        kvconform=" ".join(sorted({result.kvconform for result in bad + good})),
        bad=tuple(_bad(result) for result in bad),
        good_steps=sum(result.outcome.steps for result in good),
        good_sights=sum(result.outcome.sights for result in good),
        others=others,
    )


def _bad(result: Result) -> BadHunt:
    first = result.outcome.first
    return BadHunt(seed=result.seed, steps=result.outcome.steps, seen_as="" if first is None else first.requirement)


def load(path: Path = MEASURED) -> dict[str, Measured]:
    """The figures that are checked in, by pair."""
    return {one.pair: one for one in msgspec.json.decode(path.read_bytes(), type=list[Measured])}


def write(figures: Sequence[Measured], path: Path = MEASURED) -> None:
    """Check them in: one pair a line."""
    rows = ",\n".join(msgspec.json.encode(one).decode() for one in figures)
    path.write_text(f"[\n{rows}\n]\n", encoding="utf-8")
