"""Which task a group practises: fresh ones, and again those that the policy solves sometimes.

Only a group whose rewards differ has a gradient, and most tasks are either out of reach or safe: in a first pass over
fresh tasks four of five groups can be worthless. A task that was solved in some of its episodes and not in others is
worth another visit by a later policy, until it is solved always or never, or has been visited ``max_visits`` times, so
that a small pool is not learnt by heart. Nothing is kept here that the ledger does not hold: a restart recovers it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from glm5.rl.advantages import has_signal
from glm5.rl.config import CurriculumConfig


@dataclass(frozen=True, slots=True)
class Visit:
    """One group's worth of practice on a task."""

    task_index: int
    task_id: str
    number: int
    """0 for a fresh task."""


class Curriculum:
    """Tasks worth another visit, per taskset."""

    def __init__(self, config: CurriculumConfig) -> None:
        self._config = config
        self._waiting: dict[str, deque[tuple[int, Visit]]] = {}
        self._credit: dict[str, float] = {}

    def next_visit(self, taskset: str, step: int) -> Visit | None:
        """A task to visit again now, or None for a fresh one: at most ``revisit_share`` of the groups are visits."""
        credit = self._credit[taskset] = min(self._credit.get(taskset, 0.0) + self._config.revisit_share, 1.0)
        waiting = self._waiting.get(taskset)
        if credit < 1.0 or not waiting or waiting[0][0] > step:
            return None
        self._credit[taskset] = credit - 1.0
        return waiting.popleft()[1]

    def record(self, taskset: str, visit: Visit, rewards: Iterable[float], step: int) -> None:
        """``visit`` ended at trainer step ``step`` with the rewards of its measured episodes."""
        measured = list(rewards)
        if visit.number + 1 < self._config.max_visits and measured and has_signal(measured):
            again = Visit(visit.task_index, visit.task_id, visit.number + 1)
            self._waiting.setdefault(taskset, deque()).append((step + self._config.revisit_after_steps, again))


class RatioPicker:
    """Smooth weighted round robin over tasksets: exact shares in the long run, no bursts in the short run.

    With ``balance`` above 1 the shares are those of the *trainable* groups: a taskset whose groups are dropped for
    equal rewards more often than the others' starts more of them, at most ``balance`` times as many as its share, at
    least 1/``balance`` times. When the services of a taskset are full, the others' shares fill in; it goes on earning
    credit for ``CATCH_UP`` groups, so that one that is slow for a while still gets its share. One that is not served at
    all earns none, so that its return starts no burst.
    """

    CATCH_UP = 4

    MEMORY = 32
    """Groups over which the trainable rate of a taskset is smoothed."""

    def __init__(self, ratios: dict[str, float], balance: float = 1.0) -> None:
        self._ratios, self._balance = dict(ratios), balance
        self._credit = dict.fromkeys(ratios, 0.0)
        self._trainable = dict.fromkeys(ratios, 0.5)

    def record(self, taskset: str, trainable: bool) -> None:
        """A group of ``taskset`` ended with rewards that differ, or that do not."""
        self._trainable[taskset] += (trainable - self._trainable[taskset]) / self.MEMORY

    def weights(self) -> dict[str, float]:
        """Share of the groups that each taskset starts now, up to a common factor."""
        mean = math.exp(sum(math.log(max(rate, 1e-3)) for rate in self._trainable.values()) / len(self._trainable))
        return {name: ratio * min(max(mean / max(self._trainable[name], 1e-3), 1 / self._balance), self._balance)
                for name, ratio in self._ratios.items()}

    def pick(self, served: Mapping[str, float], has_room: Callable[[str], bool]) -> str | None:
        """The taskset of the next group among those ``served`` (with factors on their shares) that have room; None
        when there is none."""
        weights = {name: weight * served[name] for name, weight in self.weights().items() if name in served}
        roomy = {name for name in weights if has_room(name)}
        total = sum(weights.values())
        weights = {name: weight for name, weight in weights.items()
                   if name in roomy or self._credit[name] < self.CATCH_UP * total}
        if not roomy:
            return None
        for name, weight in weights.items():
            self._credit[name] += weight
        chosen = max((name for name in weights if name in roomy), key=lambda name: self._credit[name])
        self._credit[chosen] -= sum(weights.values())
        return chosen
