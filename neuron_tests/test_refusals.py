"""What a fixed batch of lines cannot serve is refused at the door, with the reason."""

from __future__ import annotations

from typing import Any

import pytest

from neuron_tests.rig import Rig
from reference_engine.config import ConfigError
from reference_engine.engine import RequestError

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"preemption_mode": "swap", "num_swap_blocks": 4}, "preemption_mode = 'swap': must be recompute"),
    ({"num_swap_blocks": 4}, "num_swap_blocks = 4: must be 0"),
    ({"num_lookahead_slots": 4}, "num_lookahead_slots = 4: must be 0"),
    ({"enable_chunked_prefill": True}, "enable_chunked_prefill = True: must be false"),
    ({"enable_prefix_caching": True}, "enable_prefix_caching = True: must be false"),
    ({"pipeline_depth": 2}, "pipeline_depth = 2: must be 1"),
    ({"sliding_window": 16, "null_block": True}, "sliding_window = 16: must be None"),
    ({"max_num_seqs": 5, "num_blocks": 5}, "max_num_seqs = 5: the device was compiled for 4 lines"),
]


@pytest.mark.assertion(25)
@pytest.mark.parametrize(("fields", "said"), REFUSED, ids=[said.partition(" ")[0] for _, said in REFUSED])
def test_a_feature_the_device_cannot_serve_is_refused(rig: Rig, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        rig.run(**fields)


@pytest.mark.assertion(25)
def test_several_sequences_of_one_request_are_refused(rig: Rig) -> None:
    run = rig.run()
    with pytest.raises(RequestError, match="n = 2: a line cannot be copied"):
        run.ask("two", 10, 4, n=2)
    assert not run.busy


@pytest.mark.assertion(26)
@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"block_size": 16}, r"block_size = 16: must be max_model_len \(129\)"),
        ({"max_model_len": None, "block_size": 129}, "max_model_len = None: must be at least 2"),
        ({"max_model_len": 130}, "max_model_len = 130: must be at most 129"),
    ],
    ids=["block_size", "no-max_model_len", "max_model_len"],
)
def test_a_block_is_a_line_and_a_line_has_a_length(rig: Rig, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        rig.run(**fields)
