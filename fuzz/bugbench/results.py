"""The file of a bench: JSON lines, a header and then one line for each cell, in the order in which cells were done.

A cell (fault, fuzzer, seed) depends on nothing but its own seed, so a bench that was stopped goes on where it was,
and several processes may work at one. A line is appended with a single write; one that was cut off in the middle is
dropped when the file is read again.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

import conformance
import fuzz
import reference_engine
from conformance.operations import Operation
from conformance.protocol import EngineConfig
from conformance.version import __version__

SCHEMA = 1


class ResultsError(ValueError):
    """A results file cannot be used: where, what was expected and found, what to do."""


class ShrunkTrace(msgspec.Struct, kw_only=True):
    """What the shrinker made of the trace of a cell. ``stable`` of 3 replays failed in the same way.

    ``cpu_seconds`` is the one figure of a bench that differs from run to run.
    """

    operations: list[Operation]
    config: EngineConfig
    before: int
    executions: int
    stable: int
    cpu_seconds: float


class Cell(msgspec.Struct, kw_only=True, omit_defaults=True, tag="cell", tag_field="kind"):
    """One fault hunted by one fuzzer with one seed.

    ``steps``: calls of `schedule` until the fault was seen, or until the hunt was cut off (``seen_as`` is then "").
    ``seen_as``: the requirement that was reported broken first. ``reached_at`` and ``triggered_at`` are steps too.
    """

    fault: str
    fuzzer: str
    seed: int
    steps: int
    seen_as: str = ""
    message: str = ""
    operations: int = 0
    reached_at: int | None = None
    triggered_at: int | None = None
    reached: int = 0
    triggered: int = 0
    shrunk: ShrunkTrace | None = None

    @property
    def key(self) -> tuple[str, str, int]:
        return self.fault, self.fuzzer, self.seed

    @property
    def detected(self) -> bool:
        return bool(self.seen_as)


class Header(msgspec.Struct, kw_only=True, tag="header", tag_field="kind"):
    """What the cells of a file have in common. ``code``: a digest of what was measured and what measured it."""

    schema: int = SCHEMA
    kvconform: str = __version__
    code: str = ""
    budgets: dict[str, int]
    """Fuzzer -> steps after which a hunt is cut off."""
    assertions: bool = False
    """Whether the reference engine kept its assertions."""


Line: TypeAlias = Header | Cell
_decoder = msgspec.json.Decoder(Line)
_encoder = msgspec.json.Encoder()


def code_digest() -> str:
    """Sixteen hex digits over the sources of the engine, the harness and the fuzzer."""
    digest = hashlib.sha256()
    for package in (conformance, fuzz, reference_engine):
        root = Path(package.__path__[0])
        for path in sorted(root.rglob("*.py")):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


class Results:
    """The cells of one bench, kept in a file as they come.

    Raises `ResultsError` when the file there is no results file, or was made by other code or with other budgets.
    """

    def __init__(self, path: Path, header: Header) -> None:
        self.path = path
        self.header = header
        self.cells: dict[tuple[str, str, int], Cell] = {}
        if path.exists():
            self._resume()
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._append(header)

    def _resume(self) -> None:
        header, cells, whole_bytes = read(self.path)
        differing = [
            f"{name} {theirs!r}, now {ours!r}" for name, theirs, ours in _pairs(header, self.header) if theirs != ours
        ]
        if differing:
            raise ResultsError(
                f"{self.path}: begun with {'; '.join(differing)}: its cells cannot stand beside new ones; name another "
                "folder, or --fresh to begin again"
            )
        os.truncate(self.path, whole_bytes)
        self.cells = {cell.key: cell for cell in cells}

    def add(self, cell: Cell) -> None:
        """Keep a cell, in memory and in the file."""
        self.cells[cell.key] = cell
        self._append(cell)

    def _append(self, line: Line) -> None:
        handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(handle, _encoder.encode(line) + b"\n")
        finally:
            os.close(handle)


def _pairs(theirs: Header, ours: Header) -> list[tuple[str, Any, Any]]:
    return [(name, getattr(theirs, name), getattr(ours, name)) for name in Header.__struct_fields__]


def read(path: Path) -> tuple[Header, list[Cell], int]:
    """The header, the cells and how many bytes are whole lines. Raises `ResultsError` saying what is wrong where."""
    raw = path.read_bytes()
    whole = raw.rfind(b"\n") + 1
    lines: list[Line] = []
    for number, row in enumerate(raw[:whole].splitlines(), 1):
        try:
            lines.append(_decoder.decode(row))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ResultsError(f"{path}:{number}: not a line of a bench: {error}; --fresh begins again") from None
    if not lines or not isinstance(lines[0], Header):
        raise ResultsError(f"{path}:1: expected the header of a bench; --fresh begins again")
    if lines[0].schema != SCHEMA:
        raise ResultsError(f"{path}:1: schema {lines[0].schema}; this kvconform reads schema {SCHEMA}")
    return lines[0], [line for line in lines[1:] if isinstance(line, Cell)], whole
