"""The regression gate: pass@1 of the same held-out tasks before and after, task by task."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from glm5.errors import DataError
from glm5.eval.statistics import Interval, bootstrap_mean, wilson_interval

Outcomes = Mapping[str, bool]
"""Whether each held-out task was solved, by task id; tasks that could not be measured are not there."""


def gate_rows(before: Outcomes, after: Outcomes, max_drop: float) -> list[dict[str, Any]]:
    """Result rows ``pass_at_1.before.TASKSET``, ``pass_at_1.after.TASKSET`` and ``gate.change.TASKSET``, whose ``met``
    tells whether pass@1 fell by at most ``max_drop``. Only tasks that were measured both times count.

    Raises DataError when a taskset has fewer than half of its tasks measured both times.
    """
    tasks: dict[str, list[str]] = defaultdict(list)
    for task_id in sorted({*before, *after}):
        tasks[task_id.partition("/")[0]].append(task_id)
    if not tasks:
        raise DataError("gate: no held-out task was measured; see the logs of the services")
    rows: list[dict[str, Any]] = []
    for taskset, names in tasks.items():
        common = [name for name in names if name in before and name in after]
        if 2 * len(common) < len(names) or not common:
            raise DataError(f"gate: taskset {taskset} has {len(common)} of {len(names)} tasks measured before and "
                            "after; see the logs of the services and run again")
        for when, outcomes in (("before", before), ("after", after)):
            solved = wilson_interval(sum(outcomes[name] for name in common), len(common))
            rows.append(_row(f"pass_at_1.{when}.{taskset}", solved))
        change = bootstrap_mean([[float(after[name]) - float(before[name])] for name in common])
        rows.append({**_row(f"gate.change.{taskset}", change), "goal": -max_drop,
                     "met": change.value >= -max_drop - 1e-12})
    return rows


def refusal(rows: Sequence[Mapping[str, Any]]) -> str:
    """Why the model may not be published, in one line; "" when it may."""
    worse = [row for row in rows if row.get("met") is False]
    if not worse:
        return ""
    told = ", ".join(f"{row['name'].removeprefix('gate.change.')} by {-row['value']:.3f} (allowed {-row['goal']:.3f})"
                     for row in worse)
    return f"refused: pass@1 fell on {told}; nothing was published"


def _row(name: str, interval: Interval) -> dict[str, Any]:
    return {"name": name, "value": interval.value, "unit": "fraction", "n": interval.n, "low": interval.low,
            "high": interval.high}
