"""Counters of the HTTP layer and the ``/metrics`` page in Prometheus' text format."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the engine module loads torch
    from glm5.engine.engine import EngineStats

_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_COUNTERS = {
    "busy_s": "seconds in which the engine computed",
    "steps": "steps of the engine",
    "generated_tokens": "sampled tokens",
    "prefilled_tokens": "prompt tokens computed",
    "cached_tokens": "prompt tokens found in the prefix cache",
    "preemptions": "times that a sequence gave up its slot for another",
    "drafted_tokens": "drafts of the MTP layer that were verified",
    "accepted_tokens": "drafts that were kept",
    "weight_updates": "weight sets swapped in",
}
_GAUGES = {
    "uptime_s": "seconds since the start",
    "running": "sequences with a slot",
    "queued": "sequences that wait for one",
    "weight_version": "version of the weights in force",
    "is_paused": "1 while paused",
    "cache_bytes": "memory of the key cache",
    "cache_blocks": "blocks of the key cache",
    "cache_blocks_used": "blocks that hold keys",
    "acceptance_length": "tokens per sequence and step with drafts",
    "speculative_speedup": "time per token without drafts over that with drafts",
    "is_drafting": "1 while the MTP layer drafts",
}


class _Histogram:
    """Durations by route."""

    def __init__(self, name: str, meaning: str) -> None:
        self._name, self._meaning = name, meaning
        self._buckets: dict[str, list[int]] = {}
        self._seconds: dict[str, float] = defaultdict(float)

    def observe(self, path: str, seconds: float) -> None:
        self._seconds[path] += seconds
        buckets = self._buckets.setdefault(path, [0] * (len(_BOUNDS_S) + 1))
        buckets[bisect_left(_BOUNDS_S, seconds)] += 1

    def lines(self) -> list[str]:
        lines = [f"# HELP {self._name} {self._meaning}", f"# TYPE {self._name} histogram"]
        for path, buckets in sorted(self._buckets.items()):
            total = 0
            for bound, count in zip((*_BOUNDS_S, "+Inf"), buckets, strict=True):
                total += count
                lines.append(f'{self._name}_bucket{{path="{path}",le="{bound}"}} {total}')
            lines.append(f'{self._name}_sum{{path="{path}"}} {self._seconds[path]:g}')
            lines.append(f'{self._name}_count{{path="{path}"}} {total}')
        return lines


class Metrics:
    """Requests by path and status, their durations, and those in flight. Used from one event loop."""

    def __init__(self) -> None:
        self.in_flight = 0
        """Generating requests that are not answered yet."""
        self._requests: dict[tuple[str, int], int] = defaultdict(int)
        self._whole = _Histogram("glm5_http_request_seconds", "duration of requests")
        self._first_byte = _Histogram("glm5_http_first_byte_seconds", "time to the first byte of the answer's body")

    def observe(self, path: str, status: int, seconds: float, first_byte_s: float | None) -> None:
        """One request to the route ``path`` ended with ``status`` after ``seconds``."""
        self._requests[path, status] += 1
        self._whole.observe(path, seconds)
        if first_byte_s is not None:
            self._first_byte.observe(path, first_byte_s)

    def render(self, stats: EngineStats) -> str:
        """The page."""
        lines: list[str] = []
        values = asdict(stats)
        for kind, table in (("counter", _COUNTERS), ("gauge", _GAUGES)):
            for name, meaning in table.items():
                full = f"glm5_{name}_total" if kind == "counter" else f"glm5_{name}"
                lines += [f"# HELP {full} {meaning}", f"# TYPE {full} {kind}", f"{full} {float(values[name]):g}"]
        lines += [
            "# HELP glm5_http_in_flight generating requests that are not answered yet",
            "# TYPE glm5_http_in_flight gauge",
            f"glm5_http_in_flight {self.in_flight}",
            "# HELP glm5_http_requests_total requests by route and status",
            "# TYPE glm5_http_requests_total counter",
        ]
        lines += [
            f'glm5_http_requests_total{{path="{path}",status="{status}"}} {count}'
            for (path, status), count in sorted(self._requests.items())
        ]
        return "\n".join([*lines, *self._whole.lines(), *self._first_byte.lines()]) + "\n"
