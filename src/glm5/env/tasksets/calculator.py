"""Arithmetic with a calculator: read a question, call the tool, report its value.

Kinds go round with the index, so every stretch of tasks holds all of them in equal shares. The content that decides the
split is the expression with the operands of + and * in order, whatever the wording.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from glm5.env.sandbox.base import Sandbox
from glm5.env.tasks import Message, Solution, Task, ToolError, draw
from glm5.env.tools import evaluate, final_answer, function_tool, progress_reward, text_argument, used_tool

_WORDINGS: dict[str, tuple[str, ...]] = {
    "add": ("What is {a} plus {b}?", "Add {a} and {b}.", "Tom has {a} nuts and gets {b} more. How many now?"),
    "subtract": ("What is {a} minus {b}?", "Tom has {a} nuts and eats {b}. How many now?", "Take {b} from {a}."),
    "multiply": ("What is {a} times {b}?", "Multiply {a} by {b}.", "How many nuts are in {a} bags of {b}?"),
    "add_multiply": ("What is {a} plus {b} times {c}?", "Tom has {a} nuts and gets {b} bags of {c}. How many now?"),
    "sum_multiply": ("Add {a} and {b}, then multiply by {c}.",),
    "add_subtract": ("Tom has {a} nuts, gets {b} and eats {c}. How many now?", "What is {a} plus {b} minus {c}?"),
}
_EXPRESSIONS = {"add": "{a} + {b}", "subtract": "{a} - {b}", "multiply": "{a} * {b}", "add_multiply": "{a} + {b} * {c}",
                "sum_multiply": "({a} + {b}) * {c}", "add_subtract": "{a} + {b} - {c}"}
_CYCLE = ("add", "subtract", "multiply", "add_multiply", "add", "subtract", "multiply", "add_subtract",
          "multiply", "sum_multiply")


@dataclass(frozen=True, slots=True)
class _Instance:
    kind: str
    numbers: tuple[int, ...]
    wording: int

    def expression(self) -> str:
        return _EXPRESSIONS[self.kind].format(**dict(zip("abc", self.numbers, strict=False)))

    def content(self) -> str:
        a, b, *rest = self.numbers
        commutes = self.kind in ("add", "multiply", "sum_multiply", "add_subtract")
        pair = sorted((a, b)) if commutes else [a, b]
        return f"{self.kind} {[*pair, *rest]}"


class Calculator:
    """Questions of two or three numbers of two digits."""

    name = "calculator"
    needs_sandbox = False

    def tools(self) -> list[dict[str, Any]]:
        """One tool: calculator."""
        return [function_tool("calculator", "Evaluate an integer expression.", expression="string")]

    def task(self, split: str, index: int) -> Task:
        """A question; ``data``: expression, value, content."""
        kind = _CYCLE[index % len(_CYCLE)]
        instance = draw(self.name, split, index, lambda rng: _make(rng, kind), _Instance.content)
        question = _WORDINGS[kind][instance.wording].format(**dict(zip("abc", instance.numbers, strict=False)))
        expression = instance.expression()
        return Task(task_id=f"{self.name}/{split}/{index}", taskset=self.name, split=split, instruction=question,
                    data={"expression": expression, "value": evaluate(expression), "content": instance.content()})

    def content(self, task: Task) -> str:
        """Kind and operands."""
        return str(task.data["content"])

    def solution(self, task: Task) -> Solution:
        """One call, then the value."""
        return Solution([("calculator", {"expression": task.data["expression"]})], str(task.data["value"]))

    async def setup(self, task: Task, sandbox: Sandbox | None) -> None:
        """Nothing to prepare."""

    async def call(self, task: Task, sandbox: Sandbox | None, tool: str, arguments: dict[str, Any]) -> str:
        """Value of the expression."""
        if tool != "calculator":
            raise ToolError(f"error: no tool {tool}")
        return str(evaluate(text_argument(arguments, "expression")))

    async def verify(self, task: Task, sandbox: Sandbox | None, messages: list[Message]) -> dict[str, float]:
        """1 when the final answer is the value, recomputed from the question's expression; a turn that computes it
        earns something too."""
        value = str(evaluate(task.data["expression"]))
        return {"reward": float(final_answer(messages) == value), "used_tool": used_tool(messages),
                **progress_reward(messages, value)}


def _make(rng: random.Random, kind: str) -> _Instance:
    def number(low: int = 10, high: int = 99) -> int:
        return rng.randint(low, high)

    if kind == "subtract":
        small, large = sorted((number(), number()))
        numbers: tuple[int, ...] = (large + 1, small)
    elif kind in ("add_multiply", "sum_multiply"):
        numbers = (number(), number(), number())
    elif kind == "add_subtract":
        first, second = number(), number()
        numbers = (first, second, rng.randint(10, min(99, first + second)))
    else:
        numbers = (number(), number())
    return _Instance(kind, numbers, rng.randrange(len(_WORDINGS[kind])))
