"""The event file of a hunt: a finding is held against what is known of the engine in the finding's configuration."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from by_hand import ScriptedEngine
from conformance.engines import EngineSource
from conformance.expectations import parse
from conformance.protocol import Engine, EngineConfig
from conformance.reports.events import event_file, read_run
from conformance.violations import Violation
from kvconform import fuzz_events

KNOWN = """
[[known]]
requirement = "PRE-4"
cases = ["fuzz"]
versions = "==1"
variant = "ahead*"
reason = "a reason"
link = "a link"
"""


def engine(config: EngineConfig) -> Engine:
    if config.num_blocks == 1:
        raise RuntimeError("no room")
    made = ScriptedEngine(features=frozenset())
    name = "ahead" if config.pipeline_depth > 1 else "scripted"
    made.capabilities = msgspec.structs.replace(made.capabilities, engine=name)
    return made


def finding(**config: Any) -> SimpleNamespace:
    violation = Violation(requirement="PRE-4", message="said", expected="", got="", step=0, operation=0)
    shrunk = SimpleNamespace(violation=violation, config=EngineConfig(**config), operations=[])
    return SimpleNamespace(requirement="PRE-4", identity="i", trace=Path("t"), symptoms=[], shrunk=shrunk)


def test_what_is_known_of_a_variant_is_known_where_the_finding_was_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(fuzz_events, "for_engine", lambda _: parse(KNOWN, source="known.toml"))
    source = EngineSource("scripted", "none:none")
    source._factory = engine
    hunter = SimpleNamespace(kept=[finding(pipeline_depth=2), finding(), finding(num_blocks=1)])
    declared = engine(EngineConfig()).capabilities
    with event_file(tmp_path / "events.jsonl", "fuzz", seed=1) as events:
        fuzz_events.record_hunt(events, "", source, declared, EngineConfig(), (), cast("Any", hunter), None)
    (column,) = read_run(tmp_path / "events.jsonl").columns.values()
    assert ["a reason" in one.known for one in column.findings] == [True, False, False]
