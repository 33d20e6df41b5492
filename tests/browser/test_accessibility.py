"""The pages under axe-core, light and dark: nothing serious. The engine of rules comes with axe-playwright-python."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from samples import conformance_page, trace_page_of_a_finding

pytest_plugins = ("chromium",)

Visit = Callable[..., Any]
SERIOUS = {"critical", "serious"}
OPENED = {
    "trace": ["", "document.getElementById('blocks').focus()"],
    "conformance": ["", "document.querySelector('button.cell.fail').click()"],
    "track-record": [""],
}
"""What is looked at: the page as it opens, and with what a person opens first."""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    table = conformance_page(folder / "site")
    record = table.with_name("track-record.html")
    return {"trace": trace_page_of_a_finding(folder), "conformance": table, "track-record": record}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", OPENED)
def test_nothing_serious(visit: Visit, pages: dict[str, Path], axe: Any, name: str, scheme: str) -> None:
    page = visit(pages[name], color_scheme=scheme)
    for action in OPENED[name]:
        if action:
            page.evaluate(f"() => {{ {action} }}")
        found = axe.run(page).response
        assert found["passes"], "nothing was looked at"
        serious = [
            f"{rule['id']} ({rule['impact']}): {node['html']} {node['failureSummary']}"
            for rule in found["violations"]
            if rule["impact"] in SERIOUS
            for node in rule["nodes"]
        ]
        assert serious == []


def test_what_is_wrong_is_noticed(visit: Visit, pages: dict[str, Path], axe: Any) -> None:
    page = visit(pages["conformance"])
    page.evaluate("() => { document.getElementById('words').removeAttribute('aria-label');"
                  " document.getElementById('words').removeAttribute('placeholder'); }")  # fmt: skip
    assert "label" in {rule["id"] for rule in axe.run(page).response["violations"] if rule["impact"] in SERIOUS}
