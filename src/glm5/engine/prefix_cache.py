"""The block tables of the running sequences, and how much of a new prompt is cached already. No tensors.

A sequence that starts gets a slot, a row of the block table. The whole blocks of the longest known prefix are shared;
if the prefix ends inside a block, that block is copied, since two sequences that write to one block would disturb each
other (copy on write). Blocks for further tokens are reserved as the sequence grows. Computed prompts are published at
once, so that the episodes of a group share theirs while they run; a finished sequence leaves everything it computed.

Invariants: a block is written by one sequence only, and never where the tree knows its content; keys are reused only
under the version that computed them; at least the last prompt token is always computed, since its logits are needed; a
sequence whose keys mix versions leaves none.

Letters: U slots, Z blocks of a slot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from glm5.engine.prefix_tree import BlockPool, Match, Node, PrefixTree


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy block ``source`` to ``target`` before the step."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a sequence goes: its slot, how many leading tokens it finds there, and the copy that this takes."""

    slot: int
    cached: int
    copy: BlockCopy | None


class PrefixCache:
    """Bookkeeping of slots and blocks; the tensors belong to the runner.

    ``table_UZ`` names the blocks of each slot, ``num_blocks_U`` how many it has, ``lengths_U`` how many of its positions
    have keys: the position of the next token. With ``recompute_last`` one cached token less is reused, for those who
    need its hidden state.
    """

    def __init__(
        self,
        num_slots: int,
        max_context: int,
        num_blocks: int,
        block_size: int,
        version: int = 0,
        *,
        enabled: bool = True,
        recompute_last: bool = False,
    ) -> None:
        self.block_size, self.num_blocks = block_size, num_blocks
        self.table_UZ = np.zeros((num_slots, -(-max_context // block_size)), np.int32)
        self.num_blocks_U = np.zeros(num_slots, np.int64)
        self.lengths_U = np.zeros(num_slots, np.int64)
        self.version = version
        self.is_enabled = enabled
        self._recompute_last = recompute_last
        self._pool = BlockPool(num_blocks)
        self._tree = PrefixTree(self._pool, block_size)
        self._idle = list(range(num_slots - 1, -1, -1))
        self._is_busy = np.zeros(num_slots, bool)
        self._pinned: list[Node | None] = [None] * num_slots
        self._published = np.zeros(num_slots, np.int64)
        self._versions = np.zeros(num_slots, np.int64)

    @property
    def num_idle(self) -> int:
        """Slots that no running sequence holds."""
        return len(self._idle)

    @property
    def num_available(self) -> int:
        """Blocks that are free or would be after eviction."""
        return self._pool.num_free + self._tree.num_evictable

    @property
    def num_used(self) -> int:
        """Blocks that hold keys, of running sequences or for reuse."""
        return self.num_blocks - self._pool.num_free

    @property
    def num_growing(self) -> int:
        """Running sequences that may take more blocks."""
        return int((self._is_busy & (self.num_blocks_U < self.table_UZ.shape[1])).sum())

    @property
    def capacity(self) -> int:
        """Tokens that a sequence can have when it runs alone."""
        blocks = min(self.table_UZ.shape[1], self.num_blocks - self._recompute_last)  # it may pin one that it copied
        return blocks * self.block_size

    def blocks_of(self, length: int) -> int:
        """Blocks that ``length`` tokens take."""
        return -(-length // self.block_size)

    def cost(self, tokens: np.ndarray, reuse: bool = True) -> int:
        """By how much ``num_available`` falls when a sequence computes ``tokens`` and one more."""
        match = self._match(tokens, reuse)
        return self.blocks_of(len(tokens) + 1) - self._tree.count_pinned(match.node)

    def acquire(self, tokens: np.ndarray, reuse: bool = True) -> Placement | None:
        """A slot for a sequence that is to compute ``tokens``; None when no slot, or no block for a copy, is left."""
        if not self._idle:
            return None
        match = self._match(tokens, reuse)
        cached = max(match.length - self._recompute_last, 0)
        whole, part = divmod(cached, self.block_size)
        self._tree.pin(match.node)
        shared = match.blocks[:whole]
        self._pool.share(shared)
        copy = None
        if part:
            if not self._make_room(1):
                self._pool.drop(shared)
                self._tree.unpin(match.node)
                return None
            copy = BlockCopy(match.blocks[whole], self._pool.take())
        slot = self._idle.pop()
        self._is_busy[slot] = True
        blocks = [*shared, copy.target] if copy else shared
        self.table_UZ[slot, : len(blocks)] = blocks
        self.num_blocks_U[slot] = len(blocks)
        self.lengths_U[slot] = cached
        self._pinned[slot], self._published[slot] = match.node, match.length - match.length % self.block_size
        self._versions[slot] = self.version
        return Placement(slot, cached, copy)

    def reserve(self, slot: int, length: int) -> bool:
        """Give ``slot`` blocks for ``length`` positions, evicting what nobody uses; False, changing nothing, if it fails."""
        have, wanted = int(self.num_blocks_U[slot]), self.blocks_of(length)
        if wanted <= have:
            return True
        if not self._make_room(wanted - have):
            return False
        self.table_UZ[slot, have:wanted] = [self._pool.take() for _ in range(wanted - have)]
        self.num_blocks_U[slot] = wanted
        return True

    def publish(self, slot: int, tokens: np.ndarray, is_complete: bool) -> None:
        """Let others share ``tokens``, whose keys ``slot`` holds: whole blocks, and the rest once it ``is_complete``."""
        node = self._pinned[slot]
        if not self.is_enabled or self._versions[slot] != self.version or node is None:
            return
        start, stop = int(self._published[slot]), len(tokens)
        if not is_complete:
            stop -= stop % self.block_size
        if stop <= start:
            return
        end = self._tree.insert(node, tokens[start:stop], self._blocks(slot, start, stop))
        self._tree.pin(end)
        self._tree.unpin(node)
        self._pinned[slot], self._published[slot] = end, stop

    def release(self, slot: int, tokens: np.ndarray | None) -> None:
        """``slot`` is idle again and leaves the keys of ``tokens``; None forgets what the sequence published, too."""
        node = self._pinned[slot]
        assert node is not None, "only busy slots are released"
        self._tree.unpin(node)
        self._pinned[slot] = None
        if self.is_enabled and self._versions[slot] == self.version:
            if tokens is None:
                self._tree.prune(node)
            else:
                self._tree.insert(self._tree.root, tokens, self._blocks(slot, 0, len(tokens)))
        self._pool.drop(self.table_UZ[slot, : self.num_blocks_U[slot]].tolist())
        self.num_blocks_U[slot] = self.lengths_U[slot] = 0
        self._idle.append(slot)
        self._is_busy[slot] = False

    def find(self, tokens: np.ndarray) -> tuple[int, list[int]]:
        """How many leading tokens are cached for reuse, and the blocks that hold them."""
        match = self._tree.match(tokens if self.is_enabled else tokens[:0])
        return match.length, match.blocks

    def adopt(self, tokens: np.ndarray, write: Callable[[list[int]], None]) -> bool:
        """Make ``tokens`` known whose keys ``write`` stores in the blocks that it is given; False when there is no room."""
        count = self.blocks_of(len(tokens))
        if not self.is_enabled or not self._make_room(count):
            return False
        blocks = [self._pool.take() for _ in range(count)]
        try:
            write(blocks)
            self._tree.insert(self._tree.root, tokens, blocks)
        finally:
            self._pool.drop(blocks)
        return True

    def set_version(self, version: int) -> None:
        """New weights: nothing computed before is shared again. Running sequences keep what they have."""
        self.version = version
        self._tree.start_version()

    def _match(self, tokens: np.ndarray, reuse: bool) -> Match:
        return self._tree.match(tokens[:-1] if reuse and self.is_enabled else tokens[:0])

    def _blocks(self, slot: int, start: int, stop: int) -> list[int]:
        return self.table_UZ[slot, start // self.block_size : self.blocks_of(stop)].tolist()

    def _make_room(self, count: int) -> bool:
        if count > self.num_available:
            return False
        self._tree.evict(count - self._pool.num_free)
        return True
