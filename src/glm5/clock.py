"""Where the time and memory of a run went, kept through crashes.

A thread adds each second to the step that is running and samples the resident memory of this process and of all its
descendants; the totals are in ``clock.json`` of the run directory, replaced atomically. ``kill -9`` loses one second.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from glm5.runlog import write_atomic

_TICK_S = 1.0


class Clock:
    """Seconds per named step and the peak memory, over all attempts at one run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        saved = json.loads(path.read_text()) if path.exists() else {}
        self.seconds: dict[str, float] = saved.get("seconds", {})
        self.peak_rss_bytes: int = saved.get("peak_rss_bytes", 0)
        self.attempts: int = saved.get("attempts", 0) + 1
        self._lock = threading.Lock()

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Count the time of the body under ``name``."""
        stopped = threading.Event()
        failures: list[OSError] = []
        ticker = threading.Thread(target=self._tick, args=(name, stopped, failures), daemon=True)
        ticker.start()
        try:
            yield
        finally:
            stopped.set()
            ticker.join(timeout=10)
        if failures:
            raise failures[-1]

    def _tick(self, name: str, stopped: threading.Event, failures: list[OSError]) -> None:
        last = time.monotonic()
        while True:
            finished = stopped.wait(_TICK_S)
            now = time.monotonic()
            with self._lock:
                self.seconds[name] = self.seconds.get(name, 0.0) + now - last
                self.peak_rss_bytes = max(self.peak_rss_bytes, tree_rss_bytes(os.getpid()))
                state = {"seconds": self.seconds, "peak_rss_bytes": self.peak_rss_bytes, "attempts": self.attempts}
                try:
                    write_atomic(self._path, json.dumps(state))
                    failures.clear()
                except OSError as error:  # a full disk; raised when the step ends, unless a later write succeeds
                    failures.append(error)
            last = now
            if finished:
                return


def tree_rss_bytes(root: int) -> int:
    """Resident bytes of process ``root`` and of all its descendants (Linux; shared pages count once per process)."""
    children: dict[int, list[int]] = {}
    resident: dict[int, int] = {}
    page = os.sysconf("SC_PAGE_SIZE")
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if not entry.isdigit():
            continue
        try:
            fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
        except OSError:  # the process ended while we were looking
            continue
        children.setdefault(int(fields[1]), []).append(int(entry))
        resident[int(entry)] = int(fields[21]) * page
    total, queue = 0, [root]
    while queue:
        process = queue.pop()
        total += resident.get(process, 0)
        queue += children.get(process, [])
    return total
