"""The services of one run as processes of this machine: engine, gateway, one task service per taskset, orchestrator;
the reward model where the configuration names one.

``RolloutStack`` starts them together, keeps them alive (``tend``), runs evaluations over them and stops them in order:
orchestrator, task services, gateway, engine. Every service keeps its URL through restarts. A restarted engine loads the
newest weights it may: those that ``LATEST`` names, or those of the last ``update_weights``.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from glm5.errors import EngineError, TaskError
from glm5.records import Episode
from glm5.rl import probes
from glm5.rl.config import RLConfig
from glm5.rl.episodes import EpisodeRunner
from glm5.rl.launch.machines import LocalMachines, Machines
from glm5.rl.launch.rewards import reward_arguments, reward_model_directory
from glm5.rl.supervisor import ServiceSpec, Supervisor
from glm5.rl.weights import WeightVersion, latest, verify
from glm5.runlog import ProgressBar, RunLog, progress_bar, write_atomic

TEND_PERIOD_S = 0.25


class RolloutStack:
    """Services around the checkpoint ``engine_dir``; use as a context manager from the main thread.

    With ``orchestrate`` an orchestrator runs too and the engine follows the versions published in ``run_dir``.
    ``beside``: services of other purposes that live and die with these.
    """

    def __init__(self, config: RLConfig, engine_dir: Path, run_dir: Path, *, weight_version: int = 0,
                 orchestrate: bool = False, beside: Sequence[ServiceSpec] = ()) -> None:
        self.config, self.run_dir, self._beside = config, run_dir, beside
        self._engine_dir, self._weight_version, self._orchestrate = engine_dir, weight_version, orchestrate
        self._log = RunLog(run_dir)
        self._supervisor = Supervisor(run_dir, self._log.event, config.supervision, _machines(config, self._log))
        self._http = httpx.Client(timeout=30, trust_env=False)
        self.engine_url = self.gateway_url = self.orchestrator_url = ""
        self.service_urls: dict[str, str] = {}
        self.urls_beside: dict[str, str] = {}
        """By name of the service."""

    def __enter__(self) -> RolloutStack:
        self._supervisor.__enter__()
        try:
            self.engine_url = self._supervisor.add(ServiceSpec("engine", "/health_generate", self._engine_arguments))
            self.gateway_url = self._supervisor.add(ServiceSpec(
                "gateway", "/health", self._gateway_arguments, probes.gateway))
            register: list[str] = []
            if self._orchestrate:
                write_atomic(self.run_dir / "config.json", json.dumps(dataclasses.asdict(self.config), indent=1) + "\n")
                self.orchestrator_url = self._add_orchestrator()
                register = ["--register", self.orchestrator_url]
            rewards = reward_arguments(self.config, self.run_dir, self._add_reward_model())
            for taskset in self.config.tasksets:
                arguments = ["env", "serve", taskset, "--sandbox", self.config.sandbox, *register, *rewards,
                             "--capacity", str(self.config.concurrency)]
                self.service_urls[taskset] = self._supervisor.add(
                    ServiceSpec(f"tasks-{taskset}", "/info", lambda arguments=arguments: arguments,
                                probes.task_service(taskset)))
            self.urls_beside = {spec.name: self._supervisor.add(spec) for spec in self._beside}
            self._supervisor.wait_until_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()
        self._supervisor.__exit__()

    def tend(self) -> None:
        """Raise what ended the supervision: ServiceError when something dies again and again. Call often."""
        self._supervisor.tend()

    def condemn(self, url: str, why: str) -> None:
        """Have the service at ``url`` started again although it looks well. From any thread."""
        self._supervisor.condemn(url, why)

    def state(self) -> dict[str, str]:
        """State of each service."""
        return self._supervisor.state()

    def heartbeats(self) -> dict[str, float]:
        """Seconds since the last good probe of each service that runs."""
        return self._supervisor.heartbeats()

    def update_weights(self, directory: Path, version: int) -> None:
        """Load a checkpoint into the engine and wait for it. Raises EngineError when it is refused."""
        answer = self._http.post(f"{self.engine_url}/update_weights_from_disk",
                                 json={"model_path": str(directory.resolve()), "weight_version": version})
        if answer.status_code != 200 or not answer.json().get("success"):
            raise EngineError(f"{self.engine_url}: did not load {directory}: {answer.text[:300]}")
        self._engine_dir, self._weight_version = directory, version

    def engine_stats(self) -> dict[str, Any]:
        """``GET /stats`` of the engine; empty while it does not answer."""
        return self._stats(self.engine_url)

    def orchestrator_stats(self) -> dict[str, Any]:
        """``GET /stats`` of the orchestrator; empty while it does not answer."""
        return self._stats(self.orchestrator_url)

    def _stats(self, url: str) -> dict[str, Any]:
        try:
            answer = self._http.get(f"{url}/stats", timeout=2)
            stats: dict[str, Any] = answer.json() if answer.status_code == 200 else {}
            return stats
        except httpx.HTTPError:
            return {}

    def evaluate(self, tasksets: Sequence[str] | None = None, *, split: str = "heldout", offset: int = 0,
                 count: int | None = None, temperature: float | None = None,
                 label: str = "evaluation") -> list[Episode]:
        """One episode for each of ``count`` tasks, from ``offset`` on, of a split of every taskset.

        Infrastructure failures are run again, as in training. ``label`` names the progress bar and the sessions. Raises
        TaskError when there are no such tasks, ServiceError when a service cannot be kept alive.
        """
        names = list(tasksets or self.config.tasksets)
        count = self.config.evaluation_count if count is None else count
        temperature = self.config.evaluation_temperature if temperature is None else temperature
        with progress_bar(label, count * len(names), "episodes") as bar:
            return asyncio.run(self._evaluate(names, split, offset, count, temperature, label, bar))

    async def _evaluate(self, names: list[str], split: str, offset: int, count: int, temperature: float,
                        label: str, bar: ProgressBar) -> list[Episode]:
        tending = asyncio.create_task(self._tend_for_ever())
        slots = asyncio.Semaphore(self.config.concurrency)
        done = 0
        # part of URLs; unique, because the gateway knows the sessions of earlier evaluations
        session_prefix = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{label}-{time.time_ns():x}")
        async with EpisodeRunner(self.config, self.gateway_url, temperature) as runner:
            async def one(taskset: str, task_id: str, index: int) -> Episode:
                nonlocal done
                async def attempt(number: int) -> Episode:
                    async with slots:
                        return await runner.attempt(
                            self.service_urls[taskset], taskset=taskset, task_id=task_id, group_id=label,
                            episode_id=f"{session_prefix}-{taskset}-{index}a{number}")

                last = (await runner.until_measured(attempt))[-1]
                done += 1
                bar.advance(done, done)
                return last

            try:
                tasks = [(name, task_id, index) for name in names for index, task_id in enumerate(
                    await runner.list_tasks(self.service_urls[name], name, split, offset, count))]
                if not tasks:
                    raise TaskError(f"{', '.join(names)}: the task services list no {split} tasks")
                running = [asyncio.create_task(one(*task)) for task in tasks]
                finished = asyncio.gather(*running)
                await asyncio.wait({finished, tending}, return_when=asyncio.FIRST_COMPLETED)
                if tending.done() and not finished.done():
                    finished.cancel()
                    tending.result()
                return list(await finished)
            finally:
                tending.cancel()

    async def _tend_for_ever(self) -> None:
        while True:
            self.tend()
            await asyncio.sleep(TEND_PERIOD_S)

    def _newest_published(self) -> WeightVersion | None:
        """What a service that starts now finds, if it is newer than what the stack began with, which is removed in
        the course of a run."""
        published = latest(self.run_dir) if self._orchestrate else None
        return published if published is not None and published.version > self._weight_version else None

    def _engine_arguments(self) -> list[str]:
        directory, version = self._engine_dir, self._weight_version
        published = self._newest_published()
        if published is not None:
            verify(published)
            directory, version = published.directory, published.version
        config = self.config
        if config.engine.kind != "built-in":
            return ["adapter", config.engine.url, "--kind", config.engine.kind, "--weights", str(directory),
                    "--weight-version", str(version), "--max-context", str(config.max_context)]
        slots = config.concurrency + self._orchestrate  # one for the canary, which must not wait for an episode
        return ["serve", str(directory), "--weight-version", str(version), "--max-slots", str(slots),
                "--max-context", str(config.max_context), "--threads", str(config.engine_threads),
                "--device", config.engine_device]

    def _gateway_arguments(self) -> list[str]:
        published = self._newest_published()
        directory = self._engine_dir if published is None else published.directory
        return ["gateway", "--engine", self.engine_url, "--tokenizer", str(directory),
                "--store", str(self.run_dir / "turns.sqlite")]

    def _add_reward_model(self) -> str:
        """URL of the reward model, "" where the configuration has none."""
        if not self.config.reward_model:
            return ""
        directory = reward_model_directory(self.config.reward_model, self.run_dir)
        arguments = ["reward", "serve", str(directory), "--threads", str(self.config.engine_threads),
                     "--device", self.config.engine_device]
        return self._supervisor.add(ServiceSpec("reward-model", "/health", lambda: arguments))

    def _add_orchestrator(self) -> str:
        arguments = ["orchestrator", str(self.run_dir / "config.json"), "--run-dir", str(self.run_dir),
                     "--gateway-url", self.gateway_url]
        return self._supervisor.add(ServiceSpec("orchestrator", "/health", lambda: arguments, probes.orchestrator,
                                                is_intake=True))


def _machines(config: RLConfig, log: RunLog) -> Machines:
    """Where ``config.launch`` puts the services."""
    if config.launch == "local":
        return LocalMachines()
    from glm5.rl.launch.cluster import RayMachines

    return RayMachines(config, log.event)
