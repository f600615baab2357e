"""What keeping a session on one engine rank saves: prompt tokens computed against prompt tokens that are new.

``python benchmarks/bench_routing.py [--ranks 4] [--sessions 64] [--turns 20] [--json]`` starts real engines over a tiny
random model, each with slots for 7/16 of the sessions, and plays all sessions at once through the gateway's router:
a turn appends new ids to all that the session has seen and samples eight more. Three runs: the router as it is, one
that gives each turn to the next rank in turn, and the router again while one rank is killed half-way. The ids of every
session are its own, so nothing is shared between sessions. A ratio is the engines' own count of prefilled tokens over
the ids that the sessions appended; the work of the killed rank up to its end is counted. About three minutes on two
idle cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

from glm5.errors import Glm5Error
from glm5.eval.report import Row, results_object
from glm5.gateway.router import LOAD_FACTOR, Router
from glm5.gateway.tree import ids_text
from glm5.gateway.upstream import EnginePool
from glm5.process import spawn, stop, wait_ready
from glm5.records import SamplingParams
from glm5.wire import HttpClient

VOCABULARY = 320
FIRST, LATER, SAMPLED = 256, 96, 8
"""Ids of a session's first prompt, of what each later turn appends, and of an answer."""
TOOL_S = 0.05
"""Longest pause between two turns of a session, so that sessions drift apart."""


class RoundRobin(Router):
    """Gives every turn to the next rank that lives."""

    def __init__(self, engine_urls: Sequence[str]) -> None:
        super().__init__(engine_urls)
        self._turns = count()

    def choose(self, session_id: str) -> str | None:
        """The next rank."""
        alive = [url for url in self.engine_urls if self.is_alive(url)]
        return alive[next(self._turns) % len(alive)] if alive else None


@dataclass
class Rank:
    """One engine process."""

    process: subprocess.Popen[bytes]
    url: str


@dataclass
class Played:
    """What one run did."""

    appended: int = 0
    prefilled: int = 0
    turns: int = 0
    lost: list[str] = field(default_factory=list)
    max_load: float = 0.0
    """Largest number of sessions on a rank over the mean."""
    moves: int = 0
    """Sessions that changed their rank, each at the price of its whole prefix."""


@contextmanager
def ranks(directory: Path, number: int, slots: int, context: int) -> Iterator[list[Rank]]:
    """Engines over a tiny random checkpoint that is written to ``directory``."""
    write_checkpoint(directory, context)
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for index in range(number):
            arguments = ["serve", str(directory), "--port", "0", "--ready-file", str(directory / f"rank{index}.json"),
                         "--max-slots", str(slots), "--max-context", str(context), "--threads", "1", "--device", "cpu"]
            processes.append(spawn(arguments, directory / f"rank{index}.log", {"OMP_NUM_THREADS": "1"}))
        yield [Rank(process, wait_ready(process, directory / f"rank{index}.json", directory / f"rank{index}.log", 300))
               for index, process in enumerate(processes)]
    finally:
        for process in processes:
            stop(process)


def write_checkpoint(directory: Path, context: int) -> None:
    """A random model that computes next to nothing."""
    import torch

    from glm5.model.checkpoint import save_model
    from glm5.model.config import preset
    from glm5.model.transformer import GlmMoeDsaForCausalLM
    from glm5.tokenizer.bpe import train_tokenizer

    config = replace(
        preset("nano"), vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, moe_intermediate_size=16,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, q_lora_rank=16, kv_lora_rank=16,
        qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, n_routed_experts=4, num_experts_per_tok=2,
        index_n_heads=4, index_head_dim=16, index_topk=8, max_position_embeddings=context)
    save_model(GlmMoeDsaForCausalLM(config, torch.Generator().manual_seed(0)), directory)
    train_tokenizer(["the quick brown fox jumps over the lazy dog " * 20], VOCABULARY).save(directory)


async def prefilled(http: HttpClient, rank: Rank) -> int:
    """Prompt tokens that a rank has computed since its start."""
    return int((await http.request("GET", f"{rank.url}/stats", None, 60.0)).json()["prefilled_tokens"])


async def play(engines: list[Rank], router: Router, name: str, sessions: int, turns: int, kill: bool) -> Played:
    """All sessions at once, on ranks that live."""
    played, http, pool = Played(), HttpClient(), EnginePool(router)
    victim = engines[0]
    before = {rank.url: await prefilled(http, rank) for rank in engines}
    after: dict[str, int] = {}
    victims: list[Rank] = []

    async def session(number: int) -> None:
        draw = random.Random(f"{name}-{number}")
        session_id, ids = f"{name}-{number}", [draw.randrange(3, VOCABULARY) for _ in range(FIRST)]
        played.appended += FIRST
        for turn in range(turns):
            sampling = SamplingParams(max_new_tokens=SAMPLED, stop_token_ids=(), seed=turn)
            ids += (await pool.generate(session_id, ids_text(ids), sampling)).output_ids
            played.turns += 1
            loads = [router.num_sessions(url) for url in router.engine_urls if router.is_alive(url)]
            if sum(loads) == sessions:
                played.max_load = max(played.max_load, max(loads) * len(loads) / sessions)
            if kill and not victims and 2 * played.turns >= sessions * turns:
                victims.append(victim)  # first, because other sessions go on while the rank is asked
                after[victim.url] = await prefilled(http, victim)
                os.kill(victim.process.pid, signal.SIGKILL)
            if turn + 1 < turns:
                await asyncio.sleep(draw.uniform(0, TOOL_S))
                ids += [draw.randrange(3, VOCABULARY) for _ in range(LATER)]
                played.appended += LATER
        router.release(session_id)

    async def guarded(number: int) -> None:
        try:
            await session(number)
        except Glm5Error as error:
            played.lost.append(f"{number}: {error}")

    health = asyncio.create_task(pool.check_health())
    try:
        await asyncio.gather(*(asyncio.create_task(guarded(number)) for number in range(sessions)))
        for rank in engines:
            if rank.url not in after:
                after[rank.url] = await prefilled(http, rank)
    finally:
        health.cancel()
        await asyncio.gather(health, return_exceptions=True)
        pool.close()
        http.close()
    played.prefilled, played.moves = sum(after[url] - before[url] for url in after), router.num_moves
    return played


def main() -> None:
    """Start the ranks, play, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    options = parser.parse_args()
    context = FIRST + options.turns * (LATER + SAMPLED) + 64
    slots = -(-7 * options.sessions // 16)
    runs: dict[str, Played] = {}
    with tempfile.TemporaryDirectory() as name, ranks(Path(name), options.ranks, slots, context) as engines:
        urls = [rank.url for rank in engines]
        for run, router in (("affine", Router(urls)), ("round_robin", RoundRobin(urls)), ("killed", Router(urls))):
            runs[run] = asyncio.run(play(engines, router, run, options.sessions, options.turns, run == "killed"))
    goals = {"affine": 1.05, "round_robin": None, "killed": 1.3}
    rows = []
    for run, played in runs.items():
        ratio, goal = played.prefilled / played.appended, goals[run]
        rows.append(Row(name=f"routing.{run}.prefill_ratio", value=ratio, unit="ratio", n=played.turns,
                        goal=None if goal is None else f"at most {goal}", met=None if goal is None else ratio <= goal))
    rows += [Row(name=f"routing.{run}.moves", value=runs[run].moves, unit="sessions") for run in ("affine", "killed")]
    lost, load = len(runs["killed"].lost), runs["affine"].max_load
    rows.append(Row(name="routing.killed.lost_sessions", value=lost, unit="sessions", n=options.sessions, goal="0",
                    met=lost == 0))
    rows.append(Row(name="routing.affine.max_load", value=load, unit="of the mean", n=options.sessions,
                    goal=f"at most {LOAD_FACTOR}", met=load <= LOAD_FACTOR))
    if not options.json:
        for row in rows:
            print(f"{row.name:32} {row.value:8.3f} {row.unit}")
    print(json.dumps(results_object("bench_routing", rows)))


if __name__ == "__main__":
    main()
