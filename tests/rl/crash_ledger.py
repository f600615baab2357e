"""Kills a process that uses a ledger between each two of its writes, and looks at what is left; run by a test.

A child is forked for every number n: it plays the scenario and is killed by SIGKILL at its n-th write, which is any SQL
statement that changes something, any commit, and any step of writing or removing a file. The parent then opens the
ledger as the next start would. Prints the number of kills.
"""

import os
import shutil
import signal
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from glm5.rl import schema
from glm5.rl.config import LedgerConfig
from glm5.rl.ledger import Ledger
from glm5.rl.replay import EpisodeFilter, read_episodes
from tests.rl.factories import add_group, make_episode

CONFIG = LedgerConfig(budget_bytes=500, retain_bytes=300)
REWARDS = (0.0, 1.0)
_WRITES = ("INSERT", "UPDATE", "COMMIT")


def open_ledger(directory: Path) -> Ledger:
    return Ledger(directory / "ledger.sqlite", max_staleness=8, pad_groups=True, config=CONFIG)


def scenario(directory: Path) -> None:
    """Groups enter beyond the budget, two batches are trained and acked, retention removes what is old."""
    ledger = open_ledger(directory)
    ledger.record_version(0, 0)
    for index in range(4):
        add_group(ledger, index, REWARDS)
        if index == 2:
            ledger.ack(ledger.lease(2, 0).batch_id, 1)
    ledger.ack(ledger.lease(1, 1).batch_id, 2)
    ledger.recover(2, 2)
    ledger.close()


def kill_at(number: int) -> None:
    """Arrange that this process kills itself before its ``number``-th write."""
    left = number

    def count(*_: object) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    connect = sqlite3.connect

    def connect_traced(*arguments: object, **options: object) -> sqlite3.Connection:
        db = connect(*arguments, **options)
        db.set_trace_callback(lambda statement: count() if statement.startswith(_WRITES) else None)
        return db

    schema.sqlite3.connect = connect_traced
    def counting(original: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            count()
            return original(*arguments, **options)

        return counted

    for name in ("replace", "unlink", "fsync", "mkdir"):
        setattr(os, name, counting(getattr(os, name)))


def verify(directory: Path) -> None:
    """What the next start finds: books that balance, every payload that is not removed, whole."""
    ledger = open_ledger(directory)
    progress = ledger.counts().batches.get("acked", 0)
    ledger.recover(progress, progress)
    assert ledger.check() == [], ledger.check()
    ledger.drop_open_groups("interrupted")
    ledger.record_version(1, progress)
    for item in read_episodes(directory, EpisodeFilter()):
        wanted = make_episode(item.episode.group_id, item.slot, item.episode.reward)
        if item.place != "removed":
            assert item.episode == wanted, item
        else:
            assert item.group_state == "acked", item  # nothing that waits is ever removed
    named = {item.episode.group_id for item in read_episodes(directory, EpisodeFilter()) if item.place == "file"}
    folder = directory / "ledger.payloads"
    assert {path.name for path in folder.glob("[!.]*")} == named
    add_group(ledger, 9, REWARDS, version=1)  # and it goes on
    assert ledger.lease(1, progress) is not None
    ledger.close()


def main(root: Path) -> None:
    kills = 0
    while True:
        directory = root / str(kills)
        directory.mkdir()
        child = os.fork()
        if child == 0:
            kill_at(kills)
            scenario(directory)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        verify(directory)
        shutil.rmtree(directory)
        if status == 0:
            break
        assert os.WIFSIGNALED(status), f"the scenario failed after {kills} writes"
        kills += 1
    print(kills)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
