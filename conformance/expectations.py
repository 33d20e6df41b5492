"""Known failures of engines, as data: strict, versioned, each with its reason and a link.

One file per engine, ``expectations/ENGINE.toml``, with entries::

    [[known]]
    requirement = "PRE-1"
    cases = ["full-batch/*"]           # optional: patterns of scenario/case; without it, every case; "fuzz"
                                       # for what only the fuzzer reaches, "corpus" for traces with options that
                                       # it does not draw
    versions = ">=0.5,<0.9"            # optional: a specifier of versions; without it, every version
    variant = "*(block manager v1)"    # optional: a pattern of what the engine calls itself
    message = "*; got *0 blocks free"  # optional, with "fuzz" or "corpus" alone: a pattern of what is said, "MESSAGE;
                                       # got GOT", so that whatever else breaks the requirement is still seen
    reason = "one sentence"
    link = "https://..."

An entry allows its cases to fail. It is *stale* when at least one of them was run and none fails; a stale entry
makes a check fail, so that a mended engine is noticed. Requirements and patterns that name nothing are errors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from conformance.protocol import Capabilities
from conformance.requirements import load as load_requirements
from conformance.scenarios import case_names

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


FUZZ = "fuzz"
"""Stands in ``cases`` for runs of the fuzzer, which are random and therefore never make an entry stale."""
CORPUS = "corpus"
"""Stands in ``cases`` for traces of the corpus alone: the fuzzer goes on judging the requirement."""


Known: TypeAlias = Callable[[str, str], bool]
"""Whether a violation is a known failure, by its requirement and what is said of it: "MESSAGE; got GOT"."""


class ExpectationsError(ValueError):
    """A file of expectations is wrong: the file, the entry, what its field takes."""


class Expectation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One known failure; the fields are explained at the head of this module."""

    requirement: str
    reason: str
    link: str
    cases: tuple[str, ...] = ()
    versions: str = ""
    variant: str = ""
    message: str = ""

    def is_about(self, requirement: str, said: str) -> bool:
        """Whether ``said``, of the violation of ``requirement``, is what the entry knows of."""
        return requirement == self.requirement and (not self.message or fnmatchcase(said, self.message))

    def covers(self, case: str) -> bool:
        """Whether ``case`` (``scenario/case``) is allowed to fail."""
        return not self.cases or any(fnmatchcase(case, pattern) for pattern in self.cases)

    def applies(self, version: str, engine: str | None = None) -> bool:
        """Whether the entry is about this version, and about what calls itself ``engine`` (None: any variant)."""
        if self.variant and engine is not None and not fnmatchcase(engine, self.variant):
            return False
        if not self.versions:
            return True
        try:
            return SpecifierSet(self.versions).contains(Version(version), prereleases=True)
        except InvalidVersion:
            return False

    def describe(self) -> str:
        """Reason and link in one sentence."""
        return f"{self.reason} ({self.link})"


class Expectations(msgspec.Struct, frozen=True, kw_only=True):
    """The known failures of one engine."""

    source: str
    entries: tuple[Expectation, ...] = ()

    def fuzzed(self, version: str) -> frozenset[str]:
        """Requirements the fuzzer does not judge on this version at all: nothing tells the known failures of them."""
        return frozenset(
            entry.requirement
            for entry in self.entries
            if entry.applies(version) and entry.covers(FUZZ) and not (entry.variant or entry.message)
        )

    def known(self, capabilities: Capabilities) -> Known:
        """What tells the known failures that the fuzzer may come upon on this engine from others."""
        entries = [entry for entry in self.applying(capabilities) if entry.covers(FUZZ)]
        return lambda requirement, said: any(entry.is_about(requirement, said) for entry in entries)

    def applying(self, capabilities: Capabilities) -> list[Expectation]:
        """The entries about this engine, as it declares itself."""
        return [entry for entry in self.entries if entry.applies(capabilities.version, capabilities.engine)]


def for_engine(name: str) -> Expectations:
    """The expectations that come with kvconform for the engine ``name``, if any. Raises `ExpectationsError`.

    ``NAME@PYTHON`` is the engine NAME.
    """
    name = name.partition("@")[0]
    resource = files("conformance").joinpath("expectations").joinpath(f"{name}.toml")
    if not name.replace("-", "").isalnum() or not resource.is_file():
        return Expectations(source=f"{name}.toml")
    return parse(resource.read_text(encoding="utf-8"), source=f"{name}.toml")


def read(path: Path) -> Expectations:
    """The expectations in a file of the user's own. Raises `ExpectationsError`."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ExpectationsError(f"{path}: cannot be read: {error}; expected a TOML file of [[known]] tables") from None
    return parse(text, source=str(path))


def parse(text: str, *, source: str) -> Expectations:
    """Read expectations from TOML; messages call the file ``source``. Raises `ExpectationsError`."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ExpectationsError(f"{source}: not valid TOML: {error}; expected [[known]] tables") from None
    unknown = sorted(document.keys() - {"known"})
    if unknown:
        raise ExpectationsError(f"{source}: unknown key; expected [[known]] tables, got {unknown[0]!r}")
    rows: Any = document.get("known", [])
    if not isinstance(rows, list):
        raise ExpectationsError(f"{source}: known: expected an array of tables, [[known]], got {type(rows).__name__}")
    entries = []
    for number, row in enumerate(rows, 1):
        try:
            entry = msgspec.convert(row, Expectation)
        except msgspec.ValidationError as error:
            known = ", ".join(Expectation.__struct_fields__)
            raise ExpectationsError(f"{source}: entry {number}: {error}; expected fields {known}") from None
        problems = _problems(entry)
        if problems:
            raise ExpectationsError(f"{source}: entry {number} ({entry.requirement}): {problems[0]}")
        entries.append(entry)
    return Expectations(source=source, entries=tuple(entries))


def _problems(entry: Expectation) -> Sequence[str]:
    problems = []
    if entry.requirement not in load_requirements():
        problems.append("expected a requirement of the contract, which has no such one")
    names = [*case_names(), FUZZ, CORPUS]
    problems += [
        f"cases: expected patterns of scenario/case, got {pattern!r}, which names no case"
        for pattern in entry.cases
        if not any(fnmatchcase(name, pattern) for name in names)
    ]
    if entry.message and not set() < set(entry.cases) <= {FUZZ, CORPUS}:
        problems.append('message: expected with cases of "fuzz" or "corpus" alone; others are told by their names')
    if not entry.reason.strip() or not entry.link.strip():
        problems.append("expected a reason and a link, got an empty one")
    try:
        SpecifierSet(entry.versions)
    except InvalidSpecifier:
        problems.append(f"versions: expected a version specifier such as '>=0.6,<0.7', got {entry.versions!r}")
    return problems
