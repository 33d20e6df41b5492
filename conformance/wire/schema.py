"""The JSON Schema of the wire protocol, made from the structs that both ends decode with.

python -m conformance.wire.schema --write docs/reference/wire-schema.json
python -m conformance.wire.schema --check docs/reference/wire-schema.json    # exit 1 when the file is out of date
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from conformance.schemas import publish, schema_of, text_of
from conformance.wire.messages import PROTOCOL, AnyAnswer, AnyCall


def schema() -> dict[str, Any]:
    """The schema of every line; ``$defs/Call`` and ``$defs/Answer`` are those of the two sides."""
    return schema_of(
        f"kvconform wire protocol {PROTOCOL}",
        "One line in either direction: a call of the harness, or the engine's answer to it.",
        Call=AnyCall,
        Answer=AnyAnswer,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the file or check it. Returns the exit code."""
    return publish("conformance.wire.schema", text_of(schema()), arguments)


if __name__ == "__main__":
    sys.exit(main())
