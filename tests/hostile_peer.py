"""Engines at the other end of the wire, made on the spot; none of their processes outlives a test."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import conformance
from conformance.wire import fleet as fleets

ROOT = Path(conformance.__file__).resolve().parents[1]
SERVER = """\
import os, signal, sys, time
from conformance.adapters.reference import make
from conformance.wire.server import Server, claim_standard_streams

WIRE = claim_standard_streams()
HOARD = []

def say(line, end=b"\\n"):
    data = memoryview(line + end)
    while data:
        data = data[os.write(WIRE.answers, data):]

class Hostile(Server):
    def answer(self, line):
        {body}

Hostile(make, "hostile", "1").run(WIRE)
"""

Hostile = Callable[[str], str]


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hostile]:
    """The name of an engine that answers as the reference engine does, but for what the ``body`` of its method does.

    ``body`` has the call in ``line`` and the proper answer in ``super().answer(line)``.
    """
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *sys.path]))
    monkeypatch.chdir(tmp_path)
    started = dict(fleets._fleets)

    def make(body: str) -> str:
        file = tmp_path / "hostile.py"
        file.write_text(SERVER.format(body="\n        ".join(body.splitlines())), encoding="utf-8")
        return f"exec:{shlex.join([sys.executable, str(file)])}"

    yield make
    for key in fleets._fleets.keys() - started.keys():
        fleets._fleets.pop(key).close()
