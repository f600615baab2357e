"""Sandboxes by the dozen: one fork server, a few clean sandboxes started ahead, each used for one episode.

Two backends behind one protocol. ``bwrap`` isolates: all namespaces, no capability, an unprivileged user, read-only
system directories, size-limited memory file systems, no network. ``none`` is a temporary directory with resource limits
and must be asked for by name. ``SandboxPool.start`` proves the isolation and raises SandboxError otherwise.

Inside, one ``/bin/sh`` reads commands from its standard input for the whole episode (a command costs about a fork);
Python programs run in forks of the fork server. Neither sees an expected answer, so nothing is gained by tampering.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import deque
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from glm5.env.sandbox.base import Limits
from glm5.env.sandbox.box import Box, read_start
from glm5.env.sandbox.directory import file_thread
from glm5.errors import ConfigError, SandboxError

BACKENDS = ("bwrap", "none")
_NOBODY = 65534
_WORK = "/work"
_PYTHON = "/opt/python"
_INFO_DESCRIPTOR = 3
_DIRECTORY_PREFIX = "glm5-sandbox-"
_REMEDY = 'install bubblewrap and allow user namespaces, or write sandbox = "none" to run without isolation'


class SandboxPool:
    """Starts, hands out and reaps sandboxes. Use from one event loop; ``start`` first, ``close`` last."""

    def __init__(self, backend: str = "bwrap", ready: int = 2, limits: Limits | None = None) -> None:
        """``ready``: how many clean sandboxes wait for their episode."""
        if backend not in BACKENDS:
            raise ConfigError(f"sandbox = {backend!r}: expected one of {', '.join(BACKENDS)}")
        self.backend = backend
        self.limits = limits or Limits()
        self._ready_size = ready if backend == "bwrap" else 0
        self._ready: deque[Box] = deque()
        self._refill: asyncio.Task[None] | None = None
        self._open: set[Box] = set()
        self._is_closing = False
        self._server: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._file_thread = file_thread(_unprivileged_user())

    async def start(self) -> None:
        """Start the fork server and prove the isolation. Raises SandboxError with one line when it is missing."""
        _remove_stale_directories()
        interpreter, library = _find_interpreter()
        settings = _settings(self.backend, self.limits, library)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        program = Path(__file__).with_name("forkserver.py")
        with theirs:
            self._server = subprocess.Popen(
                [interpreter, "-I", "-S", str(program), str(theirs.fileno()), json.dumps(settings)], env={},
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        self._socket = ours
        if self.backend == "bwrap":
            try:
                await self._prove_isolation()
            except BaseException:
                await self.close()
                raise

    async def acquire(self) -> Box:
        """A clean sandbox. The caller closes it."""
        box = self._ready.popleft() if self._ready else await self._create()
        if len(self._ready) < self._ready_size and (self._refill is None or self._refill.done()):
            self._refill = asyncio.create_task(self._fill())
        self._open.add(box)
        return box

    @property
    def num_open(self) -> int:
        """Sandboxes handed out and not closed."""
        return len(self._open)

    async def close(self) -> None:
        """Kill every sandbox and the fork server. May be called twice."""
        self._is_closing = True
        if self._refill is not None:
            await asyncio.gather(self._refill, return_exceptions=True)
        for box in [*self._open, *self._ready]:
            await box.close()
        self._ready.clear()
        self._file_thread.shutdown()
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._server is not None:
            try:
                await asyncio.to_thread(self._server.wait, 5)
            except subprocess.TimeoutExpired:
                self._server.kill()
                self._server.wait()
            self._server = None

    def forget(self, box: Box) -> None:
        """A sandbox that ``acquire`` gave was closed."""
        self._open.discard(box)

    def request_fork(self, letter: bytes, *descriptors: int) -> socket.socket:
        """Ask the fork server; returns our end of the new connection, non-blocking. See ``forkserver`` for letters."""
        if self._socket is None:
            raise SandboxError("the sandbox pool is closed; call start first")
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._socket, [letter], [theirs.fileno(), *descriptors])
            except OSError as error:
                ours.close()
                raise SandboxError(f"the fork server is gone ({error.strerror}); restart the service") from None
        ours.setblocking(False)
        return ours

    async def _fill(self) -> None:
        while len(self._ready) < self._ready_size and not self._is_closing:
            self._ready.append(await self._create())

    async def _create(self) -> Box:
        """A new sandbox; what was opened for it is closed again when it cannot be had."""
        with ExitStack() as opened:
            info = os.memfd_create("info")
            with os.fdopen(info, "rb"):
                directory, path = self._make_directory(opened) if self.backend == "none" else (None, None)
                connection = self.request_fork(b"S", info, *([] if directory is None else [directory]))
                opened.callback(connection.close)
                process = await read_start(connection, info, self.limits, isolated=directory is None)
            try:
                pidfd = os.pidfd_open(process)
                opened.callback(os.close, pidfd)
                if directory is None:
                    directory = os.open(f"/proc/{process}/root{_WORK}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except OSError as error:
                raise SandboxError(f"a new sandbox cannot be reached ({error.strerror})") from None
            opened.pop_all()
            return Box(self, self.limits, self._file_thread, connection, pidfd, directory, path)

    def _make_directory(self, opened: ExitStack) -> tuple[int, str]:
        """(descriptor, path) of a temporary work directory that belongs to the sandbox's user."""
        path = tempfile.mkdtemp(prefix=f"{_DIRECTORY_PREFIX}{os.getpid()}-")
        opened.callback(shutil.rmtree, path, ignore_errors=True)
        if (user := _unprivileged_user()) is not None:
            os.chown(path, user, user)
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        opened.callback(os.close, directory)
        return directory, path

    async def _prove_isolation(self) -> None:
        try:
            box = await self._create()
            try:
                results = [await box.exec(_SHELL_PROBE, timeout_s=10), await box.python(_PYTHON_PROBE, timeout_s=10)]
            finally:
                await box.close()
        except SandboxError as error:
            raise SandboxError(f"sandbox: isolation does not work: {error}; {_REMEDY}") from None
        for result, expected in zip(results, (f"0000000000000000 1 {self.limits.processes}", "isolated"), strict=True):
            if result.output.strip() != expected:
                raise SandboxError(f"sandbox: isolation is incomplete: expected {expected!r}, got "
                                   f"{' '.join(result.output.split())[:200]!r}; {_REMEDY}")


def _settings(backend: str, limits: Limits, library: str) -> dict[str, Any]:
    """What the fork server must know. ``library``: standard library of its interpreter."""
    user = _unprivileged_user()
    settings = {
        "user": user,
        "limits": {"RLIMIT_AS": limits.memory_bytes, "RLIMIT_FSIZE": limits.file_bytes,
                   "RLIMIT_NOFILE": limits.open_files, "RLIMIT_CORE": 0},
        "program_limits": {"RLIMIT_CPU": limits.cpu_s},
        "environment": {"PATH": "/usr/bin:/bin", "TMPDIR": "/tmp", "LANG": "C.UTF-8"},
    }
    if backend == "none":
        return {**settings, "shell": ["/bin/sh"], "work": ".",
                "python_path": [library, f"{library}/lib-dynload"]}
    command, library = _bwrap_command(limits, library, os.geteuid() if user is None else user)
    # Without a user namespace of its own, this limit would count the user's other processes.
    settings["program_limits"]["RLIMIT_NPROC"] = limits.processes
    return {**settings, "shell": command, "info": _INFO_DESCRIPTOR, "work": _WORK,
            "python_path": [library, f"{library}/lib-dynload"]}


def _find_interpreter() -> tuple[str, str]:
    """(program, standard library) of the interpreter that the fork server runs and that sandboxes see.

    The system's comes first: it is inside /usr, which every sandbox sees anyway.
    """
    probe = ("import ctypes, json, os, resource, socket, sysconfig; "
             "os.pidfd_open, socket.recv_fds; print(sysconfig.get_path('stdlib'))")
    for program in ("/usr/bin/python3", sys.executable):
        try:
            found = subprocess.run([program, "-I", "-S", "-c", probe], capture_output=True, text=True, timeout=30)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if found.returncode == 0:
            return program, found.stdout.strip()
    raise SandboxError(f"{sys.executable}: has no ctypes or no pidfd_open; use a complete Python on Linux")


def _bwrap_command(limits: Limits, library: str, user: int) -> tuple[list[str], str]:
    """(command line of one sandbox, standard library as seen inside)."""
    program = shutil.which("bwrap")
    if program is None:
        raise SandboxError('sandbox: bwrap is not installed; install bubblewrap (apt-get install bubblewrap), '
                           'or write sandbox = "none" to run without isolation')
    words = [program, "--unshare-all", "--unshare-user", "--disable-userns", "--cap-drop", "ALL", "--clearenv",
             "--new-session", "--die-with-parent", "--uid", str(_NOBODY), "--gid", str(_NOBODY),
             "--hostname", f"glm5-{os.getpid()}", "--ro-bind", "/usr", "/usr"]
    for name in ("bin", "lib", "lib32", "lib64", "sbin"):
        if os.path.islink(f"/{name}"):
            words += ["--symlink", f"usr/{name}", f"/{name}"]
        elif os.path.isdir(f"/{name}"):
            words += ["--ro-bind", f"/{name}", f"/{name}"]
    if not library.startswith("/usr/") and _is_reachable(library, user):
        words += ["--ro-bind", library, _PYTHON]
        library = _PYTHON
    for device in ("null", "zero", "urandom"):
        words += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    disk = str(limits.disk_bytes)
    words += ["--proc", "/proc", "--size", disk, "--tmpfs", "/tmp", "--size", disk, "--tmpfs", _WORK,
              "--remount-ro", "/", "--chdir", _WORK, "--setenv", "PATH", "/usr/bin:/bin", "--setenv", "HOME", _WORK,
              "--info-fd", str(_INFO_DESCRIPTOR), "--", "/bin/sh"]
    return words, library


def _is_reachable(path: str, user: int) -> bool:
    """True when ``user`` may search every directory on the way to ``path``, as its owner or as anybody."""
    found = [Path(path).stat(), *(parent.stat() for parent in Path(path).parents)]
    return all(entry.st_mode & (0o100 if entry.st_uid == user else 0o001) for entry in found)


def _unprivileged_user() -> int | None:
    """User id that sandboxes run as outside their namespace; None: the caller's own, who is no administrator."""
    return _NOBODY if os.geteuid() == 0 else None


def _remove_stale_directories() -> None:
    """Directories of services that were killed before they could remove them."""
    for path in Path(tempfile.gettempdir()).glob(f"{_DIRECTORY_PREFIX}*-*"):
        owner = path.name.removeprefix(_DIRECTORY_PREFIX).split("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(path, ignore_errors=True)


_SHELL_PROBE = """
while read -r key value rest; do case "$key$value" in CapEff:*|NoNewPrivs:*) printf '%s ' "$value";; esac
done < /proc/self/status
while read -r first second third rest; do case "$first$second" in Maxprocesses) echo "$third";; esac
done < /proc/self/limits
"""
_PYTHON_PROBE = f"""
import ctypes, os
status = dict(line.split(":\\t", 1) for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
libc = ctypes.CDLL(None, use_errno=True)
faults = []
if os.getuid() != {_NOBODY}: faults.append(f"user id {{os.getuid()}}")
if int(status["CapEff"], 16): faults.append("capabilities " + status["CapEff"])
if status["NoNewPrivs"] != "1": faults.append("new privileges are possible")
if libc.unshare(0x10000000) == 0: faults.append("a nested user namespace was allowed")
if libc.mount(b"none", b"/tmp", b"tmpfs", 0, None) == 0: faults.append("mount was allowed")
if len(open("/proc/net/dev").read().splitlines()) > 3: faults.append("network devices are visible")
if os.path.exists("/etc/passwd"): faults.append("/etc is visible")
if len([name for name in os.listdir("/proc") if name.isdigit()]) > 5: faults.append("host processes are visible")
for path in ("/", "/usr", "/dev"):
    try:
        open(path + "/probe", "w")
        faults.append(path + " is writable")
    except OSError:
        pass
print("; ".join(faults) or "isolated")
"""
