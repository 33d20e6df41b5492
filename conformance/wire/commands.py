"""The words of a command that speaks the wire protocol: of ``exec:COMMAND`` and of ``NAME@PYTHON``.

No shell is involved: COMMAND is split as a shell would split it, and its first word is run.
"""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path
from typing import Final

from conformance.wire import elsewhere
from conformance.wire.process import CannotStart

EXEC: Final = "exec:"


def words_of_exec(command: str) -> tuple[str, ...]:
    """The words of COMMAND. Raises `CannotStart` when they are none, or the first one cannot be run."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise CannotStart(f"{command}: {error}; a command is split as a shell splits it") from None
    if not words:
        raise CannotStart("expected exec:COMMAND, such as exec:./engine")
    return (_program(words[0]), *words[1:])


def words_of_python(name: str, python: str, *, strict: bool = False) -> tuple[str, ...]:
    """Serve the engine ``name`` under ``python``: an interpreter, or the folder of a virtual environment.

    Raises `CannotStart`.
    """
    path = Path(python).expanduser().absolute()
    if path.is_dir():
        path = path / "bin" / "python"
        if not path.exists():
            raise CannotStart(f"{python} is a folder without bin/python; expected an interpreter or an environment")
        program = _program(str(path))
    else:
        program = _program(str(path) if os.sep in python else python)
    return (program, elsewhere.__file__, *(["--validate-wire"] if strict else []), name)


def _program(word: str) -> str:
    """The file that ``word`` runs."""
    if os.name != "posix":
        raise CannotStart(f"{word}: engines in other processes need a POSIX system")
    found = shutil.which(word)
    if found is not None:
        return str(Path(found).absolute())
    path = Path(word)
    if path.is_dir():
        raise CannotStart(f"{word} is a folder; expected a command")
    if os.sep in word and path.exists():
        raise CannotStart(f"{word} is not executable: chmod +x {shlex.quote(word)}, or name what runs it")
    where = f"looked in {Path.cwd()}" if os.sep in word else "looked on PATH; ./NAME names a file in this folder"
    raise CannotStart(f"there is no command {word} ({where})")
