"""Bringing policy versions to engines: one background thread that never blocks episodes or the trainer.

The thread holds one target, the newest version submitted; older ones are superseded. Each engine is told to load it,
then asked to score the canary, and what it answers must equal what the trainer recorded: that catches half-loaded
shards, a wrong dtype and a stale cache. Engines are asked again every few seconds, because one that was restarted
holds whatever was newest when it started. An engine that stays unreachable or wrong beyond the deadline is an error,
raised at the next call of the trainer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from glm5.errors import WeightSyncError
from glm5.rl.weights import WeightVersion

RECHECK_S = 3.0
RETRY_S = 0.5
CANARY_TOLERANCE = 0.02
"""Largest accepted mean |log-prob difference| over the canary, in nats."""


@dataclass(frozen=True, slots=True)
class PushReport:
    """One version in one engine."""

    url: str
    version: int
    load_ms: float
    """Time the engine took to load."""
    push_s: float
    """From the request to the checked canary."""
    canary_error: float
    """Mean |log-prob difference| between engine and trainer."""


def push(client: httpx.Client, url: str, published: WeightVersion) -> PushReport:
    """Load ``published`` into the engine at ``url`` and check its canary. Raises WeightSyncError, httpx.HTTPError."""
    start = time.monotonic()
    answer = _json(client.post(f"{url}/update_weights_from_disk", json={
        "model_path": str(published.directory.resolve()), "weight_version": published.version}))
    if not answer.get("success"):
        raise WeightSyncError(f"{url}: did not load weight version {published.version}: {answer.get('message')}; "
                              "it keeps its old weights")
    error = check_canary(client, url, published)
    return PushReport(url, published.version, float(answer.get("load_ms", 0.0)), time.monotonic() - start, error)


def check_canary(client: httpx.Client, url: str, published: WeightVersion,
                 tolerance: float = CANARY_TOLERANCE) -> float:
    """Mean |difference| between the engine's canary log-probs and the manifest's. Raises WeightSyncError beyond it."""
    answer = _json(client.post(f"{url}/generate", json={
        "input_ids": published.canary_ids, "return_logprob": True, "return_prompt_logprob": True, "stream": False,
        "sampling_params": {"temperature": 1.0, "max_new_tokens": 0}}))
    found = answer.get("prompt_logprobs", [])[1:]
    expected = published.canary_logprobs
    if len(found) != len(expected):
        raise WeightSyncError(f"{url}: scored {len(found)} canary tokens, expected {len(expected)}; the engine does "
                              "not answer return_prompt_logprob")
    error = sum(abs(mine - theirs) for mine, theirs in zip(expected, found, strict=True)) / len(expected)
    if not error <= tolerance:
        raise WeightSyncError(f"{url}: canary log-probs of weight version {published.version} differ from the "
                              f"trainer's by {error:.4f} nats on average, at most {tolerance} is accepted; the engine "
                              "runs other weights or other arithmetic")
    return error


class WeightPusher:
    """Background thread; use as a context manager. ``on_event(kind, **values)`` gets pushes and failures."""

    def __init__(self, engine_urls: Sequence[str], on_event: Callable[..., None], deadline_s: float = 120.0) -> None:
        self._urls, self._on_event, self._deadline_s = list(engine_urls), on_event, deadline_s
        self._lock = threading.Condition()
        self._target: WeightVersion | None = None
        self._held: dict[str, int] = {}
        self._failing_since: dict[str, float] = {}
        self._failure: WeightSyncError | None = None
        self._stopped = False
        self._thread = threading.Thread(target=self._work, name="weight-pusher", daemon=True)

    def __enter__(self) -> WeightPusher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._stopped = True
            self._lock.notify_all()
        self._thread.join(timeout=10)

    def submit(self, published: WeightVersion) -> None:
        """Make ``published`` the target; returns at once. Raises WeightSyncError of an earlier failure."""
        with self._lock:
            self._raise_failure()
            self._target = published
            self._lock.notify_all()

    def is_held(self, version: int) -> bool:
        """Whether every engine holds ``version`` or a newer one. Raises WeightSyncError of an earlier failure."""
        with self._lock:
            self._raise_failure()
            return all(self._held.get(url, -1) >= version for url in self._urls)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        timeout = httpx.Timeout(self._deadline_s / 4, connect=5)
        with httpx.Client(timeout=timeout, trust_env=False) as client:
            while True:
                with self._lock:
                    if self._stopped:
                        return
                    target = self._target
                if target is not None:
                    for url in self._urls:
                        self._bring(client, url, target)
                with self._lock:
                    idle = all(self._held.get(url) == (target.version if target else None) for url in self._urls)
                    if not self._stopped and self._target is target:
                        self._lock.wait(RECHECK_S if idle or target is None else RETRY_S)

    def _bring(self, client: httpx.Client, url: str, target: WeightVersion) -> None:
        """One attempt; failures are kept until the deadline passes."""
        try:
            current = int(_json(client.get(f"{url}/get_model_info"))["weight_version"])
            if current != target.version:
                report = push(client, url, target)
                self._on_event("weights_pushed", url=url, version=target.version, load_ms=report.load_ms,
                               push_s=round(report.push_s, 4), canary_error=report.canary_error)
            elif self._held.get(url) != target.version:
                check_canary(client, url, target)
            with self._lock:
                self._held[url] = target.version
                self._failing_since.pop(url, None)
        except (httpx.HTTPError, WeightSyncError, KeyError, TypeError, ValueError) as error:
            self._note_failure(url, target, error)

    def _note_failure(self, url: str, target: WeightVersion, error: Exception) -> None:
        now = time.monotonic()
        with self._lock:
            self._held.pop(url, None)
            is_new = url not in self._failing_since
            since = self._failing_since.setdefault(url, now)
            if now - since > self._deadline_s:
                self._failure = error if isinstance(error, WeightSyncError) else WeightSyncError(
                    f"{url}: weight version {target.version} did not arrive within {self._deadline_s:.0f} s: "
                    f"{type(error).__name__} {error}")
        if is_new:
            self._on_event("weights_push_failed", url=url, version=target.version,
                           error=f"{type(error).__name__}: {error}")


def _json(response: httpx.Response) -> dict[str, Any]:
    """Body of an answer. Raises WeightSyncError for an error status."""
    if response.status_code >= 400:
        raise WeightSyncError(f"{response.request.url}: HTTP {response.status_code} {response.text[:200]}")
    answer: dict[str, Any] = response.json()
    return answer
