"""Many streaming sessions on one server: no error, no lost or duplicated token.

    python benchmarks/load_serve.py DIRECTORY [--sessions 1000] [--tokens 16] [--slots 32] [--url URL] [--json]

Starts ``glm5 serve`` over DIRECTORY (or uses the server at URL), opens all sessions at once, each a streamed chat
completion with a seed of its own that returns its token ids, and then repeats a sample of the seeds without streaming,
one at a time. A session is right when its ids are those of the count that it reports, its text is that of its ids, and
its ids are those of the repetition. Session bodies come in few kinds of prompt, so the prefix cache is in use.

Rows: ``load.sessions``, ``load.errors``, ``load.wrong_tokens``, ``load.compared``, ``load.tokens_per_s``,
``load.first_token_s.p50`` and ``.p99``, ``load.left_running`` (sequences at the end), ``load.cache_bytes``,
``load.server_rss_bytes`` (largest).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from glm5.eval.report import results_object
from glm5.process import spawn, stop, wait_ready
from glm5.serve.text import Detokenizer
from glm5.tokenizer.bpe import Tokenizer, load_tokenizer

_WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog")


@dataclass
class Session:
    """What one client saw."""

    seed: int
    ids: list[int] = field(default_factory=list)
    text: str = ""
    first_s: float | None = None
    reported: int | None = None
    ends: int = 0
    error: str = ""


def body_of(seed: int, model: str, tokens: int) -> dict[str, Any]:
    """The request of session ``seed``."""
    text = " ".join(_WORDS[(seed + step) % len(_WORDS)] for step in range(4 + seed % 13))
    return {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "seed": seed,
        "max_tokens": tokens,
        "enable_thinking": False,
        "return_token_ids": True,
    }


async def run_session(client: httpx.AsyncClient, session: Session, model: str, tokens: int) -> None:
    """Stream one answer to its end."""
    body = {**body_of(session.seed, model, tokens), "stream": True, "stream_options": {"include_usage": True}}
    start = time.perf_counter()
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                session.error = f"status {response.status_code}: {(await response.aread())[:200]!r}"
                return
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    read_event(session, json.loads(line[6:]), time.perf_counter() - start)
    except httpx.HTTPError as error:
        session.error = f"{type(error).__name__}: {error}"


def read_event(session: Session, event: dict[str, Any], elapsed_s: float) -> None:
    """Add one event to what ``session`` saw."""
    if "error" in event:
        session.error = event["error"]["message"]
        return
    if event.get("usage"):
        session.reported = event["usage"]["completion_tokens"]
    for choice in event["choices"]:
        new = choice.get("token_ids", [])
        if new and session.first_s is None:
            session.first_s = elapsed_s
        session.ids += new
        session.text += choice["delta"].get("content") or ""
        session.ends += choice["finish_reason"] is not None


def is_consistent(session: Session, tokenizer: Tokenizer) -> bool:
    """Whether the stream agrees with itself: one end, as many ids as it reports, the text of its ids."""
    ids = session.ids[:-1] if session.ids and session.ids[-1] in tokenizer.stop_ids else session.ids
    decoder = Detokenizer(tokenizer)
    text = decoder.feed(ids) + decoder.finish()
    has_tags = any(token in ids for token in (tokenizer.special_id("<tool_call>"), tokenizer.special_id("</think>")))
    return session.ends == 1 and session.reported == len(session.ids) and (has_tags or session.text == text)


async def run_all(url: str, sessions: list[Session], model: str, tokens: int) -> float:
    """All sessions at once; the wall time in seconds."""
    limits = httpx.Limits(max_connections=len(sessions), max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(1800, connect=120), limits=limits) as client:
        start = time.perf_counter()
        await asyncio.gather(*(run_session(client, session, model, tokens) for session in sessions))
        return time.perf_counter() - start


def repeat(url: str, session: Session, model: str, tokens: int) -> list[int]:
    """Ids of the same request without a stream, alone on the server."""
    answer = httpx.post(f"{url}/v1/chat/completions", json=body_of(session.seed, model, tokens), timeout=600)
    return list(answer.raise_for_status().json()["choices"][0]["token_ids"])


@contextmanager
def server_of(directory: Path, slots: int, context: int) -> Iterator[tuple[str, int]]:
    """URL and process id of a fresh server."""
    with tempfile.TemporaryDirectory() as root:
        ready, log = Path(root) / "ready.json", Path(root) / "serve.log"
        arguments = [
            "serve",
            str(directory),
            "--port",
            "0",
            "--ready-file",
            str(ready),
            "--max-slots",
            str(slots),
            "--max-context",
            str(context),
        ]
        process = spawn(arguments, log)
        try:
            yield wait_ready(process, ready, log, 300), process.pid
        finally:
            stop(process)


def peak_rss_bytes(pid: int) -> int | None:
    """Largest resident memory of a process so far; None when the system does not say."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:")), None)


def quantile(values: list[float], share: float) -> float | None:
    """The value that ``share`` of ``values`` do not exceed."""
    return sorted(values)[min(int(share * len(values)), len(values) - 1)] if values else None


def measure(url: str, pid: int | None, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the load and compare; result rows."""
    tokenizer = load_tokenizer(options.directory)
    model = httpx.get(f"{url}/v1/models", timeout=60).raise_for_status().json()["data"][0]["id"]
    sessions = [Session(seed) for seed in range(options.sessions)]
    wall_s = asyncio.run(run_all(url, sessions, model, options.tokens))
    failed = [session for session in sessions if session.error]
    for session in failed[:5]:
        print(f"session {session.seed}: {session.error}", file=sys.stderr)
    good = [session for session in sessions if not session.error]
    wrong = {session.seed for session in good if not is_consistent(session, tokenizer)}
    compared = good[:: max(1, len(good) // options.compare)][: options.compare]
    wrong |= {session.seed for session in compared if repeat(url, session, model, options.tokens) != session.ids}
    stats = httpx.get(f"{url}/stats", timeout=60).json()
    firsts = [session.first_s for session in good if session.first_s is not None]
    produced = sum(len(session.ids) for session in good)
    rows: list[dict[str, Any]] = [
        {"name": "load.sessions", "value": len(sessions), "unit": "sessions"},
        {"name": "load.errors", "value": len(failed), "unit": "sessions", "goal": 0, "met": not failed},
        {"name": "load.wrong_tokens", "value": len(wrong), "unit": "sessions", "goal": 0, "met": not wrong},
        {"name": "load.compared", "value": len(compared), "unit": "sessions"},
        {"name": "load.tokens_per_s", "value": produced / wall_s, "unit": "tokens/s", "n": produced},
        {"name": "load.first_token_s.p50", "value": quantile(firsts, 0.5), "unit": "s", "n": len(firsts)},
        {"name": "load.first_token_s.p99", "value": quantile(firsts, 0.99), "unit": "s", "n": len(firsts)},
        {
            "name": "load.left_running",
            "value": stats["running"] + stats["queued"],
            "unit": "sequences",
            "goal": 0,
            "met": stats["running"] + stats["queued"] == 0,
        },
        {"name": "load.cache_bytes", "value": stats["cache_bytes"], "unit": "bytes"},
    ]
    if pid is not None:
        rows.append({"name": "load.server_rss_bytes", "value": peak_rss_bytes(pid), "unit": "bytes"})
    return rows


def main() -> int:
    """Parse, measure, print; 1 when something was lost, wrong or refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="checkpoint with its tokenizer")
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=16, help="longest answer of a session")
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--compare", type=int, default=100, help="sessions that are repeated without a stream")
    parser.add_argument("--url", default="", help="use this server instead of starting one")
    parser.add_argument("--json", action="store_true", dest="as_json")
    options = parser.parse_args()
    wanted = options.sessions + 256
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))
    if options.url:
        rows = measure(options.url, None, options)
    else:
        with server_of(options.directory, options.slots, options.context) as (url, pid):
            rows = measure(url, pid, options)
    out = sys.stderr if options.as_json else sys.stdout
    for row in rows:
        print(f"{row['name']:28} {row['value']:>14.6g} {row['unit']}", file=out)
    if options.as_json:
        print(json.dumps(results_object("load serve", rows)))
    return 0 if all(row.get("met", True) for row in rows) else 1


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    sys.exit(main())
