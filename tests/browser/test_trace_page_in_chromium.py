"""The trace page in a real browser: keys, hover, pin, filter, dark mode, and how fast a large one answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from conformance.operations import Add, Operation, Step
from conformance.protocol import EngineConfig
from conformance.reports.trace_page import trace_page
from samples import recorded, trace_page_of_a_finding

pytest_plugins = ("chromium",)

Visit = Callable[..., Any]


@pytest.fixture(scope="module")
def finding(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trace_page_of_a_finding(tmp_path_factory.mktemp("page"))


def cell(page: Any) -> str:
    text: str = page.locator("#cell").inner_text()
    return text


def pixels(page: Any, canvas: str) -> str:
    data: str = page.evaluate(f"document.getElementById('{canvas}').toDataURL()")
    return data


def settle(page: Any) -> None:
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


def test_it_opens_at_the_violation(visit: Visit, finding: Path) -> None:
    page = visit(finding)
    assert cell(page).startswith("step 1, block 3")
    assert "violated here: PRE-1" in cell(page)
    assert page.locator("#operations li[aria-current=true]").inner_text().endswith("drain")


def test_keys_step_through_steps_and_blocks(visit: Visit, finding: Path) -> None:
    page = visit(finding)
    for key, start in [
        ("ArrowRight", "step 2, block 3"),
        ("ArrowDown", "step 2, block 4"),
        ("ArrowLeft", "step 1, block 4"),
        ("ArrowUp", "step 1, block 3"),
        ("End", "step 16, block 3"),
        ("ArrowRight", "step 16, block 3"),
        ("Home", "step 0, block 3"),
        ("PageDown", "step 10, block 3"),
        ("v", "step 1, block 3"),
    ]:
        page.keyboard.press(key)
        assert cell(page).startswith(start), key


def test_hovering_tells_who_holds_the_cell(visit: Visit, finding: Path) -> None:
    page = visit(finding)
    box = page.locator("#blocks").bounding_box()
    view = page.evaluate("kvconform.view")
    page.mouse.move(box["x"] + 54 + 0.5 * view["cw"], box["y"] + 18 + 0.5 * view["ch"])
    assert cell(page).startswith("step 0, block 0\nheld by r0\npositions 0 to 3")
    assert "written in this step" in cell(page)


def test_pinning_a_request_or_a_block_greys_the_rest(visit: Visit, finding: Path) -> None:
    page = visit(finding)
    page.keyboard.press("Home")
    settle(page)
    plain = pixels(page, "blocks")
    page.keyboard.press("Enter")
    settle(page)
    assert page.locator("#status").inner_text() == "r1 pinned"
    assert pixels(page, "blocks") != plain
    page.keyboard.press("Escape")
    settle(page)
    assert pixels(page, "blocks") == plain
    box = page.locator("#blocks").bounding_box()
    page.mouse.click(box["x"] + 20, box["y"] + 18 + 2.5 * page.evaluate("kvconform.view")["ch"])
    assert page.locator("#status").inner_text() == "block 2 pinned"


def test_the_filter_leaves_the_requests_that_are_named(visit: Visit, finding: Path) -> None:
    page = visit(finding)
    settle(page)
    plain = pixels(page, "lanes")
    page.fill("#filter", "r0 r3")
    settle(page)
    assert page.locator("#status").inner_text() == "only 2 of 4 requests"
    assert pixels(page, "lanes") != plain


def test_dark_follows_the_system_and_the_button(visit: Visit, finding: Path) -> None:
    light, dark = visit(finding), visit(finding, color_scheme="dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    assert light.evaluate(ground) == "rgb(255, 255, 255)"
    assert dark.evaluate(ground) != light.evaluate(ground)
    dark.click("#theme")
    assert dark.evaluate(ground) == "rgb(255, 255, 255)"


def test_it_prints_without_its_tools(visit: Visit, finding: Path) -> None:
    page = visit(finding)
    page.emulate_media(media="print")
    assert not page.locator(".tools").is_visible()
    assert page.locator("#blocks").is_visible()
    assert page.pdf()[:5] == b"%PDF-"


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of 5,000 operations and steps on 1,024 blocks."""
    random = Random(1)
    operations: list[Operation] = []
    for _ in range(2500):
        operations += [Add(random.randint(1, 120), random.randint(1, 100)), Step(2)]
    config = EngineConfig(
        num_blocks=1024, max_num_seqs=64, max_model_len=256, max_num_batched_tokens=4096, enable_prefix_caching=True
    )
    path = tmp_path_factory.mktemp("page") / "large.html"
    path.write_text(trace_page(recorded(operations, config)), encoding="utf-8")
    return path


def test_where_cells_are_thinner_than_a_pixel_they_keep_their_colours(visit: Visit, large: Path) -> None:
    page = visit(large)
    # How many of the eight colours of requests are seen in full in the picture of the blocks.
    colours = """
        (() => {
          kvconform.drawNow();
          const canvas = document.getElementById("blocks"), copy = document.createElement("canvas");
          copy.width = canvas.width; copy.height = canvas.height;
          const pen = copy.getContext("2d", { willReadFrequently: true });
          pen.drawImage(canvas, 0, 0);
          const bytes = pen.getImageData(0, 0, copy.width, copy.height).data, counts = {};
          for (let i = 0; i < bytes.length; i += 4) {
            const hex = [0, 1, 2].map((channel) => bytes[i + channel].toString(16).padStart(2, "0")).join("");
            counts[hex] = (counts[hex] || 0) + 1;
          }
          const palette = ["0072b2", "e69f00", "009e73", "cc79a7", "56b4e9", "d55e00", "b8a900", "7d7d7d"];
          return palette.filter((hex) => counts[hex] > 20).length;
        })()
    """
    page.keyboard.press("0")
    assert page.evaluate("kvconform.view.cw") < 1
    assert page.evaluate(colours) == 8
    page.keyboard.press("Enter")
    assert page.locator("#status").inner_text().endswith(" pinned")
    assert page.evaluate(colours) == 1
    page.keyboard.press("Escape")
    assert page.evaluate(colours) == 8


def test_five_thousand_steps_of_a_thousand_blocks_draw_little_for_a_key(visit: Visit, large: Path) -> None:
    page = visit(large)
    page.keyboard.press("0")
    settle(page)
    counted = """
        (() => {
          let rectangles = 0;
          const original = CanvasRenderingContext2D.prototype.fillRect;
          CanvasRenderingContext2D.prototype.fillRect = function (...box) {
            rectangles++;
            return original.apply(this, box);
          };
          const began = performance.now();
          kvconform.step("KEY");
          const took = performance.now() - began;
          CanvasRenderingContext2D.prototype.fillRect = original;
          return [rectangles, took];
        })()
    """
    # What a key costs is bounded by what it draws; the times are printed for who reads along.
    for key in ("ArrowRight", "PageDown", "Enter", "+"):
        rectangles, took = page.evaluate(counted.replace("KEY", key))
        print(f"{key}: {rectangles:,} rectangles, {took:.0f} ms")  # noqa: T201
        assert rectangles < 3_000, key
