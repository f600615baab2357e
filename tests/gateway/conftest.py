"""A tokenizer, a scripted engine and a gateway, as real processes that serve all tests of this folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

from glm5.process import PARENT_VARIABLE, stop, wait_ready
from glm5.tokenizer.bpe import Tokenizer, train_tokenizer

ENGINE = Path(__file__).with_name("scripted_engine.py")
GATEWAY_PROGRAM = (
    "import sys; from glm5.process import die_with_parent; from glm5.gateway.app import run_gateway; die_with_parent();"
    "run_gateway(sys.argv[4:], sys.argv[1], sys.argv[2], ready_file=sys.argv[3])")
TOOLS = [{"type": "function", "function": {
    "name": "add", "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"},
                                                     "note": {"type": "string"}}}}}]
CALL = ("<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value>"
        "<arg_key>b</arg_key><arg_value>2</arg_value></tool_call>")


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """Byte-level, with merges for the words of these tests, so that a spelled-out word differs from an encoded one."""
    return train_tokenizer(["the answer is seven, because three and four make seven. add note result"] * 20, 400)


@pytest.fixture(scope="session")
def tokenizer_dir(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(directory)
    return directory


@dataclass
class Service:
    """A process of the tests."""

    process: subprocess.Popen[bytes]
    url: str


def start(arguments: list[str], ready_file: Path) -> Service:
    """Start ``python <arguments>`` and wait until it has announced its URL."""
    ready_file.unlink(missing_ok=True)
    log = ready_file.with_suffix(".log")
    environment = {**os.environ, PARENT_VARIABLE: str(os.getpid())}
    with open(log, "ab") as output:
        process = subprocess.Popen([sys.executable, *arguments], stdout=output, stderr=output, env=environment,
                                   stdin=subprocess.DEVNULL, start_new_session=True)
    url = wait_ready(process, ready_file, log)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:  # the socket listens before the application is up
        try:
            if httpx.get(f"{url}/stats", timeout=5).status_code < 500:
                return Service(process, url)
        except httpx.TransportError:
            time.sleep(0.02)
    raise TimeoutError(f"{url} does not answer; see {log}")


@contextmanager
def running(arguments: list[str], ready_file: Path) -> Iterator[Service]:
    """A process that is stopped at the end."""
    service = start(arguments, ready_file)
    try:
        yield service
    finally:
        stop(service.process)


@pytest.fixture(scope="session")
def engine(tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    ready_file = tmp_path_factory.mktemp("engine") / "engine.json"
    with running([str(ENGINE), str(tokenizer_dir), str(ready_file)], ready_file) as service:
        yield service


@pytest.fixture(scope="session")
def gateway(engine: Service, tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    directory = tmp_path_factory.mktemp("gateway")
    arguments = gateway_arguments(tokenizer_dir, directory, engine.url)
    with running(arguments, directory / "gateway.json") as service:
        yield service


def gateway_arguments(tokenizer_dir: Path, directory: Path, *engine_urls: str) -> list[str]:
    """Command line of a gateway whose files lie in ``directory``."""
    return ["-c", GATEWAY_PROGRAM, str(tokenizer_dir), str(directory / "store.sqlite"), str(directory / "gateway.json"),
            *engine_urls]


@dataclass
class Agent:
    """What a test knows about its session: base URL and key, and the control URL."""

    session_id: str
    control: str
    base_url: str
    api_key: str

    @property
    def anthropic_url(self) -> str:
        """Base URL for clients that add the version themselves."""
        return self.base_url.removesuffix("/v1")

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.api_key}"}

    def post(self, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
        """One request below the base URL; the response as it came."""
        return httpx.post(f"{self.base_url}/{path}", headers={**self.headers, **headers}, timeout=30,
                          json={"model": "m", **body})

    def chat(self, messages: list[dict[str, Any]], **extra: Any) -> httpx.Response:
        """One chat completion; the response as it came."""
        return self.post("chat/completions", {"messages": messages, **extra})

    def reply(self, messages: list[dict[str, Any]], **extra: Any) -> dict[str, Any]:
        """One call that must succeed; the assistant message."""
        response = self.chat(messages, **extra)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["message"]

    def finish(self, outcome: str = "ok", reward: float | None = 1.0) -> httpx.Response:
        return httpx.post(f"{self.control}/finish", json={"outcome": outcome, "reward": reward}, timeout=30)

    def trajectories(self) -> dict[str, Any]:
        """Finish; the answer."""
        response = self.finish()
        assert response.status_code == 200, response.text
        return response.json()


_NUMBERS = count()


def open_session(gateway_url: str, **settings: Any) -> Agent:
    """A new session on a gateway."""
    settings = {"session_id": f"s{next(_NUMBERS)}-{os.getpid()}", "enable_thinking": False, **settings}
    response = httpx.post(f"{gateway_url}/sessions", json=settings, timeout=10)
    assert response.status_code == 200, response.text
    answer = response.json()
    session_id = settings["session_id"]
    return Agent(session_id, f"{gateway_url}/sessions/{session_id}", answer["base_url"], answer["api_key"])


@pytest.fixture
def agent(gateway: Service) -> Callable[..., Agent]:
    """Opens sessions: ``agent(max_turns=3)``."""
    return lambda **settings: open_session(gateway.url, **settings)


@pytest.fixture
def script(engine: Service) -> Callable[..., None]:
    """Sets what the engine answers: ``script("first<|user|>", "second<|user|>", version=2)``."""
    def set_script(*replies: Any, **settings: Any) -> None:
        httpx.post(f"{engine.url}/script", json={"version": 1, **settings, "replies": list(replies)}, timeout=10)
    return set_script


@pytest.fixture
def engine_log(engine: Service) -> Callable[[], dict[str, Any]]:
    """What the engine was asked since the last script."""
    return lambda: json.loads(httpx.get(f"{engine.url}/log", timeout=10).text)
