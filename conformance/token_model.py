"""The harness plays the model: which prompt a request has, and which token follows a prefix.

A *prefix* (all tokens of a sequence up to and including one position, under one request identity) is
interned as a small integer, its *node*. Two positions hold the same KV exactly when they have the same node;
this is what `conformance.shadow_kv` stores per slot. The next token is a function of the prefix alone, so
every configuration must produce the same tokens for a request (DET-2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from conformance.calls import ENGINE_RAISES
from conformance.operations import Add
from conformance.protocol import AdapterError, EncoderItem, Engine, Request, StreamedInput

PADDING_TOKEN: Final = 0
"""Never sampled: engines use it for padding."""
STOP_TOKEN: Final = 1
"""Sampled only where a request says so."""
FIRST_TOKEN: Final = 2
VOCABULARY_SIZE: Final = 61
"""Small on purpose: prefixes that agree by accident must occur."""

TOKEN_BITS: Final = 20
"""Of the largest vocabulary that a real model may have."""

Model: TypeAlias = Callable[[list[int]], int]
"""The token that follows a prefix, as a real model decides it."""

_MASK: Final = (1 << 61) - 1


def _mix(value: int) -> int:
    """A fixed 61-bit scramble (multiply, fold, multiply); the same on every machine and Python."""
    value = (value * 0x9E3779B97F4A7C15 + 0x7F4A7C15) & ((1 << 64) - 1)
    value ^= value >> 29
    return (value * 0xBF58476D1CE4E5B9 >> 3) & _MASK


def prompt_tokens(add: Add, ordinal: int) -> list[int]:
    """The prompt of the ``ordinal``-th request of a trace: a family's prefix, then tokens of its own."""
    shared = min(add.shared_len, add.prompt_len)
    span = VOCABULARY_SIZE - FIRST_TOKEN
    own = _mix(ordinal * 2 + 1)
    family = _mix(add.family * 2)
    return [FIRST_TOKEN + _mix(family + position) % span for position in range(shared)] + [
        FIRST_TOKEN + _mix(own + position) % span for position in range(shared, add.prompt_len)
    ]


def request_from(add: Add, ordinal: int, conversation: Sequence[int] = ()) -> Request:
    """The request that ``add`` stands for as the ``ordinal``-th of a trace. Lengths below 1 become 1.

    The prompt begins with ``conversation``, or as much of it as the prompt is long.
    """
    if add.prompt_len < 1 or add.max_tokens < 1 or add.n < 1:
        add = Add(
            prompt_len=max(1, add.prompt_len), max_tokens=max(1, add.max_tokens), family=add.family,
            shared_len=add.shared_len, priority=add.priority, n=max(1, add.n), stop_after=add.stop_after,
            salt=add.salt, adapter=add.adapter, encoder_sizes=add.encoder_sizes, continues=add.continues,
            streamed=add.streamed,
        )  # fmt: skip
    items: list[EncoderItem] = []
    at = 0
    for number, wanted in enumerate(add.encoder_sizes):
        size = max(1, min(wanted, add.prompt_len - at))
        if at + size > add.prompt_len:
            break
        items.append(EncoderItem(key=f"item{add.family}.{number}:{size}", first=at, size=size))
        at += size
    return Request(
        request_id=f"r{ordinal}",
        prompt=[*conversation[: add.prompt_len], *prompt_tokens(add, ordinal)[len(conversation) :]],
        max_tokens=add.max_tokens,
        n=add.n,
        priority=add.priority,
        arrival=ordinal,
        stop_token=None if add.stop_after is None else STOP_TOKEN,
        cache_salt=f"salt{add.salt}" if add.salt else "",
        adapter=f"adapter{add.adapter}" if add.adapter else "",
        encoder_items=tuple(items),
        streamed=_inputs(add, ordinal),
    )


def _inputs(add: Add, ordinal: int) -> tuple[StreamedInput, ...]:
    """The inputs that follow the prompt: tokens of the request's own, all of them different ones."""
    inputs: list[StreamedInput] = []
    span = VOCABULARY_SIZE - FIRST_TOKEN
    at = _mix(ordinal * 2 + 1) + add.prompt_len
    for tokens, outputs in add.streamed:
        prompt = [FIRST_TOKEN + _mix(at + position) % span for position in range(max(1, tokens))]
        inputs.append(StreamedInput(prompt, max(1, outputs)))
        at += len(prompt)
    return tuple(inputs)


def model_of(engine: Engine) -> Model | None:
    """The truth about the tokens of an engine with a model of its own, None without one.

    The model raises `AdapterError` when the adapter's reference raises or gives no token.
    """
    if not engine.capabilities.own_model:
        return None
    ask: Callable[[list[int]], object] | None = getattr(engine, "reference_token", None)
    if ask is None:
        raise AdapterError("capabilities: own_model is declared, and there is no reference_token")

    def model(tokens: list[int]) -> int:
        try:
            token = ask(tokens)
        except AdapterError:
            raise
        except ENGINE_RAISES as error:
            raise AdapterError(f"reference_token raised {type(error).__name__}: {error}") from error
        if not isinstance(token, int) or not 0 <= token < 1 << TOKEN_BITS:
            raise AdapterError(f"reference_token answers {token!r}: expected an int from 0 to 2**{TOKEN_BITS} - 1")
        return token

    return model


class PrefixTree:
    """Interned prefixes. Node 0 is "nothing was written"; a request identity has a root node of its own.

    ``model`` decides which token is next; without one, a hash of the prefix does.
    """

    __slots__ = ("_children", "_hashes", "_items", "_model", "_modelled", "_parents", "_root_of", "_roots", "_tokens")

    def __init__(self, model: Model | None = None) -> None:
        self._model = model
        self._modelled: dict[int, int] = {}
        self._children: dict[int, int] = {}
        self._hashes: list[int] = [0]
        self._parents: list[int] = [0]
        self._root_of: list[int] = [0]
        self._tokens: list[int] = [-1]
        self._roots: dict[tuple[str, str], int] = {}
        self._items: dict[tuple[int, str], int] = {}

    def root(self, request: Request) -> int:
        """The root node of the request's identity, as far as it has one from its first token: salt and adapter."""
        identity = (request.cache_salt, request.adapter)
        node = self._roots.get(identity)
        if node is None:
            node = len(self._hashes)
            self._roots[identity] = node
            # The next token does not depend on the salt, which only keeps caches apart.
            seed = 0
            for char in request.adapter:
                seed = _mix(seed + ord(char))
            self._hashes.append(seed)
            self._parents.append(0)
            self._root_of.append(node)
            self._tokens.append(-1)
        return node

    def extend(self, node: int, token: int) -> int:
        """The node of the prefix ``node`` followed by ``token``. O(1)."""
        edge = node << TOKEN_BITS | token
        child = self._children.get(edge)
        if child is None:
            child = len(self._hashes)
            self._children[edge] = child
            self._hashes.append(_mix(self._hashes[node] ^ token))
            self._parents.append(node)
            self._root_of.append(self._root_of[node])
            self._tokens.append(token)
        return child

    def walk(self, request: Request, tokens: list[int]) -> list[int]:
        """The node of every position of ``tokens`` under the request's identity.

        What precedes an encoder item does not know of it; from its first position on, everything does.
        """
        node = self.root(request)
        begins = {item.first: item.key for item in request.encoder_items}
        nodes = []
        for position, token in enumerate(tokens):
            if position in begins:
                node = self._enter_item(node, begins[position])
            node = self.extend(node, token)
            nodes.append(node)
        return nodes

    def _enter_item(self, above: int, key: str) -> int:
        """A node that holds no position: behind it lies what has seen the encoder item ``key``."""
        node = self._items.get((above, key))
        if node is None:
            node = self._items[above, key] = len(self._hashes)
            seed = self._hashes[above]
            for char in key:
                seed = _mix(seed + ord(char))
            self._hashes.append(seed)
            self._parents.append(self._parents[above])
            self._root_of.append(node)
            self._tokens.append(self._tokens[above])
        return node

    def next_token(self, node: int, seq: int) -> int:
        """The token the model samples after prefix ``node``; sequences of one request differ by ``seq``.

        A real model is greedy: it is asked once for each prefix, and gives all sequences of a request the same.
        """
        if self._model is not None:
            if node not in self._modelled:
                self._modelled[node] = self._model(self._prefix(node))
            return self._modelled[node]
        span = VOCABULARY_SIZE - FIRST_TOKEN
        return FIRST_TOKEN + (self._hashes[node] + seq * 7) % span

    def _prefix(self, node: int) -> list[int]:
        """All tokens up to and including ``node``. O(its position)."""
        tokens = []
        while self._parents[node]:
            tokens.append(self._tokens[node])
            node = self._parents[node]
        return tokens[::-1]

    def same_identity(self, one: int, other: int) -> bool:
        """Whether two nodes belong to requests of one identity (ID-1)."""
        return self._root_of[one] == self._root_of[other]

    def describe(self, node: int) -> str:
        """What a slot holds, in words: its position and token."""
        if node == 0:
            return "nothing (never written)"
        depth = 0
        above = self._parents[node]
        while above:
            depth += 1
            above = self._parents[above]
        return f"token {self._tokens[node]} of position {depth - 1}"
