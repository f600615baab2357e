"""Command-line generation and chat over a directory and over a server: the same text either way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from glm5.errors import CheckpointError, EngineError, ServiceError
from glm5.records import SamplingParams
from glm5.serve.generate import chat_loop, generate_text

from .conftest import CONTEXT, Server

GREEDY = SamplingParams(temperature=0, max_new_tokens=20)


def script(*lines: str) -> Callable[[str], str]:
    waiting = list(lines)

    def read(_: str) -> str:
        if not waiting:
            raise EOFError
        return waiting.pop(0)

    return read


def test_a_directory_and_a_server_give_the_same_text(server: Server) -> None:
    local = list(generate_text(server.directory, "the quick", GREEDY))
    assert (
        "".join(local)
        == "".join(generate_text(server.url, "the quick", GREEDY))
        == "".join(generate_text(f"{server.url}/v1", "the quick", GREEDY))
    )
    assert len(local) > 1


def test_chat_shows_the_same_answer_for_both_targets_and_survives_errors(server: Server) -> None:
    shown: dict[object, str] = {}
    for target in (server.directory, server.url):
        pieces: list[str] = []
        read = script("hi", "fox " * CONTEXT, "/clear", "", "hi", "/exit", "never")
        chat_loop(target, temperature=0.0, thinking=False, max_tokens=16, read=read, write=pieces.append)
        shown[target] = "".join(pieces)
    assert "maximum context length" in shown[server.url] and "never" not in shown[server.url]
    assert shown[server.url].splitlines()[:2] == shown[server.directory].splitlines()[:2]


def test_wrong_targets_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match="is a server running there"):
        list(generate_text("http://127.0.0.1:9", "x", GREEDY))
    with pytest.raises((CheckpointError, EngineError)):
        list(generate_text(tmp_path, "x", GREEDY))
