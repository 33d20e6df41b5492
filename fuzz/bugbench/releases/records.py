"""The pairs of releases: what is known of each fault, where to hunt for it, and how to tell it from others."""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path
from typing import Any

import msgspec
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from conformance.engines import BUILT_IN
from conformance.protocol import ConfigRefused, Feature
from conformance.requirements import load as load_requirements
from conformance.settings import parse_settings
from fuzz.bugbench.releases.hunt import Order
from fuzz.corpus import CORPUS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PAIRS = Path(__file__).with_name("pairs.toml")
SIDES = ("bad", "good")


class PairsError(ValueError):
    """``pairs.toml`` is wrong: the entry, its field, what was expected and found."""


class ReleasePair(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One fault, a release that has it and one that does not.

    ``breaks``: requirements that it breaks, the most telling one first; with ``message``, a regular expression to be
    found in what is said of the violation, they are how the fault is recognised. ``settings`` and ``without`` (features
    that no configuration uses) narrow the hunt. ``trace``: its shortest trace in ``fuzz/corpus/ENGINE/``.
    """

    id: str
    engine: str
    bad: str
    good: str
    report: str
    cause: str
    breaks: tuple[str, ...]
    message: str = ""
    settings: tuple[str, ...] = ()
    settings_good: tuple[str, ...] | None = None
    """Of the good side, where the fix is one of configuration, or where it does not take what the bad one takes."""
    without: tuple[Feature, ...] = ()
    trace: str

    @property
    def distribution(self) -> str:
        """What the engine is called on PyPI."""
        return BUILT_IN[self.engine].distributions[0]

    @property
    def path(self) -> Path:
        """The file of the trace."""
        return CORPUS / self.engine / f"{self.trace}.jsonl"

    def release(self, side: str) -> str:
        """The release of the ``bad`` or the ``good`` side."""
        return self.bad if side == "bad" else self.good

    def order(self, side: str, *, seed: int, steps_max: int) -> Order:
        """A hunt on one side: on the bad one until the fault is seen, on the good one to the end."""
        good = side == "good" and self.settings_good is not None
        return Order(
            engine=self.engine,
            settings=(self.settings_good or ()) if good else self.settings,
            without=self.without,
            breaks=self.breaks,
            message=self.message,
            seed=seed,
            steps_max=steps_max,
            until_found=side == "bad",
        )

    def digest(self, side: str) -> str:
        """Eight hex digits that are others when the hunt on that side is another."""
        facts = (self.release(side), self.order(side, seed=0, steps_max=0))
        return hashlib.sha256(msgspec.json.encode(facts)).hexdigest()[:8]


class Lock(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Releases of a distribution (a specifier of versions) that share the dependencies of one file of locks."""

    distribution: str
    releases: str
    file: str


class Book(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``pairs.toml`` as a whole."""

    lock: tuple[Lock, ...]
    pair: tuple[ReleasePair, ...]

    def lock_for(self, distribution: str, release: str) -> Lock:
        """The dependencies that the release runs with. Raises `PairsError` when none is named."""
        for lock in self.lock:
            if lock.distribution == distribution and SpecifierSet(lock.releases).contains(release, prereleases=True):
                return lock
        raise PairsError(f"no [[lock]] covers {distribution} {release}")


def load(path: Path = PAIRS) -> Book:
    """Read and check the pairs. Raises `PairsError` naming every mistake at once."""
    try:
        document: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        book = msgspec.convert(document, Book)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise PairsError(f"{path.name}: {error}") from None
    mistakes = [f"{path.name}: pair {pair.id}: {mistake}" for pair in book.pair for mistake in _mistakes(pair, book)]
    ids = [pair.id for pair in book.pair]
    mistakes += [
        f"{path.name}: pair {name}: the id is used twice" for name in sorted({n for n in ids if ids.count(n) > 1})
    ]
    if mistakes:
        raise PairsError("\n".join(mistakes))
    return book


def _mistakes(pair: ReleasePair, book: Book) -> list[str]:
    found = []
    if pair.engine not in BUILT_IN or not BUILT_IN[pair.engine].distributions:
        return [f"engine {pair.engine!r} is no built-in one that is installed from PyPI"]
    if not re.fullmatch(r"https://\S+", pair.report):
        found.append(f"report must be one https link, got {pair.report!r}")
    if not pair.cause.endswith("."):
        found.append(f"cause must end with a full stop, got {pair.cause[-10:]!r}")
    unknown = sorted(set(pair.breaks) - set(load_requirements()))
    if unknown or not pair.breaks:
        found.append(f"breaks must name requirements of the contract, got {', '.join(unknown) or 'none'}")
    found += _said_wrong(pair)
    try:
        if not (Version(pair.bad) < Version(pair.good) or pair.settings_good is not None):
            found.append(f"good must be later than bad unless settings_good is given, got {pair.bad} and {pair.good}")
        for side in SIDES:
            book.lock_for(pair.distribution, pair.release(side))
    except (InvalidVersion, InvalidSpecifier, PairsError) as error:
        found.append(str(error))
    return found


def _said_wrong(pair: ReleasePair) -> list[str]:
    """What cannot be used of the words for the hunt and of the expression for its finds."""
    found = []
    try:
        re.compile(pair.message)
    except re.error as error:
        found.append(f"message is no regular expression: {error}")
    try:
        for side in SIDES:
            parse_settings(None, pair.order(side, seed=0, steps_max=0).settings)
    except ConfigRefused as refusal:
        found.append(f"settings: {refusal}")
    return found
