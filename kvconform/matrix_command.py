"""``kvconform matrix``: the contract on many engines, releases and configurations, side by side.

Each engine is checked in a process of its own, several at a time, and leaves an event file; a matrix that was
interrupted takes those up that are whole. All of them together are the matrix's own event file.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from conformance.protocol import ConfigRefused
from conformance.reports.events import (
    Column,
    ColumnClosed,
    ColumnOpened,
    EventsError,
    Run,
    combine,
    event_file,
    read_run,
)
from conformance.requirements import load_contract
from conformance.results import SmokeResult, worst
from conformance.settings import OPTION_PREFIX, parse_settings
from conformance.version import __version__
from kvconform.console import wrapped

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_WORD = re.compile(r"(?P<name>[^\[\]]+)(?:\[(?P<settings>[^\[\]]*)\])?")
LOG_LINES = 3
"""Of the output of a process that ended early, to say why."""


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One column: an engine as the command line names it, its settings, and what its process is given."""

    engine: str
    label: str = ""
    settings: tuple[str, ...] = msgspec.field(name="set", default=())
    preset: str | None = None
    env: dict[str, str] = {}

    @property
    def column(self) -> str:
        """The name of the column; its own words where it was given none."""
        if self.label:
            return self.label
        words = ([self.preset] if self.preset else []) + [word.removeprefix(OPTION_PREFIX) for word in self.settings]
        return self.engine + (f"[{','.join(words)}]" if words else "")


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What is done with every entry. ``fuzz_steps`` 0: no fuzzing."""

    folder: Path
    requirements: tuple[str, ...] = ()
    fuzz_steps: int = 0
    seed: int = 1
    call_seconds: float = 10.0

    def stem(self, entry: Entry) -> str:
        """The entry's file name; another one as soon as anything that decides its outcome is another."""
        slug = re.sub(r"[^a-z0-9.]+", "-", entry.column.lower()).strip("-")[:60]
        facts = (__version__, entry, self.requirements, self.fuzz_steps, self.seed)
        return f"{slug}-{hashlib.sha256(msgspec.json.encode(facts, order='sorted')).hexdigest()[:8]}"

    def commands(self, entry: Entry, stem: str) -> Iterator[tuple[list[str], Path]]:
        """The commands to run for the entry, each with the event file it writes."""
        words = [*(f"--set={word}" for word in entry.settings), *(["--preset", entry.preset] if entry.preset else [])]
        words += [f"--requirement={one}" for one in self.requirements]
        words += [f"--out={self.folder / 'traces' / stem}", f"--call-seconds={self.call_seconds}"]
        start = [sys.executable, "-m", "kvconform"]
        part = self.folder / "parts" / f"{stem}.jsonl"
        yield [*start, "check", entry.engine, *words, f"--events={part}", f"--label={entry.column}"], part
        if self.fuzz_steps:
            part = part.with_name(f"{stem}-fuzz.jsonl")
            words += [
                f"--events={part}",
                f"--label={entry.column}",
                f"--steps={self.fuzz_steps}",
                f"--seed={self.seed}",
            ]
            yield [*start, "fuzz", entry.engine, *words], part


def entries_of(words: Sequence[str], file: Path | None) -> list[Entry]:
    """The columns that are asked for: those of the file, then those of the command line.

    A word is ``ENGINE`` or ``ENGINE[key=value,...]``, a key being a field of the configuration or, where there is
    none of that name, an option of the engine's. Raises `ConfigRefused`.
    """
    entries = ([] if file is None else _read(file)) + [_parsed(word) for word in words]
    if not entries:
        raise ConfigRefused(
            "no engine: expected some, as in `kvconform matrix reference smol-vllm`, or --file; got none"
        )
    columns = [entry.column for entry in entries]
    for column in columns:
        if columns.count(column) > 1:
            raise ConfigRefused(
                f"{column!r} is there twice; expected columns of different names: give each its own label"
            )
    for entry in entries:
        parse_settings(entry.preset, entry.settings)
    return entries


def _parsed(word: str) -> Entry:
    match = _WORD.fullmatch(word)
    if match is None:
        raise ConfigRefused(f"{word}: expected ENGINE or ENGINE[key=value,...]")
    settings = [part for part in (match["settings"] or "").split(",") if part]
    return Entry(engine=match["name"], settings=tuple(_setting(part) for part in settings))


def _setting(word: str) -> str:
    name = word.partition("=")[0]
    known = {field.name for field in msgspec.structs.fields(type(parse_settings(None, ())[0]))}
    return word if name in known or name.startswith(OPTION_PREFIX) else OPTION_PREFIX + word


def _read(path: Path) -> list[Entry]:
    try:
        document: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigRefused(f"{path}: cannot be read: {error}; expected a TOML file of [[column]] tables") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigRefused(f"{path}: not valid TOML: {error}; expected [[column]] tables") from None
    rows = document.pop("column", [])
    if document or not isinstance(rows, list) or not rows:
        unknown = f", got {next(iter(document))!r}" if document else ""
        raise ConfigRefused(f"{path}: expected [[column]] tables{unknown}")
    entries = []
    for number, row in enumerate(rows, 1):
        try:
            entries.append(msgspec.convert(row, Entry))
        except msgspec.ValidationError as error:
            raise ConfigRefused(
                f"{path}: column {number}: {error}; expected keys engine, label, set, preset, env"
            ) from None
    return entries


class Matrix:
    """Runs the entries of a plan. Use `run`, then read ``missing`` for why a column could not be had."""

    def __init__(self, console: Console, plan: Plan, *, fresh: bool = False) -> None:
        self._console = console
        self._plan = plan
        self._fresh = fresh
        self._children: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._stopped = False

    def run(self, entries: Sequence[Entry], jobs: int, events: Path) -> Run:
        """Check every entry, ``jobs`` at a time, write ``events``, and return what stands in it."""
        columns: dict[str, Column] = {}
        with ThreadPoolExecutor(max_workers=jobs) as pool:
            futures = {pool.submit(self._one, entry): entry for entry in entries}
            try:
                for future in as_completed(futures):
                    column = future.result()
                    columns[column.name] = column
            except BaseException:
                self._stop()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        command, edition = "matrix", load_contract().edition
        with event_file(events, command, edition=edition, seed=self._plan.seed) as writer:
            for entry in entries:
                for event in columns[entry.column].events():
                    writer.add(self._relinked(event, events))
        return read_run(events)

    def _one(self, entry: Entry) -> Column:
        stem = self._plan.stem(entry)
        parts: list[Run] = []
        for command, part in self._plan.commands(entry, stem):
            run = None if self._fresh else _whole(part)
            kept = run is not None
            if run is None:
                part.parent.mkdir(parents=True, exist_ok=True)
                log = self._plan.folder / "logs" / f"{part.stem}.txt"
                code = self._execute(command, entry, log)
                run = _whole(part)
                if run is None:
                    return self._broken(entry, code, log)
            parts.append(run)
            done = next(iter(run.columns.values()))
            with self._lock:
                wrapped(self._console, f"{entry.column}: {command[3]} {'kept' if kept else 'done'}: {done.status}")
        return next(iter(combine(parts).columns.values()))

    def _execute(self, command: list[str], entry: Entry, log: Path) -> int:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            with self._lock:
                if self._stopped:
                    return -1
                child = subprocess.Popen(  # noqa: S603 - our own command, its words passed as they are
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **entry.env, "NO_COLOR": "1"},
                    start_new_session=True,  # so that ctrl-C reaches it through us alone
                )
                self._children.add(child)
            code = child.wait()
        with self._lock:
            self._children.discard(child)
        return code

    def _stop(self) -> None:
        with self._lock:
            self._stopped = True
            for child in self._children:
                child.terminate()

    def _broken(self, entry: Entry, code: int, log: Path) -> Column:
        """A column that says why there is none: the suite or the adapter broke, or the engine is not there."""
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() if log.exists() else []
        said = " / ".join(lines[-LOG_LINES:]) or "it printed nothing"
        reason = f"the check ended with exit code {code}: {said} (whole output in {log})"
        with self._lock:
            wrapped(self._console, f"{entry.column}: {reason}")
        return Column(
            opened=ColumnOpened(
                column=entry.column, engine=entry.engine, smoke=SmokeResult(status="red", reason=reason)
            ),
            closed=ColumnClosed(column=entry.column, status="error"),
        )

    def _relinked(self, event: Any, events: Path) -> Any:
        """The event with its trace named from where the matrix's own file stands."""
        trace = getattr(event, "trace", "")
        if not trace:
            return event
        target = (self._plan.folder / "parts" / trace).resolve()
        base = events.parent.resolve()
        return msgspec.structs.replace(event, trace=os.path.relpath(target, base))


def _whole(part: Path) -> Run | None:
    """The event file of an entry, when it is there and complete."""
    try:
        run = read_run(part)
    except EventsError:
        return None
    return run if len(run.columns) == 1 else None


def exit_code(run: Run) -> int:
    """0: nothing fails but what is known to; 1: something does; 3: a column broke."""
    status = worst([column.status for column in run.columns.values()])
    return {"error": 3, "fail": 1, "stale": 1}.get(status, 0)
