"""Processes of ours: start, announce, find, stop. Nothing here kills by name; every child is stopped by its id.

A service binds its socket first (port 0 takes a free one), then writes ``{"url", "pid"}`` to a ready file, then serves.
A child asks the kernel to kill it when its parent dies, so that ``kill -9`` of the parent leaves nothing behind.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from glm5.errors import ServiceError
from glm5.runlog import remove_leftovers, write_atomic

PARENT_VARIABLE = "GLM5_PARENT_PID"
_PR_SET_PDEATHSIG = 1
_KILLED_WITHIN_S = 30.0
"""The kernel ends a killed process at once, unless it is in an uninterruptible call or the machine is overloaded."""
_YOUNG_OBJECTS = 10_000
"""New objects after which the collector looks for cycles; Python's own default is 700."""


def die_with_parent() -> None:
    """If a glm5 process started this one, arrange to be killed when that parent dies. Linux; elsewhere a no-op."""
    expected = os.environ.get(PARENT_VARIABLE)
    if expected is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(expected):  # the parent died before the request was in place
        os._exit(1)


def spawn(arguments: Sequence[str], log_path: Path,
          environment: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start ``python -m glm5 <arguments>`` in its own process group with output in ``log_path``.

    Call from the main thread: the kernel ties the parent-death signal to the thread that started the child.
    """
    log_path.parent.mkdir(parents=True, exist_ok=True)
    variables = {**os.environ, PARENT_VARIABLE: str(os.getpid()), **(environment or {})}
    with open(log_path, "ab") as log:
        return subprocess.Popen([sys.executable, "-m", "glm5", *arguments], stdin=subprocess.DEVNULL, stdout=log,
                                stderr=subprocess.STDOUT, start_new_session=True, env=variables)


def wait_ready(process: subprocess.Popen[bytes], ready_file: Path, log_path: Path, timeout_s: float = 60) -> str:
    """URL of a service that writes ``ready_file``. Raises ServiceError when it exits or the deadline passes."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if ready_file.exists():
            return str(json.loads(ready_file.read_text())["url"])
        code = process.poll()
        if code is not None:
            raise ServiceError(f"{log_path.stem}: exited with {code} before it was ready: {last_line(log_path)}")
        time.sleep(0.05)
    raise ServiceError(f"{log_path.stem}: not ready after {timeout_s:.0f} s: {last_line(log_path)}; see {log_path}")


def stop(process: subprocess.Popen[bytes], grace_s: float = 5) -> None:
    """Terminate a child and its process group; kill what is left after ``grace_s``. A child that does not end even
    then is left to the kernel."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            process.kill()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_KILLED_WITHIN_S)
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


@contextmanager
def lock_directory(directory: Path) -> Iterator[None]:
    """Hold ``directory`` for this process: two runs in one directory would train the same episodes twice.

    Removes what killed processes left unfinished there. Raises ServiceError naming the process that holds it, or the
    directory when it cannot be written. The kernel releases the lock when the holder dies.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = open(directory / ".lock", "a+")  # noqa: SIM115  closed by the next statement
    except OSError as error:
        raise ServiceError(f"{directory}: cannot be written ({error.strerror}); choose another run "
                           "directory") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise ServiceError(f"{directory}: process {file.read().strip() or 'unknown'} is running here; wait for it, "
                               "stop it, or choose another run directory") from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        remove_leftovers(directory)
        yield


def reserve(host: str) -> socket.socket:
    """A bound socket that does not listen: as long as it is open, nobody else is given its port, and ``bind`` can take
    it, again and again."""
    holder = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((host, 0))
    return holder


def bind(host: str, port: int) -> socket.socket:
    """A listening TCP socket. Raises ServiceError when the address is taken."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise ServiceError(f"{host}:{port}: {error.strerror}; choose another --port (0 takes a free one)") from None
    listener.set_inheritable(False)
    return listener


def serve_app(app: Any, host: str = "127.0.0.1", port: int = 0, ready_file: Path | None = None,
              failure: Callable[[], BaseException | None] = lambda: None, grace_s: float = 2,
              protocol: Any = "auto") -> None:
    """Serve an ASGI application until SIGTERM or SIGINT; announce its URL in ``ready_file``.

    As soon as ``failure`` gives an exception, the server stops and the exception is raised: a service that cannot do
    its work must not look well. At the end no connection is accepted any more, and requests may run on for
    ``grace_s``. ``protocol`` is uvicorn's name or class of the HTTP protocol.
    """
    import uvicorn

    class Server(uvicorn.Server):
        async def on_tick(self, counter: int) -> bool:
            return await super().on_tick(counter) or failure() is not None

    listener = bind(host, port)
    url = f"http://{host}:{listener.getsockname()[1]}"
    if ready_file is not None:
        ready_file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(ready_file, json.dumps({"url": url, "pid": os.getpid()}))
    settings = uvicorn.Config(app, log_level="warning", access_log=False, timeout_keep_alive=75,
                              timeout_graceful_shutdown=max(1, round(grace_s)), http=protocol, server_header=False)
    _settle_collector()
    _allow_connections()
    Server(settings).run(sockets=[listener])
    error = failure()
    if error is not None:
        raise error


def _settle_collector() -> None:
    """Spare a service the search for cycles in what is none: modules and tables, which live as long as the process,
    and the thousands of objects that one JSON body consists of."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS)


def _allow_connections() -> None:
    """A thousand episodes are a few thousand sockets; many systems allow 1024 unless asked."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def last_line(path: Path) -> str:
    """What a process said last in its log."""
    lines = path.read_text(errors="replace").strip().splitlines() if path.exists() else []
    return lines[-1] if lines else "(no output)"
