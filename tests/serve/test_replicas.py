"""Two real engine processes behind one server: one address, one version of weights, and no replica that is missed."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from glm5.errors import ConfigError
from glm5.process import spawn, stop, wait_ready
from glm5.serve.config import ServeConfig
from glm5.serve.replicas import serve_replicas

from .conftest import MODEL, Server, write_checkpoint

KEY = "a-key"
FLAGS = {"--max-slots": 4, "--max-context": 900, "--threads": 1, "--weight-version": 3, "--port": 0, "--replicas": 2,
         "--api-key": KEY, "--shutdown-timeout": 1}


@dataclass(frozen=True)
class Pair:
    client: httpx.Client

    def stats(self) -> dict[str, Any]:
        return self.client.get("/stats").json()

    def pids(self) -> list[int]:
        return [one["pid"] for one in self.stats()["replicas"]]

    def generate(self, ids: list[int], new: int = 12) -> dict[str, Any]:
        params = {"temperature": 0, "max_new_tokens": new, "stop_token_ids": []}
        answer = self.client.post("/generate", json={"input_ids": ids, "sampling_params": params})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def wait_replaced(self, pid: int) -> None:
        """Until both are alive and neither is process ``pid``: asked in this order, as a process that is gone stays so,
        while its death may be noticed between the two questions."""
        deadline = time.monotonic() + 120
        while pid in self.pids() or self.client.get("/health").json()["replicas_alive"] < 2:
            assert time.monotonic() < deadline, "the replica was not started again"
            time.sleep(0.1)


@pytest.fixture(scope="module")
def pair(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    root = tmp_path_factory.mktemp("pair")
    words = [str(word) for pair in FLAGS.items() for word in pair]
    process = spawn(["serve", str(checkpoint), "--ready-file", str(root / "ready.json"), *words], root / "serve.log",
                    {"OMP_NUM_THREADS": "1"})
    try:
        url = wait_ready(process, root / "ready.json", root / "serve.log", 180)
        with httpx.Client(base_url=url, timeout=120, headers={"authorization": f"Bearer {KEY}"}) as client:
            yield Pair(client)
            pids = Pair(client).pids()
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(30) is not None
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
        assert "Traceback" not in (root / "serve.log").read_text()
    finally:
        stop(process)


def test_a_pair_answers_as_one_server_and_keeps_sessions_together(pair: Pair, server: Server) -> None:
    sessions = [[(k * m) % 300 for k in range(120)] for m in (3, 7)]
    params = {"temperature": 0, "max_new_tokens": 12, "stop_token_ids": []}
    alone = [httpx.post(f"{server.url}/generate", json={"input_ids": ids, "sampling_params": params}).json()
             for ids in sessions]
    first = [pair.generate(ids) for ids in sessions]
    assert [one["output_ids"] for one in first] == [one["output_ids"] for one in alone]
    for ids, answer in zip(sessions, first, strict=True):
        again = pair.generate([*ids, *answer["output_ids"], 5, 6])
        assert again["cached_tokens"] == 120 + 11  # the last sampled id has no key yet
    stats = pair.stats()
    assert [one["generated_tokens"] for one in stats["replicas"]] == [24, 24] and stats["generated_tokens"] == 48
    page = pair.client.get("/metrics").text
    assert "glm5_generated_tokens_total 48\n" in page and 'glm5_replica_up{replica="1"} 1\n' in page
    assert pair.client.get("/v1/models").json()["data"][0]["id"] == MODEL
    assert httpx.get(pair.client.base_url.join("/stats")).status_code == 401
    assert pair.client.post("/generate", json={"input_ids": "no"}).status_code == 400
    assert pair.client.post("/v1/chat/completions", content=b"{").status_code == 400


def test_a_stored_response_is_continued_where_it_is(pair: Pair) -> None:
    user = [{"role": "user", "content": "the quick"}]
    body = {"model": MODEL, "input": user, "max_output_tokens": 4}
    ids = [pair.client.post("/v1/responses", json=body).json()["id"] for _ in range(3)]
    for response_id in ids:
        following = {**body, "input": "fox", "previous_response_id": response_id}
        assert pair.client.post("/v1/responses", json=following).status_code == 200
        assert pair.client.get(f"/v1/responses/{response_id}").json()["id"] == response_id
    assert pair.client.delete(f"/v1/responses/{ids[0]}").json()["deleted"]
    assert pair.client.get(f"/v1/responses/{ids[0]}").status_code == 404


def test_weights_reach_both_or_none(pair: Pair, tmp_path: Path) -> None:
    wrong = pair.client.post("/update_weights_from_disk", json={"model_path": str(tmp_path), "weight_version": 9})
    assert wrong.status_code == 400 and "version 3 stays in force" in wrong.json()["message"]
    write_checkpoint(tmp_path / "new", 1)
    body = {"model_path": str(tmp_path / "new"), "weight_version": 4}
    done = pair.client.post("/update_weights_from_disk", json=body).json()
    assert done["success"] and done["weight_version"] == 4 and done["message"] == ""
    assert [one["weight_version"] for one in pair.stats()["replicas"]] == [4, 4]


def test_a_killed_replica_ends_its_streams_and_is_replaced(pair: Pair) -> None:
    body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 850, "stop_token_ids": []}}
    assert pair.client.post("/pause_generation").json() == {"success": True}
    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(pair.generate, [9, 9, number], 3) for number in range(2)]  # one on each replica
        deadline = time.monotonic() + 60
        while (stats := pair.stats())["queued"] + stats["running"] < 2:
            assert time.monotonic() < deadline, "requests do not reach the replicas"
            time.sleep(0.05)
        os.kill(stats["replicas"][0]["pid"], signal.SIGKILL)
        time.sleep(0.5)
        pair.client.post("/continue_generation")
        for future in waiting:  # that of the killed one went to the other
            assert len(future.result()["output_ids"]) == 3 and set(future.result()["weight_versions"]) <= {3, 4}
    pair.wait_replaced(stats["replicas"][0]["pid"])
    with pair.client.stream("POST", "/generate", json={**body, "stream": True}) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        busy = [one["pid"] for one in pair.stats()["replicas"] if one["running"]]
        assert len(busy) == 1
        os.kill(busy[0], signal.SIGKILL)
        last = [line for line in lines if line][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "replica_failed"
    assert len(pair.generate([4, 5, 6])["output_ids"]) == 12  # at once, on the other one
    pair.wait_replaced(busy[0])
    assert len({one["weight_version"] for one in pair.stats()["replicas"]}) == 1


def test_wrong_numbers_and_roles_are_refused(checkpoint: Path) -> None:
    arguments = (checkpoint, 2, "127.0.0.1", 0, None, 0, "", [])
    with pytest.raises(ConfigError, match="one server for each role"):
        serve_replicas(*arguments, ServeConfig(role="prefill"))
    with pytest.raises(ConfigError, match="replicas=0"):
        serve_replicas(checkpoint, 0, *arguments[2:], ServeConfig())
