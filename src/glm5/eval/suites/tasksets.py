"""pass@1 by taskset from episode records.

An episode counts when something was measured: its outcome is trainable and it has a reward. Infrastructure failures,
cancelled and stale episodes and those without a reward are excluded and counted by reason, never read as failures.
Where a reward is blended, the taskset's own verifier decides about success.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from glm5.errors import DataError
from glm5.eval.report import Row
from glm5.eval.statistics import Interval, bootstrap_mean, mean_of_intervals, wilson_interval
from glm5.records import TRAINABLE_OUTCOMES, Episode


def pass_at_1_rows(label: str, episodes: Iterable[Episode], success_reward: float = 1.0) -> list[dict[str, Any]]:
    """Rows ``pass_at_1.LABEL.TASKSET``, ``pass_at_1.LABEL.mean`` and ``excluded.LABEL.REASON``.

    An attempt succeeds when its reward is at least ``success_reward``. Raises DataError when a taskset has no episode
    that counts.
    """
    attempts: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    excluded: Counter[str] = Counter()
    for episode in episodes:
        tasks = attempts[episode.taskset]
        if episode.outcome not in TRAINABLE_OUTCOMES:
            excluded[episode.outcome] += 1
        elif episode.reward is None:
            excluded["no_reward"] += 1
        else:
            own = episode.reward_parts.get("task", episode.reward)
            tasks[episode.task_id].append(float(own >= success_reward - 1e-9))
    empty = [name for name, tasks in attempts.items() if not tasks]
    if empty or not attempts:
        raise DataError(f"pass@1 {label}: taskset {', '.join(empty) or '(none)'} has no episode that counts; excluded: "
                        f"{dict(excluded)}; see the logs of the services")
    intervals = {name: _interval(tasks) for name, tasks in sorted(attempts.items())}
    rows = [_row(f"pass_at_1.{label}.{name}", interval) for name, interval in intervals.items()]
    rows.append(_row(f"pass_at_1.{label}.mean", mean_of_intervals(list(intervals.values()))))
    rows += [Row(name=f"excluded.{label}.{reason}", value=count, unit="episodes")
             for reason, count in sorted(excluded.items())]
    return [row.to_json() for row in rows]


def reward_part_rows(label: str, episodes: Iterable[Episode]) -> list[dict[str, Any]]:
    """Rows ``reward.LABEL.TASKSET`` and ``reward.LABEL.TASKSET.PART``: means over the episodes that have the part."""
    values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for episode in episodes:
        if episode.outcome in TRAINABLE_OUTCOMES and episode.reward is not None:
            parts = {"": episode.reward, **{f".{name}": value for name, value in episode.reward_parts.items()}}
            for name, value in parts.items():
                values[f"reward.{label}.{episode.taskset}{name}"][episode.task_id].append(value)
    rows = []
    for name, tasks in sorted(values.items()):
        mean = bootstrap_mean(list(tasks.values()))
        rows.append(Row(name=name, value=mean.value, unit="reward", n=mean.n, low=mean.low, high=mean.high).to_json())
    return rows


def _interval(tasks: dict[str, list[float]]) -> Interval:
    """Wilson for one attempt per task; over whole tasks where some have several."""
    groups = list(tasks.values())
    if all(len(group) == 1 for group in groups):
        return wilson_interval(sum(int(group[0]) for group in groups), len(groups))
    return bootstrap_mean(groups)


def _row(name: str, interval: Interval) -> Row:
    return Row(name=name, value=interval.value, unit="fraction", n=interval.n, low=interval.low, high=interval.high)
