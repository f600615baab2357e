"""Configuration of the HTTP server: who may call, how much, how long."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from glm5.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeConfig:
    """Limits and doors of one server."""

    api_keys: tuple[str, ...] = ()
    """Keys of which a client must send one; empty lets everybody in."""
    cors_origins: tuple[str, ...] = ()
    """Web origins that may call from a browser; ``*`` means all."""
    max_body_bytes: int = 16 << 20
    """Largest request body."""
    max_concurrent: int = 4096
    """Generating requests in flight, waiting ones included; one more is answered 429."""
    request_timeout_s: float = 3600.0
    """Longest time from a request to the end of its answer."""
    header_timeout_s: float = 15.0
    """Longest time for the head of a request to arrive."""
    body_timeout_s: float = 60.0
    """Longest time for the body of a request to arrive."""
    shutdown_timeout_s: float = 10.0
    """How long running answers may go on after SIGTERM."""
    response_memory_bytes: int = 64 << 20
    """Stored responses that ``previous_response_id`` can name; the least recently used are forgotten."""
    role: Literal["both", "prefill", "decode"] = "both"
    """``prefill`` fills prompts for others, ``decode`` takes the keys of long prompts from ``peer``."""
    peer: str = ""
    """URL of the engine that fills prompts for this one."""
    access_log: str = ""
    """File to which one JSON line a request is appended; ``-`` is standard output, empty none."""

    collect: str = ""
    """Directory in which chat answers and the feedback of users are recorded; empty records nothing."""

    def __post_init__(self) -> None:
        for name in ("max_body_bytes", "max_concurrent"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: must be at least 1; raise it")
        for name in ("request_timeout_s", "header_timeout_s", "body_timeout_s", "shutdown_timeout_s"):
            if not 0 < getattr(self, name) < 1e9:
                raise ConfigError(f"{name}={getattr(self, name)}: must be a positive number of seconds; correct it")
        if self.role not in ("both", "prefill", "decode"):
            raise ConfigError(f"role={self.role!r}: expected both, prefill or decode; correct it")
        if (self.role == "decode") != bool(self.peer):
            raise ConfigError(f"role={self.role!r} with peer={self.peer!r}: a peer belongs to the role decode, and "
                              "only to it; give both or neither")
        if self.response_memory_bytes < 0:
            raise ConfigError(f"response_memory_bytes={self.response_memory_bytes}: must be 0 (store nothing) or more")
        if any(not key or not key.isascii() for key in self.api_keys):
            raise ConfigError("api_keys: a key is empty or not ASCII; a header could not carry it, choose another")


def read_keys(path: Path) -> list[str]:
    """Keys of a file, one a line; empty lines do not count. Raises ConfigError when there is none."""
    try:
        keys = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as text ({error}); give a file with one API key a line") from None
    if not keys:
        raise ConfigError(f"{path}: holds no API key; a server without keys would let everybody in")
    return keys
