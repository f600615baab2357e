"""Repair of a small function with one wrong line; its tests run in the sandbox.

The instruction says in a few words what the function computes, shows it with line numbers, and gives one failing
example. The tool replaces one line, runs the example and says what happened; several tries are allowed. Hidden inputs
run at the end on the content of the file. Only inputs enter the sandbox: what the function returns is compared with the
expected values outside, so there is no test to edit and no expected value to find.

The content that decides the split is the correct function together with the wrong line.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from glm5.env.programs import agrees, run_function, trusted_function
from glm5.env.sandbox.base import Sandbox
from glm5.env.tasks import Message, Solution, Task, ToolError, draw
from glm5.env.tasksets.words import distinct_words
from glm5.env.tools import final_answer, function_tool, integer_argument, progress_reward, text_argument, used_tool
from glm5.errors import TaskError

_FILE = "program.py"
_HIDDEN = 8
"""Hidden inputs of a task, the shown example not among them."""
_MAX_LINE = 120
_FIXED = "ok"


def _pair(rng: random.Random, k: int) -> tuple[Any, ...]:
    return rng.randint(1, 99), rng.randint(1, 99)


def _one(rng: random.Random, k: int) -> tuple[Any, ...]:
    return (rng.randint(1, 2 * k + 9),)


def _small(rng: random.Random, k: int) -> tuple[Any, ...]:
    return (rng.randint(2, 6),)


def _numbers(rng: random.Random, k: int) -> tuple[Any, ...]:
    return ([rng.choice((rng.randint(1, 99), k, rng.randint(max(1, k - 3), k + 3))) for _ in range(rng.randint(2, 4))],)


def _text(rng: random.Random, k: int) -> tuple[Any, ...]:
    return (distinct_words(rng, 1)[0],)


@dataclass(frozen=True, slots=True)
class _Template:
    """``{f}`` is the function's name, ``{k}`` ``{m}`` numbers, ``{w}`` a word."""

    purpose: str
    lines: tuple[str, ...]
    bugs: tuple[tuple[int, str], ...]
    """(line number from 1, wrong text)"""
    inputs: Callable[[random.Random, int], tuple[Any, ...]]


_SUM = ("def {f}(items):", "    n = 0", "    for x in items:", "        if x > {k}:", "            n += x",
        "    return n")
_COUNT = (*_SUM[:3], "        if x < {k}:", "            n += 1", "    return n")
_POWER = ("def {f}(n):", "    p = 1", "    for i in range(n):", "        p = p * {k}", "    return p")
_SERIES = ("def {f}(n):", "    s = {k}", "    for i in range(1, n + 1):", "        s += i", "    return s")
_EACH = ("def {f}(items):", "    out = []", "    for x in items:", "        out.append(x + {k})", "    return out")
_REPEAT = ("def {f}(t):", '    s = ""', "    for i in range({k}):", "        s += t", "    return s")


def _multiple(rng: random.Random, k: int) -> tuple[Any, ...]:
    return (k * rng.randint(1, 9) + rng.choice((0, 0, 1, 2)),)


_TEMPLATES = (
    _Template("x times {k} plus {m}", ("def {f}(x):", "    y = x * {k}", "    return y + {m}"),
              ((2, "    y = x + {k}"), (3, "    return y - {m}"), (3, "    return x + {m}")), _one),
    _Template("x times {k} minus {m}", ("def {f}(x):", "    y = x * {k}", "    return y - {m}"),
              ((2, "    y = x - {k}"), (3, "    return y + {m}"), (3, "    return x - {m}")), _one),
    _Template("sum of items above {k}", _SUM,
              ((2, "    n = 1"), (4, "        if x < {k}:"), (5, "            n -= x"), (5, "            n += 1")),
              _numbers),
    _Template("count of items below {k}", _COUNT,
              ((2, "    n = 1"), (4, "        if x > {k}:"), (5, "            n -= 1"), (5, "            n += x")),
              _numbers),
    _Template("larger of a and b plus {k}",
              ("def {f}(a, b):", "    if a > b:", "        return a + {k}", "    return b + {k}"),
              ((2, "    if a < b:"), (3, "        return b + {k}"), (4, "    return a + {k}"),
               (4, "    return b - {k}")), _pair),
    _Template("smaller of a and b times {k}",
              ("def {f}(a, b):", "    if a < b:", "        return a * {k}", "    return b * {k}"),
              ((2, "    if a > b:"), (3, "        return b * {k}"), (4, "    return a * {k}"),
               (4, "    return b + {k}")), _pair),
    _Template("x but at most {k}", ("def {f}(x):", "    if x > {k}:", "        return {k}", "    return x"),
              ((2, "    if x < {k}:"), (3, "        return x"), (4, "    return {k}")), _one),
    _Template("x but at least {k}", ("def {f}(x):", "    if x < {k}:", "        return {k}", "    return x"),
              ((2, "    if x > {k}:"), (3, "        return x"), (4, "    return {k}")), _one),
    _Template("{k} to the power n", _POWER,
              ((2, "    p = 0"), (4, "        p = p + {k}"), (4, "        p = i * {k}"), (5, "    return n")), _small),
    _Template("sum of 1 to n plus {k}", _SERIES,
              ((3, "    for i in range(1, n):"), (4, "        s -= i"), (4, "        s += 1"), (5, "    return n")),
              _small),
    _Template("is x a multiple of {k}", ("def {f}(x):", "    r = x % {k}", "    return r == 0"),
              ((2, "    r = x * {k}"), (3, "    return r == 1"), (3, "    return x == 0")), _multiple),
    _Template("items plus {k} each", _EACH,
              ((4, "        out.append(x - {k})"), (4, "        out.append({k})"), (5, "    return items")), _numbers),
    _Template("t then {w}", ("def {f}(t):", '    s = "{w}"', "    return t + s"),
              ((3, "    return s + t"), (3, "    return t"), (3, "    return s")), _text),
    _Template("t {k} times", _REPEAT,
              ((3, "    for i in range({m}):"), (4, "        s = t"), (5, "    return t")), _text),
)


@dataclass(frozen=True, slots=True)
class _Instance:
    template: _Template
    bug: tuple[int, str]
    names: dict[str, Any]

    def correct(self) -> str:
        return "".join(line.format(**self.names) + "\n" for line in self.template.lines)

    def broken(self) -> str:
        lines = self.correct().splitlines()
        lines[self.bug[0] - 1] = self.bug[1].format(**self.names)
        return "".join(line + "\n" for line in lines)

    def content(self) -> str:
        return f"{self.correct()}{self.bug[0]}"


class Repair:
    """Functions of three to six lines, one of them wrong."""

    name = "repair"
    needs_sandbox = True

    def tools(self) -> list[dict[str, Any]]:
        """One tool: edit."""
        return [function_tool("edit", "Replace a line of the function, keep its indentation, and run the example.",
                              line="integer", text="string")]

    def task(self, split: str, index: int) -> Task:
        """``data``: function, source, fix (line, text), inputs and expected values (the first is shown), content."""
        template = _TEMPLATES[index % len(_TEMPLATES)]
        instance = draw(self.name, split, index, lambda rng: _make(rng, template), _Instance.content)
        rng = random.Random(f"{self.name}/{split}/{index}/inputs")
        broken, name = instance.broken(), instance.names["f"]
        inputs, expected, shown = _choose_inputs(rng, instance)
        numbered = "\n".join(f"{number} {line}" for number, line in enumerate(broken.splitlines(), 1))
        purpose = template.purpose.format(**instance.names)
        instruction = f"Fix {name}: {purpose}.\n{numbered}\n{_failure(name, inputs[0], repr(shown), expected[0])}"
        line = instance.bug[0]
        fix = instance.correct().splitlines()[line - 1].strip()
        return Task(task_id=f"{self.name}/{split}/{index}", taskset=self.name, split=split, instruction=instruction,
                    data={"function": name, "source": broken, "line": line, "fix": fix, "inputs": inputs,
                          "expected": expected, "content": instance.content()})

    def content(self, task: Task) -> str:
        """Correct function and wrong line."""
        return str(task.data["content"])

    def solution(self, task: Task) -> Solution:
        """One edit."""
        return Solution([("edit", {"line": task.data["line"], "text": task.data["fix"]})], "fixed")

    async def setup(self, task: Task, sandbox: Sandbox | None) -> None:
        """Write the broken function."""
        assert sandbox is not None
        await sandbox.write_file(_FILE, task.data["source"])

    async def call(self, task: Task, sandbox: Sandbox | None, tool: str, arguments: dict[str, Any]) -> str:
        """Replace a line and run the shown example: "ok" or what happened."""
        assert sandbox is not None
        if tool != "edit":
            raise ToolError(f"error: no tool {tool}")
        number, text = integer_argument(arguments, "line"), text_argument(arguments, "text").strip()
        lines = (await sandbox.read_file(_FILE) or "").splitlines()
        if not 1 <= number <= len(lines):
            raise ToolError(f"error: line is not 1 to {len(lines)}")
        if len(text.splitlines()) > 1 or len(text) > _MAX_LINE:
            raise ToolError("error: text is not one short line")
        old = lines[number - 1]
        lines[number - 1] = old[: len(old) - len(old.lstrip())] + text
        await sandbox.write_file(_FILE, "".join(f"{line}\n" for line in lines))
        name, inputs, expected = task.data["function"], task.data["inputs"][:1], task.data["expected"][:1]
        outputs = await run_function(sandbox, _FILE, name, inputs)
        return _FIXED if agrees(outputs[0], expected[0]) else _failure(name, inputs[0], outputs[0], expected[0])

    async def verify(self, task: Task, sandbox: Sandbox | None, messages: list[Message]) -> dict[str, float]:
        """1 when every input, shown and hidden, gives the expected value; the turn that first makes the shown one right
        earns something too."""
        assert sandbox is not None
        used = used_tool(messages)
        if await sandbox.read_file(_FILE) == task.data["source"]:  # known to fail its example
            return {"reward": 0.0, "passed": 0.0, "used_tool": used}
        outputs = await run_function(sandbox, _FILE, task.data["function"], task.data["inputs"])
        right = [agrees(output, value) for output, value in zip(outputs, task.data["expected"], strict=True)]
        return {"reward": float(all(right)), "passed": sum(right) / len(right), "used_tool": used,
                "answered": float(final_answer(messages) != ""), **progress_reward(messages, _FIXED)}


def _failure(name: str, arguments: tuple[Any, ...], output: str, expected: Any) -> str:
    shown = output[1:] if output.startswith("!") else output
    return f"Here {name}({', '.join(map(repr, arguments))}) gives {shown[:40]}, not {expected!r}."


def _make(rng: random.Random, template: _Template) -> _Instance:
    name, text = distinct_words(rng, 2)
    low, high = {_text: (2, 4), _small: (2, 9)}.get(template.inputs, (3, 60))
    k = rng.randint(low, high)
    m = rng.choice([number for number in range(2, max(high, 9) + 1) if number != k])
    return _Instance(template, rng.choice(template.bugs), {"f": name, "w": text, "k": k, "m": m})


def _choose_inputs(rng: random.Random, instance: _Instance) -> tuple[list[tuple[Any, ...]], list[Any], Any]:
    """(inputs, expected values, what the broken function gives for the first). The broken function fails the first
    input; it may pass some of the others. No constant passes all."""
    name, k = instance.names["f"], instance.names["k"]
    right, wrong = trusted_function(instance.correct(), name), trusted_function(instance.broken(), name)
    for _ in range(200):
        shown = instance.template.inputs(rng, k)
        if repr(right(*shown)) != repr(wrong(*shown)):
            break
    else:
        raise TaskError(f"repair: no failing input for {instance.broken()!r}; change the template")
    while True:
        inputs = [shown, *(instance.template.inputs(rng, k) for _ in range(_HIDDEN))]
        expected = [right(*arguments) for arguments in inputs]
        if len({repr(value) for value in expected}) > 1:
            return inputs, expected, wrong(*shown)
