"""The contract as data: load ``requirements.toml``, check it, and write its page of the documentation.

As a command it keeps the page in step with the data::

    python -m conformance.requirements --write docs/reference/requirements.md
    python -m conformance.requirements --check docs/reference/requirements.md

``--check`` exits with 1 when the page differs from what ``--write`` would put there.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, TypeVar

import msgspec

from conformance.protocol import Feature

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Level: TypeAlias = Literal["MUST", "SHOULD", "MAY"]

LEVELS: Final[tuple[Level, ...]] = ("MUST", "SHOULD", "MAY")
"""The levels of the contract, the most binding one first."""

_ID = re.compile(r"(?P<family>[A-Z]{2,4})-[1-9][0-9]?")
_MODULE = re.compile(r"[a-z_]+(\.[a-z_]+)*")
_Row = TypeVar("_Row", bound=msgspec.Struct)


class RequirementsError(ValueError):
    """``requirements.toml`` is malformed; the message names the file, the entry and what its field takes."""


class Family(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A group of requirements whose ids share ``prefix``."""

    prefix: str
    title: str
    text: str


class Requirement(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One requirement of the contract; the fields are explained at the head of ``requirements.toml``."""

    id: str
    level: Level
    title: str
    text: str
    since: str
    source: str
    rationale: str
    oracle: str
    needs: tuple[Feature, ...] = ()
    needs_any: tuple[Feature, ...] = ()
    note: str = ""

    @property
    def family(self) -> str:
        """The prefix of the id: ``ACC`` for ``ACC-1``."""
        return self.id.partition("-")[0]

    def missing(self, features: Collection[Feature]) -> tuple[str, ...]:
        """What an engine that declares ``features`` lacks for this requirement to apply, as short phrases.

        Empty: it applies. Otherwise the requirement is UNSUPPORTED and the phrases are the reason.
        """
        lacking: list[str] = [feature for feature in self.needs if feature not in features]
        if self.needs_any and not any(feature in features for feature in self.needs_any):
            lacking.append(" or ".join(self.needs_any))
        return tuple(lacking)


class Contract(msgspec.Struct, frozen=True, kw_only=True):
    """All requirements by id, family by family, and the edition of the contract they make up."""

    edition: str
    families: tuple[Family, ...]
    requirements: Mapping[str, Requirement]


def load() -> dict[str, Requirement]:
    """The requirements by id, in the order of the contract. Raises `RequirementsError`."""
    return dict(load_contract().requirements)


@functools.cache
def load_contract() -> Contract:
    """The contract that comes with this package. Raises `RequirementsError`."""
    source = files("conformance").joinpath("requirements.toml")
    return parse(source.read_text(encoding="utf-8"), name="requirements.toml")


def parse(text: str, *, name: str) -> Contract:
    """Read a contract from TOML; messages call the file ``name``. Raises `RequirementsError`."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RequirementsError(f"{name}: not valid TOML: {error}") from None
    unknown = sorted(document.keys() - {"edition", "family", "requirement"})
    if unknown:
        raise RequirementsError(f"{name}: unknown key {unknown[0]!r}; known: edition, family, requirement")
    edition = document.get("edition")
    if not isinstance(edition, str) or not edition.isdigit():
        raise RequirementsError(f'{name}: edition must be a number in quotes such as "1", got {edition!r}')
    families = tuple(_rows(document, "family", Family, name))
    requirements = tuple(_rows(document, "requirement", Requirement, name))
    problems = list(_problems(families, requirements, int(edition)))
    if problems:
        raise RequirementsError("\n".join(f"{name}: {problem}" for problem in problems))
    return Contract(edition=edition, families=families, requirements={row.id: row for row in requirements})


def _rows(document: Mapping[str, Any], table: str, row_type: type[_Row], name: str) -> Iterator[_Row]:
    """Convert the array of tables ``table``; messages call an entry by its first field, or by its ordinal."""
    key = row_type.__struct_fields__[0]
    entries = document.get(table)
    if not isinstance(entries, list) or not entries:
        raise RequirementsError(f"{name}: expected at least one [[{table}]] table")
    for ordinal, entry in enumerate(entries, start=1):
        label = entry[key] if isinstance(entry, dict) and key in entry else f"number {ordinal}"
        try:
            yield msgspec.convert(entry, row_type)
        except msgspec.ValidationError as error:
            known = ", ".join(row_type.__struct_fields__)
            raise RequirementsError(f"{name}: {table} {label}: {error}; known fields: {known}") from None


def _problems(families: Sequence[Family], requirements: Sequence[Requirement], edition: int) -> Iterator[str]:
    """What is wrong with a contract beyond the types of its fields, one sentence each."""
    order = [family.prefix for family in families]
    for prefix in dict.fromkeys(order):
        if order.count(prefix) > 1:
            yield f"family {prefix}: declared {order.count(prefix)} times"
    seen: set[str] = set()
    last = 0
    for row in requirements:
        if row.id in seen:
            yield f"requirement {row.id}: the id is used twice; ids are never reused"
        seen.add(row.id)
        match = _ID.fullmatch(row.id)
        if match is None or match["family"] not in order:
            yield f"requirement {row.id}: an id is a family ({', '.join(order)}), a hyphen and 1 to 99"
            continue
        if order.index(match["family"]) < last:
            yield f"requirement {row.id}: stands after family {order[last]}; keep the order of the families"
        last = order.index(match["family"])
        yield from _field_problems(row, edition)
    for prefix in order:
        if not any(row.family == prefix for row in requirements):
            yield f"family {prefix}: has no requirement"


def _field_problems(row: Requirement, edition: int) -> Iterator[str]:
    for field in ("title", "text", "source", "rationale"):
        if not getattr(row, field).strip() or "\n" in getattr(row, field):
            yield f"requirement {row.id}: {field} must be one non-empty line"
    if not row.text.endswith("."):
        yield f"requirement {row.id}: text must end with a full stop, got {row.text[-20:]!r}"
    if not row.since.isdigit() or not 1 <= int(row.since) <= edition:
        yield f"requirement {row.id}: since must be an edition from 1 to {edition}, got {row.since!r}"
    if _MODULE.fullmatch(row.oracle) is None:
        yield f"requirement {row.id}: oracle must be the name of a module, got {row.oracle!r}"
    for field, features in (("needs", row.needs), ("needs_any", row.needs_any)):
        if list(features) != sorted(set(features)):
            yield f"requirement {row.id}: {field} must be sorted and free of duplicates, got {list(features)}"


def render(contract: Contract) -> str:
    """The contract as one page of Markdown: a table of everything, then each requirement with its reasons."""
    rows = contract.requirements.values()
    counts = ", ".join(f"{sum(row.level == level for row in rows)} {level}" for level in LEVELS)
    lines = [
        "<!-- Written by `python -m conformance.requirements` from conformance/requirements.toml. -->",
        "",
        f"# The contract, edition {contract.edition}",
        "",
        "What an engine's scheduler and KV-cache block manager must keep, as checked from outside.",
        f"{len(rows)} requirements: {counts}.",
        "",
        "Ids are stable: new ones are added, none is renumbered or given another meaning.",
        "A requirement applies where the engine declares the features it needs; elsewhere it is UNSUPPORTED.",
        "The *real need* of a step is ceil((tokens + new tokens) / block_size) minus the blocks owned,",
        "summed over the sequences that run.",
        "",
        "| id | level | title | needs | judged by |",
        "|---|---|---|---|---|",
        *(f"| {_link(row)} | {row.level} | {row.title} | {_needs(row)} | `{row.oracle}` |" for row in rows),
    ]
    for family in contract.families:
        lines += ["", f"## {family.title}", "", family.text]
        for row in rows:
            if row.family == family.prefix:
                lines += ["", *_section(row)]
    return "\n".join(lines) + "\n"


def _link(row: Requirement) -> str:
    """A link to the row's section; GitHub and most renderers make this anchor of its heading."""
    anchor = re.sub(r"[^a-z0-9_ -]", "", f"{row.id} {row.title}".lower()).replace(" ", "-")
    return f"[{row.id}](#{anchor})"


def _needs(row: Requirement) -> str:
    phrases = [f"`{feature}`" for feature in row.needs]
    if row.needs_any:
        phrases.append(" or ".join(f"`{feature}`" for feature in row.needs_any))
    return ", ".join(phrases)


def _section(row: Requirement) -> Iterator[str]:
    yield f"### {row.id} {row.title}"
    yield ""
    yield f"**{row.level}.** {row.text}"
    yield ""
    yield row.rationale
    yield ""
    yield f"- Source: {row.source}"
    if row.needs or row.needs_any:
        yield f"- Needs: {_needs(row)}"
    yield f"- Judged by: `{row.oracle}`"
    yield f"- Since: edition {row.since}"
    if row.note:
        yield f"- Note: {row.note}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check the page; returns the exit code: 0 written or equal, 1 the page differs."""
    parser = argparse.ArgumentParser(prog="python -m conformance.requirements", description=render.__doc__)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", type=Path, metavar="PATH", help="write the page to PATH")
    action.add_argument("--check", type=Path, metavar="PATH", help="exit with 1 when PATH is not up to date")
    options = parser.parse_args(arguments)
    page = render(load_contract())
    if options.write is not None:
        options.write.parent.mkdir(parents=True, exist_ok=True)
        options.write.write_text(page, encoding="utf-8")
        return 0
    path: Path = options.check
    found = path.read_text(encoding="utf-8") if path.exists() else ""
    if found == page:
        return 0
    lines = difflib.unified_diff(found.splitlines(), page.splitlines(), str(path), "as it should be", lineterm="")
    sys.stderr.writelines(f"{line}\n" for line in lines)
    sys.stderr.write(f"{path} is out of date: run python -m conformance.requirements --write {path}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
