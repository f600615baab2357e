"""Which engine serves a session: consistent hashing with bounded load, sticky until the engine dies.

A session's turns share a growing prefix, so they belong on the engine that has it cached. Sessions are hashed onto a
ring of points; a session takes the first engine from its point on that is alive and below ``LOAD_FACTOR`` times the
mean number of sessions (Mirrokni et al., "Consistent Hashing with Bounded Loads"), and keeps it. When an engine dies,
only its sessions move; when it comes back, it takes new ones.
"""

from __future__ import annotations

import bisect
import hashlib
import math
from collections.abc import Sequence

from glm5.errors import GatewayError

LOAD_FACTOR = 1.25
_POINTS_PER_ENGINE = 64


class Router:
    """Sessions → engine URLs. Pure bookkeeping; ``upstream`` tells it who is alive."""

    def __init__(self, engine_urls: Sequence[str]) -> None:
        if not engine_urls:
            raise GatewayError("no engine: got an empty list of URLs; give --engine URL at least once")
        self.engine_urls = tuple(dict.fromkeys(url.rstrip("/") for url in engine_urls))
        self._ring = sorted((_point(f"{url}#{n}"), url) for url in self.engine_urls for n in range(_POINTS_PER_ENGINE))
        self._sessions: dict[str, set[str]] = {url: set() for url in self.engine_urls}
        self._assigned: dict[str, str] = {}
        self._dead: set[str] = set()

    def choose(self, session_id: str) -> str | None:
        """Engine of a session, chosen now if it has none; None while no engine is alive."""
        if session_id in self._assigned:
            return self._assigned[session_id]
        alive = len(self.engine_urls) - len(self._dead)
        if alive == 0:
            return None
        bound = math.ceil(LOAD_FACTOR * (len(self._assigned) + 1) / alive)
        first = bisect.bisect(self._ring, (_point(session_id), ""))
        for offset in range(len(self._ring)):
            url = self._ring[(first + offset) % len(self._ring)][1]
            if url not in self._dead and len(self._sessions[url]) < bound:
                self._assigned[session_id] = url
                self._sessions[url].add(session_id)
                return url
        raise AssertionError("the bound exceeds the mean, so some engine is below it")

    def release(self, session_id: str) -> None:
        """Forget a session that has ended."""
        url = self._assigned.pop(session_id, None)
        if url is not None:
            self._sessions[url].discard(session_id)

    def mark_dead(self, url: str) -> None:
        """Give no session to this engine; its sessions choose again."""
        self._dead.add(url)
        for session_id in self._sessions[url]:
            del self._assigned[session_id]
        self._sessions[url].clear()

    def mark_alive(self, url: str) -> None:
        """The engine answers again."""
        self._dead.discard(url)

    def is_alive(self, url: str) -> bool:
        """Whether sessions may be given to this engine."""
        return url not in self._dead

    def num_alive(self) -> int:
        """Number of engines that may be given sessions."""
        return len(self.engine_urls) - len(self._dead)

    def num_sessions(self, url: str) -> int:
        """Number of sessions that this engine serves."""
        return len(self._sessions[url])


def _point(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")
