"""The corpus: traces of what once broke an engine, checked in, replayed first.

``fuzz/corpus/ENGINE/NAME.jsonl``; the header of each names the engine and release it was found on, its note the
cause or the link.
"""

from __future__ import annotations

from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"


def corpus(engine: str | None = None) -> list[Path]:
    """The traces of the corpus, in order of name; those found on ``engine`` alone when it is given."""
    return sorted(CORPUS.glob(f"{engine or '*'}/*.jsonl"))
