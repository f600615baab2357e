"""Responses that a later request may continue, within a bound of memory. Used from one event loop."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Remembered:
    """A finished response."""

    body: dict[str, Any]
    """As the client got it."""
    messages: list[dict[str, Any]]
    """The conversation with its answer, instructions left out: they hold for one response only."""


class ResponseMemory:
    """The most recently used responses by owner and id."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._kept: OrderedDict[tuple[str, str], tuple[Remembered, int]] = OrderedDict()

    @property
    def size_bytes(self) -> int:
        """Length of everything kept, as JSON."""
        return self._bytes

    def remember(self, owner: str, response: Remembered) -> None:
        """Keep ``response``, forgetting the least recently used ones beyond the bound."""
        size = len(json.dumps([response.body, response.messages]))
        self._kept[owner, response.body["id"]] = (response, size)
        self._bytes += size
        while self._bytes > self._max_bytes:
            _, (_, freed) = self._kept.popitem(last=False)
            self._bytes -= freed

    def recall(self, owner: str, response_id: str) -> Remembered | None:
        """The response of ``owner`` called ``response_id``; None when it is unknown or forgotten."""
        found = self._kept.get((owner, response_id))
        if found is None:
            return None
        self._kept.move_to_end((owner, response_id))
        return found[0]

    def forget(self, owner: str, response_id: str) -> bool:
        """Drop a response; False when there is none."""
        found = self._kept.pop((owner, response_id), None)
        self._bytes -= 0 if found is None else found[1]
        return found is not None
