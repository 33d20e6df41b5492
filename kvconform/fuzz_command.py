"""``kvconform fuzz``: hunt, say what is found as it is found, and sum up."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from rich.console import Console

from conformance.calls import ENGINE_RAISES
from conformance.engines import EngineNotFound, EngineSource, option_for
from conformance.execute import NeverBuilt, probe
from conformance.protocol import AdapterError, ConfigRefused, EngineConfig
from conformance.reports.events import EventWriter
from conformance.requirements import load as load_requirements
from conformance.watchdog import Watchdog
from conformance.wording import some
from fuzz.hunt import Hunter
from kvconform.console import FuzzView, make_console, wrapped
from kvconform.exit_codes import HOLDS, INTERRUPTED, VIOLATED
from kvconform.fuzz_events import record_hunt


def fuzz_engine(
    source: EngineSource,
    config: EngineConfig,
    pinned: Collection[str],
    *,
    seed: int,
    steps: int,
    judged: frozenset[str],
    out: Path,
    watchdog: Watchdog | None = None,
    events: EventWriter | None = None,
    label: str = "",
) -> int:
    """Hunt for so many steps and print what is found; returns the exit code. The fields in ``pinned`` are kept.

    Raises `ConfigRefused` when the engine refuses what is pinned, and `AdapterError`.
    """
    console = make_console()
    try:
        capabilities = probe(source.factory, config, pinned, watchdog)
    except (AdapterError, ConfigRefused, EngineNotFound):
        raise
    except ENGINE_RAISES:
        capabilities = NeverBuilt.capabilities  # the first run will say so
    levels: dict[str, str] = {rid: item.level for rid, item in load_requirements().items()}
    named = f"{source.name} {capabilities.version}".rstrip()
    wrapped(console, f"seed {seed}, {named}, {steps:,} steps, findings in {out}/")
    view = FuzzView(console, levels, steps)
    hunter = Hunter(
        source.name,
        source.factory,
        capabilities,
        seed=seed,
        directory=out,
        pinned={name: getattr(config, name) for name in pinned},
        judged=judged,
        watchdog=watchdog,
        listener=view,
    )
    interrupted = False
    try:
        with view.shown():
            hunter.run(steps)
    except KeyboardInterrupt:
        interrupted = True
    if events is not None:
        record_hunt(events, label, source, capabilities, config, pinned, hunter, view.state)
    _sum_up(console, view, hunter, levels, interrupted=interrupted)
    if hunter.unshrunk is not None:
        wrapped(console, f"not shrunk yet: kvconform shrink {hunter.unshrunk}{option_for(source.name)}")
    return VIOLATED if hunter.kept or hunter.unshrunk else INTERRUPTED if interrupted else HOLDS


def _sum_up(console: Console, view: FuzzView, hunter: Hunter, levels: dict[str, str], *, interrupted: bool) -> None:
    state = view.state
    done = "nothing" if state is None else f"{state.runs:,} runs, {state.steps:,} steps"
    if interrupted:
        wrapped(console, f"interrupted; what was found so far is in the files named above ({done})")
    if state is not None and state.behaviours:
        reached = ", ".join(f"{name} {count:,}" for name, count in sorted(state.behaviours.items()))
        wrapped(console, f"reached: {reached}")
    if not hunter.kept:
        wrapped(console, f"no violation in {done}")
        return
    must = sum(levels.get(kept.requirement) == "MUST" for kept in hunter.kept)
    wrapped(console, f"{some(len(hunter.kept), 'finding')} ({must} of a MUST) in {done}")
    for kept in hunter.kept:
        wrapped(console, f"{kept.requirement:7} {kept.identity}  {kept.trace}", "  ")
