"""Long campaigns on released engines: how far, what was found, and whether all of it is known.

    kvconform fuzz ENGINE --seed N --steps N --events FILE [--label COLUMN]
    python benchmarks/campaigns.py [FILE ...]

keeps what the event files say in docs/campaigns.json, in the place of an older campaign of the same engine, release and
pinned configuration, and writes docs/reference/campaigns.md from it. Without a file the page is written anew.
The exit code is 1 when a finding is not known: the expectations say nothing of it, or no longer do.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from conformance.reports.events import EventsError, read_run
from conformance.wording import some

DOCS = Path(__file__).resolve().parent.parent / "docs"
RECORDS = DOCS / "campaigns.json"
PAGE = DOCS / "reference" / "campaigns.md"

_HEAD = """\
# Campaigns

What `kvconform fuzz` found on released engines when it was let run for long.
Steps are calls of `schedule`, shrinking not counted.
Findings are told apart by requirement and shape, so that one cause may stand for several; each was shrunk, failed
again, and was held against the [expectations](expectations.md) of its engine, which name the cause and a trace.
The causes are in [the track record](../track-record.md).

    kvconform fuzz ENGINE --seed N --steps N --events FILE
    python benchmarks/campaigns.py FILE

| campaign | pinned | seed | steps | runs | findings, by requirement | not known |
|---|---|---:|---:|---:|---|---|
"""


class Campaign(msgspec.Struct, kw_only=True, frozen=True):
    """One campaign. ``findings`` and ``unknown`` count shapes by requirement."""

    column: str
    engine: str
    version: str
    pinned: dict[str, Any]
    seed: int
    steps: int
    runs: int
    findings: dict[str, int]
    unknown: dict[str, int]

    @property
    def place(self) -> tuple[str, ...]:
        """What two campaigns have in common when the later takes the place of the earlier."""
        return (self.engine, self.version, self.column, str(sorted(self.pinned.items())))


def campaigns_of(path: Path) -> list[Campaign]:
    """The campaigns of an event file. Raises `EventsError`, also when it is of no campaign."""
    run = read_run(path)
    if run.header.command != "fuzz" or run.header.seed is None:
        raise EventsError(f"{path}: expected the events of `kvconform fuzz`, got those of {run.header.command}")
    campaigns = []
    for column in run.columns.values():
        opened, closed = column.opened, column.closed
        if closed is None:
            raise EventsError(f"{path}: {opened.column} was cut off; run it again")
        config = msgspec.to_builtins(opened.config)
        campaigns.append(
            Campaign(
                column=opened.column,
                engine=opened.engine,
                version=opened.version,
                pinned={name: config[name] for name in opened.pinned},
                seed=run.header.seed,
                steps=closed.steps,
                runs=closed.runs,
                findings=_by_requirement(one.requirement for one in column.findings),
                unknown=_by_requirement(one.requirement for one in column.findings if not one.known),
            )
        )
    return campaigns


def page(campaigns: list[Campaign]) -> str:
    """The page, in markdown."""
    rows = [
        f"| {one.column} | {_pinned(one.pinned)} | {one.seed} | {one.steps:,} | {one.runs:,} | "
        f"{_counted(one.findings)} | {_counted(one.unknown)} |\n"
        for one in campaigns
    ]
    steps = sum(one.steps for one in campaigns)
    return _HEAD + "".join(rows) + f"\n{some(len(campaigns), 'campaign')}, {steps:,} steps.\n"


def _by_requirement(names: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(names).items()))


def _counted(findings: dict[str, int]) -> str:
    return ", ".join(name if count == 1 else f"{name} {count}" for name, count in findings.items()) or "none"


def _pinned(fields: dict[str, Any]) -> str:
    return ", ".join(f"`{name}={value}`" for name, value in fields.items()) or "nothing"


def main(arguments: list[str] | None = None) -> int:
    """Take in the event files and write the page. 1 when a finding is not known, 2 when a file is no use."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("events", type=Path, nargs="*", help="event files of kvconform fuzz")
    asked = parser.parse_args(arguments)
    kept = {one.place: one for one in msgspec.json.decode(RECORDS.read_bytes(), type=list[Campaign])}
    try:
        for path in asked.events:
            kept.update((one.place, one) for one in campaigns_of(path))
    except EventsError as error:
        print(error, file=sys.stderr)
        return 2
    campaigns = [kept[place] for place in sorted(kept)]
    RECORDS.write_bytes(msgspec.json.format(msgspec.json.encode(campaigns)) + b"\n")
    PAGE.write_text(page(campaigns), encoding="utf-8")
    unknown = [one for one in campaigns if one.unknown]
    for one in unknown:
        print(f"{one.column}, seed {one.seed}: not known: {_counted(one.unknown)}", file=sys.stderr)
    return 1 if unknown else 0


if __name__ == "__main__":
    sys.exit(main())
