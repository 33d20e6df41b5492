"""pytest, run as its users run it: in another process, from another directory, with an environment of their own."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import neuron_tests

ROOT = Path(neuron_tests.__file__).resolve().parents[1]


class Sessions:
    """Runs pytest in ``folder``; modules written there can be loaded with ``-p``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        points = importlib.metadata.entry_points(group="pytest11")
        installed = any(point.value == "conformance.plugin" for point in points)
        self._plugin = [] if installed else ["-p", "conformance.plugin"]

    def run(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """One session; standard error goes to standard output. ``environment`` adds to ours."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("KVCONFORM_", "PYTEST_"))}
        paths = os.pathsep.join([environment.pop("PYTHONPATH", ""), str(ROOT), str(self._folder)])
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *self._plugin, *words],
            cwd=self._folder,
            env={**clean, "COLUMNS": "200", "PYTHONPATH": paths, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
