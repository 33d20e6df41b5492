"""The corpus: traces of what once broke an engine, checked in, replayed first.

``fuzz/corpus/ENGINE/NAME.jsonl``; the header of each names the engine and release it was found on, its note the
cause or the link. The page of the documentation that lists them is made from the files::

    python -m fuzz.corpus --write docs/track-record.md
"""

from __future__ import annotations

import sys
from pathlib import Path

from conformance.operations import describe
from conformance.trace import read_trace

CORPUS = Path(__file__).parent / "corpus"

_HEAD = """\
# Track record

What kvconform has found in released engines, each as the shortest sequence of requests that shows it.
Every row is a trace in `fuzz/corpus/`: `kvconform replay fuzz/corpus/ENGINE/NAME.jsonl` runs it again where that
release is installed, and says FAILED for as long as the fault is there.
This page is made from those files by `python -m fuzz.corpus --write docs/track-record.md`.

| engine | release | trace | breaks | requests | what is seen | cause or report |
|---|---|---|---|---|---|---|
"""


def corpus(engine: str | None = None) -> list[Path]:
    """The traces of the corpus, in order of name; those found on ``engine`` alone when it is given."""
    return sorted(CORPUS.glob(f"{engine or '*'}/*.jsonl"))


def track_record() -> str:
    """The page that lists the corpus. Raises `TraceError` for a trace that cannot be read."""
    rows = []
    for path in corpus():
        trace = read_trace(path)
        finding = trace.footer.violations[0]
        requests = "; ".join(describe(operation) for operation in trace.operations)
        cells = (
            trace.header.engine,
            trace.header.engine_version,
            path.stem,
            finding.requirement,
            requests,
            finding.message,
            trace.header.note,
        )
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n")
    return _HEAD + "".join(rows)


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] != "--write":
        sys.exit("usage: python -m fuzz.corpus --write FILE")
    Path(sys.argv[2]).write_text(track_record(), encoding="utf-8")
