"""The fast path of weights: from the trainer's memory to all engines at once, without the disk between them.

The version is on disk all the same, for engines that restart; only the way to running engines is shorter. The group is
formed when it is first needed and again after a failure, with growing pauses. Any failure, an engine that was killed or
hangs among them, costs at most the deadline, and the version then arrives from disk.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx
from torch import Tensor

from glm5.engine.broadcast import WeightGroup, announce
from glm5.errors import WeightSyncError
from glm5.rl.weights import WeightVersion

FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 300.0
"""Between a failure and the next attempt to form a group."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A published version and its tensors in main memory."""

    published: WeightVersion
    tensors: Mapping[str, Tensor]


class WeightBroadcaster:
    """Rank 0 of the group. Use from one thread; ``close`` it."""

    def __init__(self, engine_urls: Sequence[str], backend: str, timeout_s: float) -> None:
        """``timeout_s`` bounds forming the group, and again one broadcast."""
        self._urls, self._backend, self._timeout_s = list(engine_urls), backend, timeout_s
        self._group: WeightGroup | None = None
        self._failures = 0
        self._not_before = 0.0

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.close()
            self._group = None

    def is_ready(self) -> bool:
        """False while a pause after a failure lasts."""
        return time.monotonic() >= self._not_before

    def send(self, client: httpx.Client, snapshot: Snapshot) -> dict[str, float]:
        """Bring a version into all engines; milliseconds that each took to swap, by URL.

        Raises WeightSyncError when one of them does not take it; those that did hold it nevertheless.
        """
        try:
            if self._group is None:
                self._group = self._form(client)
            announcement = {**announce(snapshot.tensors).to_json(), "weight_version": snapshot.published.version}
            group = self._group
            answers = self._meanwhile(client, "/update_weights_from_distributed", lambda number: announcement,
                                      lambda: group.send(snapshot.tensors))
        except WeightSyncError:
            self.close()
            self._not_before = time.monotonic() + min(FIRST_PAUSE_S * 2**self._failures, LONGEST_PAUSE_S)
            self._failures += 1
            raise
        self._failures = 0
        return {url: float(answer.get("load_ms", 0.0)) for url, answer in zip(self._urls, answers, strict=True)}

    def _form(self, client: httpx.Client) -> WeightGroup:
        host = _address_towards(self._urls[0])
        with socket.socket() as probe:
            probe.bind((host, 0))
            port = int(probe.getsockname()[1])
        size = len(self._urls) + 1
        groups: list[WeightGroup] = []

        def join() -> None:
            groups.append(WeightGroup(host, port, 0, size, self._backend, self._timeout_s))

        self._meanwhile(client, "/init_weights_update_group", lambda number: {
            "master_address": host, "master_port": port, "rank_offset": number + 1, "world_size": size,
            "backend": self._backend, "timeout_s": self._timeout_s}, join)
        return groups[0]

    def _meanwhile(self, client: httpx.Client, path: str, body: Callable[[int], dict[str, Any]],
                   work: Callable[[], None]) -> list[dict[str, Any]]:
        """Do our part while every engine handles a request; their answers. Raises WeightSyncError."""
        def ask(number: int, url: str) -> dict[str, Any]:
            try:
                response = client.post(url + path, json=body(number), timeout=httpx.Timeout(self._timeout_s, connect=5))
                answer: dict[str, Any] = response.json()
            except (httpx.HTTPError, ValueError) as error:
                raise WeightSyncError(f"{url}{path}: {type(error).__name__} {error}") from None
            if response.status_code != 200 or not answer.get("success"):
                raise WeightSyncError(f"{url}{path}: {answer.get('message') or response.text[:200]}")
            return answer

        with ThreadPoolExecutor(len(self._urls)) as threads:
            asked = [threads.submit(ask, number, url) for number, url in enumerate(self._urls)]
            work()
            return [answer.result() for answer in asked]


def _address_towards(url: str) -> str:
    """Our address on the network on which ``url`` lies; nothing is sent."""
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname or "127.0.0.1", parts.port or 80))
        return str(probe.getsockname()[0])
