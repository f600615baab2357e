"""The ledger: the durable store of groups and episodes; hands samples to the trainer under lease and ack.

A group is ``open`` while its episodes run and enters whole, in one transaction, when every slot has ended:

    open → ready → leased → acked          trained, in the weights for good
      └──────┴────────┴───────┴→ dropped   with a reason; never silently

The trainer leases a batch, steps, writes the batch's id into its next checkpoint and then acks. After a crash,
``recover`` acks what the checkpoint holds and returns the rest to ``ready``: every group takes effect on the weights
exactly once. Batch ids grow and are never reused, so "held by the checkpoint" is "not greater than its last id".
The table ``leases`` keeps every lease ever given, which proves it: no group is new in two acked batches. With
``replay.share`` a batch also holds groups of earlier batches: each such use is a lease of its own, marked ``is_reuse``,
and takes effect, or is undone by a crash, with its batch.

Staleness is measured in trainer steps through the table ``versions``: trainer step − step of the oldest policy version
that sampled a trained token. A group beyond the bound is dropped when it enters and again when it would be leased.

Orchestrator and trainer each hold one connection (``schema``). The tokens of episodes are ``payloads``.
"""

from __future__ import annotations

import dataclasses
import json
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm5.errors import ServiceError
from glm5.records import Episode, Sample
from glm5.rl import audit
from glm5.rl.admission import Admission, admit, group_samples, is_measured, sampled_versions
from glm5.rl.advantages import GroupAdvantage
from glm5.rl.config import NO_BOUND, LedgerConfig, ReplayConfig, RLConfig
from glm5.rl.payloads import PayloadFiles, PayloadKeeper, decode_payload, encode_payload
from glm5.rl.schema import connect


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
    reused: int = 0
    """Groups among them that were trained before."""


class Ledger:
    """One connection to ``ledger.sqlite``, made when missing. Use each object from one thread."""

    def __init__(self, path: str | Path, *, max_staleness: int, pad_groups: bool,
                 config: LedgerConfig | None = None, replay: ReplayConfig | None = None) -> None:
        self._path = Path(path)
        self._max_staleness, self._pad_groups = max_staleness, pad_groups
        self._replay = replay or ReplayConfig()
        with self._explained():
            self._db = connect(path)
        self._files = PayloadFiles(self._path)
        self._keeper = PayloadKeeper(self._db, self._files, self._transaction, config or LedgerConfig(),
                                     self._replay.max_age if self._replay.share else -1)

    @classmethod
    def of_run(cls, config: RLConfig, run_dir: Path) -> Ledger:
        """The ledger of a run."""
        replay = config.replay if config.mode != "offline" else dataclasses.replace(config.replay, max_age=NO_BOUND)
        return cls(run_dir / "ledger.sqlite", max_staleness=config.tau, pad_groups=config.pad_groups,
                   config=config.ledger, replay=replay)

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

    def close_group(self, group_id: str, slots: Sequence[Sequence[Episode]], *, keep_equal: bool = False) -> str:
        """Enter a finished group: per slot its attempts in order, of which the last counts.

        With ``keep_equal`` a group whose rewards are all equal is kept. Such a group, and one that is dropped, may have
        ended before all its slots began; its size becomes that of ``slots``. Returns "" when the group became ready,
        else the reason why it was dropped.
        """
        finals = [attempts[-1] for attempts in slots]
        payloads = {episode.episode_id: encode_payload(episode) for attempts in slots for episode in attempts}
        with self._transaction():
            size = self._open_size(group_id)
            spans = self._step_spans(finals)
            step = self.progress().step
            stale = {episode.episode_id for episode, span in zip(finals, spans, strict=True)
                     if span is not None and step - span[0] > self._max_staleness}
            admission = self._admission(finals, spans, stale, keep_equal)
            if len(slots) > size or (len(slots) < size and not admission.reason and not keep_equal):
                raise ServiceError(f"group {group_id}: {len(slots)} slots ended, expected {size}; nothing was stored")
            for slot, attempts in enumerate(slots):
                for failed in attempts[:-1]:
                    self._insert_episode(failed, payloads, slot, final=False, excluded=failed.outcome, multiplicity=0,
                                         span=None)
                self._insert_episode(attempts[-1], payloads, slot, final=True,
                                     excluded=_excluded(attempts[-1], stale),
                                     multiplicity=admission.multiplicities[slot], span=spans[slot])
            kept = [span for span, times in zip(spans, admission.multiplicities, strict=True) if times and span]
            oldest, newest = min((low for low, _ in kept), default=None), max((high for _, high in kept), default=None)
            self._db.execute(
                "UPDATE groups SET state = ?, reason = ?, size = ?, min_step = ?, max_step = ?, closed_at = ?, "
                "place = 'database', bytes = ?, "
                "closed_seq = (SELECT COALESCE(MAX(closed_seq), 0) + 1 FROM groups) WHERE group_id = ?",
                ("dropped" if admission.reason else "ready", admission.reason, len(slots), oldest, newest,
                 time.time(), sum(map(len, payloads.values())), group_id))
        with self._explained():
            self._keeper.spill()
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

    def adopt_versions(self, versions: Iterable[int]) -> None:
        """Note policy versions of another run, which have no place among the steps of this one, as those of step 0."""
        with self._transaction():
            self._db.executemany("INSERT OR IGNORE INTO versions VALUES (?, 0, ?)",
                                 [(version, time.time()) for version in versions])

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
        return int(self._db.execute("SELECT number FROM group_counts WHERE state = 'ready'").fetchone()[0])

    def lease(self, batch_groups: int, trainer_step: int, advantage: GroupAdvantage = "mean", *,
              reuse: int = 0, fill: bool = False) -> LeasedBatch | None:
        """Hand out the ``batch_groups`` oldest ready groups, or None when there are fewer.

        At most ``reuse`` groups of earlier batches join them, the least used first, then the newest, as ``replay``
        allows. They are in the weights already, or will be undone together with this batch. With ``fill`` such groups
        also take the places of ready ones that are missing, and the batch may be smaller; None means that nothing is
        left to train.

        First drops ready groups that are too stale, and those of a lost timeline: sampled by weights of a later step
        than the trainer has, which happens when training resumed from an older checkpoint.
        """
        with self._transaction():
            self._db.execute("UPDATE groups SET state = 'dropped', reason = 'stale' WHERE state = 'ready' "
                             "AND ? - min_step > ?", (trainer_step, self._max_staleness))
            self._db.execute("UPDATE groups SET state = 'dropped', reason = 'rollback' WHERE state = 'ready' "
                             "AND max_step > ?", (trainer_step,))
            fresh = [group_id for (group_id,) in self._db.execute(
                "SELECT group_id FROM groups WHERE state = 'ready' ORDER BY min_step, closed_seq LIMIT ?",
                (batch_groups,))]
            missing = batch_groups - len(fresh)
            if missing and not fill:
                return None
            reused = self._reusable_groups(reuse + missing, trainer_step)
            if not fresh and not reused:
                return None
            batch_id = self._db.execute("INSERT INTO batches (trainer_step, leased_at, state) VALUES (?, ?, 'leased')",
                                        (trainer_step, time.time())).lastrowid
            assert batch_id is not None
            self._db.executemany("UPDATE groups SET state = 'leased', batch_id = ? WHERE group_id = ?",
                                 [(batch_id, group_id) for group_id in fresh])
            self._db.executemany("INSERT INTO leases VALUES (?, ?, ?)",
                                 [*((batch_id, group_id, 0) for group_id in fresh),
                                  *((batch_id, group_id, 1) for group_id in reused)])
            return self._load_batch(batch_id, trainer_step, fresh, reused, advantage)

    def _reusable_groups(self, wanted: int, trainer_step: int) -> list[str]:
        """At most so many groups of earlier batches that may be trained again."""
        rows = self._db.execute(
            "SELECT group_id, COUNT(*) AS uses FROM groups JOIN leases USING (group_id) JOIN batches "
            "ON batches.batch_id = leases.batch_id WHERE groups.state IN ('leased', 'acked') "
            "AND batches.state IN ('leased', 'acked') AND place != 'removed' AND ? - min_step <= ? "
            "GROUP BY group_id HAVING uses < ? ORDER BY uses, min_step DESC, closed_seq DESC LIMIT ?",
            (trainer_step, self._replay.max_age, self._replay.max_uses, wanted)).fetchall()
        return [group_id for group_id, _ in rows]

    def ack(self, batch_id: int, step: int) -> None:
        """Every batch leased up to ``batch_id`` is in a complete checkpoint of ``step``: its groups are trained.

        What retention does not keep is removed then.
        """
        with self._transaction():
            self._ack(batch_id, step)
        with self._explained():
            self._keeper.retain(step)

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
        with self._explained():
            self._keeper.sweep()
        return returned

    # -- readers --------------------------------------------------------------------------------------------------

    def accepted_and_in_flight(self) -> tuple[int, int]:
        """The two terms of the pacing formula: groups ready, leased or acked; and groups open."""
        numbers = dict(self._db.execute("SELECT state, number FROM group_counts").fetchall())
        return sum(numbers[state] for state in ("ready", "leased", "acked")), numbers["open"]

    def payload_bytes(self) -> dict[str, int]:
        """Compressed bytes of tokens by place: ``database``, ``file``, and ``removed`` for what retention gave up."""
        return audit.payload_bytes(self._db)

    def group_state(self, group_id: str) -> str | None:
        """State of a group; None when there is none of this id."""
        row = self._db.execute("SELECT state FROM groups WHERE group_id = ?", (group_id,)).fetchone()
        return None if row is None else str(row[0])

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

    def _step_spans(self, episodes: Sequence[Episode]) -> list[tuple[int, int] | None]:
        """Trainer steps of the oldest and newest version in each episode; None when it has none or one is unknown."""
        versions = [sampled_versions(episode) for episode in episodes]
        every = sorted(set().union(*versions))
        steps = dict(self._db.execute(
            f"SELECT version, step FROM versions WHERE version IN ({', '.join('?' * len(every))})", every).fetchall())
        return [(min(steps[version] for version in found), max(steps[version] for version in found))
                if found and found <= steps.keys() else None for found in versions]

    def _admission(self, finals: Sequence[Episode], spans: Sequence[tuple[int, int] | None], stale: set[str],
                   keep_equal: bool) -> Admission:
        if any(is_measured(episode) and span is None for episode, span in zip(finals, spans, strict=True)):
            return Admission("unknown_version", [0] * len(finals))
        return admit(finals, lambda episode: episode.episode_id in stale, self._pad_groups, keep_equal)

    def _insert_episode(self, episode: Episode, payloads: dict[str, bytes], slot: int, *, final: bool, excluded: str,
                        multiplicity: int, span: tuple[int, int] | None) -> None:
        self._db.execute(
            "INSERT INTO episodes VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (episode.episode_id, episode.group_id, slot, final, episode.outcome, episode.reward, episode.reason,
             excluded, multiplicity, span[0] if span else None, episode.started_at, episode.duration_s,
             payloads[episode.episode_id]))

    def _ack(self, batch_id: int, step: int) -> None:
        self._db.execute("UPDATE groups SET state = 'acked' WHERE state = 'leased' AND batch_id <= ?", (batch_id,))
        self._db.execute("UPDATE batches SET state = 'acked', acked_step = ? WHERE state = 'leased' AND batch_id <= ?",
                         (step, batch_id))

    def _load_batch(self, batch_id: int, trainer_step: int, fresh: Sequence[str], reused: Sequence[str],
                    advantage: GroupAdvantage) -> LeasedBatch:
        samples: list[Sample] = []
        staleness: dict[str, int] = {}
        episodes = 0
        for group_id in (*fresh, *reused):
            rows = self._db.execute(
                f"SELECT {EPISODE_COLUMNS}, multiplicity, episodes.min_step FROM episodes JOIN groups USING (group_id) "
                "WHERE group_id = ? AND multiplicity > 0 ORDER BY slot", (group_id,)).fetchall()
            new = group_samples([episode_of_row(row, self._files) for row in rows], [row[-2] for row in rows],
                                advantage)
            oldest = {row[0]: row[-1] for row in rows}
            staleness |= {sample.sample_id: trainer_step - oldest[sample.episode_id] for sample in new}
            samples += new
            episodes += sum(row[-2] for row in rows)
        return LeasedBatch(batch_id, trainer_step, len(fresh) + len(reused), episodes, samples, staleness, len(reused))


EPISODE_COLUMNS = ("episodes.episode_id, episodes.group_id, task_id, taskset, outcome, reward, episodes.reason, "
                   "started_at, duration_s, place, body")


def episode_of_row(row: Sequence[Any], files: PayloadFiles) -> Episode:
    """The record that the first of ``EPISODE_COLUMNS`` hold; without trajectories when its payload was removed."""
    episode_id, group_id, task_id, taskset, outcome, reward, reason, started_at, duration_s, place, body = row[:11]
    parts, trajectories = {}, []
    if place != "removed":
        payload = files.read(group_id)[episode_id] if place == "file" else body
        parts, trajectories = decode_payload(payload)
    return Episode(episode_id=episode_id, group_id=group_id, task_id=task_id, taskset=taskset, outcome=outcome,
                   reward=reward, reason=reason, started_at=started_at, duration_s=duration_s, reward_parts=parts,
                   trajectories=trajectories)


def _excluded(episode: Episode, stale: set[str]) -> str:
    """Why an episode may not be trained on; empty when it may."""
    if not is_measured(episode):
        return "unmeasured" if episode.outcome == "ok" else episode.outcome
    return "stale" if episode.episode_id in stale else ""
