"""Maths from the library ``reasoning-gym`` (extra ``gym``): its procedural sets that passed ``audit_set``.

Many sets of the library have scorers that give something for a wrong answer, raise for some, evaluate what the model
wrote, or accept only their own spelling of an answer. The ones in ``SETS`` have one answer each, an integer or a word,
and are small enough for a small model. Here an answer is right when the library's score is exactly 1; anything else, an
exception included, is wrong.

Sets go round with the index; the content that decides the split is the set and its question.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Any

from glm5.env.sandbox.base import Sandbox
from glm5.env.tasks import Message, Task, draw
from glm5.env.tasksets.questions import Question
from glm5.env.tools import final_answer
from glm5.errors import ConfigError

SETS: dict[str, dict[str, int]] = {
    "chain_sum": {"min_terms": 2, "max_terms": 2, "max_digits": 2}, "gcd": {"max_value": 60}, "lcm": {"max_value": 20},
    "products": {"max_digits": 2}, "count_bits": {"max_n": 999}, "count_primes": {"max_n": 200},
    "base_conversion": {"max_base": 10, "max_value": 99}, "leg_counting": {"min_animals": 2, "max_animals": 2},
    "letter_counting": {"min_words": 3, "max_words": 5}}
"""Name → what differs from the library's own settings."""
_CYCLE = tuple(SETS)


class Gym(Question):
    """Questions of the audited sets."""

    name = "gym"

    def task(self, split: str, index: int) -> Task:
        """A question; ``data``: set, seed, answer, content."""
        chosen = _CYCLE[index % len(_CYCLE)]
        seed, entry = draw(self.name, split, index, lambda rng: _draw(chosen, rng.getrandbits(32)),
                           lambda drawn: _content(chosen, drawn[1]))
        return Task(task_id=f"{self.name}/{split}/{index}", taskset=self.name, split=split,
                    instruction=entry["question"].strip(),
                    data={"set": chosen, "seed": seed, "answer": entry["answer"], "content": _content(chosen, entry)})

    async def verify(self, task: Task, sandbox: Sandbox | None, messages: list[Message]) -> dict[str, float]:
        """1 when the library gives the answer its full score."""
        return {"reward": float(is_right(task.data["set"], task.data["seed"], final_answer(messages)))}


def is_right(name: str, seed: int, answer: str) -> bool:
    """Whether the item of ``seed`` is answered; never by nothing, never when the scorer fails."""
    if not answer:
        return False
    dataset = _dataset(name, seed)
    try:
        return bool(dataset.score_answer(answer, dataset[0]) == 1.0)
    except Exception:  # a scorer of the library may raise anything for what a model writes
        return False


def audit_set(name: str, count: int = 20) -> list[str]:
    """Defects of a set of the library, one line each: items that change with their seed the same, a gold answer that is
    missing or not right, wrong answers that are. Empty for a set that may be used."""
    defects = []
    for seed in range(count):
        entry = _dataset(name, seed)[0]
        gold, other = entry["answer"], _dataset(name, seed + count)[0]["answer"]
        if _dataset(name, seed)[0] != entry:
            defects.append(f"seed {seed}: another item the second time")
        if not isinstance(gold, str) or not is_right(name, seed, gold):
            defects.append(f"seed {seed}: its own answer {gold!r} is not right")
            continue
        wrong = ["", "zzz wrong", f"{gold} or not", f"7{gold}", "0" if gold != "0" else "1", str([gold])]
        wrong += [other] if other != gold else []
        defects += [f"seed {seed}: {text!r} passes for {gold!r}" for text in wrong if is_right(name, seed, text)]
    return defects


def _draw(name: str, seed: int) -> tuple[int, dict[str, Any]]:
    return seed, _dataset(name, seed)[0]


def _dataset(name: str, seed: int) -> Any:
    return _library().create_dataset(name, size=1, seed=seed, **SETS.get(name, {}))


@functools.cache
def _library() -> Any:
    try:
        import reasoning_gym
    except ImportError:
        raise ConfigError("taskset 'gym': reasoning-gym is missing; install it with pip install 'glm5[gym]'") from None
    return reasoning_gym


def _content(name: str, entry: dict[str, Any]) -> str:
    """Set and question, the latter by its digest."""
    return f"{name} {hashlib.sha256(entry['question'].encode()).hexdigest()[:16]}"
