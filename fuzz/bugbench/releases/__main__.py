"""``python -m fuzz.bugbench.releases``: hunt the faults of real releases, in them and in those that mended them."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from fuzz.bugbench.releases.environments import CannotBuild, Environments, default_cache
from fuzz.bugbench.releases.measured import measured_of, write
from fuzz.bugbench.releases.page import page, table
from fuzz.bugbench.releases.records import SIDES, Book, PairsError, ReleasePair, load
from fuzz.bugbench.releases.runner import (
    BAD_STEPS,
    GOOD_STEPS,
    PART_STEPS,
    SEEDS,
    HuntFailed,
    Plan,
    Result,
    Results,
    ResultsError,
    Runner,
    in_process,
)

HOLDS, FALLS_SHORT, UNUSABLE, BROKEN = 0, 1, 2, 3
RESULTS = Path("kvconform-bench") / "releases.jsonl"


def _arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m fuzz.bugbench.releases", description=__doc__)
    parser.add_argument("pairs", nargs="*", metavar="PAIR", help="only these pairs; all when none is named")
    parser.add_argument("--list", action="store_true", help="name the pairs and do nothing")
    parser.add_argument("--side", choices=SIDES, help="only the bad or only the good releases")
    parser.add_argument("--seeds", type=_count, default=SEEDS, help="hunts on each bad release (default %(default)s)")
    parser.add_argument("--bad-steps", type=_count, default=BAD_STEPS, help="cut off there (default %(default)s)")
    parser.add_argument("--good-steps", type=_count, default=GOOD_STEPS, help="in all (default %(default)s)")
    parser.add_argument("--part-steps", type=_count, default=PART_STEPS, help="in one hunt (default %(default)s)")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="environments (default %(default)s)")
    parser.add_argument("--python", help="a Python 3.11 to build environments with")
    parser.add_argument("--out", type=Path, default=RESULTS, help="file of results (default %(default)s)")
    parser.add_argument(
        "--keep", action="store_true", help="write what --out holds to measured.json and do nothing else"
    )
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="write the page of the documentation and do nothing else"
    )
    return parser.parse_args(words)


def _count(word: str) -> int:
    number = int(word)
    if number < 1:
        raise ValueError(word)
    return number


def main(words: Sequence[str]) -> int:
    """Run the command. Returns 0 when every pair holds, 1 when one does not, 2 or 3 when it could not be done."""
    arguments = _arguments(words)
    try:
        book = load()
        if arguments.write is not None:
            arguments.write.write_text(page(), encoding="utf-8")
            return HOLDS
        pairs = _chosen(book, arguments.pairs)
        if arguments.list:
            for pair in pairs:
                _say(f"{pair.id}  {pair.engine} {pair.bad} -> {pair.good}  {pair.report}")
            return HOLDS
        results = Results(arguments.out)
        if not arguments.keep:
            _run(book, pairs, results, arguments)
    except (PairsError, ResultsError) as error:
        sys.stderr.write(f"{error}\n")
        return UNUSABLE
    except (CannotBuild, HuntFailed) as error:
        sys.stderr.write(f"{error}\n")
        return BROKEN
    measured = [measured_of(pair, results) for pair in pairs]
    if arguments.keep:
        write(measured)
    _say(table(pairs, measured).rstrip())
    return HOLDS if all(one.holds for one in measured) else FALLS_SHORT


def _chosen(book: Book, names: Sequence[str]) -> list[ReleasePair]:
    known = {pair.id: pair for pair in book.pair}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise PairsError(f"no pair {', '.join(unknown)}; there is {', '.join(known)}")
    return [known[name] for name in names] or list(book.pair)


def _run(book: Book, pairs: Sequence[ReleasePair], results: Results, arguments: argparse.Namespace) -> None:
    plan = Plan(
        seeds=arguments.seeds,
        bad_steps=arguments.bad_steps,
        good_steps=arguments.good_steps,
        part_steps=arguments.part_steps,
    )
    environments = Environments(book, arguments.cache, python=arguments.python, say=_say)
    runner = Runner(pairs, plan, results, place=environments.place, process=in_process, on_result=_said)
    runner.run([arguments.side] if arguments.side else SIDES)


def _said(result: Result) -> None:
    outcome = result.outcome
    seen = "not seen" if outcome.first is None else f"seen {outcome.sights} times, first: {outcome.first.message}"
    _say(f"{result.pair} {result.side} ({outcome.version}) seed {result.seed}: {outcome.steps:,} steps, {seen}")


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that it takes the process of the release with it
    sys.exit(main(sys.argv[1:]))
