"""A real HTTP server that speaks the token-level engine protocol and answers from a script.

The script is a list of replies; the n-th ``<|assistant|>`` of a prompt is answered with the n-th reply (the last one
from then on), so an answer depends on the prompt alone. A reply is the text of an answer (special tokens are written
as such, the stop token is the last) or an object with ``text`` and any of: ``spelled`` (one token per character, a
split that no encoder makes), ``delay_s``, ``status`` (an HTTP error), ``answer`` (the body to return), ``abort_after``
(so many ids, then an abort; whoever sends them back gets the rest, from the next weight version).
``POST /script`` sets the replies, the context length and the weight version; ``GET /log`` lists what was asked.

Started as a program: ``python scripted_engine.py TOKENIZER_DIR READY_FILE [PORT]``.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from glm5.process import die_with_parent, serve_app
from glm5.tokenizer.bpe import Tokenizer, load_tokenizer


def scripted_logprob(token: int) -> float:
    """Log-prob of a sampled id: distinct enough to notice a shift by one."""
    return -(token % 97) / 10 - 0.01


class ScriptedEngine:
    """State of the server."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.replies: list[Any] = ["ok<|user|>"]
        self.max_context = 4096
        self.version = 1
        self.log: list[dict[str, Any]] = []
        self.aborted = 0

    async def generate(self, request: Request) -> Response:
        """``POST /generate``."""
        data = await request.json()
        self.log.append(data)
        turn = data["input_ids"].count(self.tokenizer.special_id("<|assistant|>")) - 1
        reply = self.replies[min(turn, len(self.replies) - 1)]
        reply = reply if isinstance(reply, dict) else {"text": reply}
        if "delay_s" in reply and await self._client_left(request, reply["delay_s"]):
            self.aborted += 1
            return JSONResponse({}, 499)
        if "status" in reply:
            return JSONResponse({"error": {"message": "scripted failure", "type": "x", "code": None}}, reply["status"])
        if "answer" in reply:
            return Response(reply["answer"], media_type="application/json")
        ids, version, reason = self._encode(reply), self.version, "stop"
        if "abort_after" in reply:
            answered = data["input_ids"][::-1].index(self.tokenizer.special_id("<|assistant|>")) - 1
            reason = "stop" if answered else "abort"
            ids = ids[answered:] if answered else ids[:reply["abort_after"]]
            version += answered > 0
        limit = data["sampling_params"]["max_new_tokens"]
        finish_reason = reason if len(ids) <= limit else "length"
        ids = ids[:limit]
        return JSONResponse({
            "output_ids": ids, "logprobs": [scripted_logprob(token) for token in ids],
            "weight_versions": [version] * len(ids), "finish_reason": finish_reason,
            "prompt_tokens": len(data["input_ids"]), "cached_tokens": 3})

    async def script(self, request: Request) -> JSONResponse:
        """``POST /script``."""
        data = await request.json()
        self.replies = data.get("replies", self.replies)
        self.max_context = data.get("max_context", self.max_context)
        self.version = data.get("version", self.version)
        self.log.clear()
        self.aborted = 0
        return JSONResponse({})

    async def show_log(self, request: Request) -> JSONResponse:
        """``GET /log``."""
        return JSONResponse({"requests": self.log, "aborted": self.aborted})

    async def model_info(self, request: Request) -> JSONResponse:
        """``GET /get_model_info``."""
        return JSONResponse({"model_path": "script", "weight_version": self.version,
                             "vocab_size": self.tokenizer.vocab_size, "max_context": self.max_context,
                             "tokenizer_sha256": self.tokenizer.sha256})

    async def health(self, request: Request) -> JSONResponse:
        """``GET /health_generate``."""
        return JSONResponse({})

    def app(self) -> Starlette:
        """The ASGI application."""
        return Starlette(routes=[
            Route("/generate", self.generate, methods=["POST"]), Route("/script", self.script, methods=["POST"]),
            Route("/log", self.show_log), Route("/get_model_info", self.model_info),
            Route("/health_generate", self.health)])

    def _encode(self, reply: dict[str, Any]) -> list[int]:
        text = reply["text"]
        if not reply.get("spelled"):
            return self.tokenizer.encode(text, allow_special=True)
        body, marker, stop = text.rpartition("<|")
        return [token for character in body for token in self.tokenizer.encode(character)] + self.tokenizer.encode(
            marker + stop, allow_special=True)

    async def _client_left(self, request: Request, delay_s: float) -> bool:
        """Wait ``delay_s``; True as soon as the client has gone."""
        for _ in range(int(delay_s / 0.02)):
            if await request.is_disconnected():
                return True
            await asyncio.sleep(0.02)
        return False


if __name__ == "__main__":
    die_with_parent()
    chosen_port = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    serve_app(ScriptedEngine(load_tokenizer(sys.argv[1])).app(), port=chosen_port, ready_file=Path(sys.argv[2]))
