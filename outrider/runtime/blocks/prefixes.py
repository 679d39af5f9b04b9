"""Prefixes: the finished texts whose blocks are kept, found again by their tokens.

A tree of blocks: a child holds what comes next in a text, up to a block's worth of tokens; only full ones have
children. Texts of different salts have trees apart. The longest common prefix of a new text is found token by token:
the child with most tokens in common is next to where the new text's tokens would be sorted in. When blocks are wanted,
the text that was used longest ago loses its last block first, so that a block is never without what comes before it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from outrider.runtime.blocks.pool import BlockPool

WIDTH = 8  # bytes of a token


@dataclass(eq=False, slots=True)
class _Node:
    """A block of some text: the root has none."""

    block: int
    tokens: bytes
    parent: _Node | None
    used: int = 0
    keys: list[bytes] = field(default_factory=list)  # of the children, in order; none begins with another
    children: list[_Node] = field(default_factory=list)


class Prefixes:
    def __init__(self, pool: BlockPool, size: int) -> None:
        """`size` positions a block."""
        self._pool, self._size = pool, size
        self._roots: dict[str, _Node] = {}
        self._nodes: dict[int, _Node] = {}  # by block
        self._clock = 0

    def __len__(self) -> int:
        """Blocks that are kept for texts to come, whoever else holds them."""
        return len(self._nodes)

    @property
    def spare(self) -> int:
        """Blocks that `evict` could free."""
        blocks = np.fromiter(self._nodes, dtype=np.int64, count=len(self._nodes))
        return int((self._pool.holders[blocks] == 1).sum())

    def find(self, tokens: NDArray[np.int64], salt: str) -> tuple[list[int], int]:
        """Blocks that hold the beginning of a text, and how many tokens of it; of the last one maybe a part."""
        blocks, node = [], self._roots.get(salt)
        whole, at = tokens.tobytes(), 0
        step, now = self._size * WIDTH, self._tick()
        while node is not None and at < len(whole):
            child, common = _nearest(node, whole[at : at + step])
            if child is None:
                break
            child.used = now
            blocks.append(child.block)
            at += common
            node = child if common == step else None
        return blocks, at // WIDTH

    def add(self, tokens: NDArray[np.int64], salt: str, blocks: Sequence[int]) -> None:
        """Changes state: a finished text is kept. Its blocks are held from now on; those known already are not."""
        if not len(tokens):
            return
        node = self._roots.setdefault(salt, _Node(-1, b"", None))
        whole, step, now = tokens.tobytes(), self._size * WIDTH, self._tick()
        for begin, block in zip(range(0, len(whole), step), blocks, strict=True):
            part = whole[begin : begin + step]
            at = bisect_left(node.keys, part)
            if at < len(node.keys) and node.keys[at].startswith(part):  # known, and maybe more than that
                node.children[at].used = now
                node = node.children[at]
                continue
            if at and part.startswith(node.keys[at - 1]):  # an earlier end of a text, which goes on now
                at -= 1
                self._forget(node.children[at])
            child = _Node(block, part, node, now)
            node.keys.insert(at, part)
            node.children.insert(at, child)
            self._nodes[block] = child
            self._pool.hold(block)
            node = child

    def evict(self, wanted: int) -> None:
        """Changes state: frees so many blocks, those used longest ago first; fewer only where there are not more."""
        enough = self._pool.free + wanted
        for in_use in (False, True):  # what somebody holds frees nothing, but what comes before it may be held by none
            for leaf in self._leaves(in_use):
                if self._pool.free >= enough:
                    break
                self._forget(leaf)
        self._roots = {salt: root for salt, root in self._roots.items() if root.children}

    def _leaves(self, in_use: bool) -> Iterator[_Node]:
        """Those used longest ago first; what is a leaf only when its children are gone comes when they are."""
        queue = [(node.used, block) for block, node in self._nodes.items() if not node.children]
        heapify(queue)
        while queue:
            _, block = heappop(queue)
            leaf = self._nodes[block]
            parent = leaf.parent
            if self._pool.holders[block] > 1 and not in_use:
                continue
            yield leaf
            if parent is not None and not parent.children and parent.parent is not None:
                heappush(queue, (parent.used, parent.block))

    def _forget(self, leaf: _Node) -> None:
        """Changes state: a block without children is not kept any more."""
        parent = leaf.parent
        assert parent is not None and not leaf.children
        at = bisect_left(parent.keys, leaf.tokens)
        del parent.keys[at], parent.children[at], self._nodes[leaf.block]
        self._pool.drop(leaf.block)

    def _tick(self) -> int:
        self._clock += 1
        return self._clock


def _nearest(node: _Node, wanted: bytes) -> tuple[_Node | None, int]:
    """The child that has most bytes in common with what is wanted, in whole tokens, and how many."""
    at, best, most = bisect_left(node.keys, wanted), None, 0
    for i in (at - 1, at):
        if 0 <= i < len(node.keys) and (count := common(node.keys[i], wanted)) > most:
            best, most = node.children[i], count
    return best, most


def common(one: bytes, other: bytes) -> int:
    """Bytes of the tokens that both begin with."""
    length = min(len(one), len(other))
    if one[:length] == other[:length]:
        return length
    differ = np.frombuffer(one, np.uint8, length) != np.frombuffer(other, np.uint8, length)
    return int(differ.argmax()) // WIDTH * WIDTH
