"""A task service over HTTP: routes, whole episodes, classification of failures, registration, clean stop."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from glm5.env import episodes as episodes_module
from glm5.env.client import fetch_tasks, run_episode, service_info
from glm5.env.service import build_app
from glm5.env.tasks import load_taskset
from glm5.errors import ConfigError
from glm5.records import SamplingParams
from glm5.wire import HttpClient, HttpStatusError

from .scripted_model import answer, model_app, served, tool_call
from .test_sandbox import children_of

TASKSETS = {name: load_taskset(name) for name in ("calculator", "shell", "repair")}
APP_OPTIONS = {"capacity": 4}


@pytest.fixture(scope="module", autouse=True)
def earlier_children():
    """Processes that tests before these have left running: not ours to judge."""
    return set(children_of(os.getpid()))


def expert(messages):
    """A model that knows every training task by its instruction."""
    task = next(
        task
        for taskset in TASKSETS.values()
        for index in range(14)
        if (task := taskset.task("train", index)).instruction == messages[0]["content"]
    )
    solution = TASKSETS[task.taskset].solution(task)
    done = sum(message["role"] == "tool" for message in messages)
    if done < len(solution.calls):
        name, arguments = solution.calls[done]
        return tool_call(name, json.dumps(arguments))
    return answer(solution.answer)


def play(policy, body, names=("calculator", "shell", "repair"), **options):
    """Run ``await body(http, service_url, model_url)`` against a real service and a scripted model."""

    async def run(service_url, model_url):
        http = HttpClient()
        try:
            return await body(http, service_url, model_url)
        finally:
            http.close()

    with served(model_app(policy, options.pop("seen", None))) as model_url:
        with served(build_app(names, **{**APP_OPTIONS, **options})) as service_url:
            return asyncio.run(run(service_url, model_url))


def request(task_id, model_url, **changes):
    """Body of POST /episodes/run."""
    return {
        "episode_id": task_id.replace("/", "-"),
        "task_id": task_id,
        "base_url": f"{model_url}/v1",
        "api_key": "key",
        "max_turns": 4,
        "timeout_s": 20.0,
        **changes,
    }


def test_whole_episodes_of_every_taskset_succeed_with_the_expert():
    seen = []

    async def body(http, service, model):
        runs = [
            http.post(f"{service}/episodes/run", request(f"{name}/train/{index}", model), 30)
            for name in TASKSETS
            for index in range(3)
        ]
        return await asyncio.gather(*runs), await service_info(http, service)

    results, info = play(expert, body, seen=seen)
    assert [(result["outcome"], result["reward"], result["turns"], result["reason"]) for result in results] == [
        ("ok", 1.0, 2, "")
    ] * 9
    assert all(result["duration_s"] > 0 and "used_tool" in result["reward_parts"] for result in results)
    assert (info["running"], info["open_sandboxes"], info["outcomes"], info["capacity"]) == (0, 0, {"ok": 9}, 4)
    second = next(body for body in seen if len(body["messages"]) == 3)
    assert second["messages"][1] == {**tool_call("x", ""), "tool_calls": second["messages"][1]["tool_calls"]}
    assert second["messages"][2]["tool_call_id"] == "call_7"
    assert second["tools"][0]["type"] == "function"


def test_what_the_model_does_wrong_is_graded():
    policies = {
        "silence": lambda messages: answer(""),
        "wrong": lambda messages: answer("1"),
        "loop": lambda messages: tool_call("calculator", '{"expression": "1 + 1"}'),
        "bad_json": lambda messages: tool_call("calculator", "{"),
        "bad_tool": lambda messages: tool_call("nothing", "{}"),
        "length": lambda messages: {**answer("1 2 3"), "finish": "length"},
        "context": lambda messages: (
            answer("")
            if not messages
            else {"status": 400, "error": {"message": "too long", "code": "context_length_exceeded"}}
            if len(messages) > 1
            else tool_call("calculator", '{"expression": "1 + 1"}')
        ),
    }
    found = {}
    for name, policy in policies.items():

        async def body(http, service, model):
            return await http.post(f"{service}/episodes/run", request("calculator/train/0", model, max_turns=3), 30)

        result = play(policy, body, names=("calculator",))
        found[name] = (result["outcome"], result["reward"], result["turns"])
    assert found == {
        "silence": ("ok", 0.0, 1),
        "wrong": ("ok", 0.0, 1),
        "loop": ("truncated", 0.0, 3),
        "bad_json": ("agent_error", 0.0, 3),
        "bad_tool": ("agent_error", 0.0, 3),
        "length": ("truncated", 0.0, 1),
        "context": ("truncated", 0.0, 1),
    }


def test_what_the_machinery_does_wrong_has_no_reward():
    cases = {
        "status": (lambda messages: {"status": 503, "error": {"message": "engine is gone"}}, {}, "engine is gone"),
        "closed": (
            lambda messages: {"status": 410, "error": {"message": "session closed", "code": "closed"}},
            {},
            "session closed",
        ),
        "slow": (
            lambda messages: {"sleep": 5, **answer("")},
            {"timeout_s": 0.3},
            "the episode's time is over|no answer within",
        ),
        "nobody": (lambda messages: answer(""), {"base_url": "http://127.0.0.1:9/v1"}, "127.0.0.1:9"),
        "odd": (lambda messages: {"role": "assistant", "tool_calls": 3}, {}, "expected choices"),
    }
    import re

    for policy, changes, reason in cases.values():

        async def body(http, service, model, changes=changes):
            result = await http.post(f"{service}/episodes/run", request("shell/train/0", model, **changes), 30)
            return result, await service_info(http, service)

        result, info = play(policy, body, names=("shell",))
        assert (result["outcome"], result["reward"]) == ("infra_error", None)
        assert re.search(reason, result["reason"]), result["reason"]
        assert info["running"] == info["open_sandboxes"] == 0


def test_a_defect_of_a_verifier_is_not_a_reward(monkeypatch):
    async def broken(self, task, sandbox, messages):
        raise KeyError("oops")

    monkeypatch.setattr(type(TASKSETS["calculator"]), "verify", broken)

    async def body(http, service, model):
        return await http.post(f"{service}/episodes/run", request("calculator/train/0", model), 30)

    result = play(expert, body, names=("calculator",))
    assert result["outcome"] == "infra_error" and result["reason"] == "verifier: defect: KeyError: 'oops'"


def test_an_episode_can_be_driven_step_by_step():
    task = TASKSETS["shell"].task("train", 0)

    async def body(http, service, model):
        prepared = await http.post(f"{service}/episodes", {"episode_id": "a", "task_id": task.task_id}, 10)
        assert (
            prepared["messages"] == [{"role": "user", "content": task.instruction}]
            and prepared["instruction"] == task.instruction
        )
        assert prepared["tools"][0]["function"]["name"] == "shell"
        with pytest.raises(HttpStatusError, match="already running"):
            await http.post(f"{service}/episodes", {"episode_id": "a", "task_id": task.task_id}, 10)
        bad = await http.post(f"{service}/episodes/a/exec", {"name": "shell", "arguments": {}}, 10)
        assert bad == {"output": "error: command is missing"}
        before = await http.post(f"{service}/episodes/a/verify", {"messages": []}, 10)
        assert (before["reward"], before["outcome"]) == (0.0, "ok")
        done = await http.post(
            f"{service}/episodes/a/exec", {"name": "shell", "arguments": {"command": task.data["command"]}}, 10
        )
        assert done == {"output": "ok"}
        after = await http.post(f"{service}/episodes/a/verify", {"messages": [answer("done")]}, 10)
        assert (after["reward"], after["outcome"]) == (1.0, "ok") and after["reward_parts"]["state"] == 1.0
        assert await http.delete(f"{service}/episodes/a", 10) == {"removed": True}
        assert await http.delete(f"{service}/episodes/a", 10) == {"removed": False}
        with pytest.raises(HttpStatusError, match="not running here"):
            await http.post(f"{service}/episodes/a/verify", {"messages": []}, 10)

    play(expert, body)


def test_callers_mistakes_are_one_line_with_status_400():
    async def body(http, service, model):
        for path, data, message in (
            ("episodes/run", request("calculator/train/0", model, max_turns=0), "max_turns: expected a number from 1"),
            ("episodes/run", request("chess/train/0", model), "taskset 'chess' is not served here"),
            ("episodes/run", [1], "not a JSON object"),
            ("episodes", {"episode_id": "a"}, "task_id: expected a text"),
        ):
            with pytest.raises(HttpStatusError, match=message) as caught:
                await http.post(f"{service}/{path}", data, 10)
            assert caught.value.status == 400
        for query, message in (
            ("split=dev", "expected one of demo"),
            ("offset=x", "integers"),
            ("limit=0", "limit in 1"),
            ("taskset=go", "not served"),
        ):
            with pytest.raises(HttpStatusError, match=message):
                await http.get(f"{service}/tasks?{query}", 10)

    play(expert, body, names=("calculator",))
    with pytest.raises(ConfigError, match="not installed"):
        build_app(["chess"])
    with pytest.raises(ConfigError, match="no taskset named"):
        build_app([])


def test_tasks_are_listed_by_split_and_offset():
    async def body(http, service, model):
        listed = await fetch_tasks(http, service, "repair", "heldout", 3, 2)
        every = (await http.get(f"{service}/tasks?split=train&limit=2", 10))["tasks"]
        return listed, every

    listed, every = play(expert, body)
    assert [task.task_id for task in listed] == ["repair/heldout/3", "repair/heldout/4"]
    assert listed[0].instruction == TASKSETS["repair"].task("heldout", 3).instruction
    assert [task["task_id"] for task in every] == [f"{name}/train/{index}" for index in (0, 1) for name in TASKSETS]


def test_no_more_episodes_run_at_once_than_the_capacity():
    async def body(http, service, model):
        runs = asyncio.gather(
            *(
                http.post(f"{service}/episodes/run", request(f"calculator/train/{index}", model), 30)
                for index in range(7)
            )
        )
        await asyncio.sleep(0.5)
        info = await service_info(http, service)
        return info["running"], [result["outcome"] for result in await runs]

    running, outcomes = play(lambda messages: {"sleep": 0.8, **answer("1")}, body, names=("calculator",), capacity=3)
    assert running == 3 and outcomes == ["ok"] * 7


def test_abandoned_episodes_are_reaped(monkeypatch):
    monkeypatch.setattr("glm5.env.service._TTL_S", 0.1)
    monkeypatch.setattr("glm5.env.service._REAP_EVERY_S", 0.2)

    async def body(http, service, model):
        await http.post(f"{service}/episodes", {"episode_id": "a", "task_id": "shell/train/0"}, 10)
        await asyncio.sleep(1)
        return await service_info(http, service)

    info = play(expert, body)
    assert info["running"] == info["open_sandboxes"] == 0


def test_the_client_makes_a_record_and_never_raises():
    seen = []
    settings = {
        "group_id": "g",
        "taskset": "calculator",
        "task_id": "calculator/train/0",
        "max_turns": 4,
        "timeout_s": 10.0,
        "sampling": SamplingParams(temperature=0.5, seed=3),
    }

    async def body(http, service, model):
        good = await run_episode(http, gateway_url=model, service_url=service, episode_id="e1", **settings)
        no_service = await run_episode(
            http, gateway_url=model, service_url="http://127.0.0.1:9", episode_id="e2", **settings
        )
        no_gateway = await run_episode(
            http, gateway_url="http://127.0.0.1:9", service_url=service, episode_id="e3", **settings
        )
        unknown = await run_episode(
            http, gateway_url=model, service_url=service, episode_id="e4", **{**settings, "task_id": "calculator/dev/0"}
        )
        return good, no_service, no_gateway, unknown

    good, *failures = play(expert, body, names=("calculator",), seen=seen)
    assert (good.outcome, good.reward, good.task_id, good.group_id) == ("ok", 1.0, "calculator/train/0", "g")
    assert good.trajectories[0].versions == [-1, 3] and good.started_at > 1e9 and 0 < good.duration_s < 10
    for episode in failures:
        assert (episode.outcome, episode.reward, episode.trajectories) == ("infra_error", None, [])
        assert episode.reason
    opened = next(body for body in seen if body.get("session_id") == "e1")
    assert opened["sampling"]["temperature"] == 0.5 and opened["sampling"]["seed"] == 3 and opened["max_turns"] == 4
    assert {"outcome": "ok", "reward": 1.0} in seen and {"outcome": "infra_error", "reward": None} in seen


async def run_two(service_url, model_url):
    """A calculator and a shell episode against a service process."""
    http = HttpClient()
    try:
        return [
            await http.post(f"{service_url}/episodes/run", request(task_id, model_url), 30)
            for task_id in ("calculator/train/0", "shell/train/1")
        ]
    finally:
        http.close()


def test_a_service_process_runs_episodes_registers_again_and_stops_clean(tmp_path):
    calls = []

    async def register(request):
        calls.append(("register", await request.json()))
        return JSONResponse({})

    async def heartbeat(request):
        calls.append(("heartbeat", await request.json()))
        known = sum(kind == "heartbeat" for kind, _ in calls) != 2
        return JSONResponse({"error": {"message": "unknown service"}} if not known else {}, 200 if known else 404)

    app = Starlette(
        routes=[Route("/register", register, methods=["POST"]), Route("/heartbeat", heartbeat, methods=["POST"])]
    )
    program = (
        "import sys\nfrom pathlib import Path\nimport glm5.env.service as service\nservice._HEARTBEAT_S = 0.1\n"
        "service.run_service(['calculator', 'shell'], port=0, ready_file=Path(sys.argv[1]), capacity=5,\n"
        "                    register_url=sys.argv[2])"
    )
    with served(app) as url:
        ready = tmp_path / "ready.json"
        process = subprocess.Popen([sys.executable, "-c", program, str(ready), url], stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and sum(kind == "register" for kind, _ in calls) < 2:
            time.sleep(0.05)
        family = children_of(process.pid)
        with served(model_app(expert)) as model_url:
            results = asyncio.run(run_two(json.loads(ready.read_text())["url"], model_url))
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) in (0, -signal.SIGTERM)
    assert [(result["outcome"], result["reward"], result["reason"]) for result in results] == [("ok", 1.0, "")] * 2
    kinds = [kind for kind, _ in calls]
    assert kinds[:4] == ["register", "heartbeat", "heartbeat", "register"]
    description = calls[0][1]
    assert (
        description["kind"] == "task_service"
        and description["tasksets"] == ["calculator", "shell"]
        and description["capacity"] == 5
    )
    assert description["url"] == json.loads(ready.read_text())["url"] and calls[1][1] == {"id": description["id"]}
    assert family and not [pid for pid in family if Path(f"/proc/{pid}/exe").exists()]


def test_nothing_is_left_running_after_these_tests(earlier_children):
    time.sleep(0.3)
    assert set(children_of(os.getpid())) <= earlier_children
    assert episodes_module.first_messages(TASKSETS["shell"].task("train", 0))[0]["role"] == "user"
