"""Task services that registered with the orchestrator, and which of them may get work.

A service announces itself with ``POST /register`` and keeps itself alive with ``POST /heartbeat``; one that was silent
for ``DEAD_AFTER_S`` gets no new work, and what it was running is given up by its caller. It says how many episodes it
runs at once (``capacity``), how many it starts in a second at most (``speed``), and how much more or less than their
share its tasksets should get (``ratio``). How long its episodes take is measured; of services that offer the same, the
one that would be through with one more episode first gets it. Time is the orchestrator's own monotonic clock and is
passed in.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from glm5.errors import ConfigError
from glm5.rl.breaker import BreakerState, CircuitBreaker
from glm5.rl.config import BreakerConfig

DEAD_AFTER_S = 10.0
_MEMORY = 32
"""Episodes over which a service's duration is smoothed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What a service says of itself."""

    id: str
    url: str
    capacity: int
    """Episodes at once."""
    tasksets: tuple[str, ...]
    kind: str = "task_service"
    ratio: float = 1.0
    """Factor on the shares of its tasksets; of several services with the same taskset the largest counts."""
    speed: float = 0.0
    """Episodes that it starts in a second at most; 0: as many as come."""

    def __post_init__(self) -> None:
        if self.kind != "task_service":
            raise ConfigError(f"kind={self.kind!r}: only a task_service registers here")
        if self.capacity < 1 or self.ratio <= 0 or self.speed < 0 or not self.tasksets:
            raise ConfigError(f"capacity={self.capacity}, ratio={self.ratio}, speed={self.speed}, "
                              f"tasksets={self.tasksets}: expected capacity >= 1, ratio > 0, speed >= 0 and a taskset")


@dataclass(slots=True, eq=False)
class TaskService:
    """One registered service."""

    description: Description
    breaker: CircuitBreaker
    last_heartbeat: float
    running: int = 0
    """Episodes that we run there now."""
    episode_s: float | None = None
    """Seconds that an episode takes there, smoothed; None before the first has ended."""
    finished: int = 0
    """Episodes that ended there."""
    next_start: float = field(default=0.0, repr=False)
    """Before it no episode may start, because of ``speed``."""

    @property
    def service_id(self) -> str:
        """Its id."""
        return self.description.id

    @property
    def url(self) -> str:
        """Where it listens."""
        return self.description.url.rstrip("/")

    def is_alive(self, now: float) -> bool:
        """Whether the last heartbeat is recent enough."""
        return now - self.last_heartbeat < DEAD_AFTER_S

    def is_usable(self, now: float) -> bool:
        """Whether it lives and is not left alone because it failed."""
        return self.is_alive(now) and self.breaker.allows(now)

    def free(self, now: float) -> int:
        """Episodes that it may start now, its speed left aside."""
        return max(self.description.capacity - self.running, 0) if self.is_usable(now) else 0

    def begin(self, now: float) -> bool:
        """An episode starts there; True when it is the one that tries a failing service again."""
        self.running += 1
        if self.description.speed:
            period_s = 1 / self.description.speed
            self.next_start = max(self.next_start, now - period_s) + period_s
        return self.breaker.begin(now)

    def end(self, now: float, *, duration_s: float, failed: bool, is_probe: bool) -> BreakerState | None:
        """An episode ended there; ``failed`` through the service's fault. Gives the breaker's new state if it changed.
        """
        self.running -= 1
        self.finished += 1
        if not failed:
            before = duration_s if self.episode_s is None else self.episode_s
            self.episode_s = before + (duration_s - before) / _MEMORY
        return self.breaker.record(failed, is_probe, now)


class Registry:
    """All services by id."""

    def __init__(self, breaker: BreakerConfig | None = None) -> None:
        self._breaker = breaker or BreakerConfig()
        self._services: dict[str, TaskService] = {}

    def register(self, description: Description, now: float) -> None:
        """Add a service, or renew one that restarted; its running episodes are still counted until they end."""
        replaced = [one.service_id for one in self._services.values() if one.url == description.url
                    and one.service_id != description.id and not one.running]
        for service_id in replaced:
            del self._services[service_id]
        known = self._services.get(description.id)
        if known is None:
            self._services[description.id] = TaskService(description, CircuitBreaker(self._breaker), now)
        else:
            known.description, known.last_heartbeat = description, now

    def heartbeat(self, service_id: str, now: float) -> bool:
        """Note a sign of life; False for a service that must register first."""
        service = self._services.get(service_id)
        if service is None:
            return False
        service.last_heartbeat = now
        return True

    def all(self) -> list[TaskService]:
        """Every service that is registered, dead ones included."""
        return list(self._services.values())

    def shares(self, now: float) -> dict[str, float]:
        """Tasksets that a usable service offers, with the ratio it wishes."""
        shares: dict[str, float] = {}
        for service in self._services.values():
            if service.is_usable(now):
                for taskset in service.description.tasksets:
                    shares[taskset] = max(shares.get(taskset, 0.0), service.description.ratio)
        return shares

    def has_room(self, taskset: str, episodes: int, now: float) -> bool:
        """Whether so many episodes of a taskset, or all that its services hold, would find a place now."""
        offering = [service for service in self._offering(taskset) if service.is_usable(now)]
        capacity = sum(service.description.capacity for service in offering)
        return sum(service.free(now) for service in offering) >= max(min(episodes, capacity), 1)

    def choose(self, taskset: str, now: float) -> TaskService | None:
        """The service that would be through with one more episode first; None when none may start one now."""
        candidates = [service for service in self._offering(taskset) if service.free(now) and service.next_start <= now]
        known = [service.episode_s for service in candidates if service.episode_s is not None]
        typical = sum(known) / len(known) if known else 1.0

        def load(service: TaskService) -> tuple[float, int]:
            duration_s = typical if service.episode_s is None else service.episode_s
            return (service.running + 1) / service.description.capacity * duration_s, -service.free(now)

        return min(candidates, key=load, default=None)

    def _offering(self, taskset: str) -> Iterable[TaskService]:
        return (service for service in self._services.values() if taskset in service.description.tasksets)
