"""Which block holds which prefix: a tree of full blocks, compared by content and never by digest alone."""

from __future__ import annotations

from typing import TypeAlias

from .block_pool import NULL_BLOCK, BlockPool

_NO_BLOCK = -1
_Key: TypeAlias = "tuple[int, ...] | tuple[str, str]"


class _Node:
    """One full block of tokens after those of its parents. ``block`` is `_NO_BLOCK` when it was evicted."""

    __slots__ = ("block", "children", "key", "parent")

    def __init__(self, parent: _Node | None, key: _Key) -> None:
        self.parent = parent
        self.key = key
        self.children: dict[_Key, _Node] = {}
        self.block = _NO_BLOCK


class PrefixCache:
    """Full blocks by content: a tree with a branch for each identity and a node for each block.

    A path from the root spells out identity and prefix, so that a hit on other tokens or for another identity
    cannot happen (KV-2, ID-1). A node whose block was evicted stays while blocks below it are cached: they
    can be hit again as soon as the same content is published in its place.
    """

    __slots__ = ("_nodes", "_pool", "_root", "block_size")

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.block_size = block_size
        self._pool = pool
        self._root = _Node(None, ())
        self._nodes: dict[int, _Node] = {}
        pool.on_evict(self._evicted)

    def lookup(self, identity: tuple[str, str], tokens: list[int]) -> list[int]:
        """The cached blocks of the longest prefix of ``tokens`` that leaves at least one token to compute.

        Changes nothing: no reference, no order of eviction (ACC-8). Upholds KV-2, CCH-1 and ID-1.
        """
        hits: list[int] = []
        node = self._root.children.get(identity)
        if node is None:
            return hits
        size = self.block_size
        for start in range(0, (len(tokens) - 1) // size * size, size):
            node = node.children.get(tuple(tokens[start : start + size]))
            if node is None or node.block == _NO_BLOCK:
                break
            hits.append(node.block)
        return hits

    def publish(self, identity: tuple[str, str], tokens: list[int], table: list[int], num_full: int) -> None:
        """Make the first ``num_full`` blocks of ``table``, whose KV has been computed, available to `lookup`.

        Content that is already cached in another block stays there. Null blocks (out of the window) are
        passed over. Upholds KV-2: callers publish only what committed steps have written.
        """
        size = self.block_size
        assert num_full * size <= len(tokens), "only full blocks are published"
        null_block = NULL_BLOCK if self._pool.reserved else _NO_BLOCK
        node = self._child(self._root, identity)
        for index in range(num_full):
            node = self._child(node, tuple(tokens[index * size : (index + 1) * size]))
            block = table[index]
            if node.block == _NO_BLOCK and block != null_block:
                self._pool.mark_cached(block)
                self._nodes[block] = node
                node.block = block
        self._prune(node)

    def clear(self) -> None:
        """Forget every prefix (CCH-3)."""
        self._root.children.clear()
        self._nodes.clear()
        self._pool.forget_cached()

    def _evicted(self, block: int) -> None:
        node = self._nodes.pop(block)
        assert node.block == block, "a cached block has exactly one node"
        node.block = _NO_BLOCK
        self._prune(node)

    @staticmethod
    def _child(node: _Node, key: _Key) -> _Node:
        child = node.children.get(key)
        if child is None:
            child = node.children[key] = _Node(node, key)
        return child

    @staticmethod
    def _prune(node: _Node) -> None:
        """Drop ``node`` and those above it that neither have a block nor lead to one."""
        while node.parent is not None and node.block == _NO_BLOCK and not node.children:
            del node.parent.children[node.key]
            node = node.parent
