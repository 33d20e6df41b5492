"""``kvconform serve``: the engine's end of the wire, for any engine that Python knows by name."""

from __future__ import annotations

from typing import Annotated

import typer

from conformance.serve import serve

ValidateOption = Annotated[
    bool,
    typer.Option(
        "--validate-wire", "-V", help="Hold every line to and from an engine in another process to the wire protocol"
    ),
]


def serve_command(
    engine: Annotated[str, typer.Argument(help="A built-in name, an installed plugin, or package.module:factory")],
    validate_wire: ValidateOption = False,
) -> None:
    """Serve an engine to a harness by JSON lines on standard input and output, until the input ends.

    It is the other side of `exec:COMMAND` and NAME@PYTHON. docs/reference/wire-protocol.md says what is on the wire.
    """
    serve(engine, strict=validate_wire)
