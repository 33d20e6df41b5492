"""Lines out of a stream of bytes, bounded, and what a line of JSON must not hold."""

from __future__ import annotations

import json
from typing import Any, Final

LINE_BYTES_MAX: Final = 64 << 20
"""A snapshot of a pool of a million blocks is about a tenth of this."""


class LineTooLong(ValueError):  # noqa: N818 - named for what it is
    """A line has no end within `LINE_BYTES_MAX`."""


class LineBuffer:
    """Bytes as they come in, lines as they are taken out. O(bytes), also when a line comes in many pieces."""

    __slots__ = ("_bytes", "_searched", "bytes_max")

    def __init__(self, bytes_max: int = LINE_BYTES_MAX) -> None:
        self.bytes_max = bytes_max
        self._bytes = bytearray()
        self._searched = 0

    def feed(self, data: bytes) -> None:
        """More bytes have come in."""
        self._bytes += data

    def rest(self) -> bytes:
        """What has come in of lines that were not taken."""
        return bytes(self._bytes)

    def take(self) -> bytes | None:
        """The next line without its end; None until it is whole. Raises `LineTooLong`."""
        end = self._bytes.find(b"\n", self._searched)
        if end < 0:
            self._searched = len(self._bytes)
            if self._searched > self.bytes_max:
                raise LineTooLong(f"a line of more than {self.bytes_max:,} bytes")
            return None
        line = bytes(self._bytes[:end])
        del self._bytes[: end + 1]
        self._searched = 0
        return line


def ambiguity(line: bytes) -> str:
    """What another reader of this JSON might understand differently: a key twice, a number that is none; else ""."""
    problems: list[str] = []

    def pairs(members: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in members]
        problems.extend(f"the key {name!r} is there twice" for name in dict.fromkeys(names) if names.count(name) > 1)
        return dict(members)

    def constant(name: str) -> None:
        problems.append(f"{name} is no JSON number")

    try:
        json.loads(line, object_pairs_hook=pairs, parse_constant=constant)
    except (ValueError, RecursionError) as error:
        return str(error)
    return problems[0] if problems else ""
