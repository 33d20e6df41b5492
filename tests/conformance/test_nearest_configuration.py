"""An engine that takes few configurations names the nearest one, and whoever draws or probes them goes by that."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from conformance.adapters import reference
from conformance.engines import EngineSource
from conformance.execute import open_nearest, probe
from conformance.expectations import parse
from conformance.protocol import ConfigRefused, Engine, EngineConfig, EngineFactory
from conformance.smoke import find_base
from fuzz.driver import Driver
from fuzz.machine import machine_for
from kvconform.check_command import check_engines

ROOMY = EngineConfig(num_blocks=16, max_num_seqs=4)


def insisting(config: EngineConfig) -> Engine:
    """A pool of eight blocks for every sequence, and no other."""
    if config.num_blocks != 8 * config.max_num_seqs:
        fitting = msgspec.structs.replace(config, num_blocks=8 * config.max_num_seqs)
        raise ConfigRefused(f"num_blocks = {config.num_blocks}: must be 8 * max_num_seqs", instead=fitting)
    return reference.make(config)


def never_content(config: EngineConfig) -> Engine:
    raise ConfigRefused("one more", instead=msgspec.structs.replace(config, num_blocks=config.num_blocks + 1))


class Insisting(EngineSource):
    """The same as a source."""

    def __init__(self) -> None:
        super().__init__("insisting", "tests:insisting")
        self._factory = insisting

    def resolve(self) -> EngineFactory:
        return insisting


def test_a_session_is_opened_on_the_configuration_that_the_engine_names() -> None:
    session = open_nearest(insisting, ROOMY)
    assert session.config == msgspec.structs.replace(ROOMY, num_blocks=32)
    assert probe(insisting, ROOMY) == session.capabilities


@pytest.mark.parametrize("opener", [open_nearest, probe])
def test_a_pinned_field_is_not_changed(opener: object) -> None:
    assert callable(opener)
    with pytest.raises(ConfigRefused, match="num_blocks = 16"):
        opener(insisting, ROOMY, {"num_blocks"})
    assert opener(insisting, ROOMY, {"max_num_seqs"})


@pytest.mark.parametrize("opener", [open_nearest, probe])
def test_an_engine_that_refuses_what_it_named_is_not_asked_for_ever(opener: object) -> None:
    assert callable(opener)
    with pytest.raises(ConfigRefused, match="one more"):
        opener(never_content, ROOMY)


def test_a_base_configuration_is_what_the_engine_names_and_its_smoke_test_passes() -> None:
    base, result = find_base(insisting, ROOMY)
    assert (result.status, base.num_blocks, base.max_num_seqs) == ("ok", 32, 4)
    base, result = find_base(insisting, ROOMY, {"num_blocks"})
    assert (result.status, base.num_blocks) == ("refused", 16)


def test_the_driver_and_the_machine_run_on_what_the_engine_names() -> None:
    # Options that do not go together are refused too, for which nothing is named.
    capabilities = msgspec.structs.replace(probe(insisting, ROOMY), swarm_options={})
    driver = Driver(insisting, capabilities, seed=1, steps_per_run=5)
    for index in range(5):
        run = driver.run(index)
        assert (run.refusals, run.swarm.config.num_blocks) == (0, 8 * run.swarm.config.max_num_seqs)
    machine = machine_for("insisting", insisting)()
    machine.build(seed=7)
    assert machine.config is not None
    assert machine.config.num_blocks == 8 * machine.config.max_num_seqs


@pytest.mark.parametrize(("everything", "code", "word"), [(True, 0, "skipped"), (False, 2, "refused")])
def test_a_refusal_is_an_answer_and_no_fault_of_the_adapter(
    everything: bool,  # noqa: FBT001 - a parameter of the test
    code: int,
    word: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pinned = frozenset({"num_blocks"})
    exit_code = check_engines(
        [Insisting()], ROOMY, pinned, requirements=["ACC-1"], out=tmp_path, call_seconds=0, everything=everything
    )
    printed = capsys.readouterr().out
    assert exit_code == code
    assert f"{word}: num_blocks = 16: must be 8 * max_num_seqs" in printed
    assert "smoke test" not in printed


def test_the_fuzzer_judges_what_is_known_of_scenarios_alone() -> None:
    entry = '[[known]]\nrequirement = "{}"\ncases = [{}]\nreason = "one"\nlink = "two"\n'
    known = parse(entry.format("PRE-1", '"full-batch/*"') + entry.format("PRE-2", '"fuzz"'), source="a.toml")
    assert known.fuzzed("1") == {"PRE-2"}
