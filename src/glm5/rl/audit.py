"""Reading a ledger: what became of every group and episode, and whether the books balance.

Functions over an open connection, so that a report can read a ledger that others write. Invariants:

1. a group that ended has exactly ``size`` final episodes, an open or interrupted one has none;
2. a group has a reason if and only if it was dropped, and a batch if and only if it is leased or acked;
3. a kept group has more than half of its slots valid;
4. leases agree with the groups: no group is new in two acked batches, or belongs to an acked one without being acked;
   a reuse comes after the batch in which its group was new;
5. the sums that triggers keep are those of the rows; a row that names a payload in the database has one.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

from glm5.records import OUTCOMES

_CHECKS = {
    "ended group without one final episode per slot":
        "SELECT group_id FROM groups LEFT JOIN episodes USING (group_id) WHERE closed_seq IS NOT NULL "
        "GROUP BY group_id HAVING COALESCE(SUM(final), 0) != size "
        "OR COUNT(DISTINCT CASE WHEN final THEN slot END) != size",
    "group with episodes before it ended":
        "SELECT DISTINCT group_id FROM groups JOIN episodes USING (group_id) WHERE closed_seq IS NULL",
    "reason without being dropped, or dropped without a reason":
        "SELECT group_id FROM groups WHERE (reason != '') != (state = 'dropped')",
    "state and batch disagree":
        "SELECT group_id FROM groups WHERE (batch_id IS NOT NULL) != (state IN ('leased', 'acked'))",
    "kept group with half of its slots or fewer valid":
        "SELECT group_id FROM groups JOIN episodes USING (group_id) WHERE state IN ('ready', 'leased', 'acked') "
        "GROUP BY group_id HAVING 2 * SUM(multiplicity > 0) <= size",
    "group new in two acked batches":
        "SELECT group_id FROM leases JOIN batches USING (batch_id) WHERE state = 'acked' AND NOT is_reuse "
        "GROUP BY group_id HAVING COUNT(*) > 1",
    "reuse without an earlier batch in which the group was new":
        "SELECT group_id FROM leases JOIN batches USING (batch_id) WHERE is_reuse AND state != 'returned' "
        "AND NOT EXISTS (SELECT 1 FROM leases AS first JOIN batches AS earlier USING (batch_id) "
        "WHERE NOT first.is_reuse AND first.group_id = leases.group_id AND first.batch_id < leases.batch_id "
        "AND earlier.state != 'returned')",
    "group and its batch in different states":
        "SELECT group_id FROM groups JOIN batches USING (batch_id) WHERE groups.state != batches.state",
    "group of an acked batch that is not acked":
        "SELECT group_id FROM leases JOIN batches USING (batch_id) JOIN groups USING (group_id) "
        "WHERE batches.state = 'acked' AND groups.state != 'acked'",
    "leased or acked group without a lease":
        "SELECT group_id FROM groups LEFT JOIN leases USING (batch_id, group_id) "
        "WHERE groups.batch_id IS NOT NULL AND leases.group_id IS NULL",
    "counted groups are not those of the rows":
        "SELECT state FROM group_counts WHERE number != (SELECT COUNT(*) FROM groups "
        "WHERE groups.state = group_counts.state)",
    "counted payload bytes are not those of the rows":
        "SELECT place FROM payload_bytes WHERE number != (SELECT COALESCE(SUM(bytes), 0) FROM groups "
        "WHERE groups.place = payload_bytes.place)",
    "payload and its place disagree":
        "SELECT group_id FROM groups JOIN episodes USING (group_id) WHERE (body IS NULL) != (place != 'database')",
}

DROP_REASONS = ("interrupted", "rollback", "run_ended", "stale", "too_few_valid", "unknown_version", "zero_variance")
"""Why a group is dropped."""
FATES = ("trained", "waiting", "unmeasured", *(outcome for outcome in OUTCOMES if outcome != "ok"),
         *(reason for reason in DROP_REASONS if reason not in ("interrupted", "run_ended", "stale")))
"""What may become of an episode that ended: its use, the outcome that excludes it, or why its group was dropped."""
_FATES = """
SELECT CASE WHEN excluded != '' THEN excluded WHEN state = 'acked' THEN 'trained'
            WHEN state = 'dropped' THEN groups.reason ELSE 'waiting' END AS fate, COUNT(*)
FROM episodes JOIN groups USING (group_id) WHERE final GROUP BY fate"""


@dataclass(frozen=True, slots=True)
class LedgerCounts:
    """What became of everything that was started."""

    groups: dict[str, int]
    """By state: open, ready, leased, acked, dropped."""
    dropped_groups: dict[str, int]
    """Dropped groups by reason (``DROP_REASONS``)."""
    episodes: dict[str, int]
    """Final episodes by fate (``FATES``): ``trained``, ``waiting`` (ready or leased), an excluding outcome such as
    ``infra_error`` or ``stale``, or the reason for which their group was dropped. They add up to the slots of all
    groups that ended."""
    retried: int
    """Attempts that failed for infrastructure reasons and were run again."""
    batches: dict[str, int]
    """By state: leased, acked, returned."""
    reuses: int
    """How often a group that had been trained was trained again, in batches that are leased or acked."""


def counts(db: sqlite3.Connection) -> LedgerCounts:
    """Count everything in a ledger."""
    def grouped(query: str) -> dict[str, int]:
        return dict(db.execute(query).fetchall())

    return LedgerCounts(
        groups=grouped("SELECT state, COUNT(*) FROM groups GROUP BY state"),
        dropped_groups=grouped("SELECT reason, COUNT(*) FROM groups WHERE state = 'dropped' GROUP BY reason"),
        episodes=grouped(_FATES),
        retried=int(db.execute("SELECT COUNT(*) FROM episodes WHERE NOT final").fetchone()[0]),
        batches=grouped("SELECT state, COUNT(*) FROM batches GROUP BY state"),
        reuses=int(db.execute("SELECT COUNT(*) FROM leases JOIN batches USING (batch_id) WHERE is_reuse "
                              "AND state != 'returned'").fetchone()[0]))


def violations(db: sqlite3.Connection) -> list[str]:
    """Invariants that do not hold, one line each with an example."""
    found = []
    for what, query in _CHECKS.items():
        row = db.execute(query).fetchone()
        if row is not None:
            found.append(f"{what}: {row[0]}")
    return found


def payload_bytes(db: sqlite3.Connection) -> dict[str, int]:
    """Compressed bytes of tokens by place: ``database``, ``file``, and ``removed`` for what retention gave up."""
    return dict(db.execute("SELECT place, number FROM payload_bytes WHERE place != 'nowhere'").fetchall())


def trained_staleness(db: sqlite3.Connection) -> dict[int, int]:
    """Trained episodes by trainer step at lease − step of their oldest policy version."""
    return dict(db.execute(
        "SELECT trainer_step - episodes.min_step, SUM(multiplicity) FROM groups JOIN batches USING (batch_id) "
        "JOIN episodes USING (group_id) WHERE groups.state = 'acked' AND multiplicity > 0 "
        "GROUP BY trainer_step - episodes.min_step").fetchall())
