"""A real server process: the official client, the token protocol, weight updates, errors, disconnects, shutdown."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import openai
import pytest

from glm5.process import spawn, wait_ready

from .conftest import CONTEXT, MODEL, Server, write_checkpoint

USER = [{"role": "user", "content": "the quick brown fox"}]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    }
]


def generate(server: Server, **body: object) -> dict:
    response = httpx.post(f"{server.url}/generate", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def wait_until(condition: Callable[[], bool], timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.02)


def stats(server: Server) -> dict:
    return httpx.get(f"{server.url}/stats", timeout=60).json()


def test_the_official_client_lists_models_and_chats(server: Server) -> None:
    with server.client() as client:
        assert [model.id for model in client.models.list()] == [MODEL]
        answer = client.chat.completions.create(model=MODEL, messages=USER, max_tokens=12, temperature=0, logprobs=True)
        choice = answer.choices[0]
        assert choice.message.role == "assistant" and choice.finish_reason in ("length", "stop", "tool_calls")
        assert answer.usage.completion_tokens == len(choice.logprobs.content) <= 12
        assert answer.usage.prompt_tokens == len(server.tokenizer.render(USER, add_generation_prompt=True).ids)


def test_the_official_client_streams_what_it_gets_whole(server: Server) -> None:
    asked = {"model": MODEL, "messages": USER, "max_tokens": 40, "seed": 5, "tools": TOOLS}
    with server.client() as client:
        whole = client.chat.completions.create(**asked)
        content = reasoning = ""
        reason = usage = None
        for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                content += choice.delta.content or ""
                reasoning += choice.delta.model_extra.get("reasoning_content", "")
                reason = choice.finish_reason or reason
    message = whole.choices[0].message
    assert content == (message.content or "") and reasoning == message.model_extra.get("reasoning_content", "")
    assert reason == whole.choices[0].finish_reason
    assert usage.completion_tokens == whole.usage.completion_tokens > 0


def test_tool_results_can_be_sent_back(server: Server) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 3}'}}
    messages = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "3"},
    ]
    with server.client() as client:
        answer = client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=4, extra_body={"enable_thinking": False}
        )
    assert answer.usage.completion_tokens > 0


def test_completions_work_with_the_official_client(server: Server) -> None:
    with server.client() as client:
        answer = client.completions.create(model=MODEL, prompt="the quick", max_tokens=8, temperature=0)
        pieces = client.completions.create(model=MODEL, prompt="the quick", max_tokens=8, temperature=0, stream=True)
        assert "".join(piece.choices[0].text for piece in pieces) == answer.choices[0].text


def test_errors_have_the_shape_that_the_client_knows(server: Server) -> None:
    with server.client() as client:
        with pytest.raises(openai.NotFoundError, match="does not exist") as unknown:
            client.chat.completions.create(model="gpt-9", messages=USER)
        assert unknown.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError, match="maximum context length") as long:
            client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "fox " * CONTEXT}])
        assert long.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client.chat.completions.create(model=MODEL, messages=USER, temperature=-1)
        with pytest.raises(openai.BadRequestError, match="embeddings"):
            client.embeddings.create(model=MODEL, input="hi")
        with pytest.raises(openai.NotFoundError, match="/v1/files"):
            client.files.list()


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/generate", b"{", 400),
        ("/generate", b"[]", 400),
        ("/generate", b"\xff\xfe", 400),
        ("/generate", b"[" * 100_000, 400),
        ("/generate", b"{}", 400),
        ("/generate", b'{"input_ids": [1], "sampling_params": {"temperature": NaN}}', 400),
        ("/generate", b'{"input_ids": "a"}', 400),
        ("/generate", b'{"input_ids": [1, true]}', 400),
        ("/generate", b'{"input_ids": [999999]}', 400),
        ("/generate", b'{"input_ids": []}', 400),
        ("/generate", b'{"input_ids": [1], "sampling_params": {"min_p": 1.5}}', 400),
        ("/generate", b'{"input_ids": [1], "sampling_params": {"typical_p": 1}}', 400),
        ("/generate", b'{"input_ids": [1], "sampling_params": {"temperature": 1e999}}', 400),
        ("/generate", b'{"input_ids": [1], "stream": 1}', 400),
        ("/generate", b'{"input_ids": [1], "sampling_params": {"seed": 1e5}}', 400),
        ("/generate", b" " * (17 << 20), 413),
        ("/v1/chat/completions", b'{"model": "tiny", "messages": [{"role": "wizard"}]}', 400),
        ("/update_weights_from_disk", b'{"model_path": "/nowhere", "weight_version": 99}', 400),
        ("/update_weights_from_disk", b'{"model_path": 3}', 400),
        ("/nothing", b"{}", 404),
        ("/stats", b"{}", 405),
    ],
)
def test_bad_bodies_get_a_4xx_in_the_error_shape(server: Server, path: str, body: bytes, status: int) -> None:
    response = httpx.post(server.url + path, content=body, timeout=60)
    assert response.status_code == status, response.text
    if path != "/update_weights_from_disk" or b"nowhere" not in body:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    else:
        assert response.json()["success"] is False and "nowhere" in response.json()["message"]
    assert httpx.get(f"{server.url}/health_generate", timeout=60).status_code == 200


def test_generate_returns_ids_log_probs_and_versions(server: Server) -> None:
    ids = server.tokenizer.encode("the quick brown fox jumps")
    params = {"temperature": 0, "max_new_tokens": 10, "stop_token_ids": []}
    found = generate(server, input_ids=ids, sampling_params=params, session_id="s1")
    assert len(found["output_ids"]) == len(found["logprobs"]) == 10 and found["weight_versions"] == [3] * 10
    assert found["finish_reason"] == "length" and found["prompt_tokens"] == len(ids)
    longer = ids + found["output_ids"] + [5, 6]
    again = generate(server, input_ids=longer, sampling_params=params, session_id="s1")
    assert again["cached_tokens"] == len(ids) + 9
    scored = generate(server, input_ids=longer[:-2], sampling_params={"max_new_tokens": 0}, return_prompt_logprob=True)
    assert scored["output_ids"] == [] and scored["prompt_logprobs"][0] is None
    assert scored["prompt_logprobs"][len(ids) :] == pytest.approx(found["logprobs"], abs=1e-4)


def test_a_generate_stream_adds_up_to_the_whole(server: Server) -> None:
    body = {"input_ids": [40, 41, 42], "sampling_params": {"max_new_tokens": 20, "seed": 1, "stop_token_ids": []}}
    whole = generate(server, **body)
    found: dict[str, list] = {"output_ids": [], "logprobs": [], "weight_versions": []}
    with httpx.stream("POST", f"{server.url}/generate", json={**body, "stream": True}, timeout=60) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    for chunk in chunks:
        for name, values in found.items():
            values += chunk[name]
    assert found["output_ids"] == whole["output_ids"] and found["logprobs"] == pytest.approx(
        whole["logprobs"], abs=1e-4
    )
    assert [chunk["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_aborts_its_request(server: Server, stream: bool) -> None:
    httpx.post(f"{server.url}/pause_generation", timeout=60)
    try:
        body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 300, "stop_token_ids": []}, "stream": stream}
        with pytest.raises(httpx.ReadTimeout), httpx.Client(timeout=0.5) as client:
            if stream:
                with client.stream("POST", f"{server.url}/generate", json=body) as response:
                    response.read()
            else:
                client.post(f"{server.url}/generate", json=body)
        wait_until(lambda: stats(server)["queued"] == stats(server)["running"] == 0)
    finally:
        httpx.post(f"{server.url}/continue_generation", timeout=60)


def test_pause_continue_info_and_metrics(server: Server) -> None:
    info = httpx.get(f"{server.url}/get_model_info", timeout=60).json()
    assert (info["model_path"], info["vocab_size"], info["max_context"]) == (str(server.directory), 320, CONTEXT)
    httpx.post(f"{server.url}/pause_generation", timeout=60)
    assert stats(server)["is_paused"] is True
    httpx.post(f"{server.url}/continue_generation", timeout=60)
    assert stats(server)["is_paused"] is False
    page = httpx.get(f"{server.url}/metrics", timeout=60).text
    values = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    assert float(values["glm5_generated_tokens_total"]) == stats(server)["generated_tokens"] > 0
    assert float(values['glm5_http_requests_total{path="/get_model_info",status="200"}']) >= 1
    assert (
        values['glm5_http_request_seconds_bucket{path="/get_model_info",le="+Inf"}']
        == values['glm5_http_request_seconds_count{path="/get_model_info"}']
    )


def start(directory: Path, log: Path, *extra: str) -> subprocess.Popen[bytes]:
    return spawn(["serve", str(directory), "--max-slots", "4", "--threads", "1", *extra], log, {"OMP_NUM_THREADS": "1"})


def test_weights_are_swapped_while_serving_and_a_sigterm_ends_the_server(checkpoint: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "next", 1)
    log, ready = tmp_path / "serve.log", tmp_path / "ready.json"
    process = start(checkpoint, log, "--port", "0", "--ready-file", str(ready))
    try:
        url = wait_ready(process, ready, log)
        body = {
            "input_ids": [1, 2, 3],
            "sampling_params": {"temperature": 0, "max_new_tokens": 20, "stop_token_ids": []},
        }
        before = httpx.post(f"{url}/generate", json=body, timeout=60).json()
        update = httpx.post(
            f"{url}/update_weights_from_disk",
            json={"model_path": str(tmp_path / "next"), "weight_version": 1},
            timeout=60,
        ).json()
        assert update["success"] and update["weight_version"] == 1 and update["load_ms"] < 5000
        after = httpx.post(f"{url}/generate", json=body, timeout=60).json()
        assert before["weight_versions"] == [0] * 20 and after["weight_versions"] == [1] * 20
        assert before["output_ids"] != after["output_ids"] and after["cached_tokens"] == 0
        os.kill(process.pid, signal.SIGTERM)
        process.wait(10)
        assert "Traceback" not in log.read_text()
    finally:
        process.kill()
        process.wait(10)


def test_a_port_in_use_is_one_line_and_exit_2(checkpoint: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        process = start(checkpoint, tmp_path / "log", "--port", str(taken.getsockname()[1]))
        assert process.wait(60) == 2
    lines = (tmp_path / "log").read_text().strip().splitlines()
    assert len(lines) == 1 and "choose another --port" in lines[0]


def test_the_protocol_modules_load_without_torch() -> None:
    code = (
        "import sys, glm5.serve.app, glm5.serve.openai, glm5.serve.generate, glm5.engine.scheduler; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
