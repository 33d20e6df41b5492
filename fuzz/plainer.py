"""What the shrinker tries in place of an operation or a number, and how much each weighs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from conformance.operations import Abort, AbortEnded, Add, Drain, Operation, Step
from conformance.protocol import EngineConfig

SWITCHES = (
    "pipeline_depth",
    "preemption_mode",
    "sliding_window",
    "num_lookahead_slots",
    "num_speculative_tokens",
    "watermark",
    "scheduling_policy",
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "encoder_cache_size",
    "fixed_batch",
)
"""Fields that are put back to their default first: each one that goes makes the finding easier to read."""

_SIZES = (
    "num_blocks",
    "block_size",
    "max_num_seqs",
    "max_model_len",
    "max_num_batched_tokens",
    "num_swap_blocks",
    "pipeline_depth",
    "num_lookahead_slots",
    "num_speculative_tokens",
)


def smaller(value: int, low: int) -> Iterator[int]:
    """Candidates below ``value``, the boldest first."""
    candidates = [low, value // 2, value - 2, value - 1]
    yield from dict.fromkeys(candidate for candidate in candidates if low <= candidate < value)


def plainer(operation: Operation) -> Iterator[Operation]:
    """Simpler forms of one operation, the boldest first."""
    match operation:
        case Add():
            yield from _plainer_adds(operation)
        case Step():
            for value in smaller(operation.count, 1):
                yield Step(count=value)
        case Abort() | AbortEnded():
            for value in smaller(operation.index, 0):
                yield msgspec.structs.replace(operation, index=value)
        case Drain():
            yield Step()
        case _:
            return


def _plainer_adds(add: Add) -> Iterator[Add]:
    replace: Callable[..., Add] = msgspec.structs.replace
    if add.encoder_sizes:
        yield replace(add, encoder_sizes=())
        yield replace(add, encoder_sizes=add.encoder_sizes[:-1])
    if add.streamed:
        yield replace(add, streamed=())
        yield from _plainer_inputs(add)
    if add.continues is not None:
        yield replace(add, continues=None)
        for value in smaller(add.continues, 0):
            yield replace(add, continues=value)
    if add.stop_after is not None:
        yield replace(add, stop_after=None)
        for value in smaller(add.stop_after, 1):
            yield replace(add, stop_after=value)
    for value in smaller(add.prompt_len, 1):
        yield replace(add, prompt_len=value, shared_len=min(add.shared_len, value))
    for name in ("n", "max_tokens"):
        for value in smaller(getattr(add, name), 1):
            yield replace(add, **{name: value})
    for name in ("shared_len", "family", "priority", "salt", "adapter"):
        for value in smaller(getattr(add, name), 0):
            yield replace(add, **{name: value})


def _plainer_inputs(add: Add) -> Iterator[Add]:
    """With one input less, or a smaller one."""
    for place, (tokens, outputs) in enumerate(add.streamed):
        fewer = [(less, outputs) for less in smaller(tokens, 1)] + [(tokens, less) for less in smaller(outputs, 1)]
        for instead in ((), *((one,) for one in fewer)):
            yield msgspec.structs.replace(add, streamed=add.streamed[:place] + instead + add.streamed[place + 1 :])


def instead_of(operation: Operation, add: Add, depth: int) -> Iterator[Add]:
    """What ``add`` may become so that ``operation`` is not needed, with ``depth`` steps in flight when it stops."""
    replace: Callable[..., Add] = msgspec.structs.replace
    match operation:
        case Add():
            tokens = operation.prompt_len + operation.max_tokens
            yield replace(add, max_tokens=add.max_tokens + tokens)
            yield replace(add, prompt_len=add.prompt_len + tokens)
        case Abort() if add.stop_after is None:
            for outputs in (1, 2):
                yield replace(add, stop_after=outputs, max_tokens=max(add.max_tokens, outputs + depth))
        case _:
            return


def scaled_add(add: Add, size: int, old: int) -> Add:
    """The request for blocks of ``size`` tokens that ``add`` is for blocks of ``old``."""
    prompt = max(1, -(-add.prompt_len * size // old))
    return msgspec.structs.replace(
        add,
        prompt_len=prompt,
        max_tokens=max(1, -(-add.max_tokens * size // old)),
        shared_len=min(prompt, -(-add.shared_len * size // old)),
    )


def weight(operation: Operation) -> int:
    """A rough size of the operation's arguments; `Drain` weighs more than any short step."""
    match operation:
        case Add():
            plain = operation.prompt_len + operation.max_tokens + operation.shared_len + 4 * operation.n
            odd = operation.family + operation.priority + operation.salt + operation.adapter
            stop = 0 if operation.stop_after is None else 2 + operation.stop_after
            turn = 0 if operation.continues is None else 2 + operation.continues
            streamed = sum(2 + tokens + outputs for tokens, outputs in operation.streamed)
            return plain + odd + stop + turn + sum(operation.encoder_sizes) + streamed
        case Step():
            return operation.count
        case Abort() | AbortEnded():
            return operation.index
        case Drain():
            return 100
        case _:
            return 1


def config_weight(config: EngineConfig) -> int:
    """How far a configuration is from the plainest: parts that are on, and then sizes."""
    default = EngineConfig()
    switches = sum(bool(getattr(config, name) != getattr(default, name)) for name in SWITCHES)
    sizes = sum(int(getattr(config, name)) for name in _SIZES)
    return 1000 * (switches + len(config.engine_options)) + sizes
