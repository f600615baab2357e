"""One-line functions from a description; generated tests run in the sandbox.

Kinds go round with the index. The content that decides the split is the kind with its numbers and words, the name of
the function excluded. Hidden inputs run on what the model wrote; see ``glm5.env.programs``.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from glm5.env.programs import agrees, run_function, trusted_function
from glm5.env.sandbox.base import Sandbox
from glm5.env.tasks import Message, Task, draw
from glm5.env.tasksets.questions import Question
from glm5.env.tasksets.words import distinct_words
from glm5.env.tools import final_answer

_FILE = "answer.py"
_HIDDEN = 8
_MAX_SOURCE = 4000
_FENCE = re.compile(r"```(?:python)?\n(.*?)```", re.DOTALL)
Inputs = Callable[[random.Random, int], tuple[Any, ...]]


def _one(rng: random.Random, k: int) -> tuple[Any, ...]:
    return (rng.randint(1, 2 * k + 9),)


def _two(rng: random.Random, k: int) -> tuple[Any, ...]:
    return rng.randint(1, 99), rng.randint(1, 99)


def _many(rng: random.Random, k: int) -> tuple[Any, ...]:
    return ([rng.randint(max(1, k - 9), k + 9) for _ in range(rng.randint(2, 5))],)


def _multiple(rng: random.Random, k: int) -> tuple[Any, ...]:
    return (k * rng.randint(1, 9) + rng.choice((0, 0, 1)),)


def _text(rng: random.Random, k: int) -> tuple[Any, ...]:
    return (distinct_words(rng, 1)[0],)


@dataclass(frozen=True, slots=True)
class _Kind:
    """``{k} {m}`` are numbers, ``{w}`` a word; ``arguments`` are the function's."""

    arguments: str
    purpose: str
    expression: str
    inputs: Inputs


_KINDS = (
    _Kind("x", "x times {k} plus {m}", "x * {k} + {m}", _one),
    _Kind("x", "x times {k} minus {m}", "x * {k} - {m}", _one),
    _Kind("x", "x plus {k}, times {m}", "(x + {k}) * {m}", _one),
    _Kind("x", "x but at most {k}", "min(x, {k})", _one),
    _Kind("x", "x but at least {k}", "max(x, {k})", _one),
    _Kind("a, b", "larger of a and b plus {k}", "max(a, b) + {k}", _two),
    _Kind("a, b", "smaller of a and b times {k}", "min(a, b) * {k}", _two),
    _Kind("x", "is x a multiple of {k}", "x % {k} == 0", _multiple),
    _Kind("items", "items plus {k} each", "[x + {k} for x in items]", _many),
    _Kind("items", "items above {k}", "[x for x in items if x > {k}]", _many),
    _Kind("items", "sum of items below {k}", "sum(x for x in items if x < {k})", _many),
    _Kind("t", "t then {w}", 't + "{w}"', _text),
)


@dataclass(frozen=True, slots=True)
class _Instance:
    kind: _Kind
    name: str
    values: dict[str, Any]

    def signature(self) -> str:
        return f"{self.name}({self.kind.arguments})"

    def source(self) -> str:
        return f"def {self.signature()}: return {self.kind.expression.format(**self.values)}"

    def content(self) -> str:
        return self.kind.expression.format(**self.values)


class Code(Question):
    """Write a function of one line."""

    name = "code"
    needs_sandbox = True

    def task(self, split: str, index: int) -> Task:
        """``data``: function, inputs and expected values, answer, content."""
        kind = _KINDS[index % len(_KINDS)]
        instance = draw(self.name, split, index, lambda rng: _make(rng, kind), _Instance.content)
        inputs, expected = _choose_inputs(random.Random(f"{self.name}/{split}/{index}/inputs"), instance)
        return Task(task_id=f"{self.name}/{split}/{index}", taskset=self.name, split=split,
                    instruction=f"Write {instance.signature()}: {kind.purpose.format(**instance.values)}.",
                    data={"function": instance.name, "inputs": inputs, "expected": expected,
                          "answer": instance.source(), "content": instance.content()})

    async def verify(self, task: Task, sandbox: Sandbox | None, messages: list[Message]) -> dict[str, float]:
        """1 when every hidden input gives the expected value."""
        assert sandbox is not None
        source = _source(final_answer(messages))
        if not source or len(source) > _MAX_SOURCE:
            return {"reward": 0.0, "passed": 0.0}
        await sandbox.write_file(_FILE, source)
        outputs = await run_function(sandbox, _FILE, task.data["function"], task.data["inputs"])
        right = [agrees(output, value) for output, value in zip(outputs, task.data["expected"], strict=True)]
        return {"reward": float(all(right)), "passed": sum(right) / len(right)}


def _source(answer: str) -> str:
    """The first fenced block of an answer, or all of it."""
    fenced = _FENCE.search(answer)
    return fenced[1] if fenced else answer


def _make(rng: random.Random, kind: _Kind) -> _Instance:
    name, word = distinct_words(rng, 2)
    return _Instance(kind, name, {"k": rng.randint(10, 199), "m": rng.randint(2, 99), "w": word})


def _choose_inputs(rng: random.Random, instance: _Instance) -> tuple[list[tuple[Any, ...]], list[Any]]:
    """(inputs, expected values): no constant and no argument as it is passes them all."""
    function = trusted_function(instance.source(), instance.name)
    while True:
        inputs = [instance.kind.inputs(rng, instance.values["k"]) for _ in range(_HIDDEN)]
        expected = [function(*arguments) for arguments in inputs]
        copies = [any(value is argument or value == argument for argument in arguments)
                  for arguments, value in zip(inputs, expected, strict=True)]
        if len({repr(value) for value in expected}) > 1 and not all(copies):
            return inputs, expected
