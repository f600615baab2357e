"""Supervision of child processes: start, watch, restart at the same URL, stop in order.

A service is dead when its process exits; when it fails ``FAILED_PROBES`` health probes in a row (a process that was
stopped or hangs); when it answers those but fails ``FAILED_WORK`` probes of its work in a row; or when somebody who
knows better ``condemn``s it. Each of these is found within 10 s. A thread of its own per service probes; one thread,
the keeper, starts and restarts all of them, because the kernel ties the parent-death signal to the thread that started
the child, and the owner's main thread may be busy for minutes. What goes wrong for good is raised by ``tend``, which
the owner calls between other work.

Restarts back off exponentially up to a cap; a service that dies more often than ``max_restarts`` times within
``restart_window_s`` ends the run with one line. One that exits with 2 has said what the user must fix, a full disk for
example, and ends the run at once. The port of a service stays reserved while it is down, so that it comes back at its
URL. Services start in the given order and stop in the reverse one, intake before what it feeds.

Every process of this machine below the services, sandboxes included, is in ``processes.json`` with its start time; the
next supervisor of the same directory stops those that a killed one left (``rl/reaper.py``).
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
from glm5.process import last_line
from glm5.rl.launch.machines import LocalMachines, Machine, Machines, Process
from glm5.rl.operation import SupervisionConfig
from glm5.rl.reaper import ProcessRecord, reap

PROBE_PERIOD_S = 1.0
FAILED_PROBES = 3
WORK_PERIOD_S = 2.0
WORK_TIMEOUT_S = 2.5
FAILED_WORK = 2
KEEPER_PERIOD_S = 0.1
RECORD_PERIOD_S = 1.0
START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 12.0
"""A service is told to end, and killed when it does not; each step is bounded."""
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
    weights. Runs on the keeper's thread."""
    work: Callable[[httpx.Client, str], str] | None = None
    """What is wrong with the work of the service at this URL, "" for nothing; see ``rl/probes.py``. May raise
    httpx.HTTPError."""
    is_intake: bool = False
    """It gives work to the others, so it is stopped before them."""


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
    failed_work: int = 0
    complaint: str = ""
    """Why it must be started again although its process runs."""
    seen_at: float = 0.0
    """Monotonic time of the last good probe."""
    deaths: list[float] = field(default_factory=list)

    @property
    def url(self) -> str:
        host, port = self.machine.address
        return f"http://{host}:{port}"


class Supervisor:
    """Owner of the child processes of one run; use as a context manager. ``on_event(kind, **values)`` gets deaths and
    is called from the keeper's thread."""

    def __init__(self, run_dir: Path, on_event: Callable[..., None], config: SupervisionConfig | None = None,
                 machines: Machines | None = None) -> None:
        """``machines`` None starts everything on this machine."""
        self._machines = machines or LocalMachines()
        self._logs, self._ready = run_dir / "logs", run_dir / "ready"
        self._record = ProcessRecord(run_dir / "processes.json")
        self._on_event, self._config = on_event, config or SupervisionConfig()
        self._services: dict[str, _Service] = {}
        self._stopped = threading.Event()
        self._failure: BaseException | None = None
        self._threads = [threading.Thread(target=self._keep, name="keeper", daemon=True)]

    def __enter__(self) -> Supervisor:
        orphans = reap(self._record.path)
        if orphans:
            self._on_event("orphans_stopped", process_ids=orphans)
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(STOP_TIMEOUT_S * (1 + len(self._services)))
        for service in self._services.values():
            service.machine.release()
        self._record.remove()

    def _stop_order(self) -> list[_Service]:
        newest_first = list(self._services.values())[::-1]
        return [*(service for service in newest_first if service.spec.is_intake),
                *(service for service in newest_first if not service.spec.is_intake)]

    def add(self, spec: ServiceSpec) -> str:
        """Have a service started in a port of its own and give its URL at once; ``wait_until_ready`` waits for all."""
        service = _Service(spec, self._machines.place(spec.name))
        self._services = {**self._services, spec.name: service}  # a new one: other threads go through the old one
        prober = threading.Thread(target=self._probe, args=(service,), name=f"probe-{spec.name}", daemon=True)
        self._threads.append(prober)
        prober.start()
        return service.url

    def wait_until_ready(self) -> None:
        """Wait for every service. Raises ServiceError when one fails or takes longer than ``START_TIMEOUT_S``."""
        poll_until(lambda: all(service.state == "running" for service in self._services.values()), self.tend,
                   2 * START_TIMEOUT_S, "start of all services", KEEPER_PERIOD_S)

    def tend(self) -> None:
        """Raise what ended the supervision: ServiceError when a service dies too often, or exits with 2."""
        if self._failure is not None:
            raise self._failure

    def condemn(self, url: str, why: str) -> None:
        """Have the service at ``url`` started again although it looks well. From any thread."""
        for service in self._services.values():
            if service.url == url and service.state == "running":
                service.complaint = why

    def state(self) -> dict[str, str]:
        """State of every service by name, for error messages and dumps."""
        return {name: service.state for name, service in self._services.items()}

    def heartbeats(self) -> dict[str, float]:
        """Seconds since the last good probe of every service that runs."""
        now = time.monotonic()
        return {name: now - service.seen_at for name, service in self._services.items() if service.state == "running"}

    def restarts(self) -> dict[str, int]:
        """Deaths of every service that are not forgotten."""
        return {name: len(service.deaths) for name, service in self._services.items()}

    def process_ids(self) -> dict[str, int]:
        """Id of the newest process of every service, dead or alive."""
        return {name: service.process.pid for name, service in self._services.items() if service.process is not None}

    # -- the keeper's thread --------------------------------------------------------------------------------------

    def _keep(self) -> None:
        """The life of the thread: its end is that of the services, by the parent-death signal."""
        try:
            self._keep_all()
        except BaseException as error:  # raised again in the owner's thread
            self._failure = error
        self._stopped.wait()
        for service in self._stop_order():
            if service.process is not None:
                service.machine.stop(service.process)

    def _keep_all(self) -> None:
        recorded_at = 0.0
        while not self._stopped.wait(KEEPER_PERIOD_S):
            for service in self._services.values():
                self._move_on(service)
            if time.monotonic() - recorded_at >= RECORD_PERIOD_S:
                self._record.note(service.process.pid for service in self._services.values()
                                  if service.process is not None and service.machine.is_here)
                recorded_at = time.monotonic()

    def _move_on(self, service: _Service) -> None:
        """Notice a death, restart what is due."""
        if service.state == "waiting":
            if time.monotonic() - service.since >= service.wait_s:
                self._start(service)
            return
        assert service.process is not None
        code = service.process.poll()
        if code == USER_ERROR or (code is not None and code > 0 and not service.seen_at):
            self._on_event("service_failed", service=service.spec.name)
            said = last_line(self._log_file(service)).removeprefix("error: ")
            raise ServiceError(f"{service.spec.name}: {said}")
        if code is not None:
            self._mark_dead(service, f"exited with {code}")
        elif service.state == "starting":
            self._check_start(service)
        elif service.failed_probes >= FAILED_PROBES:
            self._mark_dead(service, f"failed {service.failed_probes} health probes")
        elif service.complaint:
            self._mark_dead(service, service.complaint)

    def _start(self, service: _Service) -> None:
        ready = self._ready_file(service)
        ready.unlink(missing_ok=True)
        host, port = service.machine.address
        address = ["--host", host, "--port", str(port), "--ready-file", str(ready.resolve())]
        service.process = service.machine.start([*service.spec.arguments(), *address], self._log_file(service))
        self._enter(service, "starting")

    def _check_start(self, service: _Service) -> None:
        if self._ready_file(service).exists():
            if service.seen_at:
                self._on_event("service_restarted", service=service.spec.name,
                               start_s=round(time.monotonic() - service.since, 3))
            self._enter(service, "running")
        elif time.monotonic() - service.since > START_TIMEOUT_S:
            self._mark_dead(service, f"was not ready after {START_TIMEOUT_S:.0f} s")

    def _mark_dead(self, service: _Service, why: str) -> None:
        assert service.process is not None
        service.machine.stop(service.process, grace_s=0.2)
        now, config = time.monotonic(), self._config
        service.seen_at = service.seen_at or now
        service.deaths = [death for death in service.deaths if now - death < config.restart_window_s] + [now]
        self._on_event("service_died", service=service.spec.name, why=why, deaths=len(service.deaths))
        if len(service.deaths) > config.max_restarts:
            raise ServiceError(f"{service.spec.name}: {why}, the {len(service.deaths)}th time within "
                               f"{config.restart_window_s:.0f} s; read {self._log_file(service)}, then run again")
        service.wait_s = min(config.backoff_s * 2 ** (len(service.deaths) - 1), config.max_backoff_s)
        self._enter(service, "waiting")

    def _enter(self, service: _Service, state: Literal["starting", "running", "waiting"]) -> None:
        service.state, service.since = state, time.monotonic()
        service.failed_probes = service.failed_work = 0
        service.complaint = ""
        if state == "running":
            service.seen_at = service.since

    # -- one thread per service -----------------------------------------------------------------------------------

    def _probe(self, service: _Service) -> None:
        worked_at = 0.0
        with httpx.Client(timeout=self._config.probe_timeout_s, trust_env=False) as client:
            while not self._stopped.wait(PROBE_PERIOD_S):
                if service.state != "running":
                    continue
                since = service.since
                is_well = _is_well(client, service.url + service.spec.health_path)
                complaint = None
                if is_well and service.spec.work is not None and time.monotonic() - worked_at >= WORK_PERIOD_S:
                    worked_at = time.monotonic()
                    complaint = _complaint(client, service)
                if service.since != since:  # it was restarted meanwhile and the answer is about its predecessor
                    continue
                service.failed_probes = 0 if is_well else service.failed_probes + 1
                if is_well:
                    service.seen_at = time.monotonic()
                if complaint is not None:
                    service.failed_work = service.failed_work + 1 if complaint else 0
                    if service.failed_work >= FAILED_WORK:
                        service.complaint = f"looks well but does not work: {complaint}"

    def _ready_file(self, service: _Service) -> Path:
        return self._ready / f"{service.spec.name}.json"

    def _log_file(self, service: _Service) -> Path:
        return self._logs / f"{service.spec.name}.log"


def _is_well(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(url).status_code == 200
    except httpx.HTTPError:
        return False


def _complaint(client: httpx.Client, service: _Service) -> str:
    assert service.spec.work is not None
    try:
        return service.spec.work(client, service.url)
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__} {error}"


def poll_until(condition: Callable[[], bool], tend: Callable[[], None], timeout_s: float, what: str,
               pause_s: float = 0.02) -> None:
    """Wait for ``condition`` while tending. Raises ServiceError naming ``what`` at the deadline."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise ServiceError(f"{what}: not within {timeout_s:.0f} s; see the logs of the run directory")
        tend()
        time.sleep(pause_s)
