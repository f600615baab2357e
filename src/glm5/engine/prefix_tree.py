"""Whose keys are in which block of the cache: reference counts, and a radix tree of token prefixes. No tensors.

Every block has an owner count: one for each running sequence whose table names it and one if the tree keeps it. The
tree maps token prefixes to blocks. An edge holds a run of tokens and the blocks of their keys; edges start at block
boundaries, and one that ends inside a block is a leaf. A running sequence pins the path to the deepest node that it
uses; what nobody pins may be evicted, least recently used first, from the ends of the branches.

Nodes belong to the weight version that computed them. A new version starts with an empty tree: unpinned nodes go at
once, pinned ones when their last sequence lets go.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np


class BlockPool:
    """Owner counts of the blocks of a cache."""

    def __init__(self, num_blocks: int) -> None:
        self._owners = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Blocks without an owner."""
        return len(self._free)

    def take(self) -> int:
        """A free block, owned once. Raises IndexError when there is none."""
        block = self._free.pop()
        self._owners[block] = 1
        return block

    def share(self, blocks: list[int]) -> None:
        """One more owner for each of ``blocks``."""
        for block in blocks:
            self._owners[block] += 1

    def drop(self, blocks: list[int]) -> None:
        """One owner less; blocks without any are free."""
        for block in blocks:
            self._owners[block] -= 1
            if self._owners[block] == 0:
                self._free.append(block)


class Node:
    """An edge and what follows it: ``tokens`` have their keys in ``blocks``; ``children`` are in the order of ``head``.

    Two that share a whole block share an edge, so the tokens up to the first block's end tell siblings apart, and in
    lexicographic order the one that shares most with some tokens is next to their place: thousands of siblings, as
    after a common system prompt, cost no more to search than ten.
    """

    __slots__ = ("blocks", "children", "head", "parent", "pins", "tokens")

    def __init__(self, tokens: np.ndarray, blocks: list[int], parent: Node | None, head: tuple[int, ...]) -> None:
        self.tokens, self.blocks, self.parent, self.head = tokens, blocks, parent, head
        self.children: list[Node] = []
        self.pins = 0

    def place(self, head: tuple[int, ...]) -> int:
        """Index of the first child whose head is not before ``head``."""
        return bisect_left(self.children, head, key=_HEAD)

    def find(self, head: tuple[int, ...]) -> Node | None:
        """The child of this head."""
        place = self.place(head)
        return self.children[place] if place < len(self.children) and self.children[place].head == head else None


_HEAD = attrgetter("head")


@dataclass(slots=True)
class Match:
    """The longest known prefix of some tokens."""

    node: Node
    """Deepest node whose blocks are all used whole: what to pin."""
    blocks: list[int] = field(default_factory=list)
    """Blocks that hold the prefix, the last one possibly in part."""
    length: int = 0


class PrefixTree:
    """Prefixes of one cache. Blocks in the tree are owned once by it."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.root = _empty()
        """The empty prefix under the present weights."""
        self.num_evictable = 0
        """Blocks of nodes that nobody pins."""
        self._pool, self._size = pool, block_size
        self._unpinned: OrderedDict[Node, None] = OrderedDict()
        """Oldest first; a node comes before its parent, so the oldest one is always a leaf."""

    def match(self, tokens: np.ndarray) -> Match:
        """What is known of ``tokens``. Splits an edge where whole blocks end, so that no more than these are pinned."""
        found = Match(self.root)
        while found.length < len(tokens):
            child, shared = self._longest_child(found.node, tokens[found.length :])
            if child is None:
                break
            whole, rest = shared - shared % self._size, child
            if whole == len(child.tokens):
                found.node, rest = child, None
            elif whole:
                found.node = self._split(child, whole)
            if whole:
                found.blocks += found.node.blocks
            if rest is not None and shared > whole:
                found.blocks.append(rest.blocks[0])
            found.length += shared
            if rest is not None:
                break
        return found

    def insert(self, node: Node, tokens: np.ndarray, blocks: list[int]) -> Node:
        """Make ``tokens``, whose keys are in ``blocks``, known behind ``node``; the node where they end.

        What is known already keeps its own blocks. Leaves that end inside a block give way to a longer one.
        """
        while len(tokens):
            child, shared = self._longest_child(node, tokens)
            whole = shared - shared % self._size
            if child is not None and whole:
                node = child if whole == len(child.tokens) else self._split(child, whole)
                tokens, blocks = tokens[whole:], blocks[whole // self._size :]
                continue
            if shared == len(tokens):
                break
            head = self._head(tokens)
            for length in range(1, len(head)):
                # It may end in a block of ours, which must not be in the tree twice.
                other = node.find(head[:length])
                if other is not None and not other.pins:
                    self._remove(other)
            new = Node(tokens.copy(), list(blocks), node, head)
            self._pool.share(blocks)
            node.children.insert(node.place(head), new)
            self._unpinned[new] = None
            self.num_evictable += len(blocks)
            node = new
            break
        self._touch(node)
        return node

    def pin(self, node: Node) -> None:
        """Keep the path to ``node`` until ``unpin``."""
        for step in _path(node):
            if step.pins == 0:
                del self._unpinned[step]
                self.num_evictable -= len(step.blocks)
            step.pins += 1

    def unpin(self, node: Node) -> None:
        """Undo one ``pin`` of this node. What belongs to older weights is dropped."""
        path = _path(node)
        is_stale = (path[-1].parent if path else node) is not self.root
        for step in path:
            step.pins -= 1
            if step.pins:
                continue
            if is_stale:
                self._pool.drop(step.blocks)
            else:
                self._unpinned[step] = None
                self.num_evictable += len(step.blocks)

    def prune(self, node: Node) -> None:
        """Forget ``node`` and what leads to nothing else."""
        while node in self._unpinned and not node.children and node.parent is not None:
            parent = node.parent
            self._remove(node)
            node = parent

    def count_pinned(self, node: Node) -> int:
        """Blocks on the path to ``node`` that somebody pins."""
        return sum(len(step.blocks) for step in _path(node) if step.pins)

    def evict(self, count: int) -> None:
        """Free ``count`` blocks, or all that nobody pins."""
        while count > 0 and self._unpinned:
            node = next(iter(self._unpinned))
            kept = len(node.blocks) - count
            count -= len(node.blocks)
            if kept <= 0:
                self._remove(node)
                continue
            self.num_evictable -= len(node.blocks) - kept
            self._pool.drop(node.blocks[kept:])
            node.tokens, node.blocks = node.tokens[: kept * self._size], node.blocks[:kept]

    def start_version(self) -> None:
        """New weights: nothing is known."""
        for node in self._unpinned:
            self._pool.drop(node.blocks)
        self._unpinned.clear()
        self.num_evictable = 0
        self.root = _empty()

    def _split(self, node: Node, length: int) -> Node:
        """Cut ``node`` after ``length`` tokens; the new upper part. Who pinned the node keeps pinning both."""
        parent = node.parent
        assert parent is not None and length % self._size == 0, "edges end at block boundaries"
        whole = length // self._size
        upper = Node(node.tokens[:length], node.blocks[:whole], parent, node.head)
        parent.children[parent.place(node.head)] = upper
        node.tokens, node.blocks, node.parent = node.tokens[length:], node.blocks[whole:], upper
        node.head = self._head(node.tokens)
        upper.children = [node]
        upper.pins = node.pins
        if not upper.pins:
            self._unpinned[upper] = None
        self._touch(node)
        return upper

    def _touch(self, node: Node) -> None:
        for step in _path(node):
            if step.pins == 0:
                self._unpinned.move_to_end(step)

    def _remove(self, node: Node) -> None:
        assert node.parent is not None, "the root stays"
        del node.parent.children[node.parent.place(node.head)]
        del self._unpinned[node]
        self.num_evictable -= len(node.blocks)
        self._pool.drop(node.blocks)

    def _head(self, tokens: np.ndarray) -> tuple[int, ...]:
        return tuple(tokens[: self._size].tolist())

    def _longest_child(self, node: Node, tokens: np.ndarray) -> tuple[Node | None, int]:
        """The child that shares most with the beginning of ``tokens``, and how much."""
        best, longest = None, 0
        place = node.place(self._head(tokens))
        for child in node.children[max(place - 1, 0) : place + 1]:
            shared = common_prefix(child.tokens, tokens)
            if shared > longest:
                best, longest = child, shared
        return best, longest


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """How many leading ids are equal."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length


def _empty() -> Node:
    return Node(np.zeros(0, np.int64), [], None, ())


def _path(node: Node) -> list[Node]:
    """From ``node`` up to, but without, the root."""
    path = []
    while node.parent is not None:
        path.append(node)
        node = node.parent
    return path
