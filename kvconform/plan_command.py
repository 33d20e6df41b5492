"""``kvconform plan``: how many blocks does this engine need for this batch size?"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from conformance.engines import EngineSource
from conformance.planning import BlockPlan, Point, plan_blocks
from conformance.protocol import ConfigRefused, EngineConfig
from conformance.watchdog import Watchdog
from kvconform.console import INDENT, wrapped

BAR_WIDTH = 30


def batches(config: EngineConfig, pinned: Collection[str], sizes: str) -> list[EngineConfig]:
    """A configuration for each batch size of ``sizes``, such as ``1,4,8``. Raises `ConfigRefused`.

    The token budget holds the prompts of a whole batch, unless it is pinned: what is asked for is blocks.
    """
    words = [word.strip() for word in sizes.split(",")] if sizes else [str(config.max_num_seqs)]
    for word in words:
        if not word.isdigit() or not int(word):
            raise ConfigRefused(f"{word!r}: expected batch sizes such as 1,4,8")
    found = [msgspec.structs.replace(config, max_num_seqs=int(word)) for word in words]
    if "max_num_batched_tokens" in pinned:
        return found
    return [msgspec.structs.replace(one, max_num_batched_tokens=one.max_num_seqs * one.max_model_len) for one in found]


def plan_engine(console: Console, source: EngineSource, config: EngineConfig, watchdog: Watchdog | None) -> BlockPlan:
    """Measure and print: the answer, where the blocks go, the curve, and the lines to set."""
    plan = plan_blocks(source.factory, config, watchdog=watchdog)
    name = f"{source.name} {plan.capabilities.version}"
    batch = f"max_num_seqs {config.max_num_seqs}, block_size {config.block_size}, max_model_len {config.max_model_len}"
    if plan.needed is None:
        wrapped(console, f"{name}: {batch}: no pool that was tried is enough")
    else:
        wrapped(console, f"{name}: {batch}: {plan.needed} blocks")
    for line in plan.rule:
        wrapped(console, line, INDENT)
    console.print()
    _print_curve(console, plan)
    if plan.needed is not None:
        console.print()
        wrapped(console, "to set: " + settings_line(source.name, config, plan.needed))
    return plan


def _print_curve(console: Console, plan: BlockPlan) -> None:
    console.print("  blocks  at once  preemptions  prefills   steps  steps, drawn", markup=False)
    most = max((point.steps for point in plan.curve), default=1)
    for point in plan.curve:
        mark = "*" if point.num_blocks == plan.needed else " "
        console.print(f"{mark} {point.num_blocks:>6}  {_figures(point, most)}", markup=False, no_wrap=True)


def _figures(point: Point, most: int) -> str:
    if point.refused:
        return "refused"
    if point.broken:
        return f"broken: {point.broken}"[:60]
    bar = "#" * max(1, round(BAR_WIDTH * point.steps / most))
    done = "" if point.finished == point.requests else f" ({point.finished} of {point.requests} finish)"
    return f"{point.concurrency:>7}  {point.preemptions:>11}  {point.prefills:>8}  {point.steps:>6}  {bar}{done}"


def settings_line(engine: str, config: EngineConfig, num_blocks: int) -> str:
    """The answer in the words of the engine's own configuration, where they are known, else in ours."""
    if engine.startswith("vllm"):
        return (
            f"--num-gpu-blocks-override {num_blocks} --block-size {config.block_size} "
            f"--max-num-seqs {config.max_num_seqs} --max-model-len {config.max_model_len}"
        )
    return (
        f"num_blocks={num_blocks} block_size={config.block_size} max_num_seqs={config.max_num_seqs} "
        f"max_model_len={config.max_model_len}"
    )


def picture_of(path: Path) -> Path:
    """``path``, if a picture can be drawn there: said before the work and not after it. Raises `ConfigRefused`."""
    if path.suffix not in {".png", ".svg"}:
        raise ConfigRefused(f"--plot {path}: expected a file that ends in .png or .svg, got {path.suffix or 'neither'}")
    try:
        import matplotlib  # noqa: F401, ICN001, PLC0415 - an extra
    except ModuleNotFoundError:
        raise ConfigRefused("--plot needs matplotlib: pip install 'kvconform[plots]'") from None
    return path


def plot(plans: Sequence[BlockPlan], path: Path) -> None:
    """Draw blocks -> steps and usable concurrency to a PNG or SVG file that `picture_of` let pass."""
    import matplotlib as mpl  # noqa: PLC0415 - an extra
    from matplotlib.figure import Figure  # noqa: PLC0415 - only who asks for it pays for the import

    mpl.rcParams["svg.hashsalt"] = "kvconform"  # the same picture, the same file
    figure: Any = Figure(figsize=(7, 4.5), layout="constrained")
    steps, concurrency = figure.subplots(2, 1, sharex=len(plans) == 1)
    for plan in plans:
        points = [point for point in plan.curve if not point.refused and not point.broken]
        blocks = [point.num_blocks for point in points]
        label = f"max_num_seqs {plan.config.max_num_seqs}"
        steps.plot(blocks, [point.steps for point in points], marker="o", label=label)
        concurrency.plot(blocks, [point.concurrency for point in points], marker="s", label=label)
        if plan.needed is not None:
            for axes in (steps, concurrency):
                axes.axvline(plan.needed, color="0.6", linestyle=":")
    steps.set_ylabel("steps to serve a full batch")
    concurrency.set_ylabel("sequences at once")
    concurrency.set_xlabel("blocks in the pool (dotted: enough)")
    steps.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
