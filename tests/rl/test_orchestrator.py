"""The orchestrator's loop against scripted services over real HTTP."""

import asyncio
import json
import threading
import time
from contextlib import asynccontextmanager, suppress

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from glm5.process import bind
from glm5.records import to_json
from glm5.rl import episodes, registry
from glm5.rl.config import BreakerConfig, CurriculumConfig, RLConfig
from glm5.rl.orchestrator import Orchestrator, build_app
from glm5.rl.registry import Description
from glm5.runlog import read_jsonl

from .factories import make_trajectory, open_ledger

OLD = {"mode": "async", "pacing_eta": 0, "max_staleness": 100}
"""For runs of several steps whose policy stays version 0."""


class Scripted:
    """Gateway and task service in one: rewards alternate by slot, chosen episodes fail or hang."""

    def __init__(self):
        self.episodes = []
        self.fails, self.hangs, self.breaks = set(), False, False
        self.reason = "scripted"
        self.losing = set()
        routes = [Route("/sessions", self.open, methods=["POST"]), Route("/tasks", self.tasks),
                  Route("/sessions/{id}/finish", self.finish, methods=["POST"]),
                  Route("/episodes/run", self.run, methods=["POST"])]
        self.listener = bind("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), log_level="error",
                                                    timeout_graceful_shutdown=0))
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.listener]}, daemon=True)
        self.thread.start()

    def slots(self):
        """What ran, an episode that was tried again once."""
        return {name.rsplit("a", 1)[0] for name in self.episodes}

    def close(self):
        self.server.should_exit = True
        self.thread.join(10)
        self.listener.close()

    async def open(self, request):
        return JSONResponse({"base_url": self.url, "api_key": "k"})

    async def tasks(self, request):
        query = request.query_params
        name, first = query["taskset"], int(query["offset"])
        return JSONResponse({"tasks": [
            {"task_id": f"{name}/train/{index}", "taskset": name, "split": "train", "instruction": ""}
            for index in range(first, first + int(query["limit"]))]})

    async def run(self, request):
        episode_id = (await request.json())["episode_id"]
        self.episodes.append(episode_id)
        if self.breaks:
            return JSONResponse({"error": {"message": "broken"}}, 500)
        if self.hangs:
            await asyncio.sleep(30)
        failed = episode_id in self.fails
        group, slot = episode_id.rsplit("a", 1)[0].rsplit("-s", 1)
        reward = None if failed else 0.0 if group in self.losing else float(int(slot) % 2)
        return JSONResponse({"outcome": "infra_error" if failed else "ok", "reward": reward, "reward_parts": {},
                             "reason": self.reason if failed else ""})

    async def finish(self, request):
        return JSONResponse({"trajectories": [to_json(make_trajectory(version=0))]})


@pytest.fixture
def service(monkeypatch):
    monkeypatch.setattr(registry, "DEAD_AFTER_S", 1000.0)  # nobody sends heartbeats, and a machine may be slow
    scripted = Scripted()
    yield scripted
    scripted.close()


def make_config(**changes):
    return RLConfig(**{"name": "r", "tasksets": {"calculator": 1.0, "shell": 1.0}, "groups_per_batch": 4,
                       "group_size": 2, "concurrency": 8, "mode": "sync", "episode_timeout_s": 20.0, **changes})


@asynccontextmanager
async def running(config, run_dir, service, *task_services):
    orchestrator = Orchestrator(config, run_dir, service.url)
    for number, one in enumerate(task_services or (service,)):
        orchestrator.registry.register(Description(id=f"tasks-{number}", url=one.url, capacity=64,
                                                   tasksets=tuple(config.tasksets)), time.monotonic())
    loop = asyncio.create_task(orchestrator.run())
    try:
        yield orchestrator
    finally:
        loop.cancel()
        with suppress(asyncio.CancelledError):
            await loop


async def until(condition, timeout_s=180.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "condition not reached"
        await asyncio.sleep(0.01)


def start_ledger(run_dir, config, step=0):
    ledger = open_ledger(run_dir, max_staleness=config.tau)
    ledger.record_version(0, 0)
    ledger.set_progress(step, 0)
    return ledger


def test_synchronous_mode_runs_one_batch_and_waits_for_the_step(tmp_path, service):
    config = make_config()
    ledger = start_ledger(tmp_path, config)

    async def scenario():
        async with running(config, tmp_path, service):
            await until(lambda: ledger.ready_groups() == 4)
            await asyncio.sleep(0.3)
            assert len(service.slots()) == 8
            assert {name.split("-s")[0] for name in service.episodes} == {
                "calculator-0", "calculator-1", "shell-0", "shell-1"}
            ledger.lease(4, 0)
            ledger.set_progress(1, 0)
            await until(lambda: len(service.slots()) == 16)

    asyncio.run(scenario())
    assert ledger.check() == []
    ledger.close()


def test_nothing_starts_before_the_trainer_has_published(tmp_path, service):
    config = make_config()
    ledger = start_ledger(tmp_path, config)
    ledger.set_progress(0, -1)

    async def scenario():
        async with running(config, tmp_path, service) as orchestrator:
            await asyncio.sleep(0.3)
            assert service.episodes == [] and orchestrator.stats()["may_start_groups"] == 0

    asyncio.run(scenario())
    ledger.close()


def test_an_infrastructure_failure_is_tried_again_and_then_counted(tmp_path, service, monkeypatch):
    monkeypatch.setattr(episodes, "RETRY_BASE_S", 0.01)
    config = make_config(tasksets={"shell": 1.0}, groups_per_batch=1, group_size=3, max_attempts=2)
    service.fails = {"shell-0-s0a0", "shell-0-s2a0", "shell-0-s2a1"}
    ledger = start_ledger(tmp_path, config)

    async def scenario():
        async with running(config, tmp_path, service):
            await until(lambda: ledger.ready_groups() == 1)

    asyncio.run(scenario())
    counts = ledger.counts()
    assert counts.retried == 2 and counts.episodes == {"waiting": 2, "infra_error": 1}
    assert "shell-0-s0a1" in service.episodes and "shell-0-s2a2" not in service.episodes
    ledger.close()


def test_a_group_whose_first_episodes_are_equal_ends_without_the_others(tmp_path, service, monkeypatch):
    config = make_config(tasksets={"shell": 1.0}, groups_per_batch=2, group_size=6,
                         curriculum=CurriculumConfig(screen=3))
    monkeypatch.setattr(episodes, "RETRY_BASE_S", 0.01)
    service.losing = {"shell-0", "shell-2"}
    service.fails = {"shell-2-s1a0", "shell-2-s1a1", "shell-2-s1a2"}  # not known to be equal: the others start
    ledger = start_ledger(tmp_path, config)

    async def scenario():
        async with running(config, tmp_path, service):
            await until(lambda: ledger.ready_groups() == 2)

    asyncio.run(scenario())
    slots = {group: sorted({name.split("-s")[-1][0] for name in service.episodes if name.startswith(f"{group}-s")})
             for group in ("shell-0", "shell-1", "shell-2", "shell-3")}
    assert slots["shell-0"] == ["0", "1", "2"]
    assert slots["shell-1"] == slots["shell-3"] == ["0", "1", "2", "3", "4", "5"]
    assert slots["shell-2"] == ["0", "1", "2", "3", "4", "5"]
    assert ledger.counts().dropped_groups["zero_variance"] == 2
    assert ledger.check() == []
    ledger.close()


def test_episodes_of_a_dead_service_move_to_a_live_one(tmp_path, service, monkeypatch):
    monkeypatch.setattr(registry, "DEAD_AFTER_S", 0.5)
    monkeypatch.setattr(episodes, "RETRY_BASE_S", 0.01)
    config = make_config(tasksets={"shell": 1.0}, groups_per_batch=2)
    ledger = start_ledger(tmp_path, config)
    dying = Scripted()
    dying.hangs = True

    async def scenario():
        async with running(config, tmp_path, service, service, dying) as orchestrator:
            async def beat():
                while True:
                    orchestrator.registry.heartbeat("tasks-0", time.monotonic())
                    await asyncio.sleep(0.1)

            beating = asyncio.create_task(beat())
            await until(lambda: ledger.ready_groups() == 2)
            beating.cancel()

    asyncio.run(scenario())
    assert dying.episodes and ledger.counts().retried == len(dying.episodes)
    ledger.close()
    dying.close()


def test_a_failing_service_gets_a_probe_now_and_then_and_the_others_fill_in(tmp_path, service, monkeypatch):
    monkeypatch.setattr(episodes, "RETRY_BASE_S", 0.01)
    monkeypatch.setattr(episodes, "RETRY_FACTOR", 1.5)
    broken = Scripted()
    broken.breaks = True
    config = make_config(tasksets={"shell": 1.0}, groups_per_batch=20, concurrency=40, max_attempts=8, **OLD,
                         breaker=BreakerConfig(window=8, backoff_s=0.2, max_backoff_s=0.4))
    ledger = start_ledger(tmp_path, config)

    async def scenario():
        async with running(config, tmp_path, service, service, broken) as orchestrator:
            await until(lambda: ledger.ready_groups() == 20)
            tried = len(broken.episodes)
            broken.breaks = False
            step = 0
            while len(broken.episodes) <= tried + 2:  # a probe is an episode: work must go on until its time has come
                await until(lambda: ledger.ready_groups() == 20)
                ledger.lease(20, step)
                step += 1
                ledger.set_progress(step, 0)
            return tried, orchestrator.stats()

    tried, stats = asyncio.run(scenario())
    kinds = [event["kind"] for event in read_jsonl(tmp_path / "events.jsonl")]
    assert kinds.count("circuit_open") == stats["services"][1]["times_opened"] >= 1
    assert kinds.count("circuit_closed") == 1 and stats["services"][1]["breaker"] == "closed"
    assert tried < 40 and stats["services"][0]["times_opened"] == 0
    ledger.close()
    broken.close()


def test_failures_of_the_gateway_are_not_blamed_on_the_service(tmp_path, service, monkeypatch):
    monkeypatch.setattr(episodes, "RETRY_BASE_S", 0.01)
    config = make_config(tasksets={"shell": 1.0}, max_attempts=1, breaker=BreakerConfig(window=4))
    service.reason = f"harness: {service.url}/sessions/x/v1/chat/completions: HTTP 502"
    service.fails = {f"shell-{index}-s{slot}a0" for index in range(4) for slot in range(2)}
    ledger = start_ledger(tmp_path, config)

    async def scenario():
        async with running(config, tmp_path, service, service) as orchestrator:
            await until(lambda: ledger.counts().dropped_groups.get("too_few_valid", 0) >= 4)
            return orchestrator.stats()["services"][0]["times_opened"]

    assert asyncio.run(scenario()) == 0
    ledger.close()


def test_equal_groups_are_dropped_within_the_budget_of_a_step_and_then_trained(tmp_path, service):
    config = make_config(tasksets={"shell": 1.0}, groups_per_batch=4, **OLD,
                         curriculum=CurriculumConfig(filter_budget=0.5, balance=1.0))
    service.losing = {f"shell-{index}" for index in range(100)}
    ledger = start_ledger(tmp_path, config)

    async def scenario():
        async with running(config, tmp_path, service):
            await until(lambda: ledger.ready_groups() == 4)
            await asyncio.sleep(0.3)
            assert ledger.counts().dropped_groups == {"zero_variance": 2}
            batch = ledger.lease(4, 0)
            assert {sample.advantage for sample in batch.samples} == {0.0} and batch.groups == 4
            ledger.set_progress(1, 0)
            await until(lambda: ledger.ready_groups() == 4)

    asyncio.run(scenario())
    assert ledger.counts().dropped_groups == {"zero_variance": 4} and ledger.check() == []
    ledger.close()


def test_an_episode_that_can_only_end_too_stale_is_ended(tmp_path, service):
    config = make_config(tasksets={"shell": 1.0}, groups_per_batch=1, mode="async", max_staleness=2, pacing_eta=0)
    ledger = start_ledger(tmp_path, config)
    service.hangs = True

    async def scenario():
        async with running(config, tmp_path, service) as orchestrator:
            await until(lambda: len(service.episodes) == 2)
            ledger.set_progress(3, 0)
            await asyncio.sleep(0.3)
            assert orchestrator.stats()["episodes_finished"] == 0  # 3 = bound + one publication: may still be in time
            ledger.set_progress(4, 0)
            await until(lambda: ledger.counts().episodes.get("stale") == 2)

    asyncio.run(scenario())
    assert ledger.counts().dropped_groups["too_few_valid"] == 1 and ledger.counts().retried == 0
    ledger.close()


def test_oversampling_starts_more_groups_than_are_wanted(tmp_path, service):
    config = make_config(tasksets={"shell": 1.0}, groups_per_batch=4, concurrency=64, **OLD,
                         curriculum=CurriculumConfig(oversample=2.0))
    service.losing = {f"shell-{index}" for index in range(0, 1000, 2)}
    ledger = start_ledger(tmp_path, config)

    async def scenario():
        async with running(config, tmp_path, service) as orchestrator:
            for step in range(12):
                await until(lambda: ledger.ready_groups() >= 4)
                ledger.lease(4, step)
                ledger.set_progress(step + 1, 0)
            return orchestrator.stats()["kept_share"]

    kept = asyncio.run(scenario())
    assert 0.4 < kept < 0.9  # from 1 towards the half that differs
    assert ledger.check() == []
    ledger.close()


def test_a_restarted_orchestrator_drops_what_was_open_and_repeats_no_task(tmp_path, service):
    config = make_config(tasksets={"shell": 1.0}, groups_per_batch=2)
    ledger = start_ledger(tmp_path, config)
    ledger.open_group("shell-0", taskset="shell", task_id="shell/train/0", task_index=0, size=2)

    async def scenario():
        async with running(config, tmp_path, service):
            await until(lambda: ledger.ready_groups() == 2)

    asyncio.run(scenario())
    assert {name.split("-s")[0] for name in service.episodes} == {"shell-1", "shell-2"}
    assert ledger.counts().dropped_groups == {"interrupted": 1}
    ledger.close()


def test_services_register_and_beat_over_http(tmp_path):
    async def scenario():
        app = build_app(Orchestrator(make_config(), tmp_path, "http://127.0.0.1:9"))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://o") as client:
            unknown = await client.post("/heartbeat", json={"id": "a"})
            wrong = await client.post("/register", json={"id": "a"})
            body = {"kind": "task_service", "id": "a", "url": "http://a", "capacity": 4, "tasksets": ["shell"]}
            registered = await client.post("/register", json=body)
            beat = await client.post("/heartbeat", json={"id": "a"})
            stats = (await client.get("/stats")).json()
            progress = (await client.get("/progress")).json()
        assert (unknown.status_code, wrong.status_code) == (404, 422)
        assert "register again" in json.dumps(unknown.json()) and "capacity" in json.dumps(wrong.json())
        assert (registered.status_code, beat.status_code) == (200, 200)
        assert [service["id"] for service in stats["services"]] == ["a"] and stats["violations"] == []
        assert progress.pop("loop_age_s") >= 0
        assert progress == {"step": 0, "version": -1, "may_start_groups": 0}

    asyncio.run(scenario())
