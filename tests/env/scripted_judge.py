"""A judge over real HTTP whose verdicts come from a function of what it is shown."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.env.scripted_model import answer, model_app, served


@contextmanager
def judge_server(verdict: Callable[[str, dict[str, Any]], Any], seen: list[Any] | None = None) -> Iterator[str]:
    """Base URL of an endpoint that answers ``verdict(system text, material)``: a text as it is, an object with the id
    of the question added, or a message of ``scripted_model``."""
    def policy(messages: list[dict[str, Any]]) -> dict[str, Any]:
        material = json.loads(messages[1]["content"])
        given = verdict(messages[0]["content"], material)
        if isinstance(given, str):
            return answer(given)
        if "status" in given or "sleep" in given:
            return given
        return answer(json.dumps({"id": material["id"], "reason": "because", **given}))

    with served(model_app(policy, seen)) as url:
        yield f"{url}/v1"
