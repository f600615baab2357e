"""Which engine rank serves a session: consistent hashing with bounded load.

A session's turns share a growing prefix, so they belong on the rank that has it cached. Sessions are hashed onto a
ring of points; a session takes the first rank from its point on that takes sessions and is below ``LOAD_FACTOR`` times
the mean number of sessions (Mirrokni et al., "Consistent Hashing with Bounded Loads"), and keeps it.

A session moves between two turns, along the ring, at the price of computing its prefix again; therefore only

- when its rank is dead or drains;
- when a rank was added or came back, and its rank holds more than ``REBALANCE_FACTOR`` times the mean (and one more):
  sessions move until it does not. The gap between the two factors keeps a session from moving for a small gain.

Sessions that end make no other move. A rank is no busier for it, new sessions go where there is room, and in the last
turns of a batch every move would compute the longest prefixes again. Hence the mean is of the most sessions that there
were at once since the ranks last changed.
"""

from __future__ import annotations

import bisect
import hashlib
import math
from collections.abc import Sequence

from glm5.errors import GatewayError

LOAD_FACTOR = 1.25
REBALANCE_FACTOR = 1.5
_POINTS_PER_ENGINE = 64


class Router:
    """Sessions → engine URLs. Pure bookkeeping; ``upstream`` tells it who is alive."""

    def __init__(self, engine_urls: Sequence[str]) -> None:
        if not engine_urls:
            raise GatewayError("no engine: got an empty list of URLs; give --engine URL at least once")
        self._ring: list[tuple[int, str]] = []
        self._sessions: dict[str, set[str]] = {}
        self._assigned: dict[str, str] = {}
        self._dead: set[str] = set()
        self._draining: set[str] = set()
        self._most = 0
        """Sessions at once, at most, since the set of ranks that take sessions last changed."""
        self.num_moves = 0
        """Sessions that changed their rank."""
        for url in engine_urls:
            self.add(url)

    @property
    def engine_urls(self) -> tuple[str, ...]:
        """All ranks, in the order in which they were added."""
        return tuple(self._sessions)

    def add(self, url: str) -> None:
        """A rank joins the ring, or stops draining."""
        url = url.rstrip("/")
        self._draining.discard(url)
        self._most = len(self._assigned)
        if url not in self._sessions:
            self._sessions[url] = set()
            for number in range(_POINTS_PER_ENGINE):
                bisect.insort(self._ring, (_point(f"{url}#{number}"), url))

    def drain(self, url: str) -> None:
        """The rank takes no session any more; its sessions move before their next turn. Raises GatewayError for an
        unknown rank and for the last one that takes sessions."""
        url = url.rstrip("/")
        if url not in self._sessions:
            raise GatewayError(f"{url}: not an engine of this gateway; got {', '.join(self._sessions)}")
        if set(self._sessions) - self._draining <= {url}:
            raise GatewayError(f"{url}: no other engine would take its sessions; add one before draining this")
        self._draining.add(url)

    def choose(self, session_id: str) -> str | None:
        """Engine of a session for its next turn; None while no engine takes sessions."""
        current = self._assigned.get(session_id)
        if current is not None and not self._must_leave(current):
            return current
        url = self._place(session_id)
        if url is None:
            return None if current in self._dead else current  # a draining rank serves on rather than nobody
        if current is not None:
            self._sessions[current].discard(session_id)
            self.num_moves += 1
        self._assigned[session_id] = url
        self._sessions[url].add(session_id)
        self._most = max(self._most, len(self._assigned))
        return url

    def release(self, session_id: str) -> None:
        """Forget a session that has ended."""
        url = self._assigned.pop(session_id, None)
        if url is not None:
            self._sessions[url].discard(session_id)

    def mark_dead(self, url: str) -> None:
        """Give no session to this engine; its sessions choose again at their next turns, unless it lives by then: a
        rank that was only slow still has their prefixes."""
        self._dead.add(url)

    def mark_alive(self, url: str) -> None:
        """The engine answers again."""
        if url in self._dead:
            self._dead.discard(url)
            self._most = len(self._assigned)

    def is_alive(self, url: str) -> bool:
        """Whether the engine answers."""
        return url not in self._dead

    def is_draining(self, url: str) -> bool:
        """Whether the engine's sessions are moving away."""
        return url in self._draining

    def num_alive(self) -> int:
        """Number of engines that answer."""
        return len(self._sessions) - len(self._dead)

    def num_sessions(self, url: str) -> int:
        """Number of sessions that this engine serves."""
        return len(self._sessions[url])

    def _takers(self) -> int:
        """Number of engines that may be given sessions."""
        return len(self._sessions) - len(self._dead | self._draining)

    def _must_leave(self, url: str) -> bool:
        if url in self._draining or url in self._dead:
            return True
        mean = self._most / max(self._takers(), 1)
        return len(self._sessions[url]) > math.ceil(REBALANCE_FACTOR * mean) + 1

    def _place(self, session_id: str) -> str | None:
        """The first engine from the session's point on that is below the bound; None when none takes sessions."""
        takers = self._takers()
        if takers == 0:
            return None
        others = len(self._assigned) - (session_id in self._assigned)
        bound = math.ceil(LOAD_FACTOR * (others + 1) / takers)
        first = bisect.bisect(self._ring, (_point(session_id), ""))
        for offset in range(len(self._ring)):
            url = self._ring[(first + offset) % len(self._ring)][1]
            if url not in self._dead and url not in self._draining and len(self._sessions[url]) < bound:
                return url
        raise AssertionError("the bound exceeds the mean, so some engine is below it")


def _point(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")
