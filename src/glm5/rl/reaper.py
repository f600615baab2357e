"""Processes that a killed run left behind, found by process id and start time, and stopped. Linux; elsewhere none.

Children ask the kernel to die with their parent and sandboxes with their service, so there is rarely anything to find:
a program that was caught between two forks, or one that cleared the request. While a run lives, ``processes.json``
names everything below its services. An id alone would be no proof, since the kernel gives it away again; with the start
time, and the boot that it counts from, it is.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from glm5.runlog import write_atomic

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_WAIT_S = 5.0


class ProcessRecord:
    """The file that names the processes of a living run and their owner, this process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._written: dict[int, int] = {}

    def note(self, roots: Iterable[int]) -> None:
        """Record ``roots`` and all their descendants. A full disk is no reason to stop: the old record stays."""
        found = process_tree(roots)
        if found == self._written:
            return
        owner = os.getpid()
        record = {"boot": _boot(), "owner": {str(owner): start_time(owner)}, "processes": found}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self.path, json.dumps(record) + "\n")
            self._written = found
        except OSError:
            pass

    def remove(self) -> None:
        """Everything was stopped in order."""
        self.path.unlink(missing_ok=True)


def reap(path: Path) -> list[int]:
    """Kill the processes that the record at ``path`` names, if its owner is gone; the ids of those that still ran."""
    record = _read(path)
    if record is None or record["boot"] != _boot() or any(_is_same(*item) for item in record["owner"].items()):
        return []
    orphans = [int(process) for process, started in record["processes"].items() if _is_same(process, started)]
    for process in orphans:
        try:
            os.kill(process, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
    deadline = time.monotonic() + _WAIT_S
    while any(_is_same(str(process), record["processes"][str(process)]) for process in orphans):
        if time.monotonic() > deadline:  # in an uninterruptible call; nothing more can be done here
            break
        time.sleep(0.02)
    path.unlink(missing_ok=True)
    return sorted(orphans)


def process_tree(roots: Iterable[int]) -> dict[int, int]:
    """Start time of every living process among ``roots`` and their descendants, by id."""
    children: dict[int, list[int]] = {}
    starts: dict[int, int] = {}
    for entry in os.listdir("/proc") if _BOOT_ID.exists() else ():
        if entry.isdigit() and (fields := _stat(int(entry))) and fields[0] != "Z":
            children.setdefault(int(fields[1]), []).append(int(entry))
            starts[int(entry)] = int(fields[19])
    found: dict[int, int] = {}
    queue = list(roots)
    while queue:
        process = queue.pop()
        if process in starts:
            found[process] = starts[process]
        queue += children.get(process, [])
    return dict(sorted(found.items()))


def start_time(process: int) -> int | None:
    """Clock ticks after boot at which a living process started."""
    fields = _stat(process)
    return int(fields[19]) if fields and fields[0] != "Z" else None


def _is_same(process: str, started: int) -> bool:
    return start_time(int(process)) == started


def _stat(process: int) -> list[str] | None:
    """The fields of ``/proc/ID/stat`` from the state on; None when there is no such process."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _boot() -> str:
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""


def _read(path: Path) -> dict[str, Any] | None:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return {"boot": str(record["boot"]), "owner": dict(record["owner"]), "processes": dict(record["processes"])}
    except (OSError, ValueError, KeyError, TypeError):
        return None
