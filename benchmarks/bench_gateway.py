"""What recording costs: CPU of the gateway process per model call, its engine being a server that answers at once.

``python benchmarks/bench_gateway.py [--sessions 64] [--turns 10] [--repeats 3] [--json]`` runs all sessions at the same
time; a turn sends the whole history back with a tool call and its result. Creation and end of the sessions are
included. The lowest of the repeats is reported: what else the machine does only adds to it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from glm5.eval.report import Row, results_object
from glm5.process import PARENT_VARIABLE, die_with_parent, serve_app, spawn, stop, wait_ready
from glm5.tokenizer.bpe import Tokenizer, load_tokenizer, train_tokenizer
from glm5.wire import HttpClient

TOOLS = [{"type": "function", "function": {"name": "bash", "description": "Runs a command.", "parameters": {
    "type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}}}]
ANSWER = ("I look at the files first.</think>Let me see.<tool_call>bash<arg_key>command</arg_key>"
          "<arg_value>ls -la src && git status --short</arg_value></tool_call><|observation|>")
RESULT = "total 12\n-rw-r--r-- 1 user user 120 notes.txt\n" * 4


def instant_engine(tokenizer: Tokenizer) -> Starlette:
    """An engine of the token-level protocol that always samples ``ANSWER``."""
    ids = tokenizer.encode(ANSWER, allow_special=True)
    answer = {"output_ids": ids, "logprobs": [-0.5] * len(ids), "weight_versions": [1] * len(ids),
              "finish_reason": "stop", "cached_tokens": 0}

    async def generate(request: Request) -> JSONResponse:
        await request.body()
        return JSONResponse(answer)

    async def info(request: Request) -> JSONResponse:
        return JSONResponse({"max_context": 1_000_000})

    return Starlette(routes=[Route("/generate", generate, methods=["POST"]), Route("/get_model_info", info),
                             Route("/health_generate", info), Route("/stats", info)])


async def episode(http: HttpClient, gateway: str, session_id: str, turns: int) -> None:
    """One session from its creation to its end."""
    async def post(url: str, body: dict[str, Any], key: str | None = None) -> Any:
        response = await http.request("POST", url, json.dumps(body).encode(), 120.0, key)
        if response.status != 200:
            raise RuntimeError(f"{url}: HTTP {response.status}: {response.body[:200]!r}")
        return response.json()

    session = await post(f"{gateway}/sessions", {"session_id": session_id})
    messages: list[dict[str, Any]] = [{"role": "system", "content": "You are an agent. " * 20},
                                      {"role": "user", "content": "Repair the tests."}]
    for _ in range(turns):
        body = {"model": "m", "messages": messages, "tools": TOOLS}
        answer = await post(f"{session['base_url']}/chat/completions", body, session["api_key"])
        message = answer["choices"][0]["message"]
        messages += [message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": RESULT}]
    summary = await post(f"{gateway}/sessions/{session_id}/finish", {"outcome": "ok", "reward": 1.0})
    if (summary["turns"], summary["mismatches"], len(summary["trajectories"])) != (turns, 0, 1):
        raise RuntimeError(f"{session_id}: recorded {summary['turns']} turns, {summary['mismatches']} mismatches")


async def measure(gateway: str, repeat: int, sessions: int, turns: int) -> float:
    """CPU milliseconds of the gateway per model call."""
    http = HttpClient()
    try:
        before = (await http.request("GET", f"{gateway}/stats", None, 30.0)).json()["cpu_s"]
        await asyncio.gather(*(episode(http, gateway, f"r{repeat}-{n}", turns) for n in range(sessions)))
        after = (await http.request("GET", f"{gateway}/stats", None, 30.0)).json()["cpu_s"]
    finally:
        http.close()
    return 1000 * (after - before) / (sessions * turns)


def main() -> None:
    """Start both processes, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        train_tokenizer([f"{ANSWER} {RESULT} You are an agent. Repair the tests."] * 20, 600).save(work)
        engine = subprocess.Popen([sys.executable, __file__, "--engine", str(work)], stdin=subprocess.DEVNULL,
                                  env={**os.environ, PARENT_VARIABLE: str(os.getpid())})
        gateway = None
        try:
            engine_url = wait_ready(engine, work / "engine.json", work / "engine.log")
            gateway = spawn(["gateway", "--engine", engine_url, "--tokenizer", str(work), "--store",
                             str(work / "turns.sqlite"), "--port", "0", "--ready-file", str(work / "gateway.json")],
                            work / "gateway.log")
            url = wait_ready(gateway, work / "gateway.json", work / "gateway.log")
            values = [asyncio.run(measure(url, repeat, options.sessions, options.turns))
                      for repeat in range(options.repeats)]
        finally:
            for process in (gateway, engine):
                if process is not None:
                    stop(process)
    row = Row(name="gateway.cpu_per_call", value=min(values), unit="ms", n=options.repeats, goal="at most 3.8",
              met=min(values) <= 3.8)
    if not options.json:
        print(f"{row.name:28} {row.value:7.2f} {row.unit}   all: {', '.join(f'{value:.2f}' for value in values)}")
    print(json.dumps(results_object("bench_gateway", [row])))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--engine"]:
        directory = Path(sys.argv[2])
        die_with_parent()
        serve_app(instant_engine(load_tokenizer(directory)), ready_file=directory / "engine.json")
    else:
        main()
