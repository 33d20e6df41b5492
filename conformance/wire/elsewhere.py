"""Run under another interpreter by path: ``PYTHON elsewhere.py ENGINE`` serves ENGINE with this kvconform's adapters.

kvconform need not be installed there. Its packages are found where this file is and nothing else beside them, so the
other environment keeps its own of everything else; of that, msgspec is all that is needed.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("conformance", "fuzz", "kvconform", "neuron_tests", "reference_engine")
PYTHON_MIN = (3, 10)
EXIT_USAGE = 2


class PackagesHere:
    """Finds the packages of this kvconform, and only these."""

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, *_: object
    ) -> importlib.machinery.ModuleSpec | None:
        """The package ``name`` beside this file's; None for anything else."""
        if path is not None or name not in PACKAGES:
            return None
        folder = ROOT / name
        return importlib.util.spec_from_file_location(
            name, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )


def _missing() -> str:
    """Why this interpreter cannot serve; "" when it can."""
    if sys.version_info < PYTHON_MIN:
        return f"Python {sys.version.split()[0]} is too old; kvconform needs {'.'.join(map(str, PYTHON_MIN))} or newer"
    if importlib.util.find_spec("msgspec") is None:
        return f"msgspec is not installed there: run {sys.executable} -m pip install 'msgspec>=0.19'"
    return ""


def main() -> None:
    """Serve what the command line names, or say why that cannot be."""
    if sys.path[:1] == [str(Path(__file__).parent)]:
        sys.path[0] = ""  # the current directory, as with -m, and not the folder of this file
    missing = _missing()
    if missing:
        sys.stderr.write(f"kvconform: {sys.executable}: {missing}\n")
        sys.exit(EXIT_USAGE)
    sys.meta_path.insert(0, PackagesHere)
    runpy.run_module("conformance.serve", run_name="__main__", alter_sys=False)


if __name__ == "__main__":
    main()
