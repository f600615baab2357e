"""Recording of deployed sessions (``glm5 serve --collect DIR``) and the feedback of their users.

``responses.jsonl`` has one record for each chat answer that was given whole: its id, the conversation, the answer, the
exact ids, and the client's key as a digest. ``feedback.jsonl`` has one for each ``POST /feedback``. Appends are one
write of one line, so several engine processes may share a directory. A client can keep an exchange out of the
collection by the header ``x-glm5-collect: no`` or, in the OpenAI dialects, by ``"store": false``. Recording never fails
an answer: what cannot be written is counted and said once.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import re
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

from starlette.requests import Request

from glm5.dialects.answer import Answers
from glm5.dialects.protocol import ApiError, field
from glm5.errors import ConfigError

RESPONSES, FEEDBACK = "responses.jsonl", "feedback.jsonl"
_MAX_COMMENT = 4000
_THUMBS = {"up": 1.0, "down": 0.0}
_HEADER = "x-glm5-collect"
_RESPONSE_ID = re.compile(r"(?:[a-z]+[-_])?([0-9a-f]{24})")
"""The id of an answer in any dialect; records have the part that is common to all."""


class Collection:
    """The files of one directory."""

    def __init__(self, directory: Path) -> None:
        """Raises ConfigError when the directory cannot be written."""
        self._directory = directory
        self.failed = 0
        """Records that could not be written."""
        try:
            directory.mkdir(parents=True, exist_ok=True)
            for name in (RESPONSES, FEEDBACK):
                os.close(os.open(directory / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600))
        except OSError as error:
            raise ConfigError(f"--collect {directory}: {error.strerror}; give a directory that can be "
                              "written") from None

    def add(self, run: Answers, messages: list[dict[str, Any]], owner: str) -> None:
        """Record the answer of ``run`` to a conversation, if it is one and whole."""
        if len(run.answers) != 1 or not run.answers[0].is_finished:
            return
        answer, request = run.answers[0], run.request
        calls = [{"type": "function", "function": {"name": part.name, "arguments": part.text}}
                 for part in answer.parts if part.kind == "call"]
        message: dict[str, Any] = {"role": "assistant", "content": answer.text_of("content")}
        if answer.text_of("reasoning"):
            message["reasoning_content"] = answer.text_of("reasoning")
        if calls:
            message["tool_calls"] = calls
        self._append(RESPONSES, {
            "time": time.time(), "response_id": request.token, "owner": owner[:16], "messages": [*messages, message],
            "tools": request.tools or [], "thinking": request.thinking, "finish_reason": answer.finish_reason,
            "prompt_ids": request.prompts[0], "output_ids": answer.output_ids, "logprobs": answer.logprobs})

    def add_feedback(self, data: dict[str, Any], owner: str) -> dict[str, Any]:
        """Record the body of ``POST /feedback``: ``response_id`` with ``thumbs`` (up or down) or ``score`` (0 to 1),
        perhaps a ``comment`` and a ``correction``, the answer that the user would have wanted. Raises ApiError."""
        given = field(data, "response_id", str, required=True)
        known = _RESPONSE_ID.fullmatch(given)
        if known is None:
            raise ApiError(400, f"response_id: got {given[:60]!r}, expected the id of an answer of this server",
                           "invalid_request", "response_id")
        response_id = known[1]
        thumbs, score = field(data, "thumbs", str), data.get("score")
        if thumbs is not None and (thumbs not in _THUMBS or score is not None):
            raise ApiError(400, f"thumbs: got {thumbs!r}, expected up or down, and no score beside it",
                           "invalid_request", "thumbs")
        value = _THUMBS[thumbs] if thumbs is not None else score
        correction = field(data, "correction", str)
        if value is None and not correction:
            raise ApiError(400, "feedback: expected thumbs, score or correction", "invalid_request", "thumbs")
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)
                                  or not math.isfinite(value) or not 0 <= value <= 1):
            raise ApiError(400, f"score: got {value!r}, expected a number from 0 to 1", "invalid_request", "score")
        record = {"time": time.time(), "response_id": response_id, "owner": owner[:16],
                  "score": None if value is None else float(value), "correction": correction,
                  "comment": (field(data, "comment", str) or "")[:_MAX_COMMENT]}
        if not self._append(FEEDBACK, record):
            raise ApiError(503, "the feedback could not be written; send it again later", "not_recorded")
        return {"recorded": True, "response_id": given}

    def _append(self, name: str, record: dict[str, Any]) -> bool:
        path = self._directory / name
        line = (json.dumps(record) + "\n").encode("utf-8", "backslashreplace")
        try:
            file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                written = os.write(file, line)
                if written < len(line):  # the disk filled up in the middle of the line
                    os.ftruncate(file, os.fstat(file).st_size - written)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            finally:
                os.close(file)
        except OSError as error:
            if not self.failed:
                logging.getLogger("glm5.serve").warning("%s: %s; answers go on unrecorded", path, error.strerror)
            self.failed += 1
            return False
        return True


async def then(events: AsyncGenerator[bytes, None], record: Callable[[], None]) -> AsyncGenerator[bytes, None]:
    """``events``, and ``record`` when all of them have been taken."""
    async with aclosing(events):
        async for event in events:
            yield event
    record()


def is_wanted(request: Request, data: dict[str, Any]) -> bool:
    """Whether a client lets this exchange be recorded."""
    is_refused = request.headers.get(_HEADER, "").strip().lower() in ("no", "0", "false")
    return not is_refused and data.get("store") is not False
