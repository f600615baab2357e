"""Text generation and chat from the command line, over a checkpoint directory or the URL of a server.

Both kinds of target take the same OpenAI request body and give the same events, so there is one way to print an
answer.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import httpx

from glm5.engine.config import EngineConfig
from glm5.errors import Glm5Error, ServiceError
from glm5.records import SamplingParams

_CONNECT_S, _READ_S = 10.0, 600.0
_HELP = "Type a message; /clear starts over, /exit (or end of input) leaves."


def _show(text: str) -> None:
    print(text, end="", flush=True)


class Target(Protocol):
    """Something that answers streaming OpenAI requests."""

    def events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Events of ``POST path``; ``model`` and ``stream`` are filled in. Raises Glm5Error."""


def generate_text(target: str | Path, prompt: str, params: SamplingParams) -> Iterator[str]:
    """Pieces of the continuation of ``prompt`` by ``target``, a checkpoint directory or a server's URL."""
    body = {
        "prompt": prompt,
        "max_tokens": params.max_new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "seed": params.seed,
    }
    with open_target(target) as opened:
        for event in opened.events("/v1/completions", body):
            for choice in event["choices"]:
                if choice["text"]:
                    yield choice["text"]


def chat_loop(
    target: str | Path,
    temperature: float = 0.7,
    thinking: bool = True,
    max_tokens: int | None = None,
    api_key: str = "",
    read: Callable[[str], str] = input,
    write: Callable[[str], None] = _show,
) -> None:
    """Talk to ``target`` until the input ends. ``max_tokens`` bounds an answer; None leaves it to the context.
    ``api_key`` is the server's, where it wants one.

    ``read`` asks with a prompt, ``write`` shows a piece of text.
    """
    messages: list[dict[str, Any]] = []
    with open_target(target, api_key) as opened:
        write(_HELP + "\n")
        while True:
            try:
                text = read("> ").strip()
            except (EOFError, KeyboardInterrupt):
                write("\n")
                return
            if text == "/exit":
                return
            if text == "/clear":
                messages.clear()
            elif text:
                messages.append({"role": "user", "content": text})
                body = {
                    "messages": messages,
                    "temperature": temperature,
                    "enable_thinking": thinking,
                    "max_tokens": max_tokens,
                }
                try:
                    messages.append(_show_answer(opened.events("/v1/chat/completions", body), write))
                except Glm5Error as error:  # too long, say: the conversation goes on without this message
                    messages.pop()
                    write(f"error: {error}\n")


@contextmanager
def open_target(target: str | Path, api_key: str = "") -> Iterator[Target]:
    """The target as a stream of events; a directory is loaded here and released at the end."""
    if str(target).startswith(("http://", "https://")):
        timeout = httpx.Timeout(_READ_S, connect=_CONNECT_S)
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        base_url = str(target).rstrip("/").removesuffix("/v1")
        with httpx.Client(base_url=base_url, timeout=timeout, headers=headers) as client:
            yield _Remote(client)
        return
    from glm5.tokenizer.bpe import load_tokenizer

    tokenizer = load_tokenizer(target)  # what is wrong with it is said before torch is loaded
    from glm5.engine.engine import Engine

    with (
        Engine.from_directory(target, tokenizer.stop_ids, EngineConfig(max_slots=1)) as engine,
        asyncio.Runner() as runner,
    ):
        def start(path: str, body: dict[str, Any]) -> AsyncGenerator[bytes, None]:
            from glm5.dialects.answer import Format, Run, answer_events
            from glm5.dialects.chat import parse_chat
            from glm5.dialects.completions import parse_completion

            form: Format = (
                parse_chat(body, tokenizer, "local", engine.max_context)
                if path.endswith("chat/completions")
                else parse_completion(body, tokenizer, "local")
            )
            generation = engine.submit(form.request.prompts[0], form.request.params)
            return answer_events(form, Run(form.request, tokenizer, [generation]))

        yield _Local(start, runner)


class _Local:
    """An engine in this process."""

    def __init__(
        self, start: Callable[[str, dict[str, Any]], AsyncGenerator[bytes, None]], runner: asyncio.Runner
    ) -> None:
        self._start, self._runner = start, runner

    def events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        stream = self._start(path, {**body, "model": "local", "stream": True})
        while (event := self._runner.run(_next(stream))) is not None:
            for line in event.decode().split("\n"):
                yield from _decode(line)


class _Remote:
    """A server that speaks the OpenAI API."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client
        self._model: str | None = None

    def events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        try:
            if self._model is None:
                self._model = str(self._client.get("/v1/models").raise_for_status().json()["data"][0]["id"])
            with self._client.stream("POST", path, json={**body, "model": self._model, "stream": True}) as response:
                if response.status_code != 200:
                    response.read()
                    raise ServiceError(f"{response.url}: status {response.status_code}: {_error_text(response)}")
                for line in response.iter_lines():
                    yield from _decode(line)
        except httpx.HTTPStatusError as error:
            status = error.response.status_code
            raise ServiceError(f"{error.request.url}: status {status}: {_error_text(error.response)}") from None
        except (httpx.HTTPError, KeyError, IndexError, ValueError) as error:
            raise ServiceError(
                f"{self._client.base_url}: {type(error).__name__}: {error}; is a server running there?"
            ) from None


async def _next(stream: AsyncGenerator[bytes, None]) -> bytes | None:
    return await anext(stream, None)


def _decode(line: str) -> Iterator[dict[str, Any]]:
    """The JSON of one ``data:`` line, if it is one. Raises ServiceError for an error event."""
    text = line.strip().removeprefix("data: ")
    if not line.startswith("data: ") or text == "[DONE]":
        return
    event = json.loads(text)
    if "error" in event:
        raise ServiceError(event["error"]["message"])
    yield event


def _error_text(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:200]


def _show_answer(events: Iterator[dict[str, Any]], write: Callable[[str], None]) -> dict[str, Any]:
    """Write an answer as it arrives; the assistant message for the history."""
    message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": ""}
    for event in events:
        for choice in event["choices"]:
            for key in ("reasoning_content", "content"):
                piece = choice["delta"].get(key) or ""
                if piece and key == "content" and message["reasoning_content"] and not message["content"]:
                    write("\n\n")
                message[key] += piece
                write(piece)
    write("\n")
    return message
