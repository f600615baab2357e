"""Sessions and turns on disk: SQLite in WAL mode behind one thread, which commits everything that waits in one group.

A call to the store returns when its transaction is on disk (``synchronous=FULL``): a turn that a client has seen
survives any crash. Ids are stored as little arrays, and a turn stores only the ids after its parent's.

The database belongs to one process, guarded by a lock file; other programs may read it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import fcntl
import json
import queue
import sqlite3
import threading
import time
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from glm5.errors import GatewayError
from glm5.gateway.sessions import SessionSettings
from glm5.gateway.tree import Node, Origin

T = TypeVar("T")

FORMAT = 2
_SETTINGS = TypeAdapter(SessionSettings)
COMMIT_TIMEOUT_S = 60.0
_SCHEMA = """
CREATE TABLE sessions (
    session_id TEXT PRIMARY KEY, api_key TEXT NOT NULL, settings TEXT NOT NULL, created_at REAL NOT NULL,
    state TEXT NOT NULL DEFAULT 'open', outcome TEXT, reward REAL, closed_at REAL);
CREATE INDEX sessions_by_state ON sessions (state, closed_at);
CREATE TABLE turns (
    turn_id TEXT PRIMARY KEY, session_id TEXT NOT NULL, parent TEXT, kind TEXT NOT NULL, tail_ids BLOB NOT NULL,
    output_ids BLOB NOT NULL, logprobs BLOB NOT NULL, versions BLOB NOT NULL, finish_reason TEXT NOT NULL,
    chain BLOB NOT NULL, num_messages INTEGER NOT NULL, digest BLOB NOT NULL, role TEXT NOT NULL, reason TEXT NOT NULL,
    origin TEXT NOT NULL, reasoning TEXT NOT NULL, created INTEGER NOT NULL, cached_tokens INTEGER NOT NULL,
    response TEXT, abandoned INTEGER NOT NULL DEFAULT 0);
CREATE INDEX turns_by_session ON turns (session_id);
"""


@dataclass(frozen=True, slots=True)
class StoredSession:
    """A session as it is on disk."""

    settings: SessionSettings
    api_key: str
    created_at: float
    """Unix seconds."""
    state: str
    """``open``, ``finished``, ``expired``, or ``purged`` once the turns are deleted."""
    outcome: str | None
    reward: float | None


class Store:
    """The database of one gateway. Methods that return awaitables must be called on one event loop."""

    def __init__(self, path: str | Path) -> None:
        """Open or create. Raises GatewayError when the file is in use, not a store, or cannot be written."""
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = self._take_lock()
        self._queue: queue.SimpleQueue[tuple[Callable[[sqlite3.Connection], Any], _Reply | None]] = queue.SimpleQueue()
        try:
            self._connection = self._open()
        except BaseException:
            self._lock.close()
            raise
        self.failure: GatewayError | None = None
        """Set once the disk has refused a transaction: turns can no longer be made durable."""
        self._thread = threading.Thread(target=self._serve, name="gateway-store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Finish what is queued, close the file, release the lock. May be called twice."""
        self._queue.put((_stop, None))
        self._thread.join(timeout=10)
        self._lock.close()

    async def create_session(self, settings: SessionSettings, api_key: str) -> bool:
        """Record a new session; False when there has been one of this id."""
        row = (settings.session_id, api_key, json.dumps(dataclasses.asdict(settings)), time.time())
        cursor = await self._run(lambda db: db.execute(
            "INSERT OR IGNORE INTO sessions (session_id, api_key, settings, created_at) VALUES (?, ?, ?, ?)", row))
        return cursor.rowcount == 1

    async def close_session(self, session_id: str, state: str, outcome: str | None, reward: float | None) -> None:
        """Mark a session ``finished`` or ``expired``."""
        await self._run(lambda db: db.execute(
            "UPDATE sessions SET state = ?, outcome = ?, reward = ?, closed_at = ? WHERE session_id = ?",
            (state, outcome, reward, time.time(), session_id)))

    async def find_session(self, session_id: str) -> StoredSession | None:
        """A session in any state."""
        return await self._run(lambda db: next(iter(_read_sessions(db, "session_id = ?", (session_id,))), None))

    async def open_sessions(self) -> list[StoredSession]:
        """Sessions to go on with after a restart."""
        return await self._run(lambda db: _read_sessions(db, "state = 'open'", ()))

    async def add_turn(self, session_id: str, node: Node) -> None:
        """Record a turn; returns when it is durable."""
        row = (node.turn_id, session_id, node.parent.turn_id if node.parent else None, node.kind,
               array("i", node.tail_ids).tobytes(), array("i", node.output_ids).tobytes(),
               array("d", node.logprobs).tobytes(), array("i", node.versions).tobytes(), node.finish_reason,
               node.chain, node.num_messages, node.digest, node.role, node.reason, node.origin.to_text(),
               node.reasoning, node.created, node.cached_tokens,
               None if node.response is None else json.dumps(node.response), int(node.abandoned))
        await self._run(lambda db: db.execute(f"INSERT INTO turns VALUES ({', '.join('?' * len(row))})", row))

    async def set_abandoned(self, turn_id: str, abandoned: bool) -> None:
        """Whether the client went away before it got this answer."""
        await self._run(lambda db: db.execute("UPDATE turns SET abandoned = ? WHERE turn_id = ?", (abandoned, turn_id)))

    async def load_turns(self, session_id: str) -> list[Node]:
        """The turns of a session in the order in which they were recorded."""
        return await self._run(lambda db: _read_nodes(db.execute(
            "SELECT * FROM turns WHERE session_id = ? ORDER BY rowid", (session_id,))))

    async def purge(self, closed_before: float) -> None:
        """Delete the turns of sessions closed before a Unix time; the sessions stay known, as ``purged``."""
        await self._run(lambda db: _purge(db, closed_before))

    async def _run(self, operation: Callable[[sqlite3.Connection], T]) -> T:
        """Run ``operation`` in the writer thread; its transaction is committed when this returns."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._queue.put((operation, _Reply(loop, future)))
        try:
            async with asyncio.timeout(COMMIT_TIMEOUT_S):
                return await future
        except TimeoutError:
            raise GatewayError(f"{self.path}: no commit within {COMMIT_TIMEOUT_S:.0f} s; check the disk") from None

    def _serve(self) -> None:
        """Writer thread: take all that waits, run it in one transaction, commit, answer."""
        stopping = False
        while not stopping:
            batch = [self._queue.get()]
            while not self._queue.empty():
                batch.append(self._queue.get())
            stopping = any(operation is _stop for operation, _ in batch)
            answers: list[tuple[_Reply | None, Any, GatewayError | None]] = []
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                for operation, reply in batch:
                    try:
                        answers.append((reply, operation(self._connection), None))
                    except sqlite3.OperationalError:
                        raise  # the disk: nothing of this batch is kept
                    except Exception as error:  # of this operation alone; the thread must live on for the others
                        answers.append((reply, None, self._explain(error)))
                self._connection.execute("COMMIT")
            except sqlite3.Error as error:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                refused = self._explain(error)
                if isinstance(error, sqlite3.OperationalError):
                    self.failure = refused
                answers = [(reply, None, refused) for _, reply in batch]
            _answer(answers)
        self._connection.close()

    def _explain(self, error: Exception) -> GatewayError:
        remedy = "free space on its disk, then run again" if isinstance(error, sqlite3.Error) else "send other values"
        return GatewayError(f"{self.path}: {error}; nothing was recorded; {remedy}")

    def _open(self) -> sqlite3.Connection:
        try:
            connection = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False, timeout=10)
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            found = connection.execute("PRAGMA user_version").fetchone()[0]
            if found == 0:
                connection.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {FORMAT}; COMMIT;")
            elif found != FORMAT:
                connection.close()
                raise GatewayError(f"{self.path}: store format {found}, expected {FORMAT}; choose another --store")
        except sqlite3.Error as error:
            raise GatewayError(f"{self.path}: cannot be used as a store ({error}); choose another --store") from None
        return connection

    def _take_lock(self) -> Any:
        try:
            lock = open(f"{self.path}.lock", "w")  # noqa: SIM115  held until close()
        except OSError as error:
            raise GatewayError(f"{self.path}: cannot be written ({error.strerror}); choose another --store") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise GatewayError(f"{self.path}: in use by another gateway; choose another --store") from None
        return lock


@dataclass(frozen=True, slots=True)
class _Reply:
    """Where the result of an operation goes."""

    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]


def _purge(db: sqlite3.Connection, closed_before: float) -> None:
    chosen = "state IN ('finished', 'expired') AND closed_at < ?"
    of_chosen = f"session_id IN (SELECT session_id FROM sessions WHERE {chosen})"
    db.execute(f"DELETE FROM turns WHERE {of_chosen}", (closed_before,))
    db.execute(f"UPDATE sessions SET state = 'purged' WHERE {chosen}", (closed_before,))


def _stop(_: sqlite3.Connection) -> None:
    """Ends the writer thread: it is recognised in the queue."""


def _answer(answers: Iterable[tuple[_Reply | None, Any, GatewayError | None]]) -> None:
    """Resolve the futures of one batch, with one wake-up of the event loop."""
    waiting = [(reply.future, value, error) for reply, value, error in answers if reply is not None]
    loop = next((reply.loop for reply, _, _ in answers if reply is not None), None)

    def resolve() -> None:
        for future, value, error in waiting:
            if future.cancelled():
                continue
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(value)

    if loop is not None and not loop.is_closed():
        loop.call_soon_threadsafe(resolve)


def _read_sessions(db: sqlite3.Connection, where: str, values: tuple[Any, ...]) -> list[StoredSession]:
    columns = "settings, api_key, created_at, state, outcome, reward"
    rows = db.execute(f"SELECT {columns} FROM sessions WHERE {where}", values)
    sessions = []
    for settings, *rest in rows:
        sessions.append(StoredSession(_SETTINGS.validate_python(json.loads(settings)), *rest))
    return sessions


def _read_nodes(rows: Iterable[tuple[Any, ...]]) -> list[Node]:
    nodes: dict[str, Node] = {}
    for (turn_id, _, parent, kind, tail, output, logprobs, versions, finish, chain, num, digest, role, reason, origin,
         reasoning, created, cached, response, gone) in rows:
        nodes[turn_id] = Node(
            turn_id=turn_id, parent=nodes.get(parent), kind=kind, tail_ids=_integers(tail),
            output_ids=_integers(output), logprobs=array("d", logprobs).tolist(), versions=_integers(versions),
            finish_reason=finish, chain=chain, num_messages=num, digest=digest, role=role, reason=reason,
            origin=Origin.from_text(origin), reasoning=reasoning, created=created, cached_tokens=cached,
            response=None if response is None else tuple(json.loads(response)), abandoned=bool(gone))
    return list(nodes.values())


def _integers(blob: bytes) -> list[int]:
    return array("i", blob).tolist()
