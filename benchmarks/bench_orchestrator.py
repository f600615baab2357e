"""What a thousand episodes at once cost: CPU of gateway and orchestrator per turn, and their memory.

``python benchmarks/bench_orchestrator.py [--concurrency 1000] [--turns 10] [--episodes 2000] [--quick] [--json]``

Gateway, orchestrator and task service are the real programs; the engine is a server that answers after a while with a
tool call, and at last with a right or a wrong answer, so that the ledger, the curriculum and the pacing have what they
have in a run; a loop that leases, acks and moves on stands for the trainer. CPU is what the kernel counted for the two
processes from the first episode to the last (sessions, ledger and all), divided by the model calls of that time; memory
is the sum of their peaks.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from glm5.env.tasks import Message, Solution, Task
from glm5.eval.report import Row, results_object
from glm5.process import PARENT_VARIABLE, die_with_parent, serve_app, spawn, stop, wait_ready
from glm5.rl.config import RLConfig
from glm5.rl.ledger import Ledger
from glm5.tokenizer.bpe import Tokenizer, load_tokenizer, train_tokenizer

CALL = ("I look at the files first.</think>Let me see.<tool_call>bash<arg_key>command</arg_key>"
        "<arg_value>ls -la src && git status --short</arg_value></tool_call><|observation|>")
ANSWERS = ("I have seen it.</think>The answer is 0<|user|>", "I have seen it.</think>The answer is 1<|user|>")
RESULT = "total 12\n-rw-r--r-- 1 user user 120 notes.txt\n" * 4
TOOLS = [{"type": "function", "function": {"name": "bash", "description": "Runs a command.", "parameters": {
    "type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}}}]
GOAL_MS, GOAL_BYTES = 5.0, 2e9
TIMEOUT_S = 1800.0


class Scripted:
    """A taskset without work of its own: the tool answers at once, the reward is the last character of the answer."""

    name = "scripted"
    needs_sandbox = False

    def tools(self) -> list[dict[str, Any]]:
        """One tool."""
        return TOOLS

    def task(self, split: str, index: int) -> Task:
        """Any number of tasks."""
        return Task(task_id=f"scripted/{split}/{index}", taskset="scripted", split=split,
                    instruction=f"{'You are an agent. ' * 20}Repair test {index}.")

    def content(self, task: Task) -> str:
        """Tasks differ by their number."""
        return task.task_id

    def solution(self, task: Task) -> Solution:
        """What the oracle says."""
        return Solution([], "The answer is 1")

    async def setup(self, task: Task, sandbox: Any) -> None:
        """Nothing to prepare."""

    async def call(self, task: Task, sandbox: Any, tool: str, arguments: dict[str, Any]) -> str:
        """The same listing whatever the command."""
        return RESULT

    async def verify(self, task: Task, sandbox: Any, messages: list[Message]) -> dict[str, float]:
        """1 for an answer that ends so."""
        return {"reward": float(str(messages[-1].get("content") or "").endswith("1"))}


def scripted_engine(tokenizer: Tokenizer, turns: int, latency_s: float) -> Starlette:
    """An engine of the token-level protocol: ``turns - 1`` tool calls, then an answer that is right half of the time,
    each after about ``latency_s``."""
    def answer(text: str) -> JSONResponse:
        ids = tokenizer.encode(text, allow_special=True)
        return JSONResponse({"output_ids": ids, "logprobs": [-0.5] * len(ids), "weight_versions": [1] * len(ids),
                             "finish_reason": "stop", "cached_tokens": 0})

    call, answers = answer(CALL), [answer(text) for text in ANSWERS]
    (observation,) = tokenizer.encode("<|observation|>", allow_special=True)
    choose = random.Random(0)

    async def generate(request: Request) -> JSONResponse:
        prompt = (await request.json())["input_ids"]
        await asyncio.sleep(latency_s * choose.uniform(0.5, 1.5))
        return call if prompt.count(observation) < turns - 1 else choose.choice(answers)

    async def info(request: Request) -> JSONResponse:
        return JSONResponse({"max_context": 1_000_000})

    return Starlette(routes=[Route("/generate", generate, methods=["POST"]), Route("/get_model_info", info),
                             Route("/health_generate", info), Route("/stats", info)])


@dataclass(frozen=True, slots=True)
class Services:
    """URLs, and processes whose CPU and memory are read."""

    gateway_url: str
    orchestrator_url: str
    processes: dict[str, int]


@contextmanager
def running(work: Path, config: RLConfig, turns: int, latency_s: float) -> Iterator[Services]:
    """Engine, gateway, orchestrator and task service over the run directory ``work``."""
    train_tokenizer([f"{CALL} {RESULT} {' '.join(ANSWERS)} You are an agent. Repair test 1234567890."] * 20,
                    600).save(work)
    info = work / "scripted-1.0.dist-info"  # installs the taskset as a user would, for the processes started here
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: scripted\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[glm5.tasksets]\nscripted = bench_orchestrator:Scripted\n")
    (work / "config.json").write_text(json.dumps(asdict(config)))
    path = os.pathsep.join([str(work), str(Path(__file__).parent), *sys.path])
    processes: dict[str, int] = {}
    with ExitStack() as stack:
        def start(name: str, *arguments: str) -> str:
            ready = work / f"{name}.ready.json"
            process = spawn([*arguments, "--port", "0", "--ready-file", str(ready)], work / f"{name}.log",
                            {"PYTHONPATH": path})
            stack.callback(stop, process)
            processes[name] = process.pid
            return wait_ready(process, ready, work / f"{name}.log")

        engine = subprocess.Popen([sys.executable, __file__, "--engine", str(work), str(turns), str(latency_s)],
                                  stdin=subprocess.DEVNULL, env={**os.environ, PARENT_VARIABLE: str(os.getpid())})
        stack.callback(stop, engine)
        engine_url = wait_ready(engine, work / "engine.json", work / "engine.log")
        gateway_url = start("gateway", "gateway", "--engine", engine_url, "--tokenizer", str(work), "--store",
                            str(work / "turns.sqlite"))
        orchestrator_url = start("orchestrator", "orchestrator", str(work / "config.json"), "--run-dir", str(work),
                                 "--gateway-url", gateway_url)
        start("task_service", "env", "serve", "scripted", "--register", orchestrator_url, "--capacity",
              str(config.concurrency))
        yield Services(gateway_url, orchestrator_url, processes)


def cpu_seconds(process_id: int) -> float:
    """User and system time of a process, its threads included."""
    fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_bytes(process_id: int) -> int:
    """Largest resident memory of a process so far."""
    status = Path(f"/proc/{process_id}/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def measure(services: Services, ledger: Ledger, config: RLConfig, episodes: int) -> list[Row]:
    """Let ``episodes`` end and give the rows."""
    with httpx.Client(timeout=60, trust_env=False) as http:
        def get(url: str) -> dict[str, Any]:
            answer: dict[str, Any] = http.get(f"{url}/stats").json()
            return answer

        before = {name: cpu_seconds(process) for name, process in services.processes.items()}
        ledger.record_version(1, 0)
        started, step, concurrent = time.monotonic(), 0, []
        ledger.set_progress(step, 1)
        while True:
            batch = ledger.lease(config.groups_per_batch, step)
            if batch is not None:
                step += 1
                ledger.ack(batch.batch_id, step)
                ledger.set_progress(step, 1)
                continue
            time.sleep(1.0)
            stats = get(services.orchestrator_url)
            concurrent.append(sum(service["running"] for service in stats["services"]))
            if stats["episodes_finished"] >= episodes:
                break
            if time.monotonic() - started > TIMEOUT_S:
                raise TimeoutError(f"{stats['episodes_finished']} of {episodes} episodes ended in {TIMEOUT_S:.0f} s")
        gateway = get(services.gateway_url)
        elapsed_s = time.monotonic() - started
        spent = {name: cpu_seconds(process) - before[name] for name, process in services.processes.items()}
        peak = {name: peak_bytes(process) for name, process in services.processes.items()}
    fates, retried = stats["ledger"]["episodes"], stats["ledger"]["retried"]
    if fates.get("infra_error") or retried:
        raise RuntimeError(f"not a clean run: episodes {fates}, {retried} attempts failed; read events.jsonl")
    if stats["violations"] or gateway["mismatches"] or gateway["errors"] or not step:
        raise RuntimeError(f"not a clean run: {stats['violations']}, gateway {gateway}, {step} steps")
    turns = gateway["calls"]
    per_turn = {name: 1000 * seconds / turns for name, seconds in spent.items()}
    overhead, memory = per_turn["gateway"] + per_turn["orchestrator"], peak["gateway"] + peak["orchestrator"]
    return [Row(name="orchestrator.cpu_per_turn", value=overhead, unit="ms", n=turns, goal=f"under {GOAL_MS:g}",
                met=overhead < GOAL_MS),
            *(Row(name=f"orchestrator.cpu_per_turn.{name}", value=value, unit="ms", n=turns)
              for name, value in per_turn.items()),
            Row(name="orchestrator.peak_rss_bytes", value=memory, unit="bytes", goal=f"under {GOAL_BYTES:g}",
                met=memory < GOAL_BYTES),
            *(Row(name=f"orchestrator.peak_rss_bytes.{name}", value=value, unit="bytes")
              for name, value in peak.items()),
            Row(name="orchestrator.concurrent_episodes", value=max(concurrent), unit="episodes",
                goal=f"at least {config.concurrency}", met=max(concurrent) >= config.concurrency),
            Row(name="orchestrator.turns_per_s", value=turns / elapsed_s, unit="turns/s"),
            Row(name="orchestrator.steps", value=step, unit="steps")]


def main() -> None:
    """Start, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=10, help="model calls of an episode")
    parser.add_argument("--episodes", type=int, default=2000)
    parser.add_argument("--latency-s", type=float, default=1.0, help="mean time of the engine")
    parser.add_argument("--folder", type=Path, help="a new run directory that stays, with the logs")
    parser.add_argument("--quick", action="store_true", help="64 episodes of 4 turns at once, 128 in all")
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    options = parser.parse_args()
    if options.quick:
        options.concurrency, options.turns, options.episodes, options.latency_s = 64, 4, 128, 0.2
    size, batch = 8, max(2, min(16, options.concurrency // 32))
    eta = options.concurrency // (size * batch) + 2
    config = RLConfig(name="bench", tasksets={"scripted": 1.0}, groups_per_batch=batch, group_size=size,
                      concurrency=options.concurrency, max_turns=options.turns, pacing_eta=eta,
                      max_staleness=10**6, episode_timeout_s=TIMEOUT_S, max_new_tokens=256, declare_tools=True,
                      enable_thinking=True, sandbox="none")
    with tempfile.TemporaryDirectory() as name:
        work = options.folder or Path(name)
        work.mkdir(parents=True, exist_ok=True)
        with running(work, config, options.turns, options.latency_s) as services:
            ledger = Ledger.of_run(config, work)
            try:
                rows = measure(services, ledger, config, options.episodes)
            finally:
                ledger.close()
    if not options.json:
        for row in rows:
            print(f"{row.name:40} {row.value:14.2f} {row.unit:10} {row.goal or ''}")
    print(json.dumps(results_object("bench_orchestrator", rows)))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--engine"]:
        directory = Path(sys.argv[2])
        die_with_parent()
        serve_app(scripted_engine(load_tokenizer(directory), int(sys.argv[3]), float(sys.argv[4])),
                  ready_file=directory / "engine.json")
    else:
        main()
