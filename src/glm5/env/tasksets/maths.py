"""Elementary maths in the head: order, digits, place value, small sums.

No wording is that of a taskset with tools: prompts do not declare tools, so the question must tell. Kinds go round with
the index. The content that decides the split is the kind with its numbers, those of kinds that do not care about their
order sorted, whatever the wording. The answer is recomputed from the numbers and compared as text.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from glm5.env.sandbox.base import Sandbox
from glm5.env.tasks import Message, Task, draw
from glm5.env.tasksets.questions import Question
from glm5.env.tools import final_answer

Numbers = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Kind:
    """``{a} {b} {c}`` are the numbers."""

    wordings: tuple[str, ...]
    numbers: Callable[[random.Random], Numbers]
    answer: Callable[[Numbers], str]
    ordered: bool = True
    """Whether the order of the numbers belongs to the content."""


def _different(count: int) -> Callable[[random.Random], Numbers]:
    return lambda rng: tuple(rng.sample(range(10, 100), count))


def _one(low: int, high: int) -> Callable[[random.Random], Numbers]:
    return lambda rng: (rng.randint(low, high),)


def _without_carry(rng: random.Random) -> Numbers:
    tens, ones = rng.randint(1, 49), rng.randint(0, 8)
    return 10 * tens + ones, rng.randint(1, 9 - ones)


_KINDS: dict[str, _Kind] = {
    "larger": _Kind(("Which is larger, {a} or {b}?", "Name the larger of {a} and {b}."), _different(2),
                    lambda n: str(max(n)), ordered=False),
    "smaller": _Kind(("Which is smaller, {a} or {b}?", "Name the smaller of {a} and {b}."), _different(2),
                     lambda n: str(min(n)), ordered=False),
    "largest": _Kind(("Which is the largest of {a}, {b} and {c}?",), _different(3), lambda n: str(max(n)),
                     ordered=False),
    "sort": _Kind(("Sort {a}, {b} and {c}.", "Put {a}, {b} and {c} in order."), _different(3),
                  lambda n: ", ".join(map(str, sorted(n))), ordered=False),
    "reverse": _Kind(("Write the digits of {a} backwards.", "Reverse the digits of {a}."), _one(100, 999),
                     lambda n: str(n[0])[::-1]),
    "next": _Kind(("Which number follows {a}?", "Count one up from {a}."), _one(100, 999), lambda n: str(n[0] + 1)),
    "tens": _Kind(("Which is the tens digit of {a}?",), _one(100, 999), lambda n: str(n[0] // 10 % 10)),
    "remainder": _Kind(("Which digit is the last of {a}?",), _one(100, 999), lambda n: str(n[0] % 10)),
    "hundredfold": _Kind(("Which number is 100 times {a}?",), _one(10, 999), lambda n: str(100 * n[0])),
    "add": _Kind(("Which number is {b} more than {a}?",), _without_carry, lambda n: str(sum(n))),
}
_CYCLE = tuple(_KINDS)


@dataclass(frozen=True, slots=True)
class _Instance:
    kind: str
    numbers: Numbers
    wording: int

    def content(self) -> str:
        return f"{self.kind} {list(self.numbers if _KINDS[self.kind].ordered else sorted(self.numbers))}"


class Maths(Question):
    """Questions of one to three numbers of two or three digits."""

    name = "maths"

    def task(self, split: str, index: int) -> Task:
        """A question; ``data``: kind, numbers, answer, content."""
        kind = _CYCLE[index % len(_CYCLE)]
        instance = draw(self.name, split, index, lambda rng: _make(rng, kind), _Instance.content)
        wording = _KINDS[kind].wordings[instance.wording]
        return Task(task_id=f"{self.name}/{split}/{index}", taskset=self.name, split=split,
                    instruction=wording.format(**dict(zip("abc", instance.numbers, strict=False))),
                    data={"kind": kind, "numbers": instance.numbers, "answer": _KINDS[kind].answer(instance.numbers),
                          "content": instance.content()})

    async def verify(self, task: Task, sandbox: Sandbox | None, messages: list[Message]) -> dict[str, float]:
        """1 when the answer is exactly the value."""
        right = _KINDS[task.data["kind"]].answer(task.data["numbers"])
        return {"reward": float(final_answer(messages) == right)}


def _make(rng: random.Random, kind: str) -> _Instance:
    return _Instance(kind, _KINDS[kind].numbers(rng), rng.randrange(len(_KINDS[kind].wordings)))
