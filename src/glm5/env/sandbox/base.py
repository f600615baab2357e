"""What a sandbox is: the protocol, its limits, the result of one command.

A sandbox belongs to one episode and is never handed to another. Whatever runs inside is untrusted; expected answers
never enter it. Files are exchanged with the host side through ``sandbox.directory``, which follows no link.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Resource limits of everything that runs inside one sandbox."""

    memory_bytes: int = 256 << 20
    """Address space of one process."""
    cpu_s: int = 1
    """Processor seconds of one process."""
    processes: int = 32
    """Processes and threads in the sandbox, its own keepers included."""
    file_bytes: int = 4 << 20
    """Size of one file."""
    disk_bytes: int = 8 << 20
    """Size of the work directory, and again of /tmp."""
    open_files: int = 64
    """Open files of one process."""
    output_bytes: int = 16 << 10
    """Output of one command that is kept; the rest is read and dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """What one command did. A command that fails, hangs or kills its sandbox is a result, not an exception."""

    exit_code: int
    """Exit status; 128 + signal number when a signal ended it."""
    output: str
    """Standard output and standard error, interleaved, at most ``Limits.output_bytes``."""
    timed_out: bool = False
    """The wall clock limit passed and the command was killed."""
    truncated: bool = False
    """Output was dropped."""


class Sandbox(Protocol):
    """One isolated place to run commands in; its work directory is the current directory of every command."""

    async def exec(self, command: str, stdin: str = "", timeout_s: float = 5.0) -> ExecResult:
        """Run ``command`` with /bin/sh. Raises SandboxError only when the machinery itself fails."""
        ...

    async def python(self, source: str, timeout_s: float = 5.0) -> ExecResult:
        """Run ``source`` as ``__main__`` of a fresh interpreter with the standard library and no site packages."""
        ...

    async def write_file(self, path: str, text: str) -> None:
        """Create or replace a file of the work directory, with its parent directories."""
        ...

    async def read_file(self, path: str) -> str | None:
        """Text of a regular file of the work directory, None when there is no such file."""
        ...

    async def files(self) -> dict[str, str]:
        """The whole work directory: path → text for files, ``path/`` → "" for directories; see ``directory``."""
        ...

    async def close(self) -> None:
        """Kill everything inside and free the work directory. May be called twice."""
        ...
