"""A server with keys and small limits: who may call, how much, how slowly; what others notice of it; how it ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from glm5.errors import ConfigError
from glm5.process import spawn, stop, wait_ready
from glm5.serve.config import ServeConfig, read_keys

from .conftest import MODEL

KEY = "first-key"
HEADERS = {"authorization": f"Bearer {KEY}"}
LONG = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 60, "stop_token_ids": []}}


@dataclass(frozen=True)
class Guarded:
    url: str
    log: Path
    client: httpx.Client

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").partition(":")
        return host, int(port)

    def post(self, path: str, body: Any, **rest: Any) -> httpx.Response:
        return self.client.post(path, json=body, headers=HEADERS, **rest)

    def stats(self) -> dict[str, Any]:
        return self.client.get("/stats", headers=HEADERS).json()

    def wait_idle(self) -> None:
        deadline = time.monotonic() + 30
        while self.stats()["running"] or self.stats()["queued"]:
            assert time.monotonic() < deadline, "requests stay although nobody waits for them"
            time.sleep(0.02)


@pytest.fixture(scope="module")
def guarded(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    root = tmp_path_factory.mktemp("guarded")
    (root / "keys").write_text("second-key\n\n")
    flags = {
        "--api-key": KEY,
        "--api-key-file": root / "keys",
        "--cors": "https://app.example",
        "--max-body-mib": 1,
        "--max-concurrent": 4,
        "--max-slots": 2,
        "--max-waiting": 1,
        "--max-context": 400,
        "--threads": 1,
        "--header-timeout": 4,
        "--body-timeout": 4,
        "--request-timeout": 30,
        "--shutdown-timeout": 1,
        "--access-log": root / "access.jsonl",
        "--port": 0,
        "--ready-file": root / "ready.json",
    }
    arguments = [str(word) for pair in flags.items() for word in pair]
    process = spawn(["serve", str(checkpoint), *arguments], root / "serve.log", {"OMP_NUM_THREADS": "1"})
    try:
        url = wait_ready(process, root / "ready.json", root / "serve.log", 60)
        with httpx.Client(base_url=url, timeout=60) as client:
            yield Guarded(url, root / "access.jsonl", client)
        os.kill(process.pid, signal.SIGTERM)
        process.wait(20)
        assert "Traceback" not in (root / "serve.log").read_text()
    finally:
        stop(process)


def test_a_key_is_needed_and_any_of_them_does(guarded: Guarded) -> None:
    for key in (KEY, "second-key"):
        for headers in ({"authorization": f"Bearer {key}"}, {"x-api-key": key}):
            assert guarded.client.get("/v1/models", headers=headers).status_code == 200
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": KEY}, {"x-api-key": "schlüssel".encode()}):
        found = guarded.client.get("/v1/models", headers=headers)
        assert found.status_code == 401 and found.json()["error"]["type"] == "authentication_error"
    assert guarded.client.get("/health").status_code == 200
    assert guarded.client.post("/update_weights_from_disk", json={}).status_code == 401


def test_the_clients_see_their_own_authentication_errors(guarded: Guarded) -> None:
    user: Any = [{"role": "user", "content": "hi"}]
    with openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError, match="Unknown API key"):
            client.chat.completions.create(model=MODEL, messages=user)
    with anthropic.Anthropic(base_url=guarded.url, api_key="wrong", max_retries=0) as claude:
        with pytest.raises(anthropic.AuthenticationError, match="Unknown API key"):
            claude.messages.create(model=MODEL, messages=user, max_tokens=5)
    with anthropic.Anthropic(base_url=guarded.url, api_key=KEY, max_retries=0) as claude:
        assert claude.messages.create(model=MODEL, messages=user, max_tokens=3).usage.output_tokens > 0


def test_stored_responses_belong_to_their_key(guarded: Guarded) -> None:
    body = {"model": MODEL, "input": "hi", "max_output_tokens": 3}
    name = guarded.post("/v1/responses", body).json()["id"]
    path = f"/v1/responses/{name}"
    assert guarded.client.get(path, headers=HEADERS).status_code == 200
    assert guarded.client.get(path, headers={"x-api-key": "second-key"}).status_code == 404


def test_request_ids_are_echoed_or_made_up(guarded: Guarded) -> None:
    given = guarded.client.get("/health", headers={"x-request-id": "my-id"})
    assert given.headers["x-request-id"] == given.headers["request-id"] == "my-id"
    for wrong in ("a" * 200, "two words"):
        made = guarded.client.get("/health", headers={"x-request-id": wrong})
        assert made.headers["x-request-id"].startswith("req_")


def test_browsers_of_allowed_origins_may_call(guarded: Guarded) -> None:
    ask = {
        "origin": "https://app.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization",
    }
    path = "/v1/chat/completions"
    found = guarded.client.options(path, headers=ask)
    assert found.status_code == 200 and found.headers["access-control-allow-origin"] == "https://app.example"
    assert guarded.client.options(path, headers={**ask, "origin": "https://evil.example"}).status_code == 400
    refused = guarded.client.get("/v1/models", headers={"origin": "https://app.example"})
    assert refused.status_code == 401 and "access-control-allow-origin" in refused.headers


def test_a_huge_body_is_refused_without_being_read(guarded: Guarded) -> None:
    with socket.create_connection(guarded.address, timeout=10) as client:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
        client.sendall(f"{head}content-length: {100 << 20}\r\n\r\n".encode() + b"x" * 1000)
        answer = client.recv(65536)  # long before the body is complete
        assert b" 413 " in answer and b"connection: close" in answer
    chunk = b"x" * (64 << 10)
    found = guarded.client.post("/v1/messages", content=(chunk for _ in range(100)), headers=HEADERS)
    assert found.status_code == 413 and found.json()["error"]["type"] == "request_too_large"


SLOW = {
    b"POST /generate HTTP/1.1\r\nhost: x\r\n": b" 408 ",
    b"": b" 408 ",
    f"POST /generate HTTP/1.1\r\nhost: x\r\nx-api-key: {KEY}\r\ncontent-length: 50\r\n\r\n{{".encode(): b" 408 ",
    b"GET / HTTP/1.1\r\n" + b"x: " + b"y" * (70 << 10): b" 431 ",
    b"\x16\x03\x01nonsense\r\n\r\n": b" 400 ",
}


def test_slow_and_endless_requests_are_cut_off(guarded: Guarded) -> None:
    def send(start: bytes) -> bytes:
        with socket.create_connection(guarded.address, timeout=30) as client:
            client.sendall(start)
            received = b""
            while part := client.recv(4096):
                received += part
        return received.split(b"\r\n", 1)[0]

    with ThreadPoolExecutor(len(SLOW)) as threads:
        answers = [threads.submit(send, start) for start in SLOW]
        assert guarded.client.get("/health").status_code == 200
        for answer, status in zip(answers, SLOW.values(), strict=True):
            assert status in answer.result()


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_server_says_when_to_come_back(guarded: Guarded, stream: bool) -> None:
    guarded.post("/pause_generation", {})
    try:
        with ThreadPoolExecutor(6) as threads:  # two slots, one waits, the rest find the queue or the door closed
            sent = [threads.submit(guarded.post, "/generate", {**LONG, "stream": stream}) for _ in range(6)]
            deadline = time.monotonic() + 20
            while sum(future.done() for future in sent) < 3:
                assert time.monotonic() < deadline, "nobody was turned away"
                time.sleep(0.02)
            guarded.post("/continue_generation", {})
            answers = [future.result() for future in sent]
    finally:
        guarded.post("/continue_generation", {})
    refused = [answer for answer in answers if answer.status_code == 429]
    assert len(refused) >= 3 and all(int(answer.headers["retry-after"]) > 0 for answer in refused)
    served = [answer for answer in answers if answer.status_code == 200]
    assert len(served) + len(refused) == 6 and served
    guarded.wait_idle()


def test_a_client_that_leaves_mid_stream_frees_its_slot_and_nobody_else_notices(guarded: Guarded) -> None:
    body = {"model": MODEL, "prompt": "the quick", "max_tokens": 60, "seed": 3}
    alone = guarded.post("/v1/completions", body).json()["choices"][0]["text"]
    with ThreadPoolExecutor(1) as threads:
        beside = threads.submit(guarded.post, "/v1/completions", body)
        with guarded.client.stream(
            "POST",
            "/v1/messages",
            headers=HEADERS,
            json={"model": MODEL, "max_tokens": 300, "messages": [{"role": "user", "content": "hi"}], "stream": True},
        ) as leaving:
            next(leaving.iter_bytes())
        assert beside.result().json()["choices"][0]["text"] == alone
    guarded.wait_idle()


def test_the_access_log_has_one_line_a_request(guarded: Guarded) -> None:
    headers = {**HEADERS, "x-request-id": "logged"}
    body = {**LONG, "sampling_params": {"max_new_tokens": 3, "stop_token_ids": []}}
    guarded.client.post("/generate", json=body, headers=headers)
    guarded.client.get("/v1/models", headers={"x-request-id": "nobody"})
    time.sleep(0.1)
    lines = {line["request_id"]: line for line in map(json.loads, guarded.log.read_text().splitlines())}
    found = lines["logged"]
    assert (found["method"], found["path"], found["status"]) == ("POST", "/generate", 200)
    assert (found["prompt_tokens"], found["output_tokens"]) == (2, 3) and found["duration_ms"] > 0
    assert lines["nobody"]["status"] == 401 and "output_tokens" not in lines["nobody"]
    assert KEY not in guarded.log.read_text()


def test_the_description_names_every_route(guarded: Guarded) -> None:
    document = guarded.client.get("/openapi.json").json()
    assert {"/v1/chat/completions", "/v1/responses", "/v1/messages", "/generate"} <= set(document["paths"])
    page = guarded.client.get("/docs")
    assert page.headers["content-type"].startswith("text/html") and "/v1/messages/count_tokens" in page.text


def test_running_answers_may_finish_after_a_sigterm_and_late_ones_are_cut(checkpoint: Path, tmp_path: Path) -> None:
    arguments = [
        "serve",
        str(checkpoint),
        "--port",
        "0",
        "--ready-file",
        str(tmp_path / "ready.json"),
        "--threads",
        "1",
        "--shutdown-timeout",
        "20",
        "--max-slots",
        "2",
    ]
    process = spawn(arguments, tmp_path / "log", {"OMP_NUM_THREADS": "1"})
    try:
        url = wait_ready(process, tmp_path / "ready.json", tmp_path / "log", 60)
        with httpx.stream("POST", f"{url}/generate", json={**LONG, "stream": True}, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            os.kill(process.pid, signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]" and '"length"' in rest[-2]
        process.wait(20)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health", timeout=5)
    finally:
        stop(process)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_body_bytes": 0},
        {"body_timeout_s": 0},
        {"header_timeout_s": float("nan")},
        {"api_keys": ("",)},
        {"response_memory_bytes": -1},
    ],
)
def test_wrong_settings_are_one_line(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ServeConfig(**wrong)


def test_a_key_file_without_keys_is_refused(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("\n \n")
    with pytest.raises(ConfigError, match="holds no API key"):
        read_keys(tmp_path / "keys")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(tmp_path / "missing")
