"""Numbers of a run for Prometheus, read from its run directory when they are asked for. No torch, no dependency.

The trainer serves them at ``[observation] prometheus_port``; ``glm5 exporter RUN`` does for a run of another process.
"""

from __future__ import annotations

import json
import math
import re
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from glm5.errors import ServiceError
from glm5.rl import audit
from glm5.runlog import read_jsonl

Live = Callable[[], dict[str, float]]
"""Seconds since the last sign of life of every component."""
_STALENESS = re.compile(r"(?P<name>.+)\.staleness_(?P<age>\d+)")


def render(run_dir: Path, live: Live | None = None) -> str:
    """The page: the newest record of ``metrics.jsonl`` as gauges, events and ledger as counters."""
    lines: list[str] = []
    gauges: dict[str, list[tuple[str, float]]] = {}
    for key, value in _newest_metrics(run_dir / "metrics.jsonl").items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            continue
        name, labels = _name_and_labels(key)
        gauges.setdefault(name, []).append((labels, value))
    for name, series in gauges.items():
        _write(lines, f"glm5_rl_{name}", "gauge", "newest value in metrics.jsonl", series)
    kinds = Counter(str(record["kind"]) for record in read_jsonl(run_dir / "events.jsonl") if record["kind"] != "span")
    _write(lines, "glm5_rl_events_total", "counter", "events by kind",
           [(f'{{kind="{kind}"}}', number) for kind, number in sorted(kinds.items())])
    if (run_dir / "ledger.sqlite").exists():
        with closing(sqlite3.connect(f"file:{run_dir / 'ledger.sqlite'}?mode=ro", uri=True, timeout=5)) as database:
            counts = audit.counts(database)
        for what, values in (("groups", counts.groups), ("episodes", counts.episodes)):
            _write(lines, f"glm5_rl_{what}", "gauge", f"{what} by what became of them",
                   [(f'{{state="{state}"}}', number) for state, number in sorted(values.items())])
    if live is not None:
        _write(lines, "glm5_rl_heartbeat_age_seconds", "gauge", "since the last sign of life of a component",
               [(f'{{component="{name}"}}', round(age, 3)) for name, age in sorted(live().items())])
    return "\n".join(lines) + "\n"


@contextmanager
def exporting(run_dir: Path, host: str, port: int, live: Live | None = None) -> Iterator[int]:
    """Serve ``/metrics`` from a thread while the body runs; gives the port. Raises ServiceError when it is taken."""
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.path.split("?")[0] == "/metrics"
            body = render(run_dir, live).encode() if known else b"try /metrics\n"
            self.send_response(200 if known else 404)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: one line a scrape tells nobody anything."""

    try:
        server = ThreadingHTTPServer((host, port), Handler)
    except OSError as error:
        raise ServiceError(f"prometheus_port {host}:{port}: {error.strerror}; choose another port") from None
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, name="exporter", daemon=True)
    thread.start()
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=5)


def _newest_metrics(path: Path) -> dict[str, object]:
    """The last whole record; only the end of the file is read."""
    try:
        with open(path, "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - (1 << 16)))
            lines = file.read().splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            return record
    return {}


def _name_and_labels(key: str) -> tuple[str, str]:
    """``k3.staleness_1`` → k3 with a label; ``reward.shell`` → reward of a taskset."""
    binned = _STALENESS.fullmatch(key)
    if binned:
        return _word(binned["name"]), f'{{staleness="{binned["age"]}"}}'
    name, dot, rest = key.partition(".")
    return (_word(name), f'{{name="{rest}"}}') if dot else (_word(key), "")


def _word(text: str) -> str:
    return re.sub(r"[^a-zA-Z0-9_]", "_", text)


def _write(lines: list[str], name: str, kind: str, meaning: str, series: list[tuple[str, float]]) -> None:
    if series:
        lines += [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"]
        lines += [f"{name}{labels} {value:g}" if isinstance(value, float) else f"{name}{labels} {value}"
                  for labels, value in series]
