"""What a component did and whom it waited for, as ``span`` events of the run; ``rl/timeline.py`` reads them.

``{"kind": "span", "time": end, "component", "name", "seconds", "waits_for"}``; ``waits_for`` names another component,
"" where the component worked itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SHORTEST_S = 0.2
"""States of a track that last less are part of the one before: a loop that turns often would fill the disk."""


class Track:
    """One component's line in the timeline; ``event`` is ``RunLog.event``."""

    def __init__(self, event: Callable[..., None], component: str) -> None:
        self._event, self._component = event, component
        self._state: tuple[str, str] | None = None
        self._since = 0.0

    @contextmanager
    def span(self, name: str, waits_for: str = "") -> Iterator[None]:
        """Record how long the body took, whether it succeeds or not."""
        start = time.monotonic()
        try:
            yield
        finally:
            self._write(name, waits_for, time.monotonic() - start)

    def enter(self, name: str, waits_for: str = "") -> None:
        """The component is in this state from now on; the one before is recorded when it lasted long enough."""
        now = time.monotonic()
        if self._state == (name, waits_for):
            return
        if self._state is not None:
            if now - self._since < SHORTEST_S:
                return
            self._write(*self._state, now - self._since)
        self._state, self._since = (name, waits_for), now

    def end(self) -> None:
        """Record the last state."""
        if self._state is not None:
            self._write(*self._state, time.monotonic() - self._since)
            self._state = None

    def _write(self, name: str, waits_for: str, seconds: float) -> None:
        self._event("span", component=self._component, name=name, seconds=round(seconds, 4), waits_for=waits_for)
