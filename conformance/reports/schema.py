"""The JSON Schema of event files, made from the structs that write and read them.

python -m conformance.reports.schema --write docs/reference/event-schema.json
python -m conformance.reports.schema --check docs/reference/event-schema.json    # exit 1 when the file is out of date
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from conformance.reports.events import FORMAT, Event, RunFooter, RunHeader
from conformance.schemas import publish, schema_of, text_of


def schema() -> dict[str, Any]:
    """The schema of every line; ``$defs/FirstLine``, ``$defs/Between`` and ``$defs/LastLine`` say what stands where."""
    return schema_of(
        f"kvconform event file, format {FORMAT}",
        "One line of the file: its header, an event, or its footer.",
        FirstLine=RunHeader,
        Between=Event,
        LastLine=RunFooter,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the file or check it. Returns the exit code."""
    return publish("conformance.reports.schema", text_of(schema()), arguments)


if __name__ == "__main__":
    sys.exit(main())
