"""The ledger: the durable store of groups and episodes; hands samples to the trainer under lease and ack.

A group is ``open`` while its episodes run and enters whole, in one transaction, when every slot has ended:

    open → ready → leased → acked          trained, in the weights for good
      └──────┴────────┴───────┴→ dropped   with a reason; never silently

The trainer leases a batch, steps, writes the batch's id into its next checkpoint and then acks. After a crash,
``recover`` acks what the checkpoint holds and returns the rest to ``ready``: every group takes effect on the weights
exactly once. Batch ids grow and are never reused, so "held by the checkpoint" is "not greater than its last id".
The table ``leases`` keeps every lease ever given, which proves it: no group belongs to two acked batches.

Staleness is measured in trainer steps through the table ``versions``: trainer step − step of the oldest policy version
that sampled a trained token. A group beyond the bound is dropped when it enters and again when it would be leased.

SQLite in WAL mode; orchestrator and trainer each hold one connection. Commits reach the disk before they return.
"""

from __future__ import annotations

import json
import sqlite3
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm5.errors import ServiceError
from glm5.records import Episode, Sample, to_json, trajectory_from_json
from glm5.rl import audit
from glm5.rl.admission import Admission, admit, group_samples, is_measured, sampled_versions
from glm5.rl.advantages import GroupAdvantage

FORMAT = 2
_SCHEMA = """
CREATE TABLE groups (
  group_id TEXT PRIMARY KEY, taskset TEXT NOT NULL, task_id TEXT NOT NULL, task_index INTEGER NOT NULL,
  visit INTEGER NOT NULL, size INTEGER NOT NULL,
  state TEXT NOT NULL CHECK (state IN ('open', 'ready', 'leased', 'acked', 'dropped')),
  reason TEXT NOT NULL DEFAULT '', min_step INTEGER, max_step INTEGER, batch_id INTEGER, closed_seq INTEGER,
  opened_at REAL NOT NULL, closed_at REAL, UNIQUE (taskset, task_index, visit));
CREATE INDEX groups_by_state ON groups (state, min_step, closed_seq);
CREATE UNIQUE INDEX groups_by_seq ON groups (closed_seq);
CREATE TABLE episodes (
  episode_id TEXT PRIMARY KEY, group_id TEXT NOT NULL REFERENCES groups, slot INTEGER NOT NULL, final INTEGER NOT NULL,
  outcome TEXT NOT NULL, reward REAL, reason TEXT NOT NULL, excluded TEXT NOT NULL, multiplicity INTEGER NOT NULL,
  min_step INTEGER, started_at REAL NOT NULL, duration_s REAL NOT NULL, body BLOB NOT NULL);
CREATE INDEX episodes_by_group ON episodes (group_id);
CREATE TABLE batches (
  batch_id INTEGER PRIMARY KEY AUTOINCREMENT, trainer_step INTEGER NOT NULL, leased_at REAL NOT NULL,
  state TEXT NOT NULL CHECK (state IN ('leased', 'acked', 'returned')), acked_step INTEGER);
CREATE TABLE leases (
  batch_id INTEGER NOT NULL REFERENCES batches, group_id TEXT NOT NULL REFERENCES groups,
  PRIMARY KEY (batch_id, group_id));
CREATE TABLE versions (version INTEGER PRIMARY KEY, step INTEGER NOT NULL, published_at REAL NOT NULL);
CREATE TABLE progress (
  only_row INTEGER PRIMARY KEY CHECK (only_row = 1), step INTEGER NOT NULL, version INTEGER NOT NULL);
INSERT INTO progress VALUES (1, 0, -1);
"""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the trainer is: optimizer steps done, and the newest policy version that engines may hold (-1: none)."""

    step: int
    version: int


@dataclass(frozen=True, slots=True)
class LeasedBatch:
    """Samples of whole groups, handed out once."""

    batch_id: int
    trainer_step: int
    groups: int
    episodes: int
    """Episodes the loss averages over; a repeated one counts as often as it was repeated."""
    samples: list[Sample]
    staleness: dict[str, int]
    """Steps between the trainer and the oldest version of each sample's episode, by sample id."""


@contextmanager
def reading(run_dir: Path) -> Iterator[sqlite3.Connection]:
    """The ledger of a run directory, read-only, while the run may go on. Raises ServiceError when there is none, or no
    readable one."""
    path = run_dir / "ledger.sqlite"
    if not path.is_file():
        raise ServiceError(f"{path}: missing; give the run directory of an RL run")
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=30)) as database:
            found = int(database.execute("PRAGMA user_version").fetchone()[0])
            if found != FORMAT:
                raise ServiceError(f"{path}: ledger format {found}, expected {FORMAT}; give the run directory of an RL "
                                   "run, or use the version that wrote it")
            yield database
    except sqlite3.Error as error:
        raise ServiceError(f"{path}: not a readable ledger ({error}); give the run directory of an RL run") from None


class Ledger:
    """One connection to ``ledger.sqlite``, made when missing. Use each object from one thread."""

    def __init__(self, path: str | Path, *, max_staleness: int, pad_groups: bool) -> None:
        self._path = Path(path)
        self._max_staleness, self._pad_groups = max_staleness, pad_groups
        self._db = sqlite3.connect(path, timeout=30, isolation_level=None)
        with self._explained():
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
        with self._transaction():
            found = int(self._db.execute("PRAGMA user_version").fetchone()[0])
            if found == 0:
                for statement in _SCHEMA.split(";\n"):
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version = {FORMAT}")
            elif found != FORMAT:
                raise ServiceError(f"{path}: ledger format {found}, expected {FORMAT}; use the version that wrote it")

    def close(self) -> None:
        """Close the connection; further calls fail."""
        self._db.close()

    # -- orchestrator ---------------------------------------------------------------------------------------------

    def next_task_index(self, taskset: str) -> int:
        """Smallest task index never given to a group of ``taskset``."""
        row = self._db.execute("SELECT MAX(task_index) FROM groups WHERE taskset = ?", (taskset,)).fetchone()
        return 0 if row[0] is None else int(row[0]) + 1

    def open_group(self, group_id: str, *, taskset: str, task_id: str, task_index: int, size: int,
                   visit: int = 0) -> None:
        """Reserve a group; its visit to the task is used up even if this process dies."""
        with self._transaction():
            self._db.execute(
                "INSERT INTO groups (group_id, taskset, task_id, task_index, visit, size, state, opened_at) "
                "VALUES (?, ?, ?, ?, ?, ?, 'open', ?)",
                (group_id, taskset, task_id, task_index, visit, size, time.time()))

    def last_visits(self) -> list[tuple[str, int, str, int, list[float]]]:
        """Of every task whose last visit ended: taskset, task index, task id, number of that visit, its rewards."""
        rows = self._db.execute(
            "SELECT taskset, task_index, task_id, visit, json_group_array(reward) FROM groups JOIN episodes "
            "USING (group_id) WHERE final AND reward IS NOT NULL AND closed_seq IS NOT NULL AND visit = "
            "(SELECT MAX(visit) FROM groups AS other WHERE other.taskset = groups.taskset "
            "AND other.task_index = groups.task_index) GROUP BY group_id ORDER BY closed_seq").fetchall()
        return [(*task, json.loads(rewards)) for *task, rewards in rows]

    def close_group(self, group_id: str, slots: Sequence[Sequence[Episode]]) -> str:
        """Enter a finished group: per slot its attempts in order, of which the last counts.

        A group that is dropped may have ended before all its slots began; its size becomes that of ``slots``. Returns
        "" when the group became ready, else the reason why it was dropped.
        """
        finals = [attempts[-1] for attempts in slots]
        with self._transaction():
            size = self._open_size(group_id)
            steps = self._version_steps()
            spans = [_step_span(episode, steps) for episode in finals]
            admission = self._admission(finals, spans)
            if len(slots) > size or (len(slots) < size and not admission.reason):
                raise ServiceError(f"group {group_id}: {len(slots)} slots ended, expected {size}; nothing was stored")
            for slot, attempts in enumerate(slots):
                for failed in attempts[:-1]:
                    self._insert_episode(failed, slot, final=False, excluded=failed.outcome, multiplicity=0, span=None)
                self._insert_episode(attempts[-1], slot, final=True, excluded=self._excluded(attempts[-1], spans[slot]),
                                     multiplicity=admission.multiplicities[slot], span=spans[slot])
            kept = [span for span, times in zip(spans, admission.multiplicities, strict=True) if times and span]
            oldest, newest = min((low for low, _ in kept), default=None), max((high for _, high in kept), default=None)
            self._db.execute(
                "UPDATE groups SET state = ?, reason = ?, size = ?, min_step = ?, max_step = ?, closed_at = ?, "
                "closed_seq = (SELECT COALESCE(MAX(closed_seq), 0) + 1 FROM groups) WHERE group_id = ?",
                ("dropped" if admission.reason else "ready", admission.reason, len(slots), oldest, newest,
                 time.time(), group_id))
        return admission.reason

    def drop_open_groups(self, reason: str) -> int:
        """Drop the groups whose episodes stopped with their orchestrator. Returns how many."""
        with self._transaction():
            return self._db.execute("UPDATE groups SET state = 'dropped', reason = ? WHERE state = 'open'",
                                    (reason,)).rowcount

    # -- trainer --------------------------------------------------------------------------------------------------

    def record_version(self, version: int, step: int) -> None:
        """Note that ``version`` holds the weights after ``step`` optimizer steps; before any engine may load it."""
        with self._transaction():
            self._db.execute("INSERT INTO versions VALUES (?, ?, ?)", (version, step, time.time()))

    def newest_version(self) -> int:
        """Largest policy version ever recorded, -1 when there is none."""
        row = self._db.execute("SELECT MAX(version) FROM versions").fetchone()
        return -1 if row[0] is None else int(row[0])

    def set_progress(self, step: int, version: int) -> None:
        """Publish how far the trainer is; pacing follows it."""
        with self._transaction():
            self._db.execute("UPDATE progress SET step = ?, version = ?", (step, version))

    def progress(self) -> Progress:
        """How far the trainer is."""
        return Progress(*self._db.execute("SELECT step, version FROM progress").fetchone())

    def ready_groups(self) -> int:
        """Groups that wait for the trainer, stale ones included."""
        return int(self._db.execute("SELECT COUNT(*) FROM groups WHERE state = 'ready'").fetchone()[0])

    def lease(self, batch_groups: int, trainer_step: int,
              advantage: GroupAdvantage = "mean") -> LeasedBatch | None:
        """Hand out the ``batch_groups`` oldest ready groups, or None when there are fewer.

        First drops ready groups that are too stale, and those of a lost timeline: sampled by weights of a later step
        than the trainer has, which happens when training resumed from an older checkpoint.
        """
        with self._transaction():
            self._db.execute("UPDATE groups SET state = 'dropped', reason = 'stale' WHERE state = 'ready' "
                             "AND ? - min_step > ?", (trainer_step, self._max_staleness))
            self._db.execute("UPDATE groups SET state = 'dropped', reason = 'rollback' WHERE state = 'ready' "
                             "AND max_step > ?", (trainer_step,))
            rows = self._db.execute("SELECT group_id FROM groups WHERE state = 'ready' ORDER BY min_step, closed_seq "
                                    "LIMIT ?", (batch_groups,)).fetchall()
            if len(rows) < batch_groups:
                return None
            batch_id = self._db.execute("INSERT INTO batches (trainer_step, leased_at, state) VALUES (?, ?, 'leased')",
                                        (trainer_step, time.time())).lastrowid
            assert batch_id is not None
            self._db.executemany("UPDATE groups SET state = 'leased', batch_id = ? WHERE group_id = ?",
                                 [(batch_id, group_id) for (group_id,) in rows])
            self._db.executemany("INSERT INTO leases VALUES (?, ?)", [(batch_id, group_id) for (group_id,) in rows])
            return self._load_batch(batch_id, trainer_step, [group_id for (group_id,) in rows], advantage)

    def ack(self, batch_id: int, step: int) -> None:
        """Every batch leased up to ``batch_id`` is in a complete checkpoint of ``step``: its groups are trained."""
        with self._transaction():
            self._ack(batch_id, step)

    def recover(self, last_batch_id: int, step: int) -> int:
        """After a restart from a checkpoint of ``step`` that holds batches up to ``last_batch_id`` (0: none).

        Held leases are acked, other leases return to ready, groups acked by a checkpoint that no longer exists are
        dropped as ``rollback``. Returns the number of groups that are ready again.
        """
        with self._transaction():
            self._ack(last_batch_id, step)
            returned = self._db.execute("UPDATE groups SET state = 'ready', batch_id = NULL "
                                        "WHERE state = 'leased'").rowcount
            self._db.execute("UPDATE groups SET state = 'dropped', reason = 'rollback', batch_id = NULL "
                             "WHERE state = 'acked' AND batch_id > ?", (last_batch_id,))
            self._db.execute("UPDATE batches SET state = 'returned', acked_step = NULL WHERE batch_id > ?",
                             (last_batch_id,))
        return returned

    # -- readers --------------------------------------------------------------------------------------------------

    def accepted_and_in_flight(self) -> tuple[int, int]:
        """The two terms of the pacing formula: groups ready, leased or acked; and groups open."""
        states = dict(self._db.execute("SELECT state, COUNT(*) FROM groups GROUP BY state").fetchall())
        return sum(states.get(state, 0) for state in ("ready", "leased", "acked")), states.get("open", 0)

    def counts(self) -> audit.LedgerCounts:
        """Groups by state and reason, episodes by fate."""
        return audit.counts(self._db)

    def check(self) -> list[str]:
        """Invariants that do not hold, one line each; empty when the ledger is sound."""
        return audit.violations(self._db)

    def trained_staleness(self) -> dict[int, int]:
        """Histogram of trained episodes over their staleness at lease."""
        return audit.trained_staleness(self._db)

    def rewards_since(self, closed_seq: int) -> tuple[dict[str, list[float]], int]:
        """Rewards by taskset of all measured episodes of groups that closed after ``closed_seq``, and the new mark.

        Dropped groups count too: this is the policy's success, not that of the samples that carry a gradient.
        """
        rewards: dict[str, list[float]] = {}
        mark = closed_seq
        for seq, taskset, reward in self._db.execute(
                "SELECT closed_seq, taskset, reward FROM groups JOIN episodes USING (group_id) WHERE closed_seq > ? "
                "AND final AND reward IS NOT NULL", (closed_seq,)):
            rewards.setdefault(taskset, []).append(reward)
            mark = max(mark, seq)
        return rewards, mark

    # -- inside one transaction -----------------------------------------------------------------------------------

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._explained():
            try:
                self._db.execute("BEGIN IMMEDIATE")
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # SQLite undoes some by itself, for example on a full disk
                    self._db.execute("ROLLBACK")
                raise

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise ServiceError(f"{self._path}: {error}; nothing of the transaction was kept; free space on its disk or "
                               "make it writable, then run again to continue") from error

    def _open_size(self, group_id: str) -> int:
        row = self._db.execute("SELECT size FROM groups WHERE group_id = ? AND state = 'open'", (group_id,)).fetchone()
        if row is None:
            raise ServiceError(f"group {group_id}: is not open, so its episodes cannot enter")
        return int(row[0])

    def _version_steps(self) -> dict[int, int]:
        return dict(self._db.execute("SELECT version, step FROM versions").fetchall())

    def _admission(self, finals: Sequence[Episode], spans: Sequence[tuple[int, int] | None]) -> Admission:
        if any(is_measured(episode) and span is None for episode, span in zip(finals, spans, strict=True)):
            return Admission("unknown_version", [0] * len(finals))
        span_of = {episode.episode_id: span for episode, span in zip(finals, spans, strict=True)}
        return admit(finals, lambda episode: self._is_stale(span_of[episode.episode_id]), self._pad_groups)

    def _is_stale(self, span: tuple[int, int] | None) -> bool:
        return span is not None and self.progress().step - span[0] > self._max_staleness

    def _excluded(self, episode: Episode, span: tuple[int, int] | None) -> str:
        if not is_measured(episode):
            return "unmeasured" if episode.outcome == "ok" else episode.outcome
        return "stale" if self._is_stale(span) else ""

    def _insert_episode(self, episode: Episode, slot: int, *, final: bool, excluded: str, multiplicity: int,
                        span: tuple[int, int] | None) -> None:
        body = {"reward_parts": episode.reward_parts, "trajectories": [to_json(item) for item in episode.trajectories]}
        self._db.execute(
            "INSERT INTO episodes VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (episode.episode_id, episode.group_id, slot, final, episode.outcome, episode.reward, episode.reason,
             excluded, multiplicity, span[0] if span else None, episode.started_at, episode.duration_s,
             zlib.compress(json.dumps(body).encode(), 1)))

    def _ack(self, batch_id: int, step: int) -> None:
        self._db.execute("UPDATE groups SET state = 'acked' WHERE state = 'leased' AND batch_id <= ?", (batch_id,))
        self._db.execute("UPDATE batches SET state = 'acked', acked_step = ? WHERE state = 'leased' AND batch_id <= ?",
                         (step, batch_id))

    def _load_batch(self, batch_id: int, trainer_step: int, group_ids: Sequence[str],
                    advantage: GroupAdvantage) -> LeasedBatch:
        samples: list[Sample] = []
        staleness: dict[str, int] = {}
        episodes = 0
        for group_id in group_ids:
            rows = self._db.execute(
                "SELECT episode_id, group_id, task_id, taskset, outcome, reward, episodes.reason, started_at, "
                "duration_s, body, multiplicity, episodes.min_step FROM episodes JOIN groups USING (group_id) "
                "WHERE group_id = ? AND multiplicity > 0 ORDER BY slot", (group_id,)).fetchall()
            new = group_samples([episode_of_row(row) for row in rows], [row[10] for row in rows], advantage)
            oldest = {row[0]: row[11] for row in rows}
            staleness |= {sample.sample_id: trainer_step - oldest[sample.episode_id] for sample in new}
            samples += new
            episodes += sum(row[10] for row in rows)
        return LeasedBatch(batch_id, trainer_step, len(group_ids), episodes, samples, staleness)


def _step_span(episode: Episode, steps: dict[int, int]) -> tuple[int, int] | None:
    """Trainer steps of the oldest and newest version in the episode; None when it has none or one is unknown."""
    versions = sampled_versions(episode)
    if not versions or not versions <= steps.keys():
        return None
    return min(steps[version] for version in versions), max(steps[version] for version in versions)


def episode_of_row(row: Sequence[Any]) -> Episode:
    """The record that ten columns hold: episode_id, group_id, task_id, taskset, outcome, reward, reason, started_at,
    duration_s, body."""
    body = json.loads(zlib.decompress(row[9]))
    return Episode(episode_id=row[0], group_id=row[1], task_id=row[2], taskset=row[3], outcome=row[4], reward=row[5],
                   reason=row[6], started_at=row[7], duration_s=row[8], reward_parts=body["reward_parts"],
                   trajectories=[trajectory_from_json(item) for item in body["trajectories"]])
