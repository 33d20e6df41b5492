"""The table of docs/how-to/plan-blocks.md: the blocks that a full batch needs, one block a sequence, and why.

    python benchmarks/plan_table.py vllm-v0 block_manager=v2

prints the row of one engine, of the release that is installed. Words after the engine are options of its own. Where a
watermark keeps blocks back, a second row has none, so that it and what the append check asks for are told apart.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import msgspec

from conformance.engines import load
from conformance.planning import BlockPlan, plan_blocks
from conformance.protocol import EngineConfig
from conformance.settings import parse_settings

BATCHES = (1, 4, 8, 100, 200, 256)
LENGTH = 64
"""Of a block and of the longest sequence, in tokens: with one block a sequence, the answer does not depend on it."""
NO_WATERMARK = 0.0001
"""Of a pool of this size it is no block; 0 would leave the engine its own."""
HEAD = "| engine | " + " | ".join(f"N = {batch}" for batch in BATCHES) + " |\n|---|" + "---|" * len(BATCHES)


def cell(plan: BlockPlan) -> str:
    """The blocks needed, and what each of those beyond the batch is for."""
    if plan.needed is None:
        return "none is enough"
    spare = plan.needed - plan.tokens_need
    reserved = min(spare, plan.capabilities.reserved_blocks)
    terms = [f"{reserved} null block"] if reserved else []
    if spare > reserved:
        terms.append(f"{spare - reserved} {missing_one_earlier(plan, plan.needed - 1)}")
    return f"{plan.needed}" + (f" (+{', +'.join(terms)})" if terms else "")


def missing_one_earlier(plan: BlockPlan, num_blocks: int) -> str:
    """What goes wrong with a pool of one block less."""
    point = next(point for point in plan.curve if point.num_blocks == num_blocks)
    if point.refused or point.broken:
        return "refused" if point.refused else "broken"
    if point.first_preemption is not None:
        return "append check" if point.first_preemption.needless else "in use"
    return "watermark" if point.concurrency < point.requests else "unfinished"


def row(engine: str, config: EngineConfig, words: Sequence[str]) -> str:
    """One row of the table. Raises `ConfigRefused`."""
    cells, name = [], engine
    for batch in BATCHES:
        one = msgspec.structs.replace(config, max_num_seqs=batch, max_num_batched_tokens=batch * LENGTH)
        plan = plan_blocks(load(engine).factory, one)
        name = " ".join([engine, plan.capabilities.version, *words])
        cells.append(cell(plan))
    return f"| {name} | {' | '.join(cells)} |"


def main(engine: str, options: Sequence[str]) -> None:
    """Print the rows of ``engine``."""
    config, _ = parse_settings(None, [f"engine_options.{option}" for option in options])
    config = msgspec.structs.replace(config, block_size=LENGTH, max_model_len=LENGTH)
    words = [option.partition("=")[2] for option in options]
    print(HEAD)
    first = row(engine, config, words)
    print(first, flush=True)
    if "watermark" in first:
        print(row(engine, msgspec.structs.replace(config, watermark=NO_WATERMARK), [*words, "(no watermark)"]))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
