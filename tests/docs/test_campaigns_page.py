"""The page of campaigns: made from event files, and of what is published nothing is left unknown."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from conformance.protocol import EngineConfig
from conformance.reports.events import ColumnClosed, ColumnOpened, FindingKept, event_file

ROOT = Path(__file__).parents[2]


@pytest.fixture
def campaigns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("campaigns_page", ROOT / "benchmarks" / "campaigns.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "campaigns_page", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "RECORDS", tmp_path / "campaigns.json")
    monkeypatch.setattr(module, "PAGE", tmp_path / "campaigns.md")
    module.RECORDS.write_text("[]")
    return module


def hunt(path: Path, *known: str, seed: int = 1, steps: int = 2000) -> str:
    """The events of a campaign that broke PRE-1 once for each of ``known``."""
    config = EngineConfig(scheduling_policy="priority")
    with event_file(path, "fuzz", seed=seed) as events:
        events.add(ColumnOpened(column="e 1", engine="e", version="1", config=config, pinned=("scheduling_policy",)))
        for one in known:
            events.add(FindingKept(column="e 1", requirement="PRE-1", level="MUST", message="", known=one))
        events.add(ColumnClosed(column="e 1", status="known", runs=30, steps=steps))
    return str(path)


def test_a_later_campaign_takes_the_place_of_an_earlier_one(campaigns: ModuleType, tmp_path: Path) -> None:
    assert campaigns.main([hunt(tmp_path / "a.jsonl", "a reason", "another")]) == 0
    assert "| e 1 | `scheduling_policy=priority` | 1 | 2,000 | 30 | PRE-1 2 | none |" in campaigns.PAGE.read_text()
    assert campaigns.main([hunt(tmp_path / "b.jsonl", seed=2, steps=9000)]) == 0
    assert "1 campaign, 9,000 steps" in campaigns.PAGE.read_text()


def test_a_finding_that_nobody_knows_is_named(
    campaigns: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert campaigns.main([hunt(tmp_path / "a.jsonl", "", "a reason")]) == 1
    assert "e 1, seed 1: not known: PRE-1" in capsys.readouterr().err
    assert "| PRE-1 2 | PRE-1 |" in campaigns.PAGE.read_text()


def test_a_file_of_something_else_is_refused(
    campaigns: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with event_file(tmp_path / "check.jsonl", "check", seed=1):
        pass
    assert campaigns.main([str(tmp_path / "check.jsonl")]) == 2
    assert "expected the events of `kvconform fuzz`, got those of check" in capsys.readouterr().err


def test_the_published_page_is_that_of_the_records_and_knows_every_finding(campaigns: ModuleType) -> None:
    kind: Any = list[campaigns.Campaign]  # type: ignore[name-defined]  # it is loaded by path
    records = msgspec.json.decode((ROOT / "docs" / "campaigns.json").read_bytes(), type=kind)
    assert records and not [one for one in records if one.unknown]
    assert campaigns.page(records) == (ROOT / "docs" / "reference" / "campaigns.md").read_text(encoding="utf-8")
