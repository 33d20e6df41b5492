"""Write docs/reference/cli.md from the command line itself, so that the page cannot drift from it.

python docs/generate_cli.py            # write the page
python docs/generate_cli.py --check    # exit 1 when the page is not what would be written
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import typer.main

from conformance.settings import PRESETS
from kvconform.cli import app

PAGE = Path(__file__).parent / "reference" / "cli.md"
REPEATED = ("call_seconds", "out", "preset", "requirement", "settings", "validate_wire")
"""Parameters explained at one place only, in the order of the section *Options of several commands*."""

HEAD = """\
# Command line

This page is made from the commands themselves by `python docs/generate_cli.py`.
`kvconform COMMAND --help` shows the same on a terminal.

## Exit codes

| code | meaning |
|---|---|
| 0 | the contract holds; for `replay`, FIXED; for `fuzz`, nothing found; for `diff`, the same |
| 1 | the contract is violated; for `replay`, FAILED; for `fuzz`, something found; for `check`, stale expectations too; for `diff`, they part |
| 2 | usage or configuration: a word that is not understood, an engine that is not installed or refuses to run so |
| 3 | the suite or an adapter broke, which says nothing of the engine |
| 130 | `fuzz` was interrupted and had found nothing |

A failure that is known of the engine (`conformance/expectations/`) does not change the exit code of `check`.
A requirement that the engine's features do not reach is UNSUPPORTED, which is no failure either.

## Output

On a terminal, lines are folded and coloured, and `fuzz` shows how far it is.
Elsewhere, lines stay whole, and nothing but results is printed.
`NO_COLOR` is honoured.
Errors go to standard error, everything else to standard output.

"""

SETTINGS = """\
## Configuration in words

`--set key=value` sets one field of `EngineConfig`, and may be repeated; later words win.
A field that was set is *pinned*: `check` and `fuzz` choose the other fields and leave this one alone.
With a pinned field `check` gives the bare answer: known failures are about other configurations and are not allowed for.
`--set engine_options.NAME=value` sets an option of the engine's own; `kvconform engines` lists them.
`none` stands for a field without a value.

`--preset NAME` pins several fields:

"""


def page() -> str:
    """The whole page."""
    group: Any = typer.main.get_command(app)
    commands = sorted(group.commands.items())
    return "".join(
        [
            HEAD,
            "".join(_shared(commands)),
            SETTINGS,
            "".join(_presets()),
            *("".join(_command(name, command)) for name, command in commands),
        ]
    )


def _shared(commands: Sequence[tuple[str, Any]]) -> Iterator[str]:
    yield "## Options of several commands\n\n| option | default | meaning |\n|---|---|---|\n"
    for wanted in REPEATED:
        parameter = next(p for _, command in commands for p in command.params if p.name == wanted)
        yield _row(parameter, _default(parameter))
    yield "\n"


def _presets() -> Iterator[str]:
    yield "| preset | sets | meaning |\n|---|---|---|\n"
    for name, preset in sorted(PRESETS.items()):
        fields = " ".join(f"{field}={value}" for field, value in preset.fields.items())
        yield f"| `{name}` | `{fields}` | {preset.summary} |\n"


def _command(name: str, command: Any) -> Iterator[str]:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and p.name != "help"]
    usage = " ".join(["kvconform", name, *(["[OPTIONS]"] if options else []), *map(_usage, arguments)])
    yield f"\n## kvconform {name}\n\n{command.help}\n\n    {usage}\n"
    if arguments:
        yield "\n| argument | default | meaning |\n|---|---|---|\n"
        for argument in arguments:
            yield f"| `{_metavar(argument)}` | {_default(argument)} | {argument.help} |\n"
    own = [option for option in options if option.name not in REPEATED or _differs(option)]
    if own:
        yield "\n| option | default | meaning |\n|---|---|---|\n"
        for option in own:
            yield _row(option, _default(option))
    shared = [f"`{max(option.opts, key=len)}`" for option in options if option not in own]
    if shared:
        yield f"\nAlso {', '.join(shared)}, see above.\n"


def _differs(option: Any) -> bool:
    """``record --out`` names a file, every other ``--out`` a folder."""
    return option.name == "out" and "Folder" not in option.help


def _usage(argument: Any) -> str:
    name = _metavar(argument)
    return name if argument.required else f"[{name}]"


def _metavar(argument: Any) -> str:
    name = str(argument.metavar or argument.name).upper()
    return name if argument.nargs == 1 or name.endswith("...") else f"{name}..."


def _row(option: Any, default: str) -> str:
    names = ", ".join(f"`{name}`" for name in sorted(option.opts, key=len))
    return f"| {names} | {default} | {option.help} |\n"


def _default(parameter: Any) -> str:
    if parameter.required or parameter.default is None or parameter.default is False:
        return ""
    return f"`{parameter.default}`"


def main(arguments: Sequence[str]) -> int:
    """Write the page, or with ``--check`` compare; returns the exit code."""
    if list(arguments) not in ([], ["--check"]):
        print("usage: generate_cli.py [--check]", file=sys.stderr)
        return 2
    text = page()
    if not arguments:
        PAGE.parent.mkdir(parents=True, exist_ok=True)
        PAGE.write_text(text, encoding="utf-8")
        return 0
    if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text:
        return 0
    print(f"{PAGE} is out of date; run: python docs/generate_cli.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
