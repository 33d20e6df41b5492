"""The JSON Schema of the wire protocol, made from the structs that both ends decode with.

python -m conformance.wire.schema --write docs/reference/wire-schema.json
python -m conformance.wire.schema --check docs/reference/wire-schema.json    # exit 1 when the file is out of date
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from conformance.wire.messages import PROTOCOL, AnyAnswer, AnyCall


def schema() -> dict[str, Any]:
    """The schema (2020-12) of every line; ``$defs/Call`` and ``$defs/Answer`` are those of the two sides."""
    (call, answer), definitions = msgspec.json.schema_components((AnyCall, AnyAnswer), ref_template="#/$defs/{name}")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"kvconform wire protocol {PROTOCOL}",
        "description": "One line in either direction: a call of the harness, or the engine's answer to it.",
        "anyOf": [{"$ref": "#/$defs/Call"}, {"$ref": "#/$defs/Answer"}],
        "$defs": {"Call": call, "Answer": answer, **dict(sorted(definitions.items()))},
    }


def text() -> str:
    """The file, as it is published."""
    return msgspec.json.format(msgspec.json.encode(schema()), indent=2).decode() + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the file or check it. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="conformance.wire.schema", description="The JSON Schema of the wire protocol")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", type=Path, metavar="FILE")
    what.add_argument("--check", type=Path, metavar="FILE")
    chosen = parser.parse_args(arguments)
    if chosen.write is not None:
        chosen.write.write_text(text(), encoding="utf-8")
        return 0
    if chosen.check.is_file() and chosen.check.read_text(encoding="utf-8") == text():
        return 0
    sys.stderr.write(f"{chosen.check} is out of date; run python -m conformance.wire.schema --write {chosen.check}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
