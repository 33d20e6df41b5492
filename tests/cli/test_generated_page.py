"""The pages that are made from the code are what their generators would write."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["generate_cli.py", "generate_api.py", "generate_engines.py"])
def test_the_pages_are_up_to_date(name: str) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs" / name), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
