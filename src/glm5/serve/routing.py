"""Which replica serves a request: the one that probably has its beginning cached, unless it is much busier than others.

A prompt is cut into pieces of equal length, and every beginning of it that ends with a piece is remembered, by its
hash, with the replica that got it last. A request goes where its longest remembered beginning went. Nothing is known
about the replicas' caches: a wrong guess costs a prefill.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Collection

_PIECE_BYTES = 256
_MOST_PIECES = 4096
"""Pieces of one prompt that are looked at: 1 MiB."""
_MOST_REMEMBERED = 1 << 18
_LOAD_FACTOR, _LOAD_SLACK = 1.25, 4
"""A replica with the beginning is passed over when it has more than this factor times the mean and this many more."""


class PrefixRouter:
    """Prompts → numbers of replicas. Pure bookkeeping: somebody else says who is alive and when requests end."""

    def __init__(self, count: int) -> None:
        self.loads = [0] * count
        """Requests in flight by replica."""
        self.is_alive = [False] * count
        self._served = [0] * count
        self._owners: OrderedDict[bytes, int] = OrderedDict()

    def choose(self, prompt: bytes, excluded: Collection[int] = ()) -> int | None:
        """The replica for ``prompt``, now one request busier until ``finish``; None when all that live are excluded."""
        candidates = [number for number, alive in enumerate(self.is_alive) if alive and number not in excluded]
        if not candidates:
            return None
        beginnings = _beginnings(prompt)
        chosen = min(candidates, key=lambda number: (self.loads[number], self._served[number], number))
        mean = sum(self.loads[number] for number in candidates) / len(candidates)
        for beginning in reversed(beginnings):
            owner = self._owners.get(beginning)
            if owner in candidates:
                if self.loads[owner] <= _LOAD_FACTOR * mean + _LOAD_SLACK:
                    chosen = owner
                break
        for beginning in beginnings:
            self._owners[beginning] = chosen
            self._owners.move_to_end(beginning)
        while len(self._owners) > _MOST_REMEMBERED:
            self._owners.popitem(last=False)
        self.take(chosen)
        return chosen

    def take(self, number: int) -> None:
        """A request goes to replica ``number`` for a reason of its own."""
        self.loads[number] += 1
        self._served[number] += 1

    def finish(self, number: int) -> None:
        """A request of replica ``number`` has ended."""
        self.loads[number] -= 1

    def forget(self, number: int) -> None:
        """Replica ``number`` has died, and its cache with it."""
        self.is_alive[number] = False
        self._owners = OrderedDict((key, owner) for key, owner in self._owners.items() if owner != number)


def _beginnings(prompt: bytes) -> list[bytes]:
    """Hashes of the beginnings of ``prompt`` that end with a whole piece, shortest first."""
    digest, found = hashlib.blake2b(digest_size=8), []
    stop = min(len(prompt) - len(prompt) % _PIECE_BYTES, _MOST_PIECES * _PIECE_BYTES)
    for start in range(0, stop, _PIECE_BYTES):
        digest.update(prompt[start : start + _PIECE_BYTES])
        found.append(digest.digest())
    return found
