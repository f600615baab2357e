"""Maths and science with numbers too large for the head, and a Python tool that runs in the sandbox.

Instructions begin with "Python:", because prompts do not declare tools. Kinds go round with the index; the content that
decides the split is kind and numbers. The answer is recomputed from the numbers: an integer as text, or a quantity
compared in SI units.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from glm5.env.quantities import parse_quantity
from glm5.env.sandbox.base import Sandbox
from glm5.env.tasks import Message, Solution, Task, ToolError, draw
from glm5.env.tools import final_answer, function_tool, text_argument, used_tool

_RUN_S = 2.0
_SHOWN = 200
"""Characters of output that the model sees."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """``{a} {b}`` are the numbers; ``value`` is what ``code`` prints; a science question has a ``unit``."""

    wording: str
    code: str
    value: Callable[[int, int], int]
    unit: str = ""


_KINDS: dict[str, _Kind] = {
    "multiply": _Kind("What is {a} times {b}?", "{a} * {b}", lambda a, b: a * b),
    "distance": _Kind("A cart drives {a} m/s for {b} s. How far?", "{a} * {b}", lambda a, b: a * b, "m"),
    "remainder": _Kind("What remains of {a} divided by {b}?", "{a} % {b}", lambda a, b: a % b),
    "force": _Kind("What force gives {a} kg {b} m/s2?", "{a} * {b}", lambda a, b: a * b, "N"),
    "add": _Kind("What is {a} plus {b}?", "{a} + {b}", lambda a, b: a + b),
    "energy": _Kind("What energy do {a} W use in {b} s?", "{a} * {b}", lambda a, b: a * b, "J"),
    "series": _Kind("Add all numbers from {b} to {a}.", "sum(range({b}, {a} + 1))", lambda a, b: sum(range(b, a + 1))),
    "voltage": _Kind("What voltage drives {a} A through {b} ohm?", "{a} * {b}", lambda a, b: a * b, "V"),
    "divisor": _Kind("What divides both {a} and {b}, at most?", "__import__('math').gcd({a}, {b})", math.gcd),
    "walk": _Kind("A path of {a} m and one of {b} m: how far together?", "{a} + {b}", lambda a, b: a + b, "m"),
}
_CYCLE = tuple(_KINDS)


@dataclass(frozen=True, slots=True)
class _Instance:
    kind: str
    a: int
    b: int

    def content(self) -> str:
        return f"{self.kind} {self.a} {self.b}"


class Python:
    """Questions of two numbers, and a Python interpreter."""

    name = "python"
    needs_sandbox = True

    def tools(self) -> list[dict[str, Any]]:
        """One tool: python."""
        return [function_tool("python", "Run a Python program and show what it prints.", code="string")]

    def task(self, split: str, index: int) -> Task:
        """A question; ``data``: kind, a, b, content."""
        kind = _CYCLE[index % len(_CYCLE)]
        instance = draw(self.name, split, index, lambda rng: _make(rng, kind), _Instance.content)
        return Task(task_id=f"{self.name}/{split}/{index}", taskset=self.name, split=split,
                    instruction=f"Python: {_KINDS[kind].wording.format(a=instance.a, b=instance.b)}",
                    data={"kind": kind, "a": instance.a, "b": instance.b, "content": instance.content()})

    def content(self, task: Task) -> str:
        """Kind and numbers."""
        return str(task.data["content"])

    def solution(self, task: Task) -> Solution:
        """One program that prints the value, then the value with its unit."""
        code = _KINDS[task.data["kind"]].code.format(a=task.data["a"], b=task.data["b"])
        return Solution([("python", {"code": f"print({code})"})], _answer(task))

    async def setup(self, task: Task, sandbox: Sandbox | None) -> None:
        """Nothing to prepare."""

    async def call(self, task: Task, sandbox: Sandbox | None, tool: str, arguments: dict[str, Any]) -> str:
        """What the program prints; the last line of its error when it fails."""
        assert sandbox is not None
        if tool != "python":
            raise ToolError(f"error: no tool {tool}")
        result = await sandbox.python(text_argument(arguments, "code"), timeout_s=_RUN_S)
        output = result.output.strip()
        if result.timed_out or result.exit_code == 137:
            return "error: time is over"
        if result.exit_code != 0:
            return f"error: {output.splitlines()[-1][:_SHOWN] if output else result.exit_code}"
        return output[:_SHOWN] or "ok"

    async def verify(self, task: Task, sandbox: Sandbox | None, messages: list[Message]) -> dict[str, float]:
        """1 when the answer is the value: an integer as it is written, a quantity in any unit of its dimension."""
        given, expected = final_answer(messages), _answer(task)
        quantity = parse_quantity(expected)
        if quantity is None:
            right = given == expected
        else:
            found = parse_quantity(given)
            right = found is not None and found.equals(quantity)
        return {"reward": float(right), "used_tool": used_tool(messages)}


def _answer(task: Task) -> str:
    kind = _KINDS[task.data["kind"]]
    value = kind.value(task.data["a"], task.data["b"])
    return f"{value} {kind.unit}" if kind.unit else str(value)


def _make(rng: random.Random, kind: str) -> _Instance:
    return _Instance(kind, rng.randint(100, 999), rng.randint(11, 99))
