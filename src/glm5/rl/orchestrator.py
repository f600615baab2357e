"""The orchestrator: starts episodes, groups them, paces them. An asyncio process; task services register with it.

One loop opens a group whenever pacing and concurrency allow, for the taskset whose turn it is by ratio and whose
services have room, and starts its ``group_size`` episodes. Refill is continuous: nothing waits for a batch to end. When
every slot of a group has ended, the group enters the ledger whole. Weights change under running episodes; one that must
turn out too stale is ended early. The trainer is seen only through the ledger's progress row; nothing starts before
that names a policy version.

Task indices grow per taskset, tasks worth it are visited again (``curriculum``), and a visit is reserved in the ledger
before its first episode starts, so that a restart repeats none. Groups that a dead orchestrator left open are dropped
as ``interrupted``.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from glm5.config import build_config
from glm5.errors import ConfigError, ServiceError
from glm5.process import bind, serve_app
from glm5.records import Episode, Outcome
from glm5.rl.admission import is_measured
from glm5.rl.advantages import has_signal
from glm5.rl.config import RLConfig, read_rl_config
from glm5.rl.curriculum import Curriculum, RatioPicker, Visit
from glm5.rl.episodes import EpisodeRunner, failed_episode, monitor_counts
from glm5.rl.ledger import Ledger
from glm5.rl.pacing import KeptShare, may_start_groups
from glm5.rl.registry import Description, Registry, TaskService
from glm5.rl.spans import Track
from glm5.runlog import RunLog

POLL_S = 0.05
"""How often the trainer's progress is read; also the longest idle time of the loop."""
LIST_TIMEOUT_S = 3.0
"""A task service that hangs must not stop the loop, which others watch."""
TASK_BLOCK = 64
"""Task ids fetched at once."""
AUDIT_PERIOD_S = 10.0
AUDIT_SHARE = 0.01
"""Share of the time that auditing may take; it reads the whole ledger."""
CLEANUP_S = 2.0
"""How long a cancelled attempt may take to end its session."""


@dataclass(frozen=True, slots=True)
class _Group:
    group_id: str
    taskset: str
    visit: Visit


@dataclass(slots=True, eq=False)
class _Attempt:
    """An episode that runs at a service."""

    running: asyncio.Task[Episode]
    service: TaskService
    step: int
    """Trainer step at its start."""
    verdict: tuple[Outcome, str] | None = None
    """Outcome and reason, once it was given up."""


class Orchestrator:
    """State of the process; ``run`` is its loop."""

    def __init__(self, config: RLConfig, run_dir: Path, gateway_url: str) -> None:
        self._config, self._gateway_url = config, gateway_url
        self._log = RunLog(run_dir)
        self._ledger = Ledger.of_run(config, run_dir)
        self.registry = Registry(config.breaker)
        self._picker = RatioPicker(config.tasksets, config.curriculum.balance)
        self._curriculum = Curriculum(config.curriculum)
        self._task_ids: dict[str, deque[tuple[int, str]]] = {taskset: deque() for taskset in config.tasksets}
        self._screened = min(config.curriculum.screen or config.group_size, config.group_size)
        self._slots = asyncio.Semaphore(config.concurrency)
        self._groups: set[asyncio.Task[None]] = set()
        self._attempts: set[_Attempt] = set()
        self._kept = KeptShare()
        self._filtered = (0, 0)
        """Trainer step, and groups dropped in it for equal rewards."""
        self._error: BaseException | None = None
        self._unfinished = 0
        self._started = self._finished = 0
        self._wake = asyncio.Event()
        self._next_audit = 0.0
        self._last_round = time.monotonic()
        self._track = Track(self._log.event, "orchestrator")
        self.failure: BaseException | None = None
        """What ended the loop, None while it runs."""

    async def run(self) -> None:
        """Open and run groups until cancelled."""
        interrupted = self._ledger.drop_open_groups("interrupted")
        for taskset, index, task_id, number, rewards in self._ledger.last_visits():
            if taskset in self._config.tasksets:
                self._curriculum.record(taskset, Visit(index, task_id, number), rewards, self._ledger.progress().step)
        self._log.event("orchestrator_started", interrupted_groups=interrupted)
        try:
            async with EpisodeRunner(self._config, self._gateway_url, self._config.temperature) as runner:
                while True:
                    self._last_round = time.monotonic()
                    self._give_up()
                    self._audit()
                    while await self._open_group(runner):
                        self._last_round = time.monotonic()
                    await self._pause()
        finally:
            self._track.end()
            for group in self._groups:
                group.cancel()
            await asyncio.gather(*self._groups, return_exceptions=True)
            self._ledger.drop_open_groups("run_ended")
            self._ledger.close()

    def note_end(self, loop: asyncio.Task[None]) -> None:
        """Keep what ended ``run``, if it was not cancelled."""
        self.failure = None if loop.cancelled() else loop.exception()

    def stats(self) -> dict[str, Any]:
        """What runs, what became of what ran, who serves."""
        now = time.monotonic()
        services = [{"id": service.service_id, "url": service.url, "alive": service.is_alive(now),
                     "running": service.running, "finished": service.finished, "episode_s": service.episode_s,
                     "breaker": service.breaker.state(now), "times_opened": service.breaker.times_opened,
                     "tasksets": sorted(service.description.tasksets)} for service in self.registry.all()]
        return {"episodes_unfinished": self._unfinished, "episodes_started": self._started,
                "episodes_finished": self._finished, "may_start_groups": self._may_start(), "services": services,
                "shares": self._picker.weights(), "kept_share": self._kept.value,
                "payload_bytes": self._ledger.payload_bytes(), "cpu_s": time.process_time(),
                "progress": asdict(self._ledger.progress()), "ledger": asdict(self._ledger.counts()),
                "violations": self._ledger.check()}

    def progress(self) -> dict[str, Any]:
        """How far the trainer is, how many groups may start, and how long ago the loop last went round."""
        return {**asdict(self._ledger.progress()), "may_start_groups": self._may_start(),
                "loop_age_s": time.monotonic() - self._last_round}

    def _may_start(self) -> int:
        progress = self._ledger.progress()
        if progress.version < 0:  # the trainer is not ready
            return 0
        accepted, in_flight = self._ledger.accepted_and_in_flight()
        return may_start_groups(eta=self._config.eta, step=progress.step, batch_groups=self._config.fresh_groups,
                                accepted=accepted, in_flight=in_flight, kept=self._kept.value,
                                oversample=self._config.curriculum.oversample)

    async def _open_group(self, runner: EpisodeRunner) -> bool:
        """Open one group if it may start now; False when not."""
        if self._unfinished >= self._config.concurrency or self._may_start() == 0:
            return False
        now = time.monotonic()
        taskset = self._picker.pick(self.registry.shares(now),
                                    lambda name: self.registry.has_room(name, self._screened, now))
        if taskset is None:
            return False
        visit = self._curriculum.next_visit(taskset, self._ledger.progress().step)
        visit = visit or await self._next_task(runner, taskset)
        if visit is None:
            return False
        suffix = f"v{visit.number}" if visit.number else ""
        group = _Group(f"{taskset}-{visit.task_index}{suffix}", taskset, visit)
        self._ledger.open_group(group.group_id, taskset=taskset, task_id=visit.task_id, task_index=visit.task_index,
                                visit=visit.number, size=self._config.group_size)
        self._unfinished += self._screened
        running = asyncio.create_task(self._run_group(runner, group))
        self._groups.add(running)
        running.add_done_callback(self._group_done)
        return True

    async def _next_task(self, runner: EpisodeRunner, taskset: str) -> Visit | None:
        """The next unused training task; None when its service does not answer now."""
        waiting = self._task_ids[taskset]
        if not waiting:
            service = self.registry.choose(taskset, time.monotonic())
            if service is None:
                return None
            first = self._ledger.next_task_index(taskset)
            try:
                async with asyncio.timeout(LIST_TIMEOUT_S):
                    task_ids = await runner.list_tasks(service.url, taskset, "train", first, TASK_BLOCK)
            except (ServiceError, TimeoutError) as error:
                self._log.event("tasks_not_listed", taskset=taskset, error=str(error) or "no answer in time")
                return None
            if not task_ids:
                raise ServiceError(f"taskset {taskset}: no training task at index {first}; give it more tasks or fewer "
                                   "steps")
            waiting.extend(enumerate(task_ids, first))
        return Visit(*waiting.popleft(), 0)

    async def _run_group(self, runner: EpisodeRunner, group: _Group) -> None:
        first, size = self._screened, self._config.group_size
        slots = await asyncio.gather(*(self._run_slot(runner, group, slot) for slot in range(first)))
        if first < size and not _is_hopeless([attempts[-1] for attempts in slots]):
            self._unfinished += size - first
            slots += await asyncio.gather(*(self._run_slot(runner, group, slot) for slot in range(first, size)))
        step = self._ledger.progress().step
        reason = self._ledger.close_group(group.group_id, slots, keep_equal=self._is_budget_used_up(step))
        finals = [attempts[-1].reward for attempts in slots]
        rewards = [reward for reward in finals if reward is not None]
        self._curriculum.record(group.taskset, group.visit, rewards, step)
        self._kept.record(not reason)
        if reason in ("", "zero_variance"):
            self._picker.record(group.taskset, has_signal(rewards))
        if reason == "zero_variance":
            self._filtered = (step, (self._filtered[1] if self._filtered[0] == step else 0) + 1)
        failures = [attempt.reason for attempts in slots for attempt in attempts if attempt.outcome == "infra_error"]
        if reason:
            self._log.event("group_dropped", group_id=group.group_id, reason=reason)
        if seen := monitor_counts(attempts[-1] for attempts in slots):
            self._log.event("reward_hacking", group_id=group.group_id, **seen)
        if failures:
            self._log.event("episodes_failed", group_id=group.group_id, count=len(failures), first=failures[0])

    def _is_budget_used_up(self, step: int) -> bool:
        """Whether so many groups were dropped for equal rewards in this trainer step that no more may be."""
        budget = self._config.curriculum.filter_budget * self._config.fresh_groups
        return 0 < budget <= (self._filtered[1] if self._filtered[0] == step else 0)

    def _group_done(self, group: asyncio.Task[None]) -> None:
        self._groups.discard(group)
        if not group.cancelled():
            self._error = self._error or group.exception()
        self._wake.set()

    async def _run_slot(self, runner: EpisodeRunner, group: _Group, slot: int) -> list[Episode]:
        anchored = slot >= self._config.group_size - self._config.anchors_per_group

        async def attempt(number: int) -> Episode:
            async with self._slots:
                self._started += 1
                return await self._attempt(runner, group, f"{group.group_id}-s{slot}a{number}", anchored)

        try:
            return await runner.until_measured(attempt)
        finally:
            self._unfinished -= 1
            self._finished += 1
            self._wake.set()

    async def _attempt(self, runner: EpisodeRunner, group: _Group, episode_id: str, anchored: bool) -> Episode:
        """One attempt at the best live service; ends when that service is declared dead."""
        names = {"taskset": group.taskset, "task_id": group.visit.task_id, "group_id": group.group_id,
                 "episode_id": episode_id}
        started_at = time.time()
        service = await self._wait_for_service(group.taskset)
        if service is None:
            return failed_episode(f"no live task service for {group.taskset}", started_at=started_at, **names)
        is_probe = service.begin(time.monotonic())
        attempt = _Attempt(asyncio.create_task(runner.attempt(service.url, anchored=anchored, **names)), service,
                           self._ledger.progress().step)
        self._attempts.add(attempt)
        try:
            await asyncio.wait({attempt.running})
        finally:
            attempt.running.cancel()
            await asyncio.wait({attempt.running}, timeout=CLEANUP_S)  # it closes its session and its connections
            self._attempts.discard(attempt)
            self._note_attempt(attempt, is_probe, time.time() - started_at)
        if attempt.verdict is not None:
            outcome, reason = attempt.verdict
            return failed_episode(reason, outcome=outcome, started_at=started_at, **names)
        return attempt.running.result()

    def _note_attempt(self, attempt: _Attempt, is_probe: bool, duration_s: float) -> None:
        """Tell the service's breaker how it went. What the gateway or the engine broke is not the service's fault."""
        if attempt.verdict is not None:
            outcome, reason = attempt.verdict
        elif attempt.running.done() and not attempt.running.cancelled() and not attempt.running.exception():
            outcome, reason = attempt.running.result().outcome, attempt.running.result().reason
        else:
            outcome, reason = "cancelled", ""
        failed = outcome == "infra_error" and self._gateway_url not in reason
        changed = attempt.service.end(time.monotonic(), duration_s=duration_s, failed=failed, is_probe=is_probe)
        if changed is not None:
            self._log.event(f"circuit_{changed}", id=attempt.service.service_id, reason=reason,
                            times_opened=attempt.service.breaker.times_opened)

    async def _wait_for_service(self, taskset: str) -> TaskService | None:
        deadline = time.monotonic() + self._config.episode_timeout_s
        while time.monotonic() < deadline:
            service = self.registry.choose(taskset, time.monotonic())
            if service is not None:
                return service
            await asyncio.sleep(POLL_S)
        return None

    def _give_up(self) -> None:
        """End what runs at services that died, and what can only end too stale: it began so long ago that even the
        weights which were published right after are beyond the bound."""
        now, step = time.monotonic(), self._ledger.progress().step
        oldest = step - self._config.tau - self._config.publication_interval
        dead: Counter[str] = Counter()
        for attempt in self._attempts:
            if attempt.verdict is None and not attempt.service.is_alive(now):
                attempt.verdict = ("infra_error", f"task service {attempt.service.service_id} died")
                dead[attempt.service.service_id] += 1
            elif attempt.verdict is None and attempt.step < oldest:
                attempt.verdict = ("stale", f"began at step {attempt.step}, the trainer is at {step}")
            else:
                continue
            attempt.running.cancel()
        for service_id, episodes in dead.items():
            self._log.event("task_service_dead", id=service_id, episodes=episodes)

    def _audit(self) -> None:
        """The accounting invariant, checked while running: books that do not balance must not train anything."""
        started = time.monotonic()
        if started < self._next_audit:
            return
        violations = self._ledger.check()
        ended = time.monotonic()
        self._next_audit = ended + max(AUDIT_PERIOD_S, (ended - started) / AUDIT_SHARE)
        if violations:
            raise ServiceError(f"ledger: {violations[0]} ({len(violations)} invariants broken); stop and inspect it")

    def _waits(self) -> tuple[str, str]:
        """What keeps more groups from starting now: its name, and who can change it."""
        if self._unfinished >= self._config.concurrency:
            return "all slots run", "episodes"
        if self._may_start() == 0:
            return "pacing", "trainer"
        return "no task", "task services"

    async def _pause(self) -> None:
        """Until an episode ends, or long enough to look at the trainer's progress again."""
        self._track.enter(*self._waits())
        self._wake.clear()
        if self._error is not None:  # an error of ours ends the process
            raise self._error
        try:
            async with asyncio.timeout(POLL_S):
                await self._wake.wait()
        except TimeoutError:
            pass


def _is_hopeless(screened: list[Episode]) -> bool:
    """Whether the first episodes of a group tell that its rewards will hardly differ: all known, all equal. Two of
    three groups end like that, and their other episodes would be sampled for nothing (SPEED-RL, arXiv:2506.09016)."""
    return all(is_measured(episode) for episode in screened) and not has_signal([episode.reward or 0.0
                                                                                   for episode in screened])


def build_app(orchestrator: Orchestrator) -> Starlette:
    """ASGI application around an orchestrator; its loop lives as long as the application."""
    async def register(request: Request) -> JSONResponse:
        try:
            description = build_config(Description, await request.json(), "register")
        except (ConfigError, ValueError) as error:
            return _refusal(422, f"{error}; send id, url, capacity and tasksets, and kind, ratio and speed if you like")
        orchestrator.registry.register(description, time.monotonic())
        return JSONResponse({"registered": True})

    async def heartbeat(request: Request) -> JSONResponse:
        try:
            service_id = str((await request.json())["id"])
        except (KeyError, TypeError, ValueError) as error:
            return _refusal(422, f"heartbeat: {error!r}; send id")
        if orchestrator.registry.heartbeat(service_id, time.monotonic()):
            return JSONResponse({"alive": True})
        return _refusal(404, f"heartbeat: service {service_id!r} is not registered; register again")

    async def stats(request: Request) -> JSONResponse:
        return JSONResponse(orchestrator.stats())

    async def progress(request: Request) -> JSONResponse:
        return JSONResponse(orchestrator.progress())

    async def health(request: Request) -> JSONResponse:
        return JSONResponse({"status": "ok"})

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        loop = asyncio.create_task(orchestrator.run())
        loop.add_done_callback(orchestrator.note_end)
        try:
            yield
        finally:
            loop.cancel()
            await asyncio.gather(loop, return_exceptions=True)

    routes = [Route("/register", register, methods=["POST"]), Route("/heartbeat", heartbeat, methods=["POST"]),
              Route("/stats", stats), Route("/progress", progress), Route("/health", health)]
    return Starlette(routes=routes, lifespan=lifespan)


def run_orchestrator(config: Path, run_dir: Path, gateway_url: str, host: str = "127.0.0.1", port: int = 0,
                     ready_file: Path | None = None) -> None:
    """Run until SIGTERM, or raise what ended the loop. ``config`` is a TOML file or the ``config.json`` of a run."""
    loaded = read_rl_config(config)
    if port:
        bind(host, port).close()  # a taken port is reported before anything is written
    run_dir.mkdir(parents=True, exist_ok=True)
    orchestrator = Orchestrator(loaded, run_dir, gateway_url)
    serve_app(build_app(orchestrator), host, port, ready_file, lambda: orchestrator.failure)


def _refusal(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "type": "invalid_request_error", "code": status}}, status)
