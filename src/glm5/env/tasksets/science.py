"""Questions with units: conversions by powers of ten, and one-step physics whose second number is a power of ten.

Kinds go round with the index; the content that decides the split is kind and number. The answer is a quantity: its
value is recomputed from the question and compared exactly in SI units. Where a unit is asked for, the answer must use
it; elsewhere any unit of the right dimension will do.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from fractions import Fraction

from glm5.env.quantities import parse_quantity
from glm5.env.sandbox.base import Sandbox
from glm5.env.tasks import Message, Task, draw
from glm5.env.tasksets.questions import Question
from glm5.env.tools import final_answer


@dataclass(frozen=True, slots=True)
class _Kind:
    """``{n}`` is the number."""

    wordings: tuple[str, ...]
    factor: Fraction
    """Value of the answer over the number."""
    unit: str
    asks_unit: bool = False


def _conversion(source: str, factor: str, unit: str) -> _Kind:
    wordings = (f"Convert {{n}} {source} to {unit}.", f"Give {{n}} {source} in {unit}.")
    return _Kind(wordings, Fraction(factor), unit, asks_unit=True)


_KINDS: dict[str, _Kind] = {
    "km_m": _conversion("km", "1000", "m"), "kg_g": _conversion("kg", "1000", "g"),
    "m_cm": _conversion("m", "100", "cm"), "cm_mm": _conversion("cm", "10", "mm"),
    "mm_cm": _conversion("mm", "1/10", "cm"), "cm_m": _conversion("cm", "1/100", "m"),
    "distance": _Kind(("A cart drives {n} m/s for 100 s. How far?",), Fraction(100), "m"),
    "speed": _Kind(("A cart drives {n} m in 10 s. How fast?",), Fraction(1, 10), "m/s"),
    "force": _Kind(("What force gives {n} kg 10 m/s2?",), Fraction(10), "N"),
    "voltage": _Kind(("What voltage drives {n} A through 10 ohm?",), Fraction(10), "V"),
    "energy": _Kind(("What energy do {n} W use in 100 s?",), Fraction(100), "J"),
}
_CYCLE = tuple(_KINDS)


@dataclass(frozen=True, slots=True)
class _Instance:
    kind: str
    number: int
    wording: int

    def content(self) -> str:
        return f"{self.kind} {self.number}"


class Science(Question):
    """Questions of one number of three digits."""

    name = "science"

    def task(self, split: str, index: int) -> Task:
        """A question; ``data``: kind, number, answer, content."""
        kind = _CYCLE[index % len(_CYCLE)]
        instance = draw(self.name, split, index, lambda rng: _make(rng, kind), _Instance.content)
        return Task(task_id=f"{self.name}/{split}/{index}", taskset=self.name, split=split,
                    instruction=_KINDS[kind].wordings[instance.wording].format(n=instance.number),
                    data={"kind": kind, "number": instance.number, "answer": _answer(kind, instance.number),
                          "content": instance.content()})

    async def verify(self, task: Task, sandbox: Sandbox | None, messages: list[Message]) -> dict[str, float]:
        """1 when the answer is a quantity equal to the expected one, in the unit that was asked for if one was."""
        kind = _KINDS[task.data["kind"]]
        given = parse_quantity(final_answer(messages))
        expected = parse_quantity(_answer(task.data["kind"], task.data["number"]))
        assert expected is not None
        right = given is not None and given.equals(expected) and (not kind.asks_unit or given.unit == kind.unit)
        return {"reward": float(right), "quantity": float(given is not None)}


def _answer(kind: str, number: int) -> str:
    value = number * _KINDS[kind].factor
    text = str(value) if value.denominator == 1 else f"{float(value):.2f}".rstrip("0")  # at most two decimals
    return f"{text} {_KINDS[kind].unit}"


def _make(rng: random.Random, kind: str) -> _Instance:
    return _Instance(kind, rng.randint(100, 999), rng.randrange(len(_KINDS[kind].wordings)))
