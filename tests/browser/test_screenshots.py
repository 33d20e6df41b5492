"""The pictures in the documentation are those of the pages as they are.

KVCONFORM_WRITE_SCREENSHOTS=1 tox run -e pages -- -k test_a_picture    # write them anew, into docs/pictures/
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from samples import conformance_page, trace_page_of_a_finding

pytest_plugins = ("chromium",)

PICTURES = Path(__file__).resolve().parents[2] / "docs" / "pictures"
WRITE = "KVCONFORM_WRITE_SCREENSHOTS"
BYTES_MAX = 150_000
SIZE = {"width": 1280, "height": 720}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    return {"trace": trace_page_of_a_finding(folder), "conformance": conformance_page(folder / "site")}


def size_of(png: bytes) -> tuple[int, int]:
    """Width and height, from the header of the file."""
    width, height = struct.unpack(">II", png[16:24])
    return width, height


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["trace", "conformance"])
def test_a_picture_of_the_page(visit: Callable[..., Any], pages: dict[str, Path], name: str, scheme: str) -> None:
    page = visit(pages[name], color_scheme=scheme)
    page.set_viewport_size(SIZE)
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    taken = page.screenshot()
    file = PICTURES / f"{name}-page-{scheme}.png"
    if os.environ.get(WRITE):
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(taken)
    kept = file.read_bytes()
    # Fonts differ from machine to machine, so it is not compared dot by dot.
    assert size_of(kept) == size_of(taken) == (SIZE["width"], SIZE["height"])
    assert len(kept) < BYTES_MAX
    assert 0.5 < len(kept) / len(taken) < 2, f"{file} shows something else by now: {WRITE}=1 writes it anew"
