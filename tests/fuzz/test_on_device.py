"""The fuzzer on engines that run on a device of fixed batch: drawn together with what such a device serves."""

from __future__ import annotations

from collections import Counter
from random import Random

import msgspec
import pytest

from conformance.adapters.reference import make
from conformance.operations import Add, Step
from conformance.protocol import Capabilities, EngineConfig
from conformance.requirements import load
from fuzz.driver import Driver, campaign
from fuzz.swarm import ON_DEVICE, draw_config
from miniatures import broken_on_device as broken
from miniatures.on_device import OnDevice

REFERENCE = make(EngineConfig()).capabilities
DEVICE = make(EngineConfig(block_size=32, fixed_batch=True)).capabilities


def draws(capabilities: Capabilities, count: int = 400, **pinned: object) -> list[EngineConfig]:
    rng = Random(1)
    return [draw_config(rng, capabilities, pinned) for _ in range(count)]


def test_an_engine_that_can_do_without_its_device_is_drawn_with_and_without() -> None:
    share = Counter(config.fixed_batch for config in draws(REFERENCE))
    assert abs(share[True] - 400 * ON_DEVICE) < 30


@pytest.mark.parametrize("pinned", [{}, {"block_size": 6}, {"max_model_len": 10}])
def test_what_is_drawn_for_a_device_has_one_block_for_a_sequence(pinned: dict[str, int]) -> None:
    drawn = draws(REFERENCE, fixed_batch=True, **pinned)
    assert all(config.block_size == config.max_model_len for config in drawn)
    assert all(not config.features_needed() - {"priority", "watermark"} for config in drawn)
    assert len({config.max_model_len for config in drawn}) == (1 if pinned else 18)


def test_an_engine_that_is_always_on_its_device_is_never_drawn_another_way() -> None:
    for config in draws(DEVICE):
        assert config.block_size == config.max_model_len
        assert not config.features_needed() - DEVICE.features


def test_an_engine_without_a_device_draws_what_it_always_drew() -> None:
    """Seeds that are written down somewhere go on meaning the same runs."""
    plain = msgspec.structs.replace(REFERENCE, features=REFERENCE.features - {"device"})
    assert not any(config.fixed_batch for config in draws(plain))
    first = draws(plain, count=1)[0]
    assert (first.max_model_len, first.block_size, first.max_num_seqs, first.num_blocks) == (6, 2, 4, 3)


@pytest.mark.parametrize(
    ("kind", "requests"),
    [
        (broken.ForgetsWhoHasLine, 2),
        (broken.PrefillsBeforeDecodes, 2),
        (broken.TakesRowsInOrderOfLines, 3),
        (broken.HandsOverOneToken, 2),
        (broken.CompiledTooLittle, 1),
    ],
)
def test_a_fault_on_a_device_shrinks_to_the_requests_it_takes(kind: type[OnDevice], requests: int) -> None:
    """Where there are three, one of them is there to be gone by the time the others meet."""
    capabilities = kind(EngineConfig()).capabilities
    driver = Driver(kind, capabilities, seed=1, pinned={"fixed_batch": True})
    found = campaign(driver, steps_max=1500, judged=frozenset(load()))
    discovery = next(one for one in found.discoveries.values() if one.violation.requirement == kind.breaks)
    shrunk = driver.shrink(discovery)
    assert sum(isinstance(operation, Add) for operation in shrunk.operations) == requests, shrunk.operations
    assert all(isinstance(operation, Add | Step) for operation in shrunk.operations)
    assert len(shrunk.operations) <= 4
    assert shrunk.stable == 3
