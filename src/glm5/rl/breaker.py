"""A circuit breaker: a task service that keeps failing gets no work until one attempt at it has succeeded.

    closed ──too many failures──► open ──back-off over──► half-open ──the attempt succeeded──► closed
                                    ▲───────────────the attempt failed──────┘

While it is open the service's share of the work goes to other services and tasksets. In the half-open state one attempt
at a time is let through; each failure doubles the back-off. Time is passed in.
"""

from __future__ import annotations

from collections import deque
from typing import Literal

from glm5.rl.config import BreakerConfig

BreakerState = Literal["closed", "open", "half_open"]


class CircuitBreaker:
    """The breaker of one service."""

    def __init__(self, config: BreakerConfig) -> None:
        self._config = config
        self._failures: deque[bool] = deque(maxlen=config.window)
        self._backoff_s = config.backoff_s
        self._open_until: float | None = None
        self._is_probing = False
        self.times_opened = 0
        """How often it opened, from closed or from half-open."""

    def state(self, now: float) -> BreakerState:
        """Where it is in the circle."""
        if self._open_until is None:
            return "closed"
        return "open" if now < self._open_until else "half_open"

    def allows(self, now: float) -> bool:
        """Whether an attempt may start now."""
        state = self.state(now)
        return state == "closed" or (state == "half_open" and not self._is_probing)

    def begin(self, now: float) -> bool:
        """An attempt starts; True for the one that decides whether a half-open breaker closes."""
        self._is_probing = self.state(now) == "half_open"
        return self._is_probing

    def record(self, failed: bool, is_probe: bool, now: float) -> BreakerState | None:
        """An attempt ended. Returns the new state when it changed.

        What began before the breaker opened and ends afterwards says nothing about the service as it is now.
        """
        if is_probe:
            self._is_probing = False
            return self._open(now) if failed else self._close()
        if self._open_until is not None:
            return None
        self._failures.append(failed)
        known = len(self._failures)
        is_bad = sum(self._failures) >= self._config.failure_share * known
        return self._open(now) if is_bad and known >= self._config.window // 4 else None

    def _open(self, now: float) -> BreakerState:
        self._open_until = now + self._backoff_s
        self._backoff_s = min(2 * self._backoff_s, self._config.max_backoff_s)
        self.times_opened += 1
        return "open"

    def _close(self) -> BreakerState:
        self._open_until = None
        self._backoff_s = self._config.backoff_s
        self._failures.clear()
        return "closed"
