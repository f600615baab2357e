"""The process above the trainer: starts it again when it is killed, hangs, or fails in the middle of a run.

The trainer writes one byte a second into a pipe, from a thread that does so only while the main thread moves on; the
watchdog holds the other end. Nothing of this touches the disk or reads the wall clock, so neither a full disk nor a
clock that jumps looks like a death. A trainer that falls silent for ``SILENT_S`` is killed, and its services, which ask
the kernel to die with it, go too; the next start continues from the newest checkpoint.

An error before the very first sign of life is the user's and ends the watchdog with the trainer's exit code. Later
ones, a full disk for example, are answered by another start, with growing pauses up to a cap, until there were
``max_restarts`` within ``restart_window_s``.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from glm5.errors import ServiceError
from glm5.process import PARENT_VARIABLE, stop
from glm5.rl.operation import SupervisionConfig
from glm5.runlog import RunLog

PIPE_VARIABLE = "GLM5_HEARTBEAT_FD"
BEAT_S = 1.0
SILENT_S = 8.0
START_S = 300.0
"""A trainer may take this long to load its weights and give the first sign of life."""


class Heartbeat:
    """The trainer's end of the pipe; use as a context manager. Without a watchdog it does nothing.

    The main thread calls ``note`` between pieces of work; when it has not for ``stall_s``, the beats end.
    """

    def __init__(self, stall_s: float) -> None:
        self._stall_s, self._noted = stall_s, time.monotonic()
        self._pipe = int(os.environ.get(PIPE_VARIABLE, -1))
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        if self._pipe >= 0:
            os.set_inheritable(self._pipe, False)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        if self._pipe >= 0:
            self._thread.join(timeout=5)

    def note(self) -> None:
        """The main thread moves on."""
        self._noted = time.monotonic()

    def _beat(self) -> None:
        while not self._stopped.is_set():
            if time.monotonic() - self._noted < self._stall_s:
                try:
                    os.write(self._pipe, b".")
                except OSError:  # nobody listens any more
                    return
            self._stopped.wait(BEAT_S)


def is_watched() -> bool:
    """Whether a watchdog started this process."""
    return PIPE_VARIABLE in os.environ


def keep_running(arguments: Sequence[str], run_dir: Path, config: SupervisionConfig,
                 program: Sequence[str] = (sys.executable, "-m", "glm5")) -> None:
    """Run ``program arguments`` until it ends well. Call from the main thread.

    Raises SystemExit with the program's code when it fails before its first sign of life, ServiceError when it dies
    too often.
    """
    log = RunLog(run_dir)
    deaths: list[float] = []
    has_lived = False
    while True:
        why, lived = _run_once([*program, *arguments], has_lived)
        has_lived |= lived
        if not why:
            return
        now = time.monotonic()
        deaths = [death for death in deaths if now - death < config.restart_window_s] + [now]
        _note(log.event, "trainer_died", why=why, deaths=len(deaths))
        if len(deaths) > config.max_restarts:
            raise ServiceError(f"{run_dir}: the trainer {why}, the {len(deaths)}th time within "
                               f"{config.restart_window_s:.0f} s; read its last message, then run again")
        time.sleep(min(config.backoff_s * 2 ** (len(deaths) - 1), config.max_backoff_s))


def _run_once(command: Sequence[str], has_lived: bool) -> tuple[str, bool]:
    """One life of the trainer: why it has to be started again, "" when it ended well; whether it gave a sign of life.

    ``has_lived``: an earlier life did, so whatever goes wrong now is not the configuration.
    """
    ours, theirs = os.pipe()
    environment = {**os.environ, PIPE_VARIABLE: str(theirs), PARENT_VARIABLE: str(os.getpid())}
    try:
        process = subprocess.Popen(command, env=environment, pass_fds=[theirs])
    finally:
        os.close(theirs)
    try:
        return _watch(process, ours, has_lived)
    finally:
        os.close(ours)
        stop(process, grace_s=30)


def _watch(process: subprocess.Popen[bytes], pipe: int, has_lived: bool) -> tuple[str, bool]:
    alive = False
    silent_since = time.monotonic()
    while True:
        readable, _, _ = select.select([pipe], [], [], BEAT_S)
        beats = os.read(pipe, 4096) if readable else b""
        if beats:
            alive, silent_since = True, time.monotonic()
        code = process.wait(5) if readable and not beats else process.poll()  # the pipe closes with the process
        if code is not None:
            if code in (0, 130, -signal.SIGINT):
                return "", alive
            if code > 0 and not (alive or has_lived):
                raise SystemExit(code)
            return f"exited with {code}", alive
        silent_s = time.monotonic() - silent_since
        if silent_s > (SILENT_S if alive else START_S):
            process.kill()
            return f"gave no sign of life for {silent_s:.0f} s", alive


def _note(event: Callable[..., None], kind: str, **values: object) -> None:
    try:
        event(kind, **values)
    except OSError as error:  # the disk may be what the trainer died of
        print(f"{kind}: {values} (not recorded: {error.strerror})", file=sys.stderr, flush=True)
