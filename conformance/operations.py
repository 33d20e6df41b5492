"""The vocabulary of a trace: total operations.

Every operation is legal in every state: an index is taken modulo what is live, and with nothing to act on it
is a recorded no-op. Therefore any sub-sequence of a trace is a trace, which is what lets a shrinker delete.
Operations say nothing of block ids or engine state; what they mean is decided by `conformance.session`.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

COUNT_MAX = 1 << 20
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=COUNT_MAX)]
"""A number in a trace file: bounded, so that a damaged file is refused and not run for ever."""


class Add(msgspec.Struct, frozen=True, tag="add", omit_defaults=True, forbid_unknown_fields=True):
    """Add one request of ``prompt_len`` tokens that may produce up to ``max_tokens``.

    The first ``shared_len`` prompt tokens are those of the prompt family ``family`` (requests of one family
    share them); the others are the request's own. With ``stop_after`` the model emits the request's stop
    token as its output number ``stop_after`` (counted from 1); with n > 1 each further sequence one later.
    With ``continues`` the prompt begins, as far as its length goes, with the conversation of an ended request (number
    ``continues`` modulo those): its prompt and the outputs of its first sequence.
    ``streamed`` are the inputs that follow, each so many tokens of the prompt and up to so many outputs.
    """

    prompt_len: Count
    max_tokens: Count
    family: int = 0
    shared_len: Count = 0
    priority: int = 0
    n: Count = 1
    stop_after: Count | None = None
    salt: int = 0
    adapter: int = 0
    encoder_sizes: tuple[Count, ...] = ()
    continues: Count | None = None
    streamed: tuple[tuple[Count, Count], ...] = ()


class Abort(msgspec.Struct, frozen=True, tag="abort", omit_defaults=True, forbid_unknown_fields=True):
    """Abort the live request number ``index`` modulo the live ones, in order of arrival."""

    index: Count = 0


class AbortEnded(msgspec.Struct, frozen=True, tag="abort_ended", omit_defaults=True, forbid_unknown_fields=True):
    """Abort an id that is not live: one that has ended (modulo those), or an unknown one when none has."""

    index: Count = 0


class Step(msgspec.Struct, frozen=True, tag="step", omit_defaults=True, forbid_unknown_fields=True):
    """Run ``count`` engine steps (schedule, execute, commit); with nothing live, one idle step."""

    count: Count = 1


class Drain(msgspec.Struct, frozen=True, tag="drain", omit_defaults=True, forbid_unknown_fields=True):
    """Step until nothing is live, or progress stops (which is a finding)."""


class ResetPrefixCache(
    msgspec.Struct, frozen=True, tag="reset_prefix_cache", omit_defaults=True, forbid_unknown_fields=True
):
    """Ask the engine to forget its cached prefixes."""


Operation: TypeAlias = Add | Abort | AbortEnded | Step | Drain | ResetPrefixCache


def describe(operation: Operation) -> str:
    """One operation as a short English phrase, for terminals and messages."""
    match operation:
        case Add():
            parts = [f"add prompt {operation.prompt_len} + {operation.max_tokens} tokens"]
            if operation.shared_len:
                parts.append(f"sharing {operation.shared_len} of family {operation.family}")
            if operation.continues is not None:
                parts.append(f"continuing ended request {operation.continues}")
            named = ((name, getattr(operation, name)) for name in ("priority", "salt", "adapter"))
            parts.extend(f"{name} {value}" for name, value in named if value)
            if operation.n > 1:
                parts.append(f"n = {operation.n}")
            if operation.stop_after is not None:
                parts.append(f"stopping after {operation.stop_after}")
            if operation.encoder_sizes:
                parts.append(f"encoder items of {', '.join(map(str, operation.encoder_sizes))}")
            parts.extend(f"then {tokens} + {outputs} tokens" for tokens, outputs in operation.streamed)
            return ", ".join(parts)
        case Abort():
            return f"abort live request {operation.index}"
        case AbortEnded():
            return f"abort ended request {operation.index}"
        case Step():
            return "step" if operation.count == 1 else f"step {operation.count} times"
        case Drain():
            return "drain"
        case ResetPrefixCache():
            return "reset the prefix cache"
