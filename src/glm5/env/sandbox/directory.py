"""Host-side access to a sandbox's work directory through an open directory descriptor.

The content is untrusted: no component of a path is followed through a link, only regular files are opened, pipes cannot
block the reader, and sizes and counts are bounded. No process runs inside the sandbox for any of this, which makes
setting up and verifying file tasks nearly free, and leaves nothing for a program in the sandbox to intercept.
"""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from glm5.errors import SandboxError

_MAX_ENTRIES = 512
_MAX_DEPTH = 16
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def file_thread(user: int | None) -> ThreadPoolExecutor:
    """One thread to call ``WorkDirectory`` in, acting on files as ``user`` when given (needs root).

    A sandbox's file system knows no user but its own, so root cannot create files there. The identity for file access
    belongs to a thread, and changing it cancels the kernel's death-of-parent signal for that thread: not the main one.
    """
    def become() -> None:
        if user is not None:
            libc = ctypes.CDLL(None)
            libc.setfsgid(user)
            libc.setfsuid(user)
    return ThreadPoolExecutor(1, thread_name_prefix="sandbox-files", initializer=become)


class WorkDirectory:
    """Files below one directory descriptor, which this object owns and closes."""

    def __init__(self, descriptor: int, file_bytes: int) -> None:
        """``file_bytes``: at most that much of a file is read."""
        self._root = descriptor
        self._file_bytes = file_bytes
        self._closed = False

    def write(self, path: str, text: str) -> None:
        """Create or replace ``path`` and its parent directories. Raises SandboxError when the path is unusable."""
        try:
            with self._parent(path, create=True) as (parent, name):
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                file = os.open(name, flags, 0o644, dir_fd=parent)
                try:
                    data = text.encode()
                    while data:
                        data = data[os.write(file, data):]
                finally:
                    os.close(file)
        except OSError as error:
            raise SandboxError(f"{path}: cannot be written into the sandbox ({error.strerror})") from None

    def read(self, path: str) -> str | None:
        """Text of ``path``, undecodable bytes replaced; None when it is not a readable regular file."""
        try:
            with self._parent(path, create=False) as (parent, name):
                return self._read_at(parent, name)
        except OSError:
            return None

    def tree(self) -> dict[str, str]:
        """Every entry: ``a/b`` → text of a file, ``a/`` → "" of a directory, ``a@`` → kind of anything else.

        More than 512 entries or 16 levels end the walk; the result then equals no expected tree that a task can have.
        """
        found: dict[str, str] = {}
        self._walk(self._root, "", 0, found)
        return found

    def close(self) -> None:
        """Close the descriptor."""
        if not self._closed:
            self._closed = True
            os.close(self._root)

    def _walk(self, directory: int, prefix: str, depth: int, found: dict[str, str]) -> None:
        for name in sorted(os.listdir(directory)):
            if len(found) >= _MAX_ENTRIES or depth >= _MAX_DEPTH:
                found["@"] = "too many entries"
                return
            path = prefix + name
            try:
                mode = os.lstat(name, dir_fd=directory).st_mode
                if stat.S_ISDIR(mode):
                    found[path + "/"] = ""
                    child = os.open(name, _DIRECTORY, dir_fd=directory)
                    try:
                        self._walk(child, path + "/", depth + 1, found)
                    finally:
                        os.close(child)
                elif stat.S_ISREG(mode):
                    found[path] = self._read_at(directory, name) or ""
                else:
                    found[path + "@"] = stat.filemode(mode)[0]
            except OSError as error:
                found[path + "@"] = error.strerror

    def _read_at(self, directory: int, name: str) -> str | None:
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                return None
            pieces = []
            left = self._file_bytes
            while left > 0 and (piece := os.read(file, min(left, 1 << 16))):
                pieces.append(piece)
                left -= len(piece)
            return b"".join(pieces).decode(errors="replace")
        finally:
            os.close(file)

    @contextmanager
    def _parent(self, path: str, create: bool) -> Iterator[tuple[int, str]]:
        """Descriptor of the directory that holds ``path``, and the last component."""
        *folders, name = path.split("/")
        if name in ("", ".", "..") or any(part in ("", ".", "..") for part in folders):
            raise SandboxError(f"path {path!r}: expected a relative path without . and .. components")
        opened = [self._root]
        try:
            for part in folders:
                if create:
                    self._make_directory(opened[-1], part)
                opened.append(os.open(part, _DIRECTORY, dir_fd=opened[-1]))
            yield opened[-1], name
        finally:
            for descriptor in opened[1:]:
                os.close(descriptor)

    def _make_directory(self, parent: int, name: str) -> None:
        try:
            os.mkdir(name, 0o755, dir_fd=parent)
        except FileExistsError:
            pass
