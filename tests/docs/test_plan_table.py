"""The table of the page on planning is what its script measures, as far as the engine is always there."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from conformance.adapters.reference import make
from conformance.planning import plan_blocks
from conformance.protocol import EngineConfig

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "how-to" / "plan-blocks.md"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("plan_table", ROOT / "benchmarks" / "plan_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def printed(name: str) -> list[str]:
    """The cells of a row of the page."""
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith(f"| {name} |")]
    assert len(rows) == 1
    return [cell.strip() for cell in rows[0].strip("|").split("|")][1:]


@pytest.mark.parametrize("check", ["exact", "touched", "strict"])
def test_the_rows_of_the_reference_engine(script: ModuleType, check: str) -> None:
    for batch, cell in list(zip(script.BATCHES, printed(f"reference, `{check}`"), strict=True))[:3]:
        config = EngineConfig(
            block_size=script.LENGTH,
            max_model_len=script.LENGTH,
            max_num_seqs=batch,
            max_num_batched_tokens=batch * script.LENGTH,
            engine_options={"append_check": check},
        )
        assert script.cell(plan_blocks(make, config)) == cell


def test_a_watermark_and_a_null_block_are_named(script: ModuleType) -> None:
    config = EngineConfig(
        block_size=16,
        max_model_len=16,
        max_num_seqs=50,
        max_num_batched_tokens=800,
        engine_options={"null_block": True},
    )
    kept_back = msgspec.structs.replace(config, watermark=0.04)
    assert script.cell(plan_blocks(make, kept_back)) == "53 (+1 null block, +2 watermark)"
    assert script.cell(plan_blocks(make, config)) == "51 (+1 null block)"
