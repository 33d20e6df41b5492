"""A closed engine is let go of: a campaign makes hundreds of thousands of them in one process."""

from __future__ import annotations

import gc

import pytest

from conformance.engines import EngineNotFound, load
from conformance.execute import open_nearest
from conformance.operations import Add
from conformance.protocol import AdapterError, ConfigRefused, EngineConfig

CONFIG = EngineConfig(num_blocks=8, block_size=4, max_num_seqs=2, max_model_len=16, max_num_batched_tokens=16)
ENGINES = 20


def served_and_closed(name: str) -> None:
    try:
        session = open_nearest(load(name).factory, CONFIG)
    except (AdapterError, ConfigRefused, EngineNotFound, ModuleNotFoundError) as error:
        pytest.skip(f"{name} is not to be had here: {error}")
    session.run([Add(prompt_len=6, max_tokens=3), Add(prompt_len=5, max_tokens=4)])
    session.finish()


def objects() -> int:
    gc.collect()
    return len(gc.get_objects())


@pytest.mark.parametrize(
    "name", ["reference", "lmdeploy", "nano-vllm", "sglang", "smol-vllm", "transformers", "vllm-v0", "vllm-v1"]
)
def test_nothing_of_a_closed_engine_lives_on(name: str) -> None:
    for _ in range(3):  # what is made once
        served_and_closed(name)
    before = objects()
    for _ in range(ENGINES):
        served_and_closed(name)
    assert objects() - before < 5 * ENGINES
