"""Streaming input for vLLM V1: what a client has yet to send of a prompt, and when it comes.

A request is added once for each of its inputs, under one id, and once more to say that there are no others.
"""

from __future__ import annotations

import zlib
from collections import deque
from typing import Any

import msgspec

from conformance.protocol import Request, RequestId

_WAIT_STEPS = 4
"""An input that is late comes fewer steps than this after the answer to the one before."""


def inputs_of(request: Request) -> list[Request]:
    """The request as it is sent: one for each input, the first of which has its encoder items."""
    return [
        request,
        *(
            msgspec.structs.replace(request, prompt=one.prompt, max_tokens=one.max_tokens, encoder_items=())
            for one in request.streamed
        ),
    ]


class StreamedInputs:
    """The inputs that are not answered yet, as requests of the engine's own, the closing one among them.

    ``late``: each is sent after the answer to the one before; else the engine has them all from the start.
    """

    def __init__(self, *, late: bool) -> None:
        self._late = late
        self._to_come: dict[RequestId, deque[Any]] = {}
        self._due: dict[RequestId, int] = {}
        """Request -> the step before which its next input is sent."""

    def take(self, request_id: RequestId, inputs: list[Any]) -> list[Any]:
        """Keep the inputs that follow; returns those to be sent at once."""
        if not self._late:
            return inputs
        self._to_come[request_id] = deque(inputs)
        return []

    def answered(self, request_id: RequestId, step: int) -> None:
        """The outputs that were asked for are there, before ``step``, and the request is not over."""
        if self._late:
            wait = zlib.crc32(f"{request_id}:{len(self._to_come[request_id])}".encode()) % _WAIT_STEPS
            self._due[request_id] = step + wait

    def due(self, step: int) -> list[Any]:
        """What is sent before ``step``; the last input and the word that it is the last go together."""
        sent = []
        for request_id in [name for name, due in self._due.items() if due <= step]:
            del self._due[request_id]
            inputs = self._to_come[request_id]
            sent.append(inputs.popleft())
            if len(inputs) == 1:
                sent.append(inputs[0])
        return sent

    def forget(self, request_id: RequestId) -> None:
        """The request is over."""
        self._to_come.pop(request_id, None)
        self._due.pop(request_id, None)
