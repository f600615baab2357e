"""Numbers of a whole RL run for reports, from its ledger and ``metrics.jsonl``. Free of torch; the run may still go on.

Steps that a crash undid appear twice in the metrics; curves keep the last record of each step, times count both.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from glm5.rl import audit
from glm5.rl.schema import reading
from glm5.runlog import read_jsonl


def summary_rows(run_dir: Path) -> list[dict[str, Any]]:
    """Result rows: ``busy.trainer`` and ``busy.engine`` (share of the wall time of the steps), ``tokens_per_s.rl``,
    ``episodes.FATE``, ``episodes.retried``, ``groups.STATE``, ``groups.reused``, ``payload_bytes.PLACE``,
    ``groups.dropped.REASON``, ``staleness.AGE`` (trained episodes by age in steps), ``ledger.violations``. Every fate
    and reason has its row, 0 included. Raises ServiceError without a readable ledger."""
    with reading(run_dir) as database:
        counts, violations = audit.counts(database), audit.violations(database)
        staleness, payloads = audit.trained_staleness(database), audit.payload_bytes(database)
    records = read_jsonl(run_dir / "metrics.jsonl")
    wall_s = _total(records, "step_s")
    rows = []
    if wall_s:
        rows = [_row("busy.trainer", _total(records, "train_s") / wall_s, "fraction"),
                _row("busy.engine", _total(records, "engine_busy_s") / wall_s, "fraction"),
                _row("tokens_per_s.rl", _total(records, "tokens") / wall_s, "tokens/s")]
    fates = dict.fromkeys(audit.FATES, 0) | counts.episodes
    rows += [_row(f"episodes.{fate}", number, "episodes") for fate, number in sorted(fates.items())]
    rows.append(_row("episodes.retried", counts.retried, "episodes"))
    rows += [_row(f"groups.{state}", number, "groups") for state, number in sorted(counts.groups.items())]
    rows.append(_row("groups.reused", counts.reuses, "uses"))
    rows += [_row(f"payload_bytes.{place}", number, "bytes") for place, number in sorted(payloads.items())]
    reasons = dict.fromkeys(audit.DROP_REASONS, 0) | counts.dropped_groups
    rows += [_row(f"groups.dropped.{reason}", number, "groups") for reason, number in sorted(reasons.items())]
    rows += [_row(f"staleness.{age}", number, "episodes") for age, number in sorted(staleness.items())]
    rows.append(_row("ledger.violations", len(violations), "invariants"))
    return rows


def reward_curve(run_dir: Path, key: str = "reward") -> list[tuple[int, float]]:
    """(step, mean reward of the episodes that ended during it), for ``reward`` or ``reward.TASKSET``."""
    records = [record for record in read_jsonl(run_dir / "metrics.jsonl") if key in record]
    return sorted({int(record["step"]): float(record[key]) for record in records}.items())


def _total(records: Sequence[dict[str, Any]], key: str) -> float:
    return float(sum(record.get(key, 0.0) for record in records))


def _row(name: str, value: float, unit: str) -> dict[str, Any]:
    return {"name": name, "value": value, "unit": unit}
