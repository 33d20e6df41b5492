"""A headless Chromium from the system's packages: no browser is downloaded."""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

REQUIRED = "KVCONFORM_REQUIRE_BROWSER"
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def missing(reason: str) -> NoReturn:
    """Skip with the reason; fail where the browser was promised."""
    if os.environ.get(REQUIRED):
        pytest.fail(f"{REQUIRED} is set, but {reason}", pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    executable = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if executable is None:
        missing("there is no Chromium on PATH (Debian: apt-get install chromium)")
    try:
        from playwright.sync_api import sync_playwright  # noqa: PLC0415
    except ModuleNotFoundError:
        missing("playwright is not installed (pip install playwright)")
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=executable, args=list(ARGUMENTS))
        yield running
        running.close()


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Any]]:
    """Open a file; the test fails when the page says anything on the console or asks the network for anything."""
    said: list[str] = []
    contexts: list[Any] = []

    def open_page(path: Path, **options: Any) -> Any:
        context = browser.new_context(viewport={"width": 1400, "height": 900}, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: None if request.url.startswith("file:") else said.append(request.url))
        page.goto(path.as_uri())
        page.wait_for_function("window.kvconform !== undefined")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert said == []


@pytest.fixture(scope="module")
def axe() -> Any:
    """The accessibility rules of axe-core."""
    try:
        return importlib.import_module("axe_playwright_python.sync_playwright").Axe()
    except ModuleNotFoundError:
        return missing("axe-core is not installed (pip install axe-playwright-python)")
