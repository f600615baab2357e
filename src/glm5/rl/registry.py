"""Task services that registered with the orchestrator, and which of them may get work.

A service announces itself with ``POST /register`` and keeps itself alive with ``POST /heartbeat``; one that was silent
for ``DEAD_AFTER_S`` gets no new work, and what it was running is given up by its caller. Time is the orchestrator's own
monotonic clock and is passed in.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

DEAD_AFTER_S = 10.0


@dataclass(slots=True, eq=False)
class TaskService:
    """One registered service."""

    service_id: str
    url: str
    capacity: int
    """Episodes at once."""
    tasksets: frozenset[str]
    last_heartbeat: float
    running: int = 0
    """Episodes that we run there now."""

    def is_alive(self, now: float) -> bool:
        """Whether the last heartbeat is recent enough."""
        return now - self.last_heartbeat < DEAD_AFTER_S


class Registry:
    """All services by id."""

    def __init__(self) -> None:
        self._services: dict[str, TaskService] = {}

    def register(self, service_id: str, url: str, capacity: int, tasksets: Iterable[str], now: float) -> None:
        """Add a service, or renew one that restarted; its running episodes are still counted until they end."""
        known = self._services.get(service_id)
        self._services[service_id] = TaskService(service_id, url.rstrip("/"), capacity, frozenset(tasksets), now,
                                                 known.running if known else 0)

    def heartbeat(self, service_id: str, now: float) -> bool:
        """Note a sign of life; False for a service that must register first."""
        service = self._services.get(service_id)
        if service is None:
            return False
        service.last_heartbeat = now
        return True

    def get(self, service_id: str) -> TaskService:
        """The service as it is registered now."""
        return self._services[service_id]

    def all(self) -> list[TaskService]:
        """Every service ever registered."""
        return list(self._services.values())

    def served(self, now: float) -> set[str]:
        """Tasksets that a live service offers."""
        return {taskset for service in self._services.values() if service.is_alive(now) for taskset in service.tasksets}

    def choose(self, taskset: str, now: float) -> TaskService | None:
        """The live service of ``taskset`` with the most free capacity; None when all are dead or full."""
        candidates = [service for service in self._services.values()
                      if taskset in service.tasksets and service.is_alive(now) and service.running < service.capacity]
        return max(candidates, key=lambda service: service.capacity - service.running, default=None)
