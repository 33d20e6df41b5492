"""The fuzzer on one engine: ``pytest --pyargs fuzz --engine NAME``, in parallel with ``-n``.

First the corpus, then the Hypothesis machine and a seeded campaign, each in several parts of the swarm.
Known failures of the engine (see `conformance.expectations`) are not reported.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from conformance.engines import EngineNotFound, load, option_for
from conformance.execute import execute, probe
from conformance.expectations import for_engine
from conformance.plugin import engine_name
from conformance.protocol import AdapterError, Capabilities, ConfigRefused, EngineConfig, EngineFactory
from conformance.requirements import load as load_requirements
from conformance.settings import parse_settings
from conformance.trace import read_trace
from conformance.watchdog import Watchdog
from fuzz.corpus import corpus
from fuzz.driver import Driver, campaign
from fuzz.findings import keep
from fuzz.machine import Failure, machine_for, run_machine
from fuzz.shrink import Shrunk

CAMPAIGN_STEPS = 5000
FINDINGS = Path("kvconform-findings")
SLICES: dict[str, dict[str, Any]] = {
    "whole-swarm": {},
    "plain": {"enable_prefix_caching": False, "enable_chunked_prefill": False, "pipeline_depth": 1},
    "prefix-caching": {"enable_prefix_caching": True},
    "chunked-prefill": {"enable_chunked_prefill": True},
    "one-block-per-sequence": {"block_size": 16, "max_model_len": 16},
}
"""Parts of the swarm, so that workers share them out and each gets its examples."""


class Subject:
    """The engine under test, and what is judged of it."""

    def __init__(self, config: pytest.Config) -> None:
        settings, pinned = parse_settings(config.getoption("kv_preset"), config.getoption("kv_set"))
        self.name = engine_name(config)
        self.pinned = {name: getattr(settings, name) for name in sorted(pinned)}
        self.factory: EngineFactory = load(self.name, validate_wire=config.getoption("kv_validate_wire")).factory
        self.capabilities: Capabilities = probe(self.factory, EngineConfig(**self.pinned), self.pinned)
        self.expectations = for_engine(self.name)
        self.judged = frozenset(load_requirements()) - self.expectations.fuzzed(self.capabilities.version)
        self.watchdog = Watchdog()
        self.seed: int = config.getoption("kv_seed")

    def pins(self, part: str) -> dict[str, Any]:
        """The pinned fields of a part of the swarm; skips when the engine does not declare what it needs."""
        pins = {**SLICES[part], **self.pinned}
        missing = EngineConfig(**pins).features_needed() - self.capabilities.features
        if missing:
            pytest.skip(f"UNSUPPORTED: {self.name} does not declare {', '.join(sorted(missing))}")
        return pins

    def fail(self, shrunk: Shrunk, seed: int | None) -> None:
        """Keep the finding as a trace and a ready test, and fail with the commands that show it again."""
        kept = keep(self.factory, self.name, shrunk, FINDINGS, seed=seed, watchdog=self.watchdog)
        pytest.fail(
            f"{shrunk.violation}\n  replay   kvconform replay {kept.trace}{option_for(self.name)}\n"
            f"  explain  kvconform explain {kept.trace}\n  test     pytest {kept.test}\n\n"
            f"{kept.test.read_text(encoding='utf-8')}",
            pytrace=False,
        )


@pytest.fixture(scope="session")
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    """The engine that ``--engine`` names."""
    try:
        made = Subject(request.config)
    except (EngineNotFound, ConfigRefused) as error:
        pytest.exit(str(error), returncode=pytest.ExitCode.USAGE_ERROR)
    yield made
    made.watchdog.stop()


@pytest.mark.parametrize("path", corpus(), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_corpus(subject: Subject, path: Path) -> None:
    """What once broke an engine holds on this one, as far as it accepts the configuration."""
    trace = read_trace(path)
    config = trace.header.config
    if trace.header.engine != subject.name:
        options = subject.pinned.get("engine_options", {})  # those of the trace are another engine's words
        config = msgspec.structs.replace(config, engine_options=options)
    try:
        known = subject.expectations.applying(probe(subject.factory, config, EngineConfig.__struct_fields__))
    except ConfigRefused as refusal:
        pytest.skip(f"refused: {refusal}")
    execution = execute(
        subject.factory,
        config,
        trace.operations,
        judge=subject.judged - {entry.requirement for entry in known},
        watchdog=subject.watchdog,
    )
    if execution.refused is not None:
        pytest.skip(f"refused: {execution.refused}")
    assert not execution.violations, (
        f"{execution.violations[0]}\n  replay   kvconform replay {path} --engine {shlex.quote(subject.name)}"
    )


@pytest.mark.parametrize("part", SLICES)
def test_machine(subject: Subject, part: str) -> None:
    """The Hypothesis machine."""
    try:
        machine = machine_for(
            f"{subject.name}-{part}",
            subject.factory,
            judged=subject.judged,
            expectations=subject.expectations,
            pinned=subject.pins(part),
            watchdog=subject.watchdog,
        )
    except ConfigRefused as refusal:
        pytest.skip(f"refused: {refusal}")
    try:
        run_machine(machine)
    except Failure as failure:
        subject.fail(failure.shrunk, None)


@pytest.mark.parametrize("part", SLICES)
def test_campaign(subject: Subject, part: str) -> None:
    """The seeded driver."""
    pins = subject.pins(part)
    driver = Driver(
        subject.factory,
        subject.capabilities,
        seed=subject.seed,
        pinned=pins,
        watchdog=subject.watchdog,
        expectations=subject.expectations,
    )
    try:
        state = campaign(driver, steps_max=CAMPAIGN_STEPS, judged=subject.judged)
    except AdapterError as error:
        pytest.skip(f"refused: {error}")
    for discovery in state.discoveries.values():
        subject.fail(driver.shrink(discovery), driver.seed)
