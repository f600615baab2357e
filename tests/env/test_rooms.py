"""Rewards of the taskset ``rooms`` by hand."""

import asyncio

import pytest

from glm5.env.tasks import ToolError
from glm5.env.tasksets.rooms import Rooms


def call(name, tool="lookup"):
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {
        "name": tool, "arguments": {"person": name}}}]}


def test_the_reward_is_for_the_call_and_the_answer():
    taskset = Rooms()
    task = taskset.task("train", 3)
    name, room = task.data["name"], task.data["room"]
    assert name in task.instruction and str(room) not in task.instruction and 100 <= room <= 999

    def reward(*messages):
        return asyncio.run(taskset.verify(task, None, list(messages)))["reward"]

    def answer(text):
        return {"role": "assistant", "content": text}

    assert reward(call(name), answer(f"{name} is in room {room}.")) == 1.0
    assert reward(call(name.lower()), answer(str(room))) == 1.0
    assert reward(call(name), answer(f"{room} or 12")) == 0.2
    assert reward(call(name), answer("no idea")) == 0.2
    assert reward(call(name)) == 0.2
    assert reward(call("nobody"), answer(str(room))) == 0.0
    assert reward(call(name, "search"), answer(str(room))) == 0.0
    assert reward(answer(str(room))) == 0.0
    assert asyncio.run(taskset.call(task, None, "lookup", {"person": f" {name} "})) == f"room {room}"
    for tool, arguments in (("lookup", {"person": "nobody"}), ("search", {"person": name}), ("lookup", {})):
        with pytest.raises(ToolError):
            asyncio.run(taskset.call(task, None, tool, arguments))
