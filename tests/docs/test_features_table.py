"""The table of features: everything declared has states to reach, and the published page reaches all of them."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from conformance.protocol import Capabilities

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def features() -> ModuleType:
    spec = importlib.util.spec_from_file_location("features_table", ROOT / "benchmarks" / "features.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["features_table"] = module
    spec.loader.exec_module(module)
    return module


def test_what_is_declared_without_states_to_reach_is_an_error(features: ModuleType) -> None:
    known = Capabilities(engine="e", version="1", features=frozenset({"abort"}), swarm_options={"pause": ("new",)})
    assert [aspect.name for aspect in features.aspects_of(known)] == ["abort", "paused: new", "paused: all"]
    with pytest.raises(LookupError, match="no states are listed for swap, frobnicate"):
        features.aspects_of(
            Capabilities(engine="e", version="1", features=frozenset({"swap"}), swarm_options={"frobnicate": (1,)})
        )


def test_the_published_page_has_no_state_that_was_never_reached() -> None:
    page = (ROOT / "docs" / "reference" / "vllm-v1-features.md").read_text(encoding="utf-8")
    rows = [line.split("|")[4] for line in page.splitlines() if line.startswith("| ") and "states reached" not in line]
    assert len(rows) > 30
    assert not [row for row in rows if re.search(r" 0(,|\s*$)", row)]
