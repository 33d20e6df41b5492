"""Do the hunts of all pairs, each written down as soon as it is done, and go on where a run was stopped.

The bad release is hunted until the fault is seen, once with each seed. The good release is hunted for so many steps
in all, in parts of `PART_STEPS`, each with a seed of its own. Hunts on one release share a process, because importing
an engine takes longer than finding most faults.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from conformance.version import __version__
from fuzz.bugbench.releases.environments import Place
from fuzz.bugbench.releases.hunt import Order, Outcome
from fuzz.bugbench.releases.records import SIDES, ReleasePair

SCHEMA: Final = 1
BAD_STEPS: Final = 200_000
"""A hunt on a bad release is cut off there, and counts as a miss."""
GOOD_STEPS: Final = 1_000_000
PART_STEPS: Final = 50_000
SEEDS: Final = 3
BATCH: Final = 8
"""Hunts that one process does at most, so that what it holds in memory stays small."""


_BEGINS: Final = b'{"schema":'


class ResultsError(ValueError):
    """A file of results cannot be gone on with: where, what was found, what to do."""


class HuntFailed(RuntimeError):  # noqa: N818 - named for what happened
    """The process of a release ended before its hunts were done: which, how, the end of what it said."""


class Key(NamedTuple):
    """What makes a hunt another one. ``digest``: of the release and of all that the pair says of the hunt."""

    pair: str
    side: str
    digest: str
    seed: int
    steps_max: int


class Result(msgspec.Struct, kw_only=True):
    """A hunt that is done. ``kvconform``: the version that did it."""

    schema: int = SCHEMA
    kvconform: str = __version__
    pair: str
    side: str
    digest: str
    seed: int
    steps_max: int
    outcome: Outcome

    @property
    def key(self) -> Key:
        return Key(self.pair, self.side, self.digest, self.seed, self.steps_max)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How much is done. ``steps``: calls of `schedule`."""

    seeds: int = SEEDS
    bad_steps: int = BAD_STEPS
    good_steps: int = GOOD_STEPS
    part_steps: int = PART_STEPS

    def hunts(self, pair: ReleasePair, side: str) -> Iterator[Key]:
        """The hunts on one side of a pair."""
        seeds, steps = self.seeds, self.bad_steps
        if side == "good":
            seeds, steps = -(-self.good_steps // self.part_steps), self.part_steps
        for seed in range(1, seeds + 1):
            yield Key(pair.id, side, pair.digest(side), seed, steps)


Process = Callable[[Place, Sequence[Order]], Iterable[Outcome]]
"""Carries out orders where a release runs, and gives the outcomes in their order, as they come. Raises `HuntFailed`."""


class Results:
    """The hunts that are done, in a file of JSON lines. Raises `ResultsError` for one that is none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done: dict[Key, Result] = {}
        if path.exists():
            raw = path.read_bytes()
            whole = raw[: raw.rfind(b"\n") + 1]
            if raw and not raw.startswith(_BEGINS[: len(raw)]):
                raise ResultsError(f"{path}: no file of results, which begins with {_BEGINS.decode()}; name another")
            for number, line in enumerate(whole.splitlines(), 1):
                self._take(number, line)
            os.truncate(path, len(whole))  # a line that was cut off in the middle
        else:
            path.parent.mkdir(parents=True, exist_ok=True)

    def _take(self, number: int, line: bytes) -> None:
        try:
            result = msgspec.json.decode(line, type=Result)
        except msgspec.DecodeError as error:
            raise ResultsError(f"{self.path}:{number}: not a line of results: {error}; name another file") from None
        if result.schema != SCHEMA:
            raise ResultsError(f"{self.path}:{number}: schema {result.schema}; this kvconform reads schema {SCHEMA}")
        self.done[result.key] = result

    def add(self, result: Result) -> None:
        """Keep one, in memory and in the file."""
        self.done[result.key] = result
        with self.path.open("ab") as file:
            file.write(msgspec.json.encode(result) + b"\n")

    def of(self, pair: ReleasePair, side: str) -> list[Result]:
        """The hunts on that side as the pair is now, one a seed: the longest, of which others are the beginning."""
        longest: dict[int, Result] = {}
        for one in sorted(self.done.values(), key=lambda one: one.steps_max):
            if (one.pair, one.side, one.digest) == (pair.id, side, pair.digest(side)):
                longest[one.seed] = one
        return [longest[seed] for seed in sorted(longest)]


class Runner:
    """Does what ``results`` lacks of ``plan``. ``place`` says where a release runs, ``process`` runs it there."""

    def __init__(
        self,
        pairs: Sequence[ReleasePair],
        plan: Plan,
        results: Results,
        *,
        place: Callable[[str, str], Place],
        process: Process,
        on_result: Callable[[Result], None] | None = None,
    ) -> None:
        self._pairs = {pair.id: pair for pair in pairs}
        self._plan = plan
        self._results = results
        self._place = place
        self._process = process
        self._on_result = on_result

    def run(self, sides: Sequence[str] = SIDES) -> None:
        """Every hunt on the bad releases, then those on the good ones. Raises `HuntFailed` and `CannotBuild`.

        All seeds of a pair are in one process, and so are pairs of one release; an interrupt loses one hunt. A process
        that fails keeps nobody else from being hunted: it is raised at the end.
        """
        failures = []
        for side in sides:
            todo = [
                key
                for pair in self._pairs.values()
                for key in self._plan.hunts(pair, side)
                if key not in self._results.done
            ]
            todo.sort(key=self._where)  # stable: seeds of a pair stay in order
            for where, keys in itertools.groupby(todo, self._where):
                for batch in _batches(list(keys)):
                    try:
                        self._do(where, batch)
                    except HuntFailed as failure:
                        failures.append(str(failure))
        if failures:
            raise HuntFailed("\n".join(failures))

    def _where(self, key: Key) -> tuple[str, str]:
        pair = self._pairs[key.pair]
        return pair.distribution, pair.release(key.side)

    def _do(self, where: tuple[str, str], keys: list[Key]) -> None:
        orders = [self._pairs[key.pair].order(key.side, seed=key.seed, steps_max=key.steps_max) for key in keys]
        outcomes = self._process(self._place(*where), orders)
        for key, outcome in zip(keys, outcomes, strict=True):
            result = Result(**key._asdict(), outcome=outcome)
            self._results.add(result)
            if self._on_result is not None:
                self._on_result(result)


def _batches(keys: list[Key]) -> Iterator[list[Key]]:
    for first in range(0, len(keys), BATCH):
        yield keys[first : first + BATCH]


def in_process(place: Place, orders: Sequence[Order]) -> Iterator[Outcome]:
    """A `Process`: another interpreter, which appends its outcomes to a file that is followed."""
    with tempfile.TemporaryDirectory(prefix="kvconform-releases-") as folder:
        outcomes, log = Path(folder) / "outcomes.jsonl", Path(folder) / "log.txt"
        with log.open("wb") as output:
            child = subprocess.Popen(  # noqa: S603 - our own module
                [str(place.python), "-W", "ignore", "-m", "fuzz.bugbench.releases.hunt", str(outcomes)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=place.environment(),
                cwd=folder,
            )
            try:
                assert child.stdin is not None, "a pipe was asked for"
                child.stdin.write(msgspec.json.encode(list(orders)))
                child.stdin.close()
                given = 0
                while True:
                    over = child.poll() is not None
                    lines = outcomes.read_bytes().split(b"\n")[:-1] if outcomes.exists() else []
                    for line in lines[given:]:
                        yield msgspec.json.decode(line, type=Outcome)
                    given = len(lines)
                    if over:
                        break
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        child.wait(timeout=1.0)
            finally:
                child.terminate()
                child.wait()
        if given < len(orders):
            said = log.read_text(encoding="utf-8", errors="replace").strip()[-600:]
            raise HuntFailed(f"{place.path[0].name}: ended with exit code {child.returncode}: {said}")
