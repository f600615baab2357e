"""The run directory: the interface between processes that are not on the wire, and to whoever reads a run later.

``runs/<name>/{config.json, metrics.jsonl, events.jsonl, ledger.sqlite, weights/, checkpoints/, report.md}``.
Appends are one ``write`` of one line, so that readers never see half a record; whole files and directories are written
beside their target as ``.NAME.PROCESS.tmp`` and renamed. Whoever takes over a run directory first calls
``remove_leftovers``, which undoes what a killed writer left half-done.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

T = TypeVar("T")
LINE_PERIOD_S = 10.0
"""Time between two lines of progress where there is no terminal."""
_UNFINISHED = re.compile(r"\.(?P<name>.+)\.(?P<process>\d+)\.(?P<kind>tmp|old)")


def temporary_path(path: Path) -> Path:
    """Where this process writes what is going to be ``path``."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def replace_directory(temporary: Path, target: Path) -> None:
    """Put the complete directory ``temporary`` in the place of ``target``.

    An old ``target`` is moved aside first; a process that is killed between the two renames loses nothing, because
    ``remove_leftovers`` brings the old one back.
    """
    old = target.with_name(f".{target.name}.{os.getpid()}.old")
    if target.exists():
        os.rename(target, old)
    try:
        os.rename(temporary, target)
    except OSError:
        if old.exists():
            os.rename(old, target)
        raise
    flush_to_disk(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def remove_directory(path: Path) -> None:
    """Remove a directory that counts as complete: it loses its name before its contents."""
    hidden = temporary_path(path)
    os.rename(path, hidden)
    shutil.rmtree(hidden)


def remove_leftovers(directory: Path) -> None:
    """Clear everything below ``directory`` that writers which no longer run left unfinished.

    Call it before this process writes there: unfinished files under its own id are of an earlier process of that id.
    """
    for folder, folders, files in os.walk(directory):
        for name in (*folders, *files):
            unfinished = _UNFINISHED.fullmatch(name)
            if unfinished is None or _is_another_process(int(unfinished["process"])):
                continue
            path, target = Path(folder, name), Path(folder, unfinished["name"])
            if unfinished["kind"] == "old" and not target.exists():
                path.rename(target)
            elif path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        folders[:] = [name for name in folders if not _UNFINISHED.fullmatch(name)]


def flush_to_disk(path: Path) -> None:
    """Return when the contents of a file, or the names in a directory, survive a power failure."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _is_another_process(process_id: int) -> bool:
    if process_id == os.getpid():
        return False
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def write_atomic(path: Path, content: str | bytes) -> None:
    """Replace ``path`` by ``content``: a reader sees the old or the new file, whole."""
    temporary = temporary_path(path)
    try:
        with open(temporary, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Records of a ``.jsonl`` file; a torn last line (a crash while appending) is left out."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


class RunLog:
    """Writer of one run directory; of several processes of a run only one ``writes``."""

    def __init__(self, directory: str | Path, writes: bool = True) -> None:
        self.directory, self._writes = Path(directory), writes
        self.directory.mkdir(parents=True, exist_ok=True)

    def write_config(self, config: Any) -> None:
        """Write the resolved configuration, a dataclass or a dict, as ``config.json``."""
        data = dataclasses.asdict(config) if dataclasses.is_dataclass(config) else config
        if self._writes:
            write_atomic(self.directory / "config.json", json.dumps(data, indent=1, default=str) + "\n")

    def metrics(self, **values: Any) -> None:
        """Append one record to ``metrics.jsonl``; by convention it has ``step``."""
        self._append("metrics.jsonl", {"time": round(time.time(), 3), **values})

    def event(self, kind: str, **values: Any) -> None:
        """Append one record to ``events.jsonl``."""
        self._append("events.jsonl", {"time": round(time.time(), 3), "kind": kind, **values})

    def _append(self, name: str, record: dict[str, Any]) -> None:
        if not self._writes:
            return
        line = (json.dumps(record, default=float) + "\n").encode()
        path = self.directory / name
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            written = os.write(file, line)
            if written < len(line):  # the disk filled up in the middle of the line
                os.ftruncate(file, os.fstat(file).st_size - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from None
        finally:
            os.close(file)


class ProgressBar:
    """Progress of long work on stderr: a bar on a terminal, a plain line every few seconds elsewhere."""

    def __init__(self, title: str, total: int, unit: str, progress: Progress | None, shown: bool = True) -> None:
        self._shown = shown
        self._title, self._total, self._unit = title, total, unit
        self._progress = progress
        self._task = progress.add_task(title, total=total, note="") if progress else None
        self._start = self._last_line = time.monotonic()
        self._done = 0

    def advance(self, done: int, units: float, note: str = "") -> None:
        """``done`` of the total steps are finished, ``units`` (tokens, documents …) in all since the start."""
        elapsed = max(time.monotonic() - self._start, 1e-9)
        text = f"{units / elapsed:,.0f} {self._unit}/s {note}".rstrip()
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=done, note=text)
            return
        now = time.monotonic()
        if self._shown and (now - self._last_line >= LINE_PERIOD_S or done >= self._total > self._done):
            self._last_line = now
            eta = elapsed / max(done, 1) * max(self._total - done, 0)
            print(f"{self._title}: {done}/{self._total} {text} ETA {eta:.0f}s", file=sys.stderr, flush=True)
        self._done = done


@contextmanager
def progress_bar(title: str, total: int, unit: str = "tokens", shown: bool = True) -> Iterator[ProgressBar]:
    """Show ``title`` while the body runs ``total`` steps; see ``ProgressBar.advance``. Without ``shown``, nothing."""
    console = Console(stderr=True)
    if not (shown and console.is_terminal):
        yield ProgressBar(title, total, unit, None, shown)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:.0f}/{task.total:.0f}"),
               TextColumn("{task.fields[note]}"), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=False) as progress:
        yield ProgressBar(title, total, unit, progress)


def tracked(items: Sequence[T], title: str, unit: str, size: Callable[[T], float] = lambda item: 1) -> Iterator[T]:
    """``items`` one by one under a progress bar of their number; ``size`` gives the ``unit``s of one for the rate."""
    units = 0.0
    with progress_bar(title, len(items), unit) as bar:
        for done, item in enumerate(items, start=1):
            yield item
            units += size(item)
            bar.advance(done, units)
