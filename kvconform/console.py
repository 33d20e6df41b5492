"""What a person sees: tables on a terminal, plain lines elsewhere. Rendering only; nothing is decided here."""

from __future__ import annotations

import shlex
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from conformance.engines import option_for
from conformance.operations import Operation, describe
from conformance.protocol import EngineConfig
from conformance.violations import Violation
from fuzz.driver import Campaign, Discovery
from fuzz.findings import Kept

INDENT = "    "


def make_console(*, stderr: bool = False) -> Console:
    """A console that honours NO_COLOR and, without a terminal, keeps lines whole (no wrapping, no markup)."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else 10_000
    return Console(stderr=stderr, width=width, highlight=False, soft_wrap=not stream.isatty())


def wrapped(console: Console, text: str, indent: str = "") -> None:
    """Print ``text`` folded to the terminal; one line where there is none."""
    width = console.width if console.is_terminal else 10_000
    for line in text.splitlines() or [""]:
        folded = textwrap.wrap(line, width, initial_indent=indent, subsequent_indent=indent) or [""]
        for part in folded:
            console.print(part, markup=False)


def config_line(config: EngineConfig) -> str:
    """The configuration in one line: the sizes always, everything else only where it is not the default."""
    default = EngineConfig()
    sizes = ("num_blocks", "block_size", "max_num_seqs", "max_model_len", "max_num_batched_tokens")
    parts = [f"{name}={getattr(config, name)}" for name in sizes]
    parts += [
        f"{name}={getattr(config, name)}"
        for name in EngineConfig.__struct_fields__
        if name not in {*sizes, "engine_options"} and getattr(config, name) != getattr(default, name)
    ]
    parts += [f"engine_options.{name}={value}" for name, value in sorted(config.engine_options.items())]
    return " ".join(parts)


def operation_lines(operations: list[Operation]) -> list[str]:
    """The operations as numbered phrases."""
    if not operations:
        return ["none: it fails before any request is added"]
    return [f"{number}. {describe(operation)}" for number, operation in enumerate(operations, 1)]


def print_violation(console: Console, violation: Violation, level: str = "") -> None:
    """One violation: the requirement, what happened, expected and got."""
    head = f"{violation.requirement} {level}".strip()
    wrapped(console, f"{head}: {violation.message}")
    wrapped(console, f"expected {violation.expected}", INDENT)
    wrapped(console, f"got      {violation.got}", INDENT)


def print_kept(console: Console, kept: Kept, level: str, found: str) -> None:
    """A finding with its shortest sequence of requests and the commands that show it again."""
    print_violation(console, kept.shrunk.violation, level)
    console.print(f"{INDENT}shortest sequence of requests:", markup=False)
    for line in operation_lines(kept.shrunk.operations):
        wrapped(console, line, INDENT * 2)
    wrapped(console, f"with {config_line(kept.shrunk.config)}", INDENT)
    wrapped(
        console,
        f"{found}; shrunk from {kept.shrunk.before} operations in {kept.shrunk.executions} executions, "
        f"failed again {kept.shrunk.stable} times of 3",
        INDENT,
    )
    others = ", ".join(dict.fromkeys(symptom.requirement for symptom in kept.symptoms))
    if others:
        wrapped(console, f"the same trace also breaks {others}", INDENT)
    console.print(f"{INDENT}replay   kvconform replay {quoted(kept.trace)}{option_for(kept.engine)}", markup=False)
    console.print(f"{INDENT}explain  kvconform explain {quoted(kept.trace)}", markup=False)
    console.print(f"{INDENT}test     pytest {quoted(kept.test)}", markup=False)
    console.print(f"{INDENT}page     {quoted(kept.page)}", markup=False)


def quoted(path: Path) -> str:
    """A path as one word of a shell command."""
    return shlex.quote(str(path))


class FuzzView:
    """Shows a hunt while it goes on: a live line on a terminal, nothing but findings elsewhere."""

    def __init__(self, console: Console, levels: dict[str, str], steps_max: int) -> None:
        self._console = console
        self._levels = levels
        self._steps_max = steps_max
        self._live: Live | None = None
        self.state: Campaign | None = None

    @contextmanager
    def shown(self) -> Iterator[FuzzView]:
        """Keep the live line up, on a terminal."""
        if not self._console.is_terminal:
            yield self
            return
        with Live(Text(""), console=self._console, refresh_per_second=8, transient=True) as live:
            self._live = live
            yield self

    def progress(self, state: Campaign) -> None:
        self.state = state
        if self._live is not None:
            self._live.update(
                Text(
                    f"{state.steps:,} of {self._steps_max:,} steps · {state.runs:,} runs · "
                    f"{len(state.discoveries)} kinds of violation"
                )
            )

    def found(self, kept: Kept, discovery: Discovery) -> None:
        found = f"found after {discovery.steps_until:,} steps, in run {discovery.run.index}"
        print_kept(self._console, kept, self._levels.get(kept.requirement, ""), found)
        self._console.print()

    def same(self, kept: Kept, discovery: Discovery) -> None:
        wrapped(
            self._console,
            f"{discovery.violation.requirement} as well: {discovery.violation.message} "
            f"(shrinks to the same trace, {kept.trace.name})",
        )
        self._console.print()
