"""What the suite asserts of a Neuron device and of who serves on it: 34 assertions, as data.

As a command it keeps their page in step with the data::

    python -m neuron_tests.assertions --write docs/reference/neuron-assertions.md
    python -m neuron_tests.assertions --check docs/reference/neuron-assertions.md

``--check`` exits with 1 when the page differs from what ``--write`` would put there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

Kind: TypeAlias = Literal["emulated", "hardware"]


class Assertion(NamedTuple):
    """One assertion. ``number`` is stable; ``broken_by`` names what has been seen to make its test fail."""

    number: int
    title: str
    why: str
    kinds: tuple[Kind, ...]
    where: str
    """Why it runs there and nowhere else."""
    broken_by: tuple[str, ...]

    @property
    def runs_on(self) -> str:
        """The column of the table."""
        return "both" if len(self.kinds) == 2 else self.kinds[0]  # noqa: PLR2004 - of two kinds


_BOTH: tuple[Kind, ...] = ("emulated", "hardware")
_HARDWARE: tuple[Kind, ...] = ("hardware",)
_EMULATED: tuple[Kind, ...] = ("emulated",)

_ROWS = (
    Assertion(
        1,
        "At concurrency N, the batch size, every prompt is prefilled once and nobody is preempted",
        "vLLM issue 8007, by counting prefills and not by the clock",
        _BOTH,
        "scheduler and device together",
        ("touched blocks counted",),
    ),
    Assertion(
        2,
        "The same with N = 1",
        "every token was a prefill there",
        _BOTH,
        "scheduler and device together",
        ("touched blocks counted",),
    ),
    Assertion(
        3,
        "At full load every decode call has N rows",
        "N - 1 rows and one recompute look alike from outside",
        _BOTH,
        "scheduler and device together",
        ("touched blocks counted",),
    ),
    Assertion(
        4,
        "Greedy tokens are those of Hugging Face in float32 on the CPU, alone and in a full batch",
        "the truth everything else leans on; lines that leak into each other",
        _BOTH,
        "float32 without auto-cast is exact enough on both",
        ("lines-leak", "prefill-touches-next-line", "rows given to the wrong requests"),
    ),
    Assertion(
        5,
        "A short request on the line of a long one gets the tokens of a fresh line",
        "rows of the former holder must be masked",
        _BOTH,
        "the mask is part of the graph",
        ("stale-rows-visible",),
    ),
    Assertion(
        6,
        "A long request on the line of a short one gets the tokens of a fresh line",
        "a prefill writes its whole bucket, and decodes go on from there",
        _BOTH,
        "the write is part of the graph",
        ("prefill-truncated",),
    ),
    Assertion(
        7,
        "Line numbers lie in [0, N) and differ within a call, whatever the block ids",
        "line N aliases line 0 in a prefill and nothing says so",
        _BOTH,
        "read off the calls",
        ("block ids as lines",),
    ),
    Assertion(
        8,
        "A full decode with lines in any order gives each request its own row",
        "SDK 2.19 returned full batches by line (transformers-neuronx issue 94)",
        _BOTH,
        "host code of transformers-neuronx, emulated in both forms",
        ("rows not sorted on a device of the old order", "rows given to the wrong requests"),
    ),
    Assertion(
        9,
        "A one-token prompt changes no other request",
        "an input of width 1 takes the decode route and overwrites position 0 of all other lines",
        _BOTH,
        "deduced from source: hardware has to confirm it",
        ("one-token prompts not widened", "prefill-touches-next-line"),
    ),
    Assertion(
        10,
        "Every live line is in every decode call, in random workloads too",
        "a line left out loses its position 0",
        _BOTH,
        "read off the calls; random workloads are few and derandomised on hardware",
        ("a live line left out",),
    ),
    Assertion(
        11,
        "Leaving out a live line on purpose does damage it",
        "shows that 10 is needed, and tells if that ever changes",
        _BOTH,
        "deduced from source: hardware has to confirm it",
        ("inactive-lines-idle",),
    ),
    Assertion(
        12,
        "Prompts of bucket - 1, bucket and bucket + 1 tokens are right, and so are two that end at a bucket together",
        "the padding step is skipped at the exact size",
        _BOTH,
        "host code and graphs",
        ("full-bucket-off-by-one", "full-bucket-shared-end"),
    ),
    Assertion(
        13,
        "Decoding from one token bucket into the next is right",
        "the graphs share one cache",
        _BOTH,
        "graphs",
        ("token-bucket-loses-cache",),
    ),
    Assertion(
        14,
        "A prompt longer than the largest context bucket is refused before the device, and serving goes on",
        "an assertion inside transformers-neuronx ends the engine",
        _BOTH,
        "the refusal is ours, the going on is the device's",
        ("prompts not checked",),
    ),
    Assertion(
        15,
        "A prompt that fills its line gets 1 token, one shorter 2, one longer is refused",
        "no second block can exist",
        _BOTH,
        "the last position of the last bucket is used",
        ("one position too many",),
    ),
    Assertion(
        16,
        "Of N + 2 requests two wait, in order, and each starts the step after one has finished",
        "queueing in place of recompute",
        _BOTH,
        "scheduler and device together",
        ("touched blocks counted", "lines never freed"),
    ),
    Assertion(
        17,
        "After an abort in mid-decode the line is free in the next step, and survivors and successor are right",
        "this is how lines get out of order",
        _BOTH,
        "scheduler and device together",
        ("lines never freed", "partial-rows-packed"),
    ),
    Assertion(
        18,
        "An abort while waiting, and one in the step of the prefill, leak no line",
        "a leaked line is a batch size lost for good",
        _BOTH,
        "scheduler and device together",
        ("lines never freed",),
    ),
    Assertion(
        19,
        "N requests take at most 1.05 times the steps of N - 1; on hardware at least 0.95 times the tokens per second",
        "what users see of issue 8007",
        _BOTH,
        "steps on both, the clock on hardware alone",
        ("touched blocks counted",),
    ),
    Assertion(
        20,
        "A decode step takes as long with one live row as with N, within 20 %",
        "shapes are static: anything else is hidden work",
        _HARDWARE,
        "an emulator has no time of its own",
        ("time grows with rows",),
    ),
    Assertion(
        21,
        "Nothing is compiled after the graphs were built",
        "a shape that leaks costs minutes in service",
        _BOTH,
        "the ledger of the emulator; the compile cache and the process table on hardware",
        ("late-compile",),
    ),
    Assertion(
        22,
        "Another process with a warm cache starts without compiling",
        "what a restart costs",
        _HARDWARE,
        "there is no compile cache elsewhere",
        ("cache not shared",),
    ),
    Assertion(
        23,
        "The same workload gives the same tokens twice",
        "determinism",
        _BOTH,
        "scheduler and device together",
        ("nondeterministic",),
    ),
    Assertion(
        24,
        "Requests of different lengths in one batch each get their own length and tokens",
        "which row is whose, as the batch thins out",
        _BOTH,
        "scheduler and device together",
        ("partial-rows-packed", "rows given to the wrong requests"),
    ),
    Assertion(
        25,
        "n > 1, swap, lookahead, chunked prefill, prefix caching and pipelining are refused at the door",
        "each would crash or corrupt later",
        _BOTH,
        "no device call is made",
        ("configuration not checked",),
    ),
    Assertion(
        26,
        "A block size other than max_model_len is refused, and so is a missing max_model_len",
        "vLLM kept a block size of 16 with device=auto and failed at the first long request",
        _EMULATED,
        "no device call is made",
        ("configuration not checked",),
    ),
    Assertion(
        27,
        "100 and 256 requests run at once on as many lines",
        "a watermark of 1 % keeps one or two of them out",
        _EMULATED,
        "compiling that many lines tells nothing of the device",
        ("watermark of 1 %",),
    ),
    Assertion(
        28,
        "A prefill on line N fails with status 1006, or overwrites line 0 alone",
        "which of them the hardware does is open",
        _BOTH,
        "on hardware only with `--neuron-destructive`, last, in a process of its own: it may wedge the core",
        ("prefill-touches-next-line",),
    ),
    Assertion(
        29,
        "There are cores enough, and a second process that wants them fails and harms nobody",
        "cores are reserved by process",
        _HARDWARE,
        "there are no cores elsewhere",
        ("too few cores", "cores shared"),
    ),
    Assertion(
        30,
        "Sampling on the device with top_k = 1 gives the host's argmax",
        "the second way to a token",
        _BOTH,
        "a graph of its own",
        ("samples-second-best",),
    ),
    Assertion(
        31,
        "After a reset the device answers as it did at first, also from rows nobody wrote since",
        "tests share one model",
        _BOTH,
        "the runtime writes the zeros",
        ("reset-keeps-rows",),
    ),
    Assertion(
        32,
        "With exact accounting N blocks suffice; counting touched blocks preempts with N and not with N + 1",
        "shows that the spare block is a workaround",
        _EMULATED,
        "a matter of the scheduler; 1 to 3 show it on hardware",
        ("touched blocks counted",),
    ),
    Assertion(
        33,
        "A decode step traced by hand leaves the cache of an inactive line as it is, bit by bit, and computes what the "
        "CPU does",
        "compiler, runtime and device by themselves",
        _BOTH,
        "torch_neuronx.trace on hardware, torch.jit.trace elsewhere",
        ("inactive line written",),
    ),
    Assertion(
        34,
        "The packages are the pinned ones, and no placeholders",
        "the public index has packages of the same names that install and cannot be imported",
        _HARDWARE,
        "they are installed there alone",
        ("another release", "a placeholder"),
    ),
)

ASSERTIONS: dict[int, Assertion] = {row.number: row for row in _ROWS}
"""By number."""

HARDWARE_ORDER = (34, 29, 33, 4)
"""First on hardware, in this order: what makes everything after it pointless when it fails. 28 comes last."""

LAST = 28


def hardware_rank(number: int) -> tuple[int, int]:
    """Sort key of the tests on hardware."""
    if number == LAST:
        return (2, number)
    return (0, HARDWARE_ORDER.index(number)) if number in HARDWARE_ORDER else (1, number)


def render() -> str:
    """The page: one table."""
    lines = [
        "<!-- Written by `python -m neuron_tests.assertions`. -->",
        "",
        "# Assertions of the Neuron suite",
        "",
        "N is the number of lines, the batch size the device was compiled for.",
        "Each assertion is one test, and the same body runs on both devices: `pytest --pyargs neuron_tests` on the",
        "emulated one, with `-m neuron` on hardware ([how to](../how-to/run-on-inf2.md)).",
        "The last column names what has been seen to break the test: faults of the emulated device (`like-this`),",
        "and others planted in the runner, the engine or the machine.",
        "",
        "| # | assertion | why | runs on | because | broken by |",
        "|---|---|---|---|---|---|",
        *(
            f"| {row.number} | {row.title} | {row.why} | {row.runs_on} | {row.where} | "
            f"{', '.join(map(_shown, row.broken_by))} |"
            for row in _ROWS
        ),
        "",
        f"Order on hardware: {', '.join(map(str, HARDWARE_ORDER))}, the others by number, and {LAST} last.",
    ]
    return "\n".join(lines) + "\n"


def _shown(name: str) -> str:
    return name if " " in name else f"`{name}`"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check the page; returns the exit code: 0 written or equal, 1 the page differs."""
    parser = argparse.ArgumentParser(prog="python -m neuron_tests.assertions", description="The page of assertions.")
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", type=Path, metavar="FILE", help="write the page to FILE")
    action.add_argument("--check", type=Path, metavar="FILE", help="exit with 1 when FILE is not up to date")
    options = parser.parse_args(arguments)
    if options.write is not None:
        options.write.write_text(render(), encoding="utf-8")
        return 0
    page: Path = options.check
    if page.exists() and page.read_text(encoding="utf-8") == render():
        return 0
    sys.stderr.write(f"{page} is out of date: run python -m neuron_tests.assertions --write {page}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
