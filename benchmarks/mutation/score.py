"""The mutation score of a session of cosmic-ray: which mutants of the reference engine its contract kills.

::

    python benchmarks/mutation/score.py --skip SESSION.sqlite   # before they are run: what cannot matter
    python benchmarks/mutation/score.py SESSION.sqlite          # afterwards; exits with 1 below the target

``equivalent.toml`` beside this file names the mutants that behave as the engine does, or otherwise and within the
contract, each with the reason. They are told by what a line was and what it became, so that they survive an edit
elsewhere; one that is killed, or is no mutant any more, is an error.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import TestOutcome, WorkerOutcome, WorkResult

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TARGET = 0.95
EQUIVALENT = Path(__file__).with_name("equivalent.toml")


class Mutant(NamedTuple):
    """A line of a file, in the innermost function around it ("" outside), as it was and as it became."""

    file: str
    within: str
    line: str
    becomes: str


class Outcome(NamedTuple):
    """A mutant, which operator made it where, and whether it was killed."""

    mutant: Mutant
    operator: str
    row: int
    killed: bool


def skip(database: WorkDB) -> int:
    """Mark the mutants that nothing can kill: those of assertions, which are taken out, and of annotations."""
    outside: dict[Path, set[int]] = {}
    skipped = 0
    for item in list(database.pending_work_items):
        (mutation,) = item.mutations
        path = Path(mutation.module_path)
        if path not in outside:
            outside[path] = set(_rows_that_do_nothing(path.read_text(encoding="utf-8")))
        if mutation.start_pos[0] in outside[path]:
            database.set_result(item.job_id, WorkResult(worker_outcome=WorkerOutcome.SKIPPED))
            skipped += 1
    return skipped


def _rows_that_do_nothing(source: str) -> list[int]:
    rows: list[int] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assert):
            rows += range(node.lineno, (node.end_lineno or node.lineno) + 1)
        if isinstance(node, ast.AnnAssign) and node.value is None:
            rows.append(node.lineno)
    return rows


def outcomes(database: WorkDB) -> list[Outcome]:
    """What came of every mutant that was not skipped. Raises ValueError when some were not run."""
    results = dict(database.results)
    functions: dict[Path, dict[int, str]] = {}
    found = []
    for item in database.work_items:
        (mutation,) = item.mutations
        result = results.get(item.job_id)
        if result is None:
            raise ValueError("the session is not complete; cosmic-ray exec goes on with it")
        if result.worker_outcome is WorkerOutcome.SKIPPED:
            continue
        path, row = Path(mutation.module_path), mutation.start_pos[0]
        if path not in functions:
            functions[path] = _functions(path.read_text(encoding="utf-8"))
        removed, added = _changed(result.diff or "")
        found.append(
            Outcome(
                Mutant(path.name, functions[path].get(row, ""), removed, added),
                mutation.operator_name.partition("/")[2],
                row,
                result.test_outcome is not TestOutcome.SURVIVED,
            )
        )
    return found


def _functions(source: str) -> dict[int, str]:
    """Row -> the innermost function it lies in."""
    rows: dict[int, str] = {}
    for node in ast.walk(ast.parse(source)):  # outer ones come first
        if isinstance(node, ast.FunctionDef):
            rows.update(dict.fromkeys(range(node.lineno, (node.end_lineno or node.lineno) + 1), node.name))
    return rows


def _changed(diff: str) -> tuple[str, str]:
    """The line that a diff changes, before and after."""
    rows = [row for row in diff.splitlines() if not row.startswith(("---", "+++"))]
    before, after = (" ".join(row[1:] for row in rows if row[:1] == sign).strip() for sign in "-+")
    return before, after


def equivalents() -> dict[Mutant, str]:
    """Mutant -> the reason why no contract can kill it. An entry gives it for all that a line ``becomes``."""
    entries = tomllib.loads(EQUIVALENT.read_text(encoding="utf-8")).get("mutant", [])
    return {
        Mutant(one["file"], one["within"], one["line"], becomes): one["reason"]
        for one in entries
        for becomes in one["becomes"]
    }


def judge(found: list[Outcome], known: dict[Mutant, str]) -> int:
    """Print the score, and what is not accounted for. The exit code: 0 when there is nothing of it."""
    alive = [one for one in found if not one.killed and one.mutant not in known]
    killed = [one for one in found if one.killed and one.mutant in known]
    names = {one.mutant for one in found}
    stale = [mutant for mutant in known if mutant not in names]
    equivalent = sum(one.mutant in known for one in found)
    counted = len(found) - equivalent
    score = (counted - len(alive)) / max(1, counted)
    for one in sorted(alive, key=lambda one: (one.mutant.file, one.row)):
        print(f"survives: {one.mutant.file}:{one.row} {one.operator}\n  - {one.mutant.line}\n  + {one.mutant.becomes}")
    for one in killed:
        print(f"killed, so it is not equivalent: {one.mutant}")
    for mutant in stale:
        print(f"no such mutant any more: {mutant}")
    for file, count in sorted(Counter(one.mutant.file for one in found).items()):
        print(f"{file}: {count} mutants, {sum(one.mutant.file == file for one in alive)} survive")
    print(f"{len(found)} mutants, {equivalent} equivalent; of the other {counted} killed: {score:.1%}")
    return int(bool(killed or stale) or score < TARGET)


if __name__ == "__main__":
    with use_db(sys.argv[-1], WorkDB.Mode.open) as opened:
        if sys.argv[1] == "--skip":
            print(f"{skip(opened)} skipped")
        else:
            sys.exit(judge(outcomes(opened), equivalents()))
