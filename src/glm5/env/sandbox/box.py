"""One sandbox: its shell, its Python programs, its files, its end.

The shell is an ordinary ``/bin/sh`` that reads a script from its standard input: a command is quoted, evaluated in a
subshell, and followed by a line with a random mark and its exit status. Output is read here, under a deadline and a
cap; whoever passes either loses the sandbox, which is a result of that command and not a failure of ours.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import select
import shlex
import shutil
import signal
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from glm5.env.sandbox.base import ExecResult, Limits
from glm5.env.sandbox.directory import WorkDirectory
from glm5.errors import SandboxError

T = TypeVar("T")
_START_S = 10.0
_FIRST_PROCESS = re.compile(rb'"child-pid": (\d+)')
_MARK_BYTES = 64
"""More than the longest mark line without a reason."""
_FLOOD = 64
"""A command that writes this many times the kept output is stopped."""
_KILLED = 137


class Owner(Protocol):
    """What a sandbox needs of its pool."""

    def request_fork(self, letter: bytes, *descriptors: int) -> socket.socket:
        """A connection to a new fork of the fork server."""
        ...

    def forget(self, box: Box) -> None:
        """The sandbox was closed."""
        ...


class Box:
    """A sandbox of a pool; implements ``base.Sandbox``. One command at a time."""

    def __init__(self, owner: Owner, limits: Limits, file_thread: ThreadPoolExecutor, connection: socket.socket,
                 process: int, directory: int, path: str | None) -> None:
        """``connection`` of the shell, descriptor of the first ``process``, open work ``directory``: all owned by the
        sandbox. ``path``: of the work directory when there is no isolation, else None."""
        self._owner, self._limits, self._file_thread = owner, limits, file_thread
        self._connection, self._process, self._directory, self._path = connection, process, directory, path
        self._files = WorkDirectory(directory, limits.file_bytes)
        self._ended = ""
        """Why nothing can run here any more, as a command is told."""
        self._closed = False

    async def exec(self, command: str, stdin: str = "", timeout_s: float = 5.0) -> ExecResult:
        """Run ``command`` with /bin/sh in the work directory, in about one fork."""
        if "\0" in command or "\0" in stdin:
            return ExecResult(exit_code=2, output="a command cannot contain a NUL character")
        mark = secrets.token_hex(8)
        source = f"printf %s {shlex.quote(stdin)} |" if stdin else ""
        redirect = "" if stdin else "</dev/null"
        script = f"{source} ( eval {shlex.quote(command)} ) {redirect} 2>&1\nprintf '\\n{mark} %s\\n' $?\n"
        return await self._converse(self._connection, script.encode(), mark, timeout_s)

    async def python(self, source: str, timeout_s: float = 5.0) -> ExecResult:
        """Run ``source`` as ``__main__`` in a fork of a booted interpreter, about 5 ms of processor time."""
        mark, program = secrets.token_hex(8), source.encode()
        self._check_open()
        letter, target = (b"E", self._process) if self._path is None else (b"D", self._directory)
        with self._owner.request_fork(letter, target) as fork:
            return await self._converse(fork, f"{mark} {len(program)}\n".encode() + program, mark, timeout_s)

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
        self._owner.forget(self)
        self._kill()
        self._connection.close()
        os.close(self._process)
        self._files.close()
        if self._path is not None:
            shutil.rmtree(self._path, ignore_errors=True)

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxError("the sandbox is closed; acquire a new one")

    async def _require_death(self, connection: socket.socket, error: str) -> None:
        """A program that could not be run is the doing of what killed the sandbox before, or a failure of ours."""
        if connection is self._connection:  # the shell itself has ended
            return
        for _ in range(20):  # the last processes of a killed sandbox take a moment
            if select.select([self._process], [], [], 0)[0]:
                return
            await asyncio.sleep(0.01)
        raise SandboxError(f"a program could not be run: {error or 'the fork server gave no answer'}")

    def _kill(self) -> None:
        try:
            if self._path is not None:  # no process namespace ends what the shell started
                os.killpg(_process_id(self._process), signal.SIGKILL)
            signal.pidfd_send_signal(self._process, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass

    async def _in_file_thread(self, function: Callable[..., T], *arguments: str) -> T:
        self._check_open()
        return await asyncio.get_running_loop().run_in_executor(self._file_thread, function, *arguments)

    async def _converse(self, connection: socket.socket, request: bytes, mark: str, timeout_s: float) -> ExecResult:
        """Send ``request``, read until its mark; the sandbox ends when the deadline or the cap is passed."""
        self._check_open()
        if self._ended:
            return ExecResult(exit_code=_KILLED, output=f"the sandbox has ended: an earlier command {self._ended}")
        reader = _OutputReader(mark, self._limits.output_bytes)
        loop = asyncio.get_running_loop()
        timed_out = False
        try:
            async with asyncio.timeout(timeout_s):
                await loop.sock_sendall(connection, request)
                while not reader.is_complete and not self._ended:
                    reader.feed(await loop.sock_recv(connection, 1 << 16))
                    if reader.is_closed or reader.error:
                        await self._require_death(connection, reader.error)
                        self._ended = "killed it"
                    elif reader.size > _FLOOD * self._limits.output_bytes:
                        self._ended = f"wrote more than {_FLOOD * self._limits.output_bytes} bytes"
        except TimeoutError:
            timed_out = True
            self._ended = f"ran longer than {timeout_s:g} s"
        except OSError:
            self._ended = "killed it"
        if self._ended:
            self._kill()
        return reader.result(timed_out)


class _OutputReader:
    """Collects output up to the line ``<mark> <exit status>``."""

    def __init__(self, mark: str, limit: int) -> None:
        self._mark = f"\n{mark} ".encode()
        self._limit = limit
        self._kept = bytearray()
        self.size = 0
        self.is_closed = False
        self._status: str | None = None

    @property
    def is_complete(self) -> bool:
        """The mark was read."""
        return self._status is not None

    @property
    def error(self) -> str:
        """Why the program was not run; empty when it was."""
        return (self._status or "").removeprefix("error ") if not (self._status or "0").isdigit() else ""

    def feed(self, piece: bytes) -> None:
        """Take what was read; an empty piece is the end of the connection."""
        self.is_closed = not piece
        self.size += len(piece)
        self._kept += piece
        start = self._kept.rfind(self._mark, max(0, len(self._kept) - len(piece) - _MARK_BYTES))
        if start >= 0 and self._kept.endswith(b"\n"):
            self._status = bytes(self._kept[start + len(self._mark):]).decode(errors="replace").strip()
            del self._kept[start:]
        elif len(self._kept) > self._limit + _MARK_BYTES:
            del self._kept[self._limit:-_MARK_BYTES]

    def result(self, timed_out: bool) -> ExecResult:
        """What the command did."""
        code = int(self._status) if self._status and not self.error else _KILLED
        output = bytes(self._kept[: self._limit]).decode(errors="replace")
        truncated = self.size > self._limit + _MARK_BYTES
        return ExecResult(exit_code=code, output=output, timed_out=timed_out, truncated=truncated)


async def read_start(connection: socket.socket, info: int, limits: Limits, isolated: bool) -> int:
    """Give a new shell its limits; id of the sandbox's first process, once the shell answers.

    It answers only inside a finished sandbox; the id is then in the memory file ``info``. Raises SandboxError with the
    last line of what was said instead.
    """
    processes = f"ulimit -p {limits.processes} 2>/dev/null || ulimit -u {limits.processes}\n" if isolated else ""
    loop = asyncio.get_running_loop()
    heard = b""
    try:
        async with asyncio.timeout(_START_S):
            await loop.sock_sendall(connection, f"ulimit -t {limits.cpu_s}\n{processes}echo ready\n".encode())
            while not heard.endswith(b"ready\n"):
                try:
                    piece = await loop.sock_recv(connection, 4096)
                except ConnectionResetError:  # told once when bwrap ended without reading; its message follows
                    continue
                if not piece:
                    lines = heard.decode(errors="replace").strip().splitlines()
                    raise SandboxError(lines[-1] if lines else "the shell of a sandbox ended without a message")
                heard += piece
            while not (found := _FIRST_PROCESS.search(os.pread(info, 4096, 0))):
                await asyncio.sleep(0.001)
    except TimeoutError:
        raise SandboxError(f"a new sandbox was not ready after {_START_S:.0f} s") from None
    except BrokenPipeError:
        raise SandboxError("the shell of a sandbox ended at once") from None
    return int(found[1])


def _process_id(pidfd: int) -> int:
    """Process id behind a descriptor. Raises ProcessLookupError when it has ended."""
    with open(f"/proc/self/fdinfo/{pidfd}") as file:
        number = next(int(line.split()[1]) for line in file if line.startswith("Pid:"))
    if number <= 0:
        raise ProcessLookupError
    return number
