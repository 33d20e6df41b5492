"""JSON Schemas made from the structs that read and write, so that what is published cannot drift from what is done."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec


def schema_of(title: str, description: str, **lines: Any) -> dict[str, Any]:
    """The schema (2020-12) of a stream of lines. ``lines``: a name for each kind -> its struct or union of structs.

    A line is any of them; each stands under its name in ``$defs``.
    """
    components, definitions = msgspec.json.schema_components(lines.values(), ref_template="#/$defs/{name}")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": title,
        "description": description,
        "anyOf": [{"$ref": f"#/$defs/{name}"} for name in lines],
        "$defs": {**dict(zip(lines, components, strict=True)), **dict(sorted(definitions.items()))},
    }


def text_of(schema: dict[str, Any]) -> str:
    """The file, as it is published."""
    return msgspec.json.format(msgspec.json.encode(schema), indent=2).decode() + "\n"


def publish(module: str, text: str, arguments: Sequence[str] | None = None) -> int:
    """The command ``python -m MODULE``: ``--write FILE`` or ``--check FILE``. Returns the exit code."""
    parser = argparse.ArgumentParser(prog=module, description="A JSON Schema, made from the structs")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", type=Path, metavar="FILE")
    what.add_argument("--check", type=Path, metavar="FILE")
    chosen = parser.parse_args(arguments)
    if chosen.write is not None:
        chosen.write.write_text(text, encoding="utf-8")
        return 0
    if chosen.check.is_file() and chosen.check.read_text(encoding="utf-8") == text:
        return 0
    sys.stderr.write(f"{chosen.check} is out of date; run python -m {module} --write {chosen.check}\n")
    return 1
