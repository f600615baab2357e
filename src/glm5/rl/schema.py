"""Tables of ``ledger.sqlite``, and how a connection to them is opened.

Sums that are asked for all the time (groups by state, payload bytes by place) are kept by triggers in the transaction
that changes them, so that a ledger of a million groups answers as fast as an empty one; ``audit`` compares them with
the rows. SQLite in WAL mode; commits reach the disk before they return.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from glm5.errors import ServiceError

FORMAT = 3
_SCHEMA = """
CREATE TABLE groups (
  group_id TEXT PRIMARY KEY, taskset TEXT NOT NULL, task_id TEXT NOT NULL, task_index INTEGER NOT NULL,
  visit INTEGER NOT NULL, size INTEGER NOT NULL,
  state TEXT NOT NULL CHECK (state IN ('open', 'ready', 'leased', 'acked', 'dropped')),
  reason TEXT NOT NULL DEFAULT '', min_step INTEGER, max_step INTEGER, batch_id INTEGER, closed_seq INTEGER,
  place TEXT NOT NULL DEFAULT 'nowhere' CHECK (place IN ('nowhere', 'database', 'file', 'removed')),
  bytes INTEGER NOT NULL DEFAULT 0,
  opened_at REAL NOT NULL, closed_at REAL, UNIQUE (taskset, task_index, visit));
CREATE INDEX groups_by_state ON groups (state, min_step, closed_seq);
CREATE INDEX groups_by_place ON groups (place, closed_seq);
CREATE UNIQUE INDEX groups_by_seq ON groups (closed_seq);
CREATE TABLE episodes (
  episode_id TEXT PRIMARY KEY, group_id TEXT NOT NULL REFERENCES groups, slot INTEGER NOT NULL, final INTEGER NOT NULL,
  outcome TEXT NOT NULL, reward REAL, reason TEXT NOT NULL, excluded TEXT NOT NULL, multiplicity INTEGER NOT NULL,
  min_step INTEGER, started_at REAL NOT NULL, duration_s REAL NOT NULL, body BLOB);
CREATE INDEX episodes_by_group ON episodes (group_id);
CREATE TABLE batches (
  batch_id INTEGER PRIMARY KEY AUTOINCREMENT, trainer_step INTEGER NOT NULL, leased_at REAL NOT NULL,
  state TEXT NOT NULL CHECK (state IN ('leased', 'acked', 'returned')), acked_step INTEGER);
CREATE TABLE leases (
  batch_id INTEGER NOT NULL REFERENCES batches, group_id TEXT NOT NULL REFERENCES groups,
  is_reuse INTEGER NOT NULL, PRIMARY KEY (batch_id, group_id));
CREATE INDEX leases_by_group ON leases (group_id);
CREATE TABLE versions (version INTEGER PRIMARY KEY, step INTEGER NOT NULL, published_at REAL NOT NULL);
CREATE TABLE progress (
  only_row INTEGER PRIMARY KEY CHECK (only_row = 1), step INTEGER NOT NULL, version INTEGER NOT NULL);
INSERT INTO progress VALUES (1, 0, -1);
CREATE TABLE group_counts (state TEXT PRIMARY KEY, number INTEGER NOT NULL);
INSERT INTO group_counts VALUES ('open', 0), ('ready', 0), ('leased', 0), ('acked', 0), ('dropped', 0);
CREATE TRIGGER count_new AFTER INSERT ON groups BEGIN
  UPDATE group_counts SET number = number + 1 WHERE state = NEW.state; END;
CREATE TRIGGER count_changed AFTER UPDATE OF state ON groups WHEN OLD.state != NEW.state BEGIN
  UPDATE group_counts SET number = number - 1 WHERE state = OLD.state; \
  UPDATE group_counts SET number = number + 1 WHERE state = NEW.state; END;
CREATE TABLE payload_bytes (place TEXT PRIMARY KEY, number INTEGER NOT NULL);
INSERT INTO payload_bytes VALUES ('nowhere', 0), ('database', 0), ('file', 0), ('removed', 0);
CREATE TRIGGER payload_moved AFTER UPDATE OF place, bytes ON groups BEGIN
  UPDATE payload_bytes SET number = number - OLD.bytes WHERE place = OLD.place; \
  UPDATE payload_bytes SET number = number + NEW.bytes WHERE place = NEW.place; END;
"""


def connect(path: str | Path) -> sqlite3.Connection:
    """A connection in autocommit mode to the ledger at ``path``, made when missing.

    Raises ServiceError for a ledger of another format, sqlite3.Error for what cannot be opened.
    """
    db = sqlite3.connect(path, timeout=30, isolation_level=None)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        db.execute("BEGIN IMMEDIATE")
        found = int(db.execute("PRAGMA user_version").fetchone()[0])
        if found == 0:
            for statement in _SCHEMA.split(";\n"):
                db.execute(statement)
            db.execute(f"PRAGMA user_version = {FORMAT}")
        db.execute("COMMIT")
    except BaseException:
        db.close()  # undoes what was not committed
        raise
    if found not in (0, FORMAT):
        db.close()
        raise ServiceError(f"{path}: ledger format {found}, expected {FORMAT}; use the version that wrote it")
    return db


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
