"""What a release needs to run: an environment of its dependencies, shared, and the release itself beside it.

A release's scheduler is Python, and its dependencies are those of its neighbours. So the dependencies come from a
lock of ``requirements/``, once for all releases that the lock serves, and the release alone is unpacked into a folder
that stands first on the path::

    CACHE/environments/vllm-0.16.0-1a2b3c4d/        a virtual environment: the lock without the engine, and the harness
    CACHE/releases/vllm-0.12.0/                     pip install --no-deps --target

A folder gets its name when it is complete, so one that is there is used as it is; the name of an environment holds a
digest of its locks. Compiled parts are not kept: they make nine tenths of a release, and want a device.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from fuzz.bugbench.releases.records import Book

ROOT: Final = Path(__file__).resolve().parents[3]
REQUIREMENTS: Final = ROOT / "requirements"
HARNESS: Final = "harness.txt"
PYTHON: Final = "3.11"
"""What the locks are for."""
COMPILED: Final = ("*.so", "*.cubin", "*.cu")


class CannotBuild(RuntimeError):  # noqa: N818 - named for what happened
    """An environment cannot be built: which one, the command that failed, the end of what it said."""


class Place(NamedTuple):
    """Where a release runs: an interpreter, and what stands first on its path."""

    python: Path
    path: tuple[Path, ...]

    def environment(self) -> dict[str, str]:
        """The environment variables of a process there: one thread, no bytecode left in the cache, the path."""
        path = os.pathsep.join(map(str, self.path))
        return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}


def default_cache() -> Path:
    """The folder that the platform keeps for this: ``$XDG_CACHE_HOME``, or what stands for it."""
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local"))
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "kvconform" / "releases"


def default_python() -> str:
    """The interpreter to build environments with: this one if it is of the version of the locks."""
    return sys.executable if sys.version_info[:2] == (3, 11) else f"python{PYTHON}"


class Environments:
    """Builds what is missing under ``cache``. ``run`` carries out a command; it raises CalledProcessError."""

    def __init__(
        self,
        book: Book,
        cache: Path,
        *,
        requirements: Path = REQUIREMENTS,
        python: str | None = None,
        say: Callable[[str], None] = print,
        run: Callable[[Sequence[str]], None] | None = None,
    ) -> None:
        self._book = book
        self._cache = cache
        self._requirements = requirements
        self._python = python or default_python()
        self._say = say
        self._run = run or _execute

    def place(self, distribution: str, release: str) -> Place:
        """Where the release runs; built first when it is not there. Raises `CannotBuild` and `PairsError`."""
        lock = self._requirements / self._book.lock_for(distribution, release).file
        interpreter = self._dependencies(lock, distribution) / "bin" / "python"
        return Place(interpreter, (self._release(interpreter, distribution, release), ROOT))

    def _dependencies(self, lock: Path, distribution: str) -> Path:
        rows = [row for part in (self._requirements / HARNESS, lock) for row in _locked(part, distribution)]
        digest = hashlib.sha256("\n".join(rows).encode()).hexdigest()[:8]
        folder = self._cache / "environments" / f"{lock.stem}-{digest}"
        if folder.exists():
            return folder
        part = self._part(folder)
        self._say(f"building {folder}")
        self._step(folder, [self._python, "-m", "venv", str(part)])
        (part / "locked.txt").write_text("\n".join(rows) + "\n", encoding="utf-8")
        pip = [str(part / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-deps"]
        self._step(folder, [*pip, "-r", str(part / "locked.txt")])
        part.rename(folder)
        return folder

    def _release(self, interpreter: Path, distribution: str, release: str) -> Path:
        folder = self._cache / "releases" / f"{distribution}-{release}"
        if folder.exists():
            return folder
        part = self._part(folder)
        self._say(f"building {folder}")
        pip = [str(interpreter), "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
        self._step(folder, [*pip, "--target", str(part), f"{distribution}=={release}"])
        for pattern in COMPILED:
            for file in sorted(part.rglob(pattern)):
                file.unlink()
        part.rename(folder)
        return folder

    def _part(self, folder: Path) -> Path:
        """Where the folder is built; what a build that was cut off has left there goes."""
        part = folder.with_name(f".{folder.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        return part

    def _step(self, folder: Path, command: Sequence[str]) -> None:
        try:
            self._run(command)
        except (OSError, subprocess.CalledProcessError) as error:
            said = (getattr(error, "stderr", None) or str(error)).strip()[-600:]
            raise CannotBuild(f"{folder.name}: {' '.join(command)} failed: {said}") from error


def _locked(file: Path, distribution: str) -> list[str]:
    """The lines of a lock without comments and without the engine, which has a folder of its own."""
    if not file.exists():
        raise CannotBuild(f"{file}: no such lock; the bench on releases runs from a source tree of kvconform")
    rows = [row.strip() for row in file.read_text(encoding="utf-8").splitlines()]
    engine = re.compile(rf"{re.escape(distribution)}(-cpu)?==")
    return [row for row in rows if row and not row.startswith("#") and not engine.match(row)]


def _execute(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)  # noqa: S603 - our own
