"""Serve an engine over the wire: ``python -m conformance.serve ENGINE``, which is what ``kvconform serve`` does.

Of other packages it needs msgspec alone, so that it runs beside an engine whose environment has nothing else.
"""

from __future__ import annotations

import argparse
import os
import sys

from conformance.engines import EngineNotFound, load
from conformance.protocol import AdapterError, Engine, EngineConfig
from conformance.wire.server import Server, claim_standard_streams


def serve(name: str, *, strict: bool = False) -> None:
    """Serve the engine ``name`` on standard input and output until the input ends. Raises `EngineNotFound`."""
    source = load(name)

    def make(config: EngineConfig) -> Engine:
        try:
            return source.factory(config)
        except EngineNotFound as error:  # the engine is not at fault
            raise AdapterError(str(error)) from None

    if os.isatty(0):
        sys.stderr.write(f"kvconform: {name} is served to a harness, by JSON lines; try kvconform check {name}\n")
    Server(make, name, source.installed_version, strict=strict).run(claim_standard_streams())


def main() -> int:
    """The module as a script. Returns the exit code: 2 when there is no such engine here."""
    parser = argparse.ArgumentParser(prog="conformance.serve", description="Serve an engine over the wire.")
    parser.add_argument("-V", "--validate-wire", action="store_true", help="hold every line to the protocol")
    parser.add_argument("engine", help="a built-in name, an entry point, package.module:factory, exec:COMMAND")
    arguments = parser.parse_args()
    try:
        serve(arguments.engine, strict=arguments.validate_wire)
    except EngineNotFound as error:
        sys.stderr.write(f"kvconform: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
