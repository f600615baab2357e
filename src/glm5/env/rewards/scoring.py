"""The client of a served outcome reward model (``glm5 reward serve``)."""

from __future__ import annotations

import math

from glm5.env.tasks import Message
from glm5.errors import ServiceError, TaskError
from glm5.wire import HttpClient

_TIMEOUT_S = 60.0


class RewardModelClient:
    """Rewards of conversations from ``url``; use on one event loop."""

    def __init__(self, url: str, http: HttpClient) -> None:
        self._url, self._http = url, http

    async def score(self, messages: list[Message]) -> float:
        """Reward of a finished conversation, 0 to 1. Raises TaskError when the service gives none."""
        try:
            answer = await self._http.post(f"{self._url}/score", {"conversations": [messages]}, _TIMEOUT_S)
        except ServiceError as error:
            raise TaskError(f"reward model: {error}") from None
        try:
            [reward] = answer["rewards"]
        except (KeyError, TypeError, ValueError):
            raise TaskError(f"reward model {self._url}: expected one reward, got {str(answer)[:120]}") from None
        if type(reward) is not float or not math.isfinite(reward) or not 0 <= reward <= 1:
            raise TaskError(f"reward model {self._url}: reward {reward!r} is no number from 0 to 1")
        return reward
