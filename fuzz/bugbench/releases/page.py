"""The page of the documentation that shows the pairs and what was measured, and the same figures as a table."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from conformance.operations import describe
from conformance.trace import read_trace
from fuzz.bugbench.releases.measured import Measured, load
from fuzz.bugbench.releases.records import Book, ReleasePair
from fuzz.bugbench.releases.records import load as load_book
from fuzz.bugbench.releases.runner import BAD_STEPS, GOOD_STEPS

_HEAD = f"""\
# Pairs of releases

Faults that real releases on PyPI carry, each beside a release without it: the fuzzer has to see the fault in the first
and must not see it in the second.
The target is {BAD_STEPS:,} steps at most until the fault is seen, and {GOOD_STEPS:,} steps of the good
release without it.
The columns say how far the checked-in figures go.
A find counts as the fault when it breaks the requirement named and its message fits the pair's expression; anything
else that a release does wrong counts neither way, and is in the last column by requirement where the good release does
it.
Steps are calls of `schedule`. A step count for the bad release is the median of its seeds, with the worst in brackets.

    python -m fuzz.bugbench.releases                       # every pair, from nothing: about 12 GB
    python -m fuzz.bugbench.releases PAIR --good-steps 50000
    python -m fuzz.bugbench.releases --list

Results go to a file of JSON lines; a run that was stopped goes on there.
Environments are built in a cache folder (`--cache`), and releases that take the same dependencies share them.
This page is made from `pairs.toml`, `measured.json` and the corpus:
`python -m fuzz.bugbench.releases --write docs/reference/release-pairs.md`.
"""


def page() -> str:
    """The page, from what is checked in. Raises `PairsError` and `TraceError` for files that are wrong."""
    book, figures = load_book(), load()
    measured = [figures[pair.id] for pair in book.pair if pair.id in figures]
    return "".join([_HEAD, "\n", _summary(book, measured), "\n", table(book.pair, measured), *map(_section, book.pair)])


def _summary(book: Book, measured: Sequence[Measured]) -> str:
    v1 = sum(pair.engine == "vllm-v1" for pair in book.pair)
    found = sum(one.found for one in measured)
    silent = sum(one.good_steps > 0 and not one.good_sights for one in measured)
    steps = sum(one.good_steps for one in measured)
    return (
        f"{len(book.pair)} pairs, {v1} of them vLLM V1. Found in the bad release with every seed: {found}. "
        f"Silent in the good release: {silent}, over {steps:,} steps in all.\n"
    )


def table(pairs: Sequence[ReleasePair], measured: Sequence[Measured]) -> str:
    """The figures of ``pairs`` as a Markdown table; a cell is empty where nothing was measured."""
    by_pair = {one.pair: one for one in measured}
    head = (
        "| pair | engine | bad | good | breaks | seeds | steps until seen "
        "| steps of the good one | seen there | other finds there |\n|"
    )
    rows = (_row(pair, by_pair.get(pair.id)) for pair in pairs)
    return head + "---|" * 10 + "\n" + "".join(rows)


def _row(pair: ReleasePair, one: Measured | None) -> str:
    seen, seeds, steps, sights, others = "", "", "", "", ""
    if one is not None and one.bad:
        counts = sorted(hunt.steps for hunt in one.bad if hunt.seen_as)
        seeds = f"{len(counts)} of {len(one.bad)}"
        seen = f"{median(counts):,.0f} ({counts[-1]:,})" if counts else "not seen"
    if one is not None and one.good_steps:
        steps, sights = f"{one.good_steps:,}", str(one.good_sights)
        others = ", ".join(f"{name} {count}" for name, count in sorted(one.others.items())) or "none"
    good = pair.good if pair.bad != pair.good else f"{pair.good}, other configuration"
    cells = (
        f"[{pair.id}](#{pair.id})",
        pair.engine,
        pair.bad,
        good,
        ", ".join(pair.breaks),
        seeds,
        seen,
        steps,
        sights,
        others,
    )
    return f"| {' | '.join(cells)} |\n"


def _section(pair: ReleasePair) -> str:
    trace = read_trace(pair.path)
    finding = trace.footer.violations[0]
    said = f", with a message that fits `{pair.message}`" if pair.message else ""
    region = [f"`{word}`" for word in pair.settings] + [f"no {feature.replace('_', ' ')}" for feature in pair.without]
    good = (
        ""
        if pair.settings_good is None
        else f"; on the good side {', '.join(f'`{word}`' for word in pair.settings_good)}"
    )
    return (
        f"\n## {pair.id}\n\n{pair.cause}\n\n"
        f"- Report: <{pair.report}>\n"
        f"- Hunted in: {', '.join(region) or 'every configuration that the release takes'}{good}\n"
        f"- Recognised by: {', '.join(pair.breaks)}{said}\n"
        f"- Shortest trace: `fuzz/corpus/{pair.engine}/{pair.trace}.jsonl`: "
        f"{'; '.join(describe(operation) for operation in trace.operations)}\n"
        f"- What is seen: {finding.requirement}, {finding.message}\n"
    )
