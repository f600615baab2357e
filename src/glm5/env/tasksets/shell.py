"""File tasks in a shell: the end state of the whole work directory decides, or a value read from it.

Names are made-up words with a space in front wherever they occur, in the instruction and in the command. Kinds go round
with the index from one-word deletions to two commands in one line. The content that decides the split is the kind and
the words that the instruction names, in order.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from glm5.env.sandbox.base import Sandbox
from glm5.env.tasks import Message, Solution, Task, ToolError, draw
from glm5.env.tasksets.words import distinct_words
from glm5.env.tools import final_answer, function_tool, text_argument, used_tool

_COMMAND_S = 3.0
_SHOWN = 300
"""Characters of output that the model sees."""
_DONE = "done"


@dataclass(frozen=True, slots=True)
class _Kind:
    """``{a} {b} {c}`` are words; ``{a}`` is a file that exists with text ``{t}`` unless ``creates``."""

    wordings: tuple[str, ...]
    command: str
    words: int = 2
    creates: bool = False
    effect: str = "none"
    answer: str = _DONE
    lines: bool = False
    """The file holds 10 to 99 lines instead of one."""


_KINDS: dict[str, _Kind] = {
    "delete": _Kind(("Delete file {a}.", "Remove file {a}."), "rm {a}", words=1, effect="delete"),
    "show": _Kind(("What does file {a} say?", "Read file {a}."), "cat {a}", words=1, answer="{t}"),
    "copy": _Kind(("Copy file {a} to {b}.",), "cp {a} {b}", effect="copy"),
    "rename": _Kind(("Rename file {a} to {b}.", "Move file {a} to {b}."), "mv {a} {b}", effect="move"),
    "write": _Kind(("Write {b} to file {a}.", "Make file {a} with text {b}."), "echo {b} > {a}", creates=True,
                   effect="write"),
    "append": _Kind(("Append {b} to file {a}.", "Add line {b} to file {a}."), "echo {b} >> {a}", effect="append"),
    "count": _Kind(("How many lines has file {a}?", "Count lines of file {a}."), "wc -l < {a}", words=1, answer="{n}",
                   lines=True),
    "make": _Kind(("Make directory {a}.", "Create directory {a}."), "mkdir {a}", words=1, creates=True, effect="make"),
    "into": _Kind(("Move file {a} into new directory {b}.", "Make directory {b} and move {a} there."),
                  "mkdir {b} && mv {a} {b}", effect="into"),
}
_CYCLE = ("delete", "copy", "show", "write", "rename", "count", "append", "make", "into", "copy")


@dataclass(frozen=True, slots=True)
class _Instance:
    kind: str
    words: tuple[str, ...]
    text: str
    others: tuple[str, ...]
    lines: int
    wording: int

    def content(self) -> str:
        return f"{self.kind} {' '.join(self.words)}"


class Shell:
    """One or two files, one command."""

    name = "shell"
    needs_sandbox = True

    def tools(self) -> list[dict[str, Any]]:
        """One tool: shell."""
        return [function_tool("shell", "Run a shell command in the work directory.", command="string")]

    def task(self, split: str, index: int) -> Task:
        """``data``: files before, tree after, command, answer ("" when any answer will do), content."""
        name = _CYCLE[index % len(_CYCLE)]
        instance = draw(self.name, split, index, lambda rng: _make(rng, name), _Instance.content)
        kind = _KINDS[name]
        values = {**dict(zip("abc", instance.words, strict=False)), "t": instance.text, "n": instance.lines}
        before = {other: f"{other}\n" for other in instance.others}
        if not kind.creates:
            lines = [instance.text] * instance.lines if kind.lines else [instance.text]
            before[instance.words[0]] = "".join(f"{line}\n" for line in lines)
        answer = kind.answer.format(**values)
        return Task(
            task_id=f"{self.name}/{split}/{index}", taskset=self.name, split=split,
            instruction=kind.wordings[instance.wording].format(**values),
            data={"before": before, "after": _apply(kind.effect, before, instance.words), "content": instance.content(),
                  "command": kind.command.format(**values), "answer": answer})

    def content(self, task: Task) -> str:
        """Kind and named words."""
        return str(task.data["content"])

    def solution(self, task: Task) -> Solution:
        """One command, then "done" or the value."""
        return Solution([("shell", {"command": task.data["command"]})], task.data["answer"])

    async def setup(self, task: Task, sandbox: Sandbox | None) -> None:
        """Create the files."""
        assert sandbox is not None
        for path, text in task.data["before"].items():
            await sandbox.write_file(path, text)

    async def call(self, task: Task, sandbox: Sandbox | None, tool: str, arguments: dict[str, Any]) -> str:
        """Output of the command; "ok" when it succeeds in silence."""
        assert sandbox is not None
        if tool != "shell":
            raise ToolError(f"error: no tool {tool}")
        result = await sandbox.exec(text_argument(arguments, "command"), timeout_s=_COMMAND_S)
        output = result.output.strip()[:_SHOWN]
        if result.timed_out:
            return "error: time is over"
        if result.exit_code == 0:
            return output or "ok"
        return f"error {result.exit_code}: {output}".rstrip(": ")

    async def verify(self, task: Task, sandbox: Sandbox | None, messages: list[Message]) -> dict[str, float]:
        """1 when the work directory is exactly as it should be and, where a value was asked, the answer is it."""
        assert sandbox is not None
        state = float(await sandbox.files() == task.data["after"])
        answer = final_answer(messages)
        answered = float(answer == task.data["answer"]) if task.data["answer"] != _DONE else 1.0
        return {"reward": state * answered, "state": state, "answer": answered, "used_tool": used_tool(messages)}


def _make(rng: random.Random, name: str) -> _Instance:
    kind = _KINDS[name]
    words = distinct_words(rng, kind.words + 3)
    named, text, others = words[: kind.words], words[kind.words], words[kind.words + 1:]
    return _Instance(name, tuple(named), text, tuple(others), rng.randint(10, 99), rng.randrange(len(kind.wordings)))


def _apply(effect: str, before: dict[str, str], words: tuple[str, ...]) -> dict[str, str]:
    """The tree that the task asks for, in the form of ``Sandbox.files``."""
    after = dict(before)
    a, b = words[0], words[-1]
    if effect == "delete":
        del after[a]
    elif effect == "copy":
        after[b] = after[a]
    elif effect == "move":
        after[b] = after.pop(a)
    elif effect == "write":
        after[a] = f"{b}\n"
    elif effect == "append":
        after[a] += f"{b}\n"
    elif effect == "make":
        after[f"{a}/"] = ""
    elif effect == "into":
        after[f"{b}/"] = ""
        after[f"{b}/{a}"] = after.pop(a)
    return after
