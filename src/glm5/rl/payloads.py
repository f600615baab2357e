"""Payloads: the tokens of recorded episodes, in ``ledger.sqlite`` or, beyond a budget, in files beside it.

``groups.place`` says where the payloads of a group are:

    nowhere → database → file      spilled: all its episodes in ``ledger.payloads/GROUP``, compressed together
                  └───────┴→ removed   given up by retention after it was trained or dropped; its row stays

Nothing waits in memory, and a payload is never in no place: it is in a file, on disk, before its row says so, and its
row says that it is removed before the file goes. A process that is killed between any two of these writes leaves at
most a file that no row names, which ``sweep`` deletes at the next start. Files are checksummed.
"""

from __future__ import annotations

import dataclasses
import json
import sqlite3
import zlib
from array import array
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from glm5.errors import ServiceError
from glm5.records import Episode, Trajectory
from glm5.rl.audit import payload_bytes
from glm5.rl.config import LedgerConfig
from glm5.runlog import flush_to_disk, write_atomic

Transaction = Callable[[], AbstractContextManager[None]]
_STREAMS = {"ids": "i", "loss_mask": "b", "logprobs": "d", "versions": "i"}
"""Token streams of a trajectory and how their numbers are stored."""


def encode_payload(episode: Episode) -> bytes:
    """Reward parts and trajectories, compressed: a line of JSON, then the token streams as little-endian numbers."""
    head: dict[str, Any] = {"reward_parts": episode.reward_parts, "trajectories": []}
    streams = []
    for trajectory in episode.trajectories:
        rest = {item.name: getattr(trajectory, item.name) for item in dataclasses.fields(trajectory)
                if item.name not in _STREAMS}
        head["trajectories"].append({**rest, "length": len(trajectory.ids)})
        streams += [array(code, getattr(trajectory, name)).tobytes() for name, code in _STREAMS.items()]
    return zlib.compress(json.dumps(head).encode() + b"\n" + b"".join(streams), 1)


def decode_payload(payload: bytes) -> tuple[dict[str, float], list[Trajectory]]:
    """Inverse of ``encode_payload``."""
    raw = zlib.decompress(payload)
    start = raw.index(b"\n") + 1
    head = json.loads(raw[:start])
    trajectories = []
    for rest in head["trajectories"]:
        length, streams = rest.pop("length"), {}
        for name, code in _STREAMS.items():
            numbers: array[Any] = array(code)
            end = start + length * numbers.itemsize
            numbers.frombytes(raw[start:end])
            streams[name] = [bool(on) for on in numbers] if name == "loss_mask" else numbers.tolist()
            start = end
        trajectories.append(Trajectory(**streams, **rest))
    return head["reward_parts"], trajectories


class PayloadFiles:
    """The spilled payloads of one ledger, a file per group."""

    def __init__(self, ledger_path: Path) -> None:
        self.directory = ledger_path.with_suffix(".payloads")
        self._last: tuple[str, dict[str, bytes]] = ("", {})

    def write(self, group_id: str, payloads: dict[str, bytes]) -> None:
        """Make the payloads of a group, by episode id, durable. Raises OSError."""
        if not self.directory.is_dir():
            self.directory.mkdir(exist_ok=True)
            flush_to_disk(self.directory.parent)
        raw = [zlib.decompress(payload) for payload in payloads.values()]
        head = json.dumps(dict(zip(payloads, map(len, raw), strict=True))).encode()
        write_atomic(self._path(group_id), head + b"\n" + zlib.compress(b"".join(raw), 6))
        flush_to_disk(self.directory)

    def read(self, group_id: str) -> dict[str, bytes]:
        """The payloads of a group by episode id. Raises ServiceError when the file is missing or damaged."""
        if self._last[0] == group_id:  # a file never changes, and readers go through a group episode by episode
            return self._last[1]
        path = self._path(group_id)
        try:
            head, _, compressed = path.read_bytes().partition(b"\n")
            raw = zlib.decompress(compressed)  # its checksum is verified
            payloads, start = {}, 0
            for episode_id, length in json.loads(head).items():
                payloads[episode_id] = zlib.compress(raw[start:start + length], 1)
                start += length
            self._last = (group_id, payloads)
            return payloads
        except (OSError, ValueError, zlib.error) as error:
            raise ServiceError(f"{path}: the payloads of group {group_id} cannot be read ({error}); restore the file "
                               "from a copy of the run") from None

    def remove(self, group_id: str) -> None:
        """Delete the file of a group, if there is one."""
        self._path(group_id).unlink(missing_ok=True)

    def group_ids(self) -> Iterator[str]:
        """Groups that have a file."""
        if self.directory.is_dir():
            yield from (unquote(path.name) for path in self.directory.iterdir() if not path.name.startswith("."))

    def _path(self, group_id: str) -> Path:
        return self.directory / quote(group_id, safe="")


class PayloadKeeper:
    """Keeps the payloads of a ledger within its budgets; ``transaction`` opens one on ``db``."""

    def __init__(self, db: sqlite3.Connection, files: PayloadFiles, transaction: Transaction, config: LedgerConfig,
                 reuse_age: int) -> None:
        self._db, self._files, self._transaction, self._config = db, files, transaction, config
        self._reuse_age = reuse_age
        """Trained groups up to this age, in steps, may be trained again and stay; -1: none may."""

    def spill(self) -> int:
        """Move payloads to files until the database holds no more than ``budget_bytes``. Returns how many groups.

        Those needed last go first: trained and dropped groups from the oldest, then ready ones from the newest. Raises
        ServiceError when the files cannot be written; every payload is then still where it was.
        """
        moved = 0
        while payload_bytes(self._db)["database"] > self._config.budget_bytes:
            try:
                with self._transaction():  # open while the file is written: ``sweep`` finds the file with its row
                    self._spill_one()
            except OSError as error:
                raise ServiceError(f"{self._files.directory}: {error.strerror}; the ledger is beyond budget_bytes = "
                                   f"{self._config.budget_bytes} and cannot spill, nothing was lost; free space on its "
                                   "disk or raise ledger.budget_bytes, then run again to continue") from None
            moved += 1
        return moved

    def _spill_one(self) -> None:
        row = self._db.execute(
            "SELECT group_id FROM groups WHERE place = 'database' ORDER BY state IN ('ready', 'leased'), "
            "CASE WHEN state IN ('ready', 'leased') THEN -closed_seq ELSE closed_seq END LIMIT 1").fetchone()
        if row is not None:  # another process may have been faster
            payloads = dict(self._db.execute("SELECT episode_id, body FROM episodes WHERE group_id = ?",
                                             row).fetchall())
            self._files.write(row[0], payloads)
            self._move(row[0], "file")

    def retain(self, step: int) -> int:
        """Remove payloads that ended, oldest first, until they hold no more than ``retain_bytes``; how many groups.

        Groups that wait, are leased or may be trained again keep theirs. Their rows stay, and so do the counts.
        """
        if not self._config.retain_bytes:
            return 0
        rows = self._db.execute(
            "SELECT group_id, bytes FROM groups WHERE place IN ('database', 'file') AND (state = 'dropped' "
            "OR (state = 'acked' AND ? - min_step > ?)) ORDER BY closed_seq", (step, self._reuse_age)).fetchall()
        excess = sum(size for _, size in rows) - self._config.retain_bytes
        removed = 0
        for group_id, size in rows:
            if excess <= 0:
                break
            with self._transaction():
                self._move(group_id, "removed")
            self._files.remove(group_id)
            excess -= size
            removed += 1
        return removed

    def sweep(self) -> None:
        """Delete the files that no row names: a process was killed before or after it changed the row."""
        with self._transaction():
            for group_id in self._files.group_ids():
                row = self._db.execute("SELECT place FROM groups WHERE group_id = ?", (group_id,)).fetchone()
                if row is None or row[0] != "file":
                    self._files.remove(group_id)

    def _move(self, group_id: str, place: str) -> None:
        self._db.execute("UPDATE groups SET place = ? WHERE group_id = ?", (place, group_id))
        self._db.execute("UPDATE episodes SET body = NULL WHERE group_id = ?", (group_id,))
