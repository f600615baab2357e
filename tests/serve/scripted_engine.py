"""An engine that says what a script tells it to, and the server of this package over it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import uvicorn

from glm5.process import bind
from glm5.serve.app import build_app
from glm5.tokenizer.bpe import Tokenizer

from .replay import Replay


class ScriptedEngine:
    """Answers the n-th request with the n-th text; remembers what it was asked."""

    vocab_size = 1000
    max_context = 100_000
    config = SimpleNamespace(max_slots=1)

    def __init__(self, tokenizer: Tokenizer, texts: Sequence[str]) -> None:
        self._tokenizer, self._texts = tokenizer, list(texts)
        self.prompts: list[str] = []

    def submit(self, ids: list[int], params: Any, **_: Any) -> Replay:
        self.prompts.append(self._tokenizer.decode(ids))
        text = self._texts.pop(0)
        output = [*self._tokenizer.encode(text, allow_special=True), self._tokenizer.special_id("<|user|>")]
        return Replay(output, list(range(0, len(output), 3)))

    def close(self) -> None:
        """Nothing to stop."""


@contextmanager
def serving(engine: ScriptedEngine, tokenizer: Tokenizer) -> Iterator[str]:
    """URL of a server over ``engine`` in a thread of this process."""
    listener = bind("127.0.0.1", 0)
    app = build_app(engine, tokenizer, "scripted")  # type: ignore[arg-type]
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        deadline = time.monotonic() + 30
        while not server.started:
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()
