"""Who did what when in a run, and who waited for whom: from ``events.jsonl``, ``metrics.jsonl`` and the ledger.

Spans come from ``rl/spans.py``; pushes, broadcasts and the times in which a service was down follow from their events;
how busy the engine was in each step from its counters; the episodes that ran from the ledger. The run may still go on.
"""

from __future__ import annotations

import json
import sqlite3
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm5.errors import ServiceError
from glm5.runlog import read_jsonl, write_atomic

_DURATIONS = {"weights_pushed": ("weights", "push", "push_s"), "weights_broadcast": ("weights", "broadcast", "seconds"),
              "weights_broadcast_failed": ("weights", "failed broadcast", "seconds")}
"""Events that tell how long something took: component, name, key of the seconds."""


@dataclass(frozen=True, slots=True)
class Span:
    """One stretch of time of one component."""

    component: str
    name: str
    start: float
    """Unix seconds."""
    seconds: float
    waits_for: str = ""
    """The component that was waited for; "" for work."""


def read_spans(run_dir: Path) -> list[Span]:
    """All spans of a run in order of their start. Raises ServiceError when nothing was recorded."""
    path = run_dir / "events.jsonl"
    if not path.exists():
        raise ServiceError(f"{path}: missing; give the run directory of an RL run")
    return sorted(_spans(read_jsonl(path)), key=lambda span: span.start)


def wait_rows(run_dir: Path) -> list[dict[str, Any]]:
    """Result rows: ``busy.COMPONENT.NAME`` and ``wait.COMPONENT.OTHER`` in seconds, and the share of the component's
    recorded time; ``engine.busy`` and ``engine.idle`` from the engine's own counters."""
    totals: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for span in read_spans(run_dir):
        kind, what = ("wait", span.waits_for) if span.waits_for else ("busy", span.name)
        totals[kind, span.component, what].append(span.seconds)
    whole: dict[str, float] = defaultdict(float)
    for (_, component, _), seconds in totals.items():
        whole[component] += sum(seconds)
    rows: list[dict[str, Any]] = []
    for (kind, component, what), seconds in sorted(totals.items()):
        name = f"{kind}.{component}.{what}".replace(" ", "_")
        rows.append({"name": name, "value": round(sum(seconds), 3), "unit": "s", "n": len(seconds),
                     "ratio": round(sum(seconds) / whole[component], 4) if whole[component] else 0.0})
    metrics = read_jsonl(run_dir / "metrics.jsonl")
    wall_s = sum(record.get("step_s", 0.0) for record in metrics)
    if wall_s:
        busy_s = min(sum(record.get("engine_busy_s", 0.0) for record in metrics), wall_s)
        rows += [{"name": f"{name}.engine.steps", "value": round(value, 3), "unit": "s", "n": len(metrics),
                  "ratio": round(value / wall_s, 4)} for name, value in (("busy", busy_s), ("idle", wall_s - busy_s))]
    return rows


def write_trace(run_dir: Path, output: Path) -> int:
    """Write Chrome's trace format (chrome://tracing, ui.perfetto.dev); the number of spans."""
    spans = read_spans(run_dir)
    components = list(dict.fromkeys(span.component for span in spans))
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": number, "args": {"name": component}}
        for number, component in enumerate(components)]
    events += [
        {"ph": "X", "pid": 1, "tid": components.index(span.component), "ts": round(1e6 * span.start),
         "dur": round(1e6 * span.seconds), "name": f"waits for {span.waits_for}" if span.waits_for else span.name,
         "cat": "wait" if span.waits_for else "work"} for span in spans]
    events += [{"ph": "C", "pid": 1, "ts": round(1e6 * at), "name": name, "args": {"value": value}}
               for name, at, value in _counters(run_dir)]
    write_atomic(output, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n")
    return len(spans)


def _spans(events: Sequence[dict[str, Any]]) -> Iterator[Span]:
    down: dict[str, float] = {}
    for event in events:
        kind, at = event["kind"], float(event["time"])
        if kind == "span":
            yield Span(event["component"], event["name"], at - event["seconds"], event["seconds"], event["waits_for"])
        elif kind in _DURATIONS:
            component, name, key = _DURATIONS[kind]
            yield Span(component, name, at - event[key], event[key])
        elif kind == "service_died":
            down.setdefault(event["service"], at)
        elif kind == "service_restarted" and event["service"] in down:
            start = down.pop(event["service"])
            yield Span(event["service"], "down", start, at - start)


def _counters(run_dir: Path) -> Iterator[tuple[str, float, float]]:
    """(name, Unix seconds, value) of what is a level rather than a span."""
    for record in read_jsonl(run_dir / "metrics.jsonl"):
        if record.get("step_s") and "engine_busy_s" in record:
            yield "engine busy %", record["time"] - record["step_s"], 100 * record["engine_busy_s"] / record["step_s"]
    path = run_dir / "ledger.sqlite"
    if path.exists():
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=30)) as database:
            rows = database.execute("SELECT started_at, started_at + duration_s FROM episodes").fetchall()
        running = 0
        for at, change in sorted([(start, 1) for start, _ in rows] + [(end, -1) for _, end in rows]):
            running += change
            yield "episodes running", at, running
