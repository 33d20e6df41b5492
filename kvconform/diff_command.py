"""``kvconform diff``: the same requests on two engines, or on one under two configurations; where they part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from conformance.differential import (
    Divergence,
    Side,
    explain_divergence,
    first_divergence,
    recorded_side,
    run_side,
    shared_operations,
    shortened,
)
from conformance.engines import EngineSource, load, load_recorded
from conformance.execute import probe
from conformance.operations import Drain, Operation, describe
from conformance.protocol import Capabilities, ConfigRefused, EngineConfig
from conformance.settings import parse_settings
from conformance.trace import Trace, read_trace
from conformance.watchdog import Watchdog
from fuzz.driver import DRAWS_MAX, flatten
from fuzz.source import OperationSource
from fuzz.swarm import draw_config, draw_swarm
from kvconform.console import INDENT, config_line, make_console, wrapped
from kvconform.serve_command import ValidateOption

LABELS = "A", "B"
OPERATIONS_PER_RUN = 60
EXECUTIONS_MAX = 200
"""Comparisons spent on shortening what a seed has found."""
SAME, APART = 0, 1


def diff_command(
    trace: Annotated[Path | None, typer.Argument(help="A trace file: its requests and its configuration")] = None,
    engine: Annotated[
        list[str] | None,
        typer.Option(help="Engine A, and a second time engine B; with a trace and one engine, A is what was recorded"),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Draw configurations and requests, until the two part")] = None,
    steps: Annotated[int, typer.Option(min=1, help="With --seed: engine steps of A and B together to run")] = 20_000,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="key=value for both, as for check; repeatable")
    ] = None,
    settings_a: Annotated[list[str] | None, typer.Option("--set-a", help="key=value for A alone; repeatable")] = None,
    settings_b: Annotated[list[str] | None, typer.Option("--set-b", help="key=value for B alone; repeatable")] = None,
    call_seconds: Annotated[
        float, typer.Option("--call-seconds", min=0.0, help="Bound on one call into the engine; 0 for none")
    ] = 10.0,
    validate_wire: ValidateOption = False,
) -> None:
    """Run the same requests on two engines or configurations, and say where they part; exit 0 when they never do.

    Blocks are compared up to renaming. A trace without an engine is compared with what its own engine does now.
    """
    names = engine or []
    own = [settings_a or [], settings_b or []]
    if (trace is None) == (seed is None):
        raise ConfigRefused("nothing to compare: expected a trace, or --seed to draw requests; got neither")
    if len(names) > len(LABELS):
        raise ConfigRefused(f"--engine: expected two at most, for the two sides, got {len(names)}")
    console = make_console()
    bench = _Bench(settings or [], own, Watchdog(call_seconds_max=call_seconds) if call_seconds else None)
    if trace is not None:
        raise typer.Exit(_of_trace(console, bench, read_trace(trace), names, validate_wire=validate_wire))
    if len(names) < len(LABELS) and not any(own):
        raise ConfigRefused("two sides that are the same: expected --engine twice, or once with --set-a or --set-b")
    assert seed is not None
    bench.sources = [load(name, validate_wire=validate_wire) for name in (names * 2)[:2] or ["reference"] * 2]
    raise typer.Exit(_of_seed(console, bench, seed, steps))


class _Bench:
    """The two sides to be: their engines, and what is set for both and for each."""

    def __init__(self, settings: list[str], own: list[list[str]], watchdog: Watchdog | None) -> None:
        self.words = [[*settings, *words] for words in own]
        self.watchdog = watchdog
        self.sources: list[EngineSource] = []

    @property
    def pinned(self) -> list[dict[str, Any]]:
        """The fields that are set, for each side."""
        found = []
        for words in self.words:
            config, names = parse_settings(None, words)
            found.append({name: getattr(config, name) for name in sorted(names)})
        return found

    def configs(self, base: EngineConfig) -> list[EngineConfig]:
        """``base`` with what is set, for each side; options are added to those that ``base`` has."""
        configs = []
        for fields in self.pinned:
            options = {**base.engine_options, **fields.get("engine_options", {})}
            configs.append(msgspec.structs.replace(base, **{**fields, "engine_options": options}))
        return configs

    def capabilities(self, configs: Sequence[EngineConfig]) -> list[Capabilities]:
        """What each engine declares under its configuration. Raises `ConfigRefused`, naming the side."""
        found = []
        for label, source, config in zip(LABELS, self.sources, configs, strict=True):
            try:
                found.append(probe(source.factory, config))
            except ConfigRefused as refusal:
                raise ConfigRefused(f"{label}, {source.name}: {refusal}") from None
            missing = config.features_needed() - found[-1].features
            if missing:
                raise ConfigRefused(f"{label}, {source.name}: does not declare {', '.join(sorted(missing))}")
        return found

    def run(self, configs: Sequence[EngineConfig], operations: list[Operation]) -> list[Side]:
        """Both sides."""
        return [
            run_side(label, source.name, source.factory, config, operations, watchdog=self.watchdog)
            for label, source, config in zip(LABELS, self.sources, configs, strict=True)
        ]


def _of_trace(console: Console, bench: _Bench, trace: Trace, names: list[str], *, validate_wire: bool) -> int:
    recorded = len(names) < len(LABELS) and not any(word for words in bench.words for word in words)
    given: list[str | None] = [*names] or [None]
    bench.sources = [
        load_recorded(trace.header.engine, name, validate_wire=validate_wire) for name in (given * 2)[: len(LABELS)]
    ]
    base = trace.header.config
    if any(source.name.partition("@")[0] != trace.header.engine.partition("@")[0] for source in bench.sources):
        if base.engine_options:
            options = ", ".join(base.engine_options)
            wrapped(console, f"left out: {options}, options that are {trace.header.engine}'s own")
        base = msgspec.structs.replace(base, engine_options={})
    if recorded:
        return _report(console, [recorded_side("A", trace), _again(bench, trace, base)])
    configs = bench.configs(base)
    operations = shared_operations(trace.operations, bench.capabilities(configs), configs)
    if len(operations) < len(trace.operations):
        left_out = len(trace.operations) - len(operations)
        wrapped(console, f"left out: {left_out} operations, which need what one of the two does not declare")
    return _report(console, bench.run(configs, operations))


def _again(bench: _Bench, trace: Trace, config: EngineConfig) -> Side:
    """The engine of a trace, now: judged, and stopped, as a replay would be."""
    return run_side(
        "B",
        bench.sources[1].name,
        bench.sources[1].factory,
        config,
        trace.operations,
        judge=[finding.requirement for finding in trace.footer.violations] or None,
        stop_at_first=not trace.header.to_the_end,
        watchdog=bench.watchdog,
    )


def _report(console: Console, sides: list[Side]) -> int:
    divergence = first_divergence(*sides)
    for paragraph in explain_divergence(sides[0], sides[1], divergence):
        wrapped(console, paragraph.strip(), INDENT * (len(paragraph) > len(paragraph.lstrip())))
    return SAME if divergence is None else APART


# ------------------------------------------------------------------------------------------------- from a seed


def _of_seed(console: Console, bench: _Bench, seed: int, steps_max: int) -> int:
    wrapped(console, f"seed {seed}, {bench.sources[0].name} and {bench.sources[1].name}, {steps_max:,} steps")
    capabilities = bench.capabilities(bench.configs(EngineConfig()))
    steps, run = 0, 0
    while steps < steps_max:
        configs, operations = _drawn(bench, Random(f"{seed}:{run}"), capabilities)  # noqa: S311 - reproducible
        sides = bench.run(configs, operations)
        steps += sum(side.steps for side in sides) + 1
        divergence = first_divergence(*sides)
        if divergence is not None:
            short = shortened(operations, divergence, _compare(bench, configs), EXECUTIONS_MAX)
            wrapped(console, f"found in run {run}, shortened from {len(operations)} operations to {len(short)}:")
            for number, operation in enumerate(short, 1):
                wrapped(console, f"{number}. {describe(operation)}", INDENT)
            wrapped(console, f"with {config_line(configs[0])}", INDENT)
            return _report(console, bench.run(configs, short))
        run += 1
    wrapped(console, f"the same in {run} runs of {steps:,} steps together, up to the names of blocks")
    return SAME


def _compare(bench: _Bench, configs: Sequence[EngineConfig]) -> Callable[[list[Operation]], Divergence | None]:
    return lambda operations: first_divergence(*bench.run(configs, operations))


def _drawn(
    bench: _Bench, rng: Random, capabilities: Sequence[Capabilities]
) -> tuple[list[EngineConfig], list[Operation]]:
    """Configurations that both engines take, and operations for them. Raises `ConfigRefused` when there are none."""
    common = _common(capabilities)
    both = {name: value for name, value in bench.pinned[0].items() if bench.pinned[1].get(name) == value}
    reason = ""
    for _ in range(DRAWS_MAX):
        config = draw_config(rng, common, both)
        configs = bench.configs(config)
        try:
            declared = bench.capabilities(configs)
        except ConfigRefused as refusal:
            reason = str(refusal)
            continue
        source = OperationSource(rng, draw_swarm(rng, _common(declared), config))
        drawn = [source.draw() for _ in range(OPERATIONS_PER_RUN)]
        return configs, [*flatten(shared_operations(drawn, declared, configs)), Drain()]
    raise ConfigRefused(f"{DRAWS_MAX} drawn configurations were refused by one of the two; the last: {reason}")


def _common(capabilities: Sequence[Capabilities]) -> Capabilities:
    """What both sides can do, for the draws; options are an engine's own and are not drawn."""
    one, other = capabilities
    most = [size for size in (one.block_size_max, other.block_size_max) if size is not None]
    return msgspec.structs.replace(
        one,
        features=one.features & other.features,
        reserved_blocks=max(one.reserved_blocks, other.reserved_blocks),
        block_size_min=max(one.block_size_min, other.block_size_min),
        block_size_max=min(most, default=None),
        swarm_options={},
    )
