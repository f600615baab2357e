"""Asking a directory: call a tool for a fact that nobody can know, then report it.

Two turns that a small model half knows: a call in the declared form with the right name, and an answer with the room
and no other number. The first alone earns a share of the reward, so that there is something to learn from before the
whole succeeds. The content that decides the split is name and room, whatever the wording.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Any

from glm5.env.sandbox.base import Sandbox
from glm5.env.tasks import Message, Solution, Task, ToolError, draw
from glm5.env.tools import final_answer, function_tool, parse_arguments, text_argument

CALL_REWARD = 0.2
"""For a right call without the right answer."""
_NAMES = (
    "Ada", "Alan", "Anna", "Ben", "Carl", "Clara", "Dana", "David", "Edith", "Emma", "Erik", "Felix", "Frank", "Grace",
    "Hannah", "Henry", "Ida", "Iris", "Ivan", "Jack", "Jane", "Karl", "Kate", "Laura", "Leo", "Lena", "Maria", "Max",
    "Mia", "Nina", "Noah", "Olga", "Oscar", "Paul", "Peter", "Rosa", "Ruth", "Sam", "Sara", "Simon", "Sophie", "Tara",
    "Thomas", "Tina", "Victor", "Walter", "Wendy", "Zoe")
_WORDINGS = ("In which room is {name}?", "What is the room number of {name}?", "Where do I find {name}?",
             "I have a letter for {name}. Which room?", "Tell me the room of {name}.")


@dataclass(frozen=True, slots=True)
class _Instance:
    name: str
    room: int
    wording: int

    def content(self) -> str:
        return f"{self.name} {self.room}"


class Rooms:
    """Rooms of three digits, looked up by name."""

    name = "rooms"
    needs_sandbox = False

    def tools(self) -> list[dict[str, Any]]:
        """One tool: lookup."""
        return [function_tool("lookup", "Room of a person.", person="string")]

    def task(self, split: str, index: int) -> Task:
        """A question; ``data``: name, room, content."""
        instance = draw(self.name, split, index, _make, _Instance.content)
        question = _WORDINGS[instance.wording].format(name=instance.name)
        return Task(task_id=f"{self.name}/{split}/{index}", taskset=self.name, split=split, instruction=question,
                    data={"name": instance.name, "room": instance.room, "content": instance.content()})

    def content(self, task: Task) -> str:
        """Name and room."""
        return str(task.data["content"])

    def solution(self, task: Task) -> Solution:
        """One call, then the room."""
        name = task.data["name"]
        return Solution([("lookup", {"person": name})], f"{name} is in room {task.data['room']}.")

    async def setup(self, task: Task, sandbox: Sandbox | None) -> None:
        """Nothing to prepare."""

    async def call(self, task: Task, sandbox: Sandbox | None, tool: str, arguments: dict[str, Any]) -> str:
        """The room of the person asked for; nobody else is in the directory."""
        if tool != "lookup":
            raise ToolError(f"error: no tool {tool}")
        if text_argument(arguments, "person").strip().lower() != task.data["name"].lower():
            raise ToolError("error: no such person")
        return f"room {task.data['room']}"

    async def verify(self, task: Task, sandbox: Sandbox | None, messages: list[Message]) -> dict[str, float]:
        """1 when the person was looked up and the answer names the room and no other number."""
        called = _has_looked_up(messages, task.data["name"])
        right = called and re.findall(r"\d+", final_answer(messages)) == [str(task.data["room"])]
        return {"reward": 1.0 if right else CALL_REWARD * called, "called": float(called)}


def _make(rng: random.Random) -> _Instance:
    return _Instance(rng.choice(_NAMES), rng.randint(100, 999), rng.randrange(len(_WORDINGS)))


def _has_looked_up(messages: list[Message], name: str) -> bool:
    for call in (call for message in messages for call in message.get("tool_calls") or ()):
        try:
            tool, arguments = parse_arguments(call)
        except ToolError:
            continue
        if tool == "lookup" and str(arguments.get("person", "")).strip().lower() == name.lower():
            return True
    return False
