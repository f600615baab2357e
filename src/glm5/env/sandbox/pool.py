"""Sandboxes by the dozen: one fork server, a few clean sandboxes started ahead, each used for one episode.

Two backends behind one protocol. ``bwrap`` isolates: all namespaces, no capability, an unprivileged user, read-only
system directories, size-limited memory file systems, no network. ``none`` is a temporary directory with resource limits
and must be asked for by name. ``SandboxPool.start`` proves the isolation and raises SandboxError otherwise.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from glm5.errors import ConfigError, SandboxError
from glm5.env.sandbox.base import ExecResult, Limits
from glm5.env.sandbox.directory import WorkDirectory, file_thread

T = TypeVar("T")
BACKENDS = ("bwrap", "none")
_NOBODY = 65534
_WORK = "/work"
_PYTHON = "/opt/python"
_MACHINERY_S = 10.0
"""Time that the fork server may take beyond a command's own limit before the sandbox counts as broken."""
_DIRECTORY_PREFIX = "glm5-sandbox-"


class SandboxPool:
    """Starts, hands out and reaps sandboxes. Use from one event loop; ``start`` first, ``close`` last."""

    def __init__(self, backend: str = "bwrap", ready: int = 2, limits: Limits | None = None) -> None:
        """``ready``: how many clean sandboxes wait for their episode."""
        if backend not in BACKENDS:
            raise ConfigError(f"sandbox = {backend!r}: expected one of {', '.join(BACKENDS)}")
        self.backend = backend
        self.limits = limits or Limits()
        self.file_thread = file_thread(_NOBODY if self._drops_user else None)
        self._ready_size = ready if backend == "bwrap" else 0
        self._ready: deque[BoxedSandbox] = deque()
        self._refill: asyncio.Task[None] | None = None
        self._open: set[BoxedSandbox] = set()
        self._server: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    async def start(self) -> None:
        """Start the fork server and prove the isolation. Raises SandboxError with one line when it is missing."""
        _remove_stale_directories()
        interpreter, library = _find_interpreter()
        settings = self._settings(library)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        program = Path(__file__).with_name("forkserver.py")
        self._server = subprocess.Popen(
            [interpreter, "-I", "-S", str(program), str(theirs.fileno()), json.dumps(settings)], env={},
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        theirs.close()
        self._socket = ours
        if self.backend == "bwrap":
            try:
                await self._prove_isolation()
            except BaseException:
                await self.close()
                raise

    async def acquire(self) -> BoxedSandbox:
        """A clean sandbox. The caller closes it."""
        sandbox = self._ready.popleft() if self._ready else await self._create()
        if self._ready_size and (self._refill is None or self._refill.done()):
            self._refill = asyncio.create_task(self._fill())
        self._open.add(sandbox)
        return sandbox

    @property
    def num_open(self) -> int:
        """Sandboxes handed out and not closed."""
        return len(self._open)

    async def close(self) -> None:
        """Kill every sandbox and the fork server. May be called twice."""
        if self._refill is not None:
            self._refill.cancel()
            await asyncio.gather(self._refill, return_exceptions=True)
        for sandbox in [*self._open, *self._ready]:
            await sandbox.close()
        self._ready.clear()
        self.file_thread.shutdown()
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._server is not None:
            try:
                await asyncio.to_thread(self._server.wait, 2)
            except subprocess.TimeoutExpired:
                self._server.kill()
                self._server.wait()
            self._server = None

    async def _fill(self) -> None:
        while len(self._ready) < self._ready_size:
            self._ready.append(await self._create())

    async def _create(self) -> BoxedSandbox:
        if self.backend == "none":
            path = tempfile.mkdtemp(prefix=f"{_DIRECTORY_PREFIX}{os.getpid()}-")
            if self._drops_user:
                os.chown(path, _NOBODY, _NOBODY)
            return BoxedSandbox(self, os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), None, path)
        connection = self._send(b"S")
        try:
            process = await _first_process(connection)
            return BoxedSandbox(self, _open_work(process), (process, connection), None)
        except BaseException:
            connection.close()
            raise

    def _send(self, letter: bytes, descriptor: int | None = None) -> socket.socket:
        """Ask the fork server for a fork; returns our end of its connection."""
        if self._socket is None:
            raise SandboxError("the sandbox pool is closed; call start first")
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                others = [] if descriptor is None else [descriptor]
                socket.send_fds(self._socket, [letter], [theirs.fileno(), *others])
            except OSError as error:
                ours.close()
                raise SandboxError(f"the fork server of the sandboxes is gone ({error.strerror}); restart the service") from None
        ours.setblocking(False)
        return ours

    @property
    def _drops_user(self) -> bool:
        return os.geteuid() == 0

    def _settings(self, library: str) -> dict[str, Any]:
        """What the fork server must know. ``library``: standard library of its interpreter."""
        limits = self.limits
        resources = {"RLIMIT_AS": limits.memory_bytes, "RLIMIT_CPU": limits.cpu_s, "RLIMIT_FSIZE": limits.file_bytes,
                     "RLIMIT_NOFILE": limits.open_files, "RLIMIT_CORE": 0}
        work, bwrap, seen_library = ".", [], library
        if self.backend == "bwrap":
            # Without a user namespace of its own this limit would count the user's other processes.
            resources["RLIMIT_NPROC"] = limits.processes
            work = _WORK
            bwrap, seen_library = _bwrap_command(limits, library, _NOBODY if self._drops_user else os.geteuid())
        return {"parent": os.getpid(), "user": _NOBODY if self._drops_user else None, "limits": resources, "work": work,
                "environment": {"PATH": "/usr/bin:/bin", "HOME": work, "TMPDIR": "/tmp", "LANG": "C.UTF-8"},
                "output_bytes": limits.output_bytes, "bwrap": bwrap,
                "python_path": [seen_library, f"{seen_library}/lib-dynload"]}

    async def _prove_isolation(self) -> None:
        remedy = 'install bubblewrap and allow user namespaces, or write sandbox = "none" to run without isolation'
        try:
            sandbox = await self.acquire()
            try:
                result = await sandbox.python(_PROBE, timeout_s=10)
            finally:
                await sandbox.close()
        except SandboxError as error:
            raise SandboxError(f"sandbox: isolation does not work: {error}; {remedy}") from None
        if result.exit_code != 0 or result.output.strip() != "isolated":
            found = result.output.strip().splitlines()
            raise SandboxError(f"sandbox: isolation is incomplete: {found[-1] if found else 'no output'}; {remedy}")


class BoxedSandbox:
    """A sandbox of a pool; see ``base.Sandbox`` for the protocol."""

    def __init__(self, pool: SandboxPool, work: int, process: tuple[int, socket.socket] | None, path: str | None) -> None:
        """``work``: open work directory; ``process``: the first process and its connection (bwrap); ``path``: of
        the work directory (none). The sandbox owns all of them."""
        self._pool = pool
        self._files = WorkDirectory(work, pool.limits.file_bytes)
        self._work = work
        self._pidfd, self._connection = (os.pidfd_open(process[0]), process[1]) if process else (None, None)
        self._path = path
        self._closed = False

    async def exec(self, command: str, stdin: str = "", timeout_s: float = 5.0) -> ExecResult:
        """Run ``command`` with /bin/sh in the work directory."""
        return await self._run("sh", command, stdin, timeout_s)

    async def python(self, source: str, stdin: str = "", timeout_s: float = 5.0) -> ExecResult:
        """Run ``source`` in a fork of a booted interpreter, about 3 ms of processor time."""
        return await self._run("python", source, stdin, timeout_s)

    async def write_file(self, path: str, text: str) -> None:
        """Create or replace a file."""
        await self._in_file_thread(self._files.write, path, text)

    async def read_file(self, path: str) -> str | None:
        """Text of a file or None."""
        return await self._in_file_thread(self._files.read, path)

    async def files(self) -> dict[str, str]:
        """The whole work directory."""
        return await self._in_file_thread(self._files.tree)

    async def close(self) -> None:
        """Kill everything inside."""
        if self._closed:
            return
        self._closed = True
        self._pool._open.discard(self)
        self._files.close()
        if self._pidfd is not None:
            try:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            except ProcessLookupError:
                pass
            os.close(self._pidfd)
        if self._connection is not None:
            self._connection.close()
        if self._path is not None:
            shutil.rmtree(self._path, ignore_errors=True)

    async def _in_file_thread(self, function: Callable[..., T], *arguments: str) -> T:
        if self._closed:
            raise SandboxError("the sandbox is closed; acquire a new one")
        return await asyncio.get_running_loop().run_in_executor(self._pool.file_thread, function, *arguments)

    async def _run(self, kind: str, text: str, stdin: str, timeout_s: float) -> ExecResult:
        if self._closed:
            raise SandboxError("the sandbox is closed; acquire a new one")
        request = {"kind": kind, "text": text, "stdin": stdin, "timeout_s": timeout_s}
        isolated = self._pidfd is not None
        connection = self._pool._send(b"E" if isolated else b"D", self._pidfd if isolated else self._work)
        with connection:
            try:
                async with asyncio.timeout(timeout_s + _MACHINERY_S):
                    loop = asyncio.get_running_loop()
                    await loop.sock_sendall(connection, json.dumps(request).encode() + b"\n")
                    answer = json.loads(await _read_all(connection) or b"{}")
            except TimeoutError:
                raise SandboxError(f"no answer from the sandbox {_MACHINERY_S:.0f} s after the command's limit") from None
            except (OSError, ValueError) as error:
                raise SandboxError(f"the sandbox's connection broke ({error})") from None
        if answer.get("gone"):
            return ExecResult(exit_code=137, output="the sandbox was killed by an earlier command")
        if "exit_code" not in answer:
            raise SandboxError(f"the sandbox could not run a command: {answer.get('error', 'no answer')}")
        return ExecResult(**answer)


def _find_interpreter() -> tuple[str, str]:
    """(program, standard library) of the interpreter that the fork server runs and that sandboxes see.

    The system's comes first: it is inside /usr, which every sandbox sees anyway.
    """
    probe = ("import ctypes, json, os, resource, select, socket, sysconfig; "
             "os.pidfd_open, socket.recv_fds; print(sysconfig.get_path('stdlib'))")
    for program in ("/usr/bin/python3", sys.executable):
        try:
            found = subprocess.run([program, "-I", "-S", "-c", probe], capture_output=True, text=True, timeout=30)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if found.returncode == 0:
            return program, found.stdout.strip()
    raise SandboxError(f"{sys.executable}: cannot run a plain Python program (ctypes, pidfd_open); use a complete Python 3.11 on Linux")


def _bwrap_command(limits: Limits, library: str, user: int) -> tuple[list[str], str]:
    """(command line of one sandbox, standard library as seen inside). The payload ``cat`` keeps the namespaces alive
    until its input closes."""
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
    disk = str(limits.disk_bytes)
    words += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev", "--size", disk, "--tmpfs", "/tmp",
              "--size", disk, "--tmpfs", _WORK, "--remount-ro", "/", "--chdir", _WORK, "--info-fd", "3", "--", "cat"]
    return words, library


def _is_reachable(path: str, user: int) -> bool:
    """True when ``user`` may search every directory on the way to ``path``, as its owner or as anybody."""
    found = [Path(path).stat(), *(parent.stat() for parent in Path(path).parents)]
    return all(entry.st_mode & (0o100 if entry.st_uid == user else 0o001) for entry in found)


async def _first_process(connection: socket.socket) -> int:
    """Id of the sandbox's first process, once the payload echoes, which it does only in a finished sandbox."""
    loop = asyncio.get_running_loop()
    heard = b""
    try:
        async with asyncio.timeout(_MACHINERY_S):
            await loop.sock_sendall(connection, b"ready\n")
            while not heard.endswith(b"ready\n"):
                try:
                    piece = await loop.sock_recv(connection, 4096)
                except ConnectionResetError:  # reported once when bwrap ended without reading; its message follows
                    continue
                if not piece:
                    message = heard.decode(errors="replace").strip().splitlines()
                    raise SandboxError(message[-1] if message else "bwrap ended without a message")
                heard += piece
    except TimeoutError:
        raise SandboxError(f"bwrap was not ready after {_MACHINERY_S:.0f} s") from None
    except OSError as error:
        raise SandboxError(f"bwrap was not started ({error.strerror})") from None
    return int(json.loads(heard[: heard.rindex(b"}") + 1])["child-pid"])


def _open_work(process: int) -> int:
    try:
        return os.open(f"/proc/{process}/root{_WORK}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise SandboxError(f"the work directory of a sandbox cannot be opened ({error.strerror})") from None


async def _read_all(connection: socket.socket) -> bytes:
    loop = asyncio.get_running_loop()
    pieces = []
    while piece := await loop.sock_recv(connection, 1 << 16):
        pieces.append(piece)
    return b"".join(pieces)


def _remove_stale_directories() -> None:
    """Directories of services that were killed before they could remove them."""
    for path in Path(tempfile.gettempdir()).glob(f"{_DIRECTORY_PREFIX}*-*"):
        owner = path.name.removeprefix(_DIRECTORY_PREFIX).split("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(path, ignore_errors=True)


_PROBE = f"""
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
