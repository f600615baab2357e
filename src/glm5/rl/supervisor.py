"""Supervision of child processes: start, watch, restart at the same URL, stop in order.

A service is dead when its process exits, or when it fails ``FAILED_PROBES`` health probes in a row (a process that was
stopped or hangs). Probing runs in a thread; starting and restarting happen in ``tend``, which the owner calls from its
main thread between other work, because the kernel ties the parent-death signal to the thread that started the child.
``tend`` never waits: a restart is a state (running → waiting → starting → running) that moves on at later calls.

Restarts back off; a service that dies more than ``MAX_RESTARTS`` times within ``RESTART_WINDOW_S`` ends the run with
one line. One that exits with 2 has said what the user must fix, a full disk for example, and ends the run at once. The
port of a service stays reserved while it is down, so that it comes back at its URL. Services start in the given order
and stop in the reverse one, so that intake stops before what it feeds on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import httpx

from glm5.errors import ServiceError
from glm5.process import last_line, wait_ready
from glm5.rl.launch.machines import LocalMachines, Machine, Machines, Process

PROBE_PERIOD_S = 1.0
PROBE_TIMEOUT_S = 3.0
FAILED_PROBES = 3
START_TIMEOUT_S = 90.0
MAX_RESTARTS = 5
RESTART_WINDOW_S = 300.0
USER_ERROR = 2
"""Exit code of the command line for what the user can fix."""


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """How to start one service."""

    name: str
    """Unique; also the name of its log and ready file."""
    health_path: str
    """Answers 200 when the service is well."""
    arguments: Callable[[], list[str]]
    """``glm5`` arguments without host, port and ready file; called at every start, so that a restart sees the newest
    weights."""


@dataclass(slots=True, eq=False)
class _Service:
    spec: ServiceSpec
    machine: Machine
    state: Literal["starting", "running", "waiting"] = "waiting"
    process: Process | None = None
    since: float = 0.0
    """Monotonic time at which the state was entered."""
    wait_s: float = 0.0
    """How long to stay in ``waiting``."""
    failed_probes: int = 0
    deaths: list[float] = field(default_factory=list)

    @property
    def url(self) -> str:
        host, port = self.machine.address
        return f"http://{host}:{port}"


class Supervisor:
    """Owner of the child processes of one run; use as a context manager. ``on_event(kind, **values)`` gets deaths."""

    def __init__(self, run_dir: Path, on_event: Callable[..., None], machines: Machines | None = None) -> None:
        """``machines`` None starts everything on this machine."""
        self._machines = machines or LocalMachines()
        self._logs, self._ready = run_dir / "logs", run_dir / "ready"
        self._on_event = on_event
        self._services: dict[str, _Service] = {}
        self._stopped = threading.Event()
        self._prober = threading.Thread(target=self._probe_all, name="prober", daemon=True)

    def __enter__(self) -> Supervisor:
        self._prober.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        for service in reversed(self._services.values()):
            if service.process is not None:
                service.machine.stop(service.process)
            service.machine.release()
        self._prober.join(timeout=2 * PROBE_TIMEOUT_S)

    def add(self, spec: ServiceSpec) -> str:
        """Start a service in a port of its own and return its URL at once; ``wait_until_ready`` waits for all."""
        service = _Service(spec, self._machines.place(spec.name))
        self._services[spec.name] = service
        self._start(service)
        return service.url

    def wait_until_ready(self) -> None:
        """Wait for every service. Raises ServiceError when one exits or takes longer than ``START_TIMEOUT_S``."""
        for service in self._services.values():
            if service.state == "starting" and service.process is not None:
                left = max(service.since + START_TIMEOUT_S - time.monotonic(), 1.0)
                wait_ready(service.process, self._ready_file(service), self._log_file(service), left)
                self._enter(service, "running")

    def tend(self) -> None:
        """Move every service on: notice deaths, restart what is due.

        Raises ServiceError when one dies too often, or exits with 2: then a restart would fail in the same way.
        """
        for service in self._services.values():
            if service.state == "waiting":
                if time.monotonic() - service.since >= service.wait_s:
                    self._start(service)
                continue
            assert service.process is not None
            code = service.process.poll()
            if code == USER_ERROR:
                self._on_event("service_failed", service=service.spec.name)
                said = last_line(self._log_file(service)).removeprefix("error: ")
                raise ServiceError(f"{service.spec.name}: {said}")
            if code is not None:
                self._mark_dead(service, f"exited with {code}")
            elif service.state == "running" and service.failed_probes >= FAILED_PROBES:
                self._mark_dead(service, f"failed {service.failed_probes} health probes")
            elif service.state == "starting":
                self._check_start(service)

    def state(self) -> dict[str, str]:
        """State of every service by name, for error messages and dumps."""
        return {name: service.state for name, service in self._services.items()}

    def process_ids(self) -> dict[str, int]:
        """Id of the newest process of every service, dead or alive."""
        return {name: service.process.pid for name, service in self._services.items() if service.process is not None}

    def _start(self, service: _Service) -> None:
        ready = self._ready_file(service)
        ready.unlink(missing_ok=True)
        host, port = service.machine.address
        address = ["--host", host, "--port", str(port), "--ready-file", str(ready.resolve())]
        service.process = service.machine.start([*service.spec.arguments(), *address], self._log_file(service))
        self._enter(service, "starting")

    def _check_start(self, service: _Service) -> None:
        if self._ready_file(service).exists():
            self._on_event("service_restarted", service=service.spec.name,
                           start_s=round(time.monotonic() - service.since, 3))
            self._enter(service, "running")
        elif time.monotonic() - service.since > START_TIMEOUT_S:
            self._mark_dead(service, f"was not ready after {START_TIMEOUT_S:.0f} s")

    def _mark_dead(self, service: _Service, why: str) -> None:
        assert service.process is not None
        service.machine.stop(service.process, grace_s=0.2)
        now = time.monotonic()
        service.deaths = [death for death in service.deaths if now - death < RESTART_WINDOW_S] + [now]
        self._on_event("service_died", service=service.spec.name, why=why, deaths=len(service.deaths))
        if len(service.deaths) > MAX_RESTARTS:
            raise ServiceError(f"{service.spec.name}: {why}, the {len(service.deaths)}th time within "
                               f"{RESTART_WINDOW_S:.0f} s; read {self._log_file(service)}, then run again")
        service.wait_s = 0.25 * 2 ** (len(service.deaths) - 1)
        self._enter(service, "waiting")

    def _enter(self, service: _Service, state: Literal["starting", "running", "waiting"]) -> None:
        service.state, service.since, service.failed_probes = state, time.monotonic(), 0

    def _probe_all(self) -> None:
        with httpx.Client(timeout=PROBE_TIMEOUT_S, trust_env=False) as client:
            while not self._stopped.wait(PROBE_PERIOD_S):
                for service in list(self._services.values()):
                    if service.state == "running":
                        self._probe(client, service)

    def _probe(self, client: httpx.Client, service: _Service) -> None:
        since = service.since
        try:
            is_well = client.get(service.url + service.spec.health_path).status_code == 200
        except httpx.HTTPError:
            is_well = False
        if service.since == since:  # else it was restarted meanwhile and the answer is about its predecessor
            service.failed_probes = 0 if is_well else service.failed_probes + 1

    def _ready_file(self, service: _Service) -> Path:
        return self._ready / f"{service.spec.name}.json"

    def _log_file(self, service: _Service) -> Path:
        return self._logs / f"{service.spec.name}.log"


def poll_until(condition: Callable[[], bool], tend: Callable[[], None], timeout_s: float, what: str,
               pause_s: float = 0.02) -> None:
    """Wait for ``condition`` while tending. Raises ServiceError naming ``what`` at the deadline."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise ServiceError(f"{what}: not within {timeout_s:.0f} s; see the logs of the run directory")
        tend()
        time.sleep(pause_s)
