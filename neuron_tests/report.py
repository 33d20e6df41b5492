"""The result file of a run: what was there, what each assertion gave, and what was learned beside it."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import pytest

from conformance.version import __version__
from neuron_tests.assertions import ASSERTIONS
from neuron_tests.rig import Rig

FORMAT = 1

OPEN_QUESTIONS = {
    "prefill_on_line_n": "what a prefill on line N does: fails with status 1006, or overwrites line 0",
    "one_token_call_damages": "whether a call of width 1 at position 0 spoils the other lines",
    "omitted_line_damaged": "whether a line that is left out of a decode loses its position 0",
    "row_order": "whether a full decode out of order returns rows as asked (new) or by line (old)",
    "compile_seconds": "how long each shape takes to compile, and hence that it compiles",
    "tokens_compared": "greedy tokens compared with the CPU in float32",
    "near_ties": "of these, tokens that were second best by less than the gap",
    "versions": "which releases were installed together",
    "restart_seconds": "from the end of one process until another has built the model",
}
"""Keys of the notes that answer what could not be settled without hardware."""


class Recorder:
    """Gathers results as pytest reports them, in that order, and writes them when the session ends."""

    def __init__(self, path: str | None) -> None:
        self.deselected = 0
        self._path = path
        self._results: list[dict[str, Any]] = []
        self._rigs: list[Rig] = []

    def watch(self, rig: Rig) -> None:
        """Take the notes of ``rig`` into the report."""
        self._rigs.append(rig)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the outcome of a test, and of its setup when that did not pass."""
        number = dict(report.user_properties).get("assertion")
        if number is None or not (report.when == "call" or report.outcome != "passed"):
            return
        assert isinstance(number, int)
        self._results.append(
            {
                "assertion": number,
                "title": ASSERTIONS[number].title,
                "test": report.nodeid.rpartition("::")[2],
                "outcome": report.outcome if report.when == "call" or report.skipped else "error",
                "seconds": round(report.duration, 3),
                "said": None if report.passed else _said(report),
            }
        )

    def pytest_sessionfinish(self) -> None:
        """Write the report, if one was asked for."""
        if self._path is None:
            return
        document = {
            "format": FORMAT,
            "kvconform": __version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "devices": [{"kind": rig.kind, **rig.learned()} for rig in self._rigs],
            "questions": OPEN_QUESTIONS,
            "results": self._results,
        }
        Path(self._path).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _said(report: pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):  # a skip: file, line, reason
        return str(report.longrepr[2])
    return report.longreprtext[-2000:]
