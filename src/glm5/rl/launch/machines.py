"""Where the services of a run live: each gets a machine that keeps an address for it and starts its processes there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from glm5.process import reserve, spawn, stop

_HOST = "127.0.0.1"


class Process(Protocol):
    """A started process."""

    @property
    def pid(self) -> int:
        """Its id on its machine."""
        ...

    def poll(self) -> int | None:
        """Its exit code, None while it runs."""
        ...


class Machine(Protocol):
    """The place of one service."""

    @property
    def address(self) -> tuple[str, int]:
        """Host and port, kept as long as the machine is not released."""
        ...

    @property
    def is_here(self) -> bool:
        """Whether process ids of it mean something to this process."""
        ...

    def start(self, arguments: Sequence[str], log_file: Path) -> Process:
        """Start ``glm5 <arguments>``."""
        ...

    def stop(self, process: Process, grace_s: float = 5) -> None:
        """Terminate a process and its group; kill what is left after ``grace_s``."""
        ...

    def release(self) -> None:
        """Give the address back."""
        ...


class Machines(Protocol):
    """Gives every service a machine."""

    def place(self, service: str) -> Machine:
        """The machine for ``service``. Raises ServiceError when there is no room."""
        ...


class LocalMachine:
    """This machine."""

    is_here = True

    def __init__(self) -> None:
        self._holder = reserve(_HOST)

    @property
    def address(self) -> tuple[str, int]:
        """See ``Machine``."""
        return _HOST, int(self._holder.getsockname()[1])

    def start(self, arguments: Sequence[str], log_file: Path) -> Process:
        """See ``Machine``. From a thread that lives as long as the process may (see ``glm5.process.spawn``)."""
        return spawn(arguments, log_file)

    def stop(self, process: Process, grace_s: float = 5) -> None:
        """See ``Machine``."""
        stop(process, grace_s)  # type: ignore[arg-type]  # what ``start`` gave

    def release(self) -> None:
        """See ``Machine``."""
        self._holder.close()


class LocalMachines:
    """Everything on this machine."""

    def place(self, service: str) -> Machine:
        """See ``Machines``."""
        return LocalMachine()
