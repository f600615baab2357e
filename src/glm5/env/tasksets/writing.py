"""Short texts to instruction: what is right is checked by rules, how it is put is left to a reward model or a judge.

The instructions name made-up words and say how to write them: in reverse order, without one, several times, as a list,
a number as JSON. Rules look for what the instruction asks and let any words around it pass, except where the form is
the task. Every second demonstration of the kinds that allow it is padded as language models tend to write ("Sure! Here
you are: …"); the anchors are plain. So a model that only imitates is right and wordy half of the time, and rules alone
never tell it so. The content that decides the split is the kind and the words.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from glm5.env.rewards.rules import VERIFIERS
from glm5.env.sandbox.base import Sandbox
from glm5.env.tasks import Message, Solution, Task, ToolError, draw
from glm5.env.tasksets.words import distinct_words
from glm5.env.tools import final_answer

_PADDED = "Sure! Here you are: {answer}. I hope this helps!"
_NUMBERS = {"two": 2, "three": 3}


@dataclass(frozen=True, slots=True)
class _Kind:
    """``{a} {b} {c}`` are words, ``{n}`` a number of two digits, ``{m}`` a numeral."""

    wordings: tuple[str, ...]
    anchor: str
    wrong: str
    """An answer that looks right and is not."""
    words: int = 2
    may_be_padded: bool = True


_KINDS: dict[str, _Kind] = {
    "reverse": _Kind(("Write {a} and {b} in reverse order.", "Swap {a} and {b}."), "{b} and {a}", "{a} and {b}"),
    "without": _Kind(("Write {a} {b} {c} without {b}.", "Drop {b} from {a} {b} {c}."), "{a} {c}", "{a} {b}", words=3),
    "times": _Kind(("Write {a} {m} times.", "Say {a} {m} times."), "{repeated}", "{a}", words=1),
    "list": _Kind(("List {a} and {b} with dashes.", "Make a list of {a} and {b}."), "- {a}\n- {b}", "{a} and {b}",
                  may_be_padded=False),
    "json": _Kind(("Give size {n} as JSON.", "Write JSON with size {n}."), '{{"size": {n}}}', "size {n}", words=0,
                  may_be_padded=False),
}
_CYCLE = ("reverse", "times", "without", "list", "reverse", "json", "without", "times")


@dataclass(frozen=True, slots=True)
class _Instance:
    kind: str
    words: tuple[str, ...]
    number: int
    numeral: str
    wording: int

    def values(self) -> dict[str, Any]:
        named = dict(zip("abc", self.words, strict=False))
        repeated = " ".join([*self.words[:1]] * _NUMBERS[self.numeral])
        return {**named, "n": self.number, "m": self.numeral, "repeated": repeated}

    def content(self) -> str:
        known = {"json": str(self.number), "times": f"{self.words[:1]} {self.numeral}"}
        return f"{self.kind} {known.get(self.kind, ' '.join(self.words))}"

    def rules(self) -> list[tuple[str, dict[str, Any]]]:
        """What an answer must satisfy: verifiers and their options."""
        if self.kind == "json":
            return [("json_value", {"value": {"size": self.number}})]
        if self.kind == "times":
            return [("required", {"texts": [self.words[0]], "count": _NUMBERS[self.numeral]})]
        a, b, *rest = self.words
        if self.kind == "list":
            return [("pattern", {"regex": f"- {a}\n- {b}"})]
        if self.kind == "without":
            return [("required", {"texts": [a, rest[0]], "count": 1}), ("forbidden", {"texts": [b]})]
        return [("required", {"texts": [a, b], "count": 1}), ("pattern", {"regex": f"{b}.*{a}", "whole": False})]


class Writing:
    """One answer, no tools."""

    name = "writing"
    needs_sandbox = False

    def tools(self) -> list[dict[str, Any]]:
        """None."""
        return []

    def task(self, split: str, index: int) -> Task:
        """``data``: rules, anchor, wrong answer, content, and whether a demonstration of it is padded."""
        name = _CYCLE[index % len(_CYCLE)]
        instance = draw(self.name, split, index, lambda rng: _make(rng, name), _Instance.content)
        kind, values = _KINDS[name], instance.values()
        return Task(
            task_id=f"{self.name}/{split}/{index}", taskset=self.name, split=split,
            instruction=kind.wordings[instance.wording].format(**values),
            data={"rules": instance.rules(), "anchor": kind.anchor.format(**values),
                  "wrong": kind.wrong.format(**values), "content": instance.content(),
                  "padded": kind.may_be_padded and index // len(_CYCLE) % 2 == 0})

    def content(self, task: Task) -> str:
        """Kind and words."""
        return str(task.data["content"])

    def solution(self, task: Task) -> Solution:
        """The anchor; in a demonstration now and then with words around it."""
        anchor = task.data["anchor"]
        is_padded = task.split == "demo" and task.data["padded"]
        return Solution([], _PADDED.format(answer=anchor) if is_padded else anchor)

    def wrong_answer(self, task: Task) -> str:
        """An answer that looks right and is not."""
        return str(task.data["wrong"])

    def preference(self, task: Task) -> tuple[str, str]:
        """(better, worse) answer as a person would judge: plain before padded, right before wrong."""
        anchor, wrong = task.data["anchor"], task.data["wrong"]
        return anchor, _PADDED.format(answer=anchor) if task.data["padded"] else wrong

    async def setup(self, task: Task, sandbox: Sandbox | None) -> None:
        """Nothing to prepare."""

    async def call(self, task: Task, sandbox: Sandbox | None, tool: str, arguments: dict[str, Any]) -> str:
        """There are no tools."""
        raise ToolError(f"error: no tool {tool}")

    async def verify(self, task: Task, sandbox: Sandbox | None, messages: list[Message]) -> dict[str, float]:
        """1 when the final answer satisfies every rule."""
        answer = final_answer(messages)
        satisfied = all(VERIFIERS[kind](answer, **options) == 1 for kind, options in task.data["rules"])
        return {"reward": float(satisfied), "words": float(len(answer.split()))}


def _make(rng: random.Random, name: str) -> _Instance:
    kind = _KINDS[name]
    words = tuple(distinct_words(rng, max(kind.words, 1)))
    return _Instance(name, words, rng.randint(10, 999), rng.choice(list(_NUMBERS)), rng.randrange(len(kind.wordings)))
