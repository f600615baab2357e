"""Bringing policy versions to engines: one background thread that never blocks episodes or the trainer.

The thread holds one target, the newest version submitted; older ones are superseded. Each engine gets it, by broadcast
where that is configured and works, else from disk, and is asked to score the canary. What it answers must equal what
the trainer recorded: that catches half-loaded shards, a wrong dtype and a stale cache. An engine that answers otherwise
is rolled back to the version that it served before.

Every few seconds each engine is asked again for its version and its canary, ahead of all other requests: one that was
restarted holds whatever was newest when it started, and one that looks well may do no work or serve other weights than
it says. The second wrong or missing answer in a row is reported through ``on_suspect``, so that the engine is started
again. An engine that stays unreachable or wrong beyond the deadline is an error, raised at the trainer's next call.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from glm5.errors import WeightSyncError
from glm5.rl.broadcast import Snapshot, WeightBroadcaster
from glm5.rl.operation import CANARY_TOLERANCE, WeightsConfig
from glm5.rl.weights import WeightVersion

RETRY_S = 0.5
CANARY_TIMEOUT_S = 3.0
"""An engine that works scores the canary between two steps; with two attempts it is found out within 10 s."""
_CANARY_PRIORITY = 1_000_000
_STRIKES = 2


class CanaryError(WeightSyncError):
    """An engine answered, but not with what the trainer computes."""


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


def push(client: httpx.Client, url: str, published: WeightVersion,
         tolerance: float = CANARY_TOLERANCE) -> PushReport:
    """Load ``published`` into the engine at ``url`` and check its canary.

    Raises CanaryError, WeightSyncError when it is not loaded, httpx.HTTPError.
    """
    start = time.monotonic()
    load_ms = load(client, url, published)
    error = check_canary(client, url, published, tolerance)
    return PushReport(url, published.version, load_ms, time.monotonic() - start, error)


def load(client: httpx.Client, url: str, published: WeightVersion, rollback: bool = False) -> float:
    """Load ``published`` from disk; milliseconds that the engine took. Raises WeightSyncError, httpx.HTTPError."""
    answer = _json(client.post(f"{url}/update_weights_from_disk", json={
        "model_path": str(published.directory.resolve()), "weight_version": published.version,
        **({"rollback": True} if rollback else {})}))
    if not answer.get("success"):
        raise WeightSyncError(f"{url}: did not load weight version {published.version}: {answer.get('message')}; "
                              "it keeps its old weights")
    return float(answer.get("load_ms", 0.0))


def check_canary(client: httpx.Client, url: str, published: WeightVersion,
                 tolerance: float = CANARY_TOLERANCE) -> float:
    """Mean |difference| between the engine's canary log-probs and the manifest's.

    Raises CanaryError beyond the tolerance, httpx.TimeoutException when there is no answer in ``CANARY_TIMEOUT_S``.
    """
    answer = _json(client.post(f"{url}/generate", timeout=CANARY_TIMEOUT_S, json={
        "input_ids": published.canary_ids, "return_logprob": True, "return_prompt_logprob": True, "stream": False,
        "priority": _CANARY_PRIORITY, "sampling_params": {"temperature": 1.0, "max_new_tokens": 0}}))
    found = answer.get("prompt_logprobs", [])[1:]
    expected = published.canary_logprobs
    if len(found) != len(expected):
        raise CanaryError(f"{url}: scored {len(found)} canary tokens, expected {len(expected)}; the engine does "
                          "not answer return_prompt_logprob")
    error = sum(abs(mine - theirs) for mine, theirs in zip(expected, found, strict=True)) / len(expected)
    if not error <= tolerance:
        raise CanaryError(f"{url}: canary log-probs of weight version {published.version} differ from the "
                          f"trainer's by {error:.4f} nats on average, at most {tolerance} is accepted; the engine "
                          "runs other weights or other arithmetic")
    return error


@dataclass(slots=True)
class _Engine:
    """What the pusher knows of one engine."""

    url: str
    held: WeightVersion | None = None
    """What it was last seen to serve, by its canary."""
    checked_at: float = field(default=float("-inf"))
    failing_since: float | None = None
    strikes: int = 0
    """Wrong or missing answers in a row."""
    steps: int = -1
    """Steps that it had made when it was last asked for them, -1 when it did not say."""


class WeightPusher:
    """Background thread; use as a context manager. ``on_event(kind, **values)`` gets pushes and failures.

    ``on_suspect(url, why)`` is told of an engine that looks alive and is not; it is called from the thread.
    """

    def __init__(self, engine_urls: Sequence[str], on_event: Callable[..., None], config: WeightsConfig | None = None,
                 on_suspect: Callable[[str, str], None] = lambda url, why: None) -> None:
        self._config, self._on_event, self._on_suspect = config or WeightsConfig(), on_event, on_suspect
        self._engines = [_Engine(url) for url in engine_urls]
        self._lock = threading.Condition()
        self._target: WeightVersion | None = None
        self._snapshot: Snapshot | None = None
        self._failure: BaseException | None = None
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="weight-pusher", daemon=True)

    def __enter__(self) -> WeightPusher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._stopped = True
            self._lock.notify_all()
        self._thread.join(timeout=10)

    @property
    def wants_snapshot(self) -> bool:
        """Whether versions are broadcast from memory."""
        return self._config.transport == "collective"

    def submit(self, published: WeightVersion, tensors: Mapping[str, Any] | None = None) -> None:
        """Make ``published`` the target; returns at once. ``tensors`` are a snapshot of its weights, to broadcast.

        Raises WeightSyncError of an earlier failure.
        """
        with self._lock:
            self._raise_failure()
            self._target = published
            self._snapshot = Snapshot(published, tensors) if tensors is not None else None
            self._lock.notify_all()

    def is_held(self, version: int) -> bool:
        """Whether every engine holds ``version`` or a newer one. Raises WeightSyncError of an earlier failure."""
        with self._lock:
            self._raise_failure()
            return all(engine.held is not None and engine.held.version >= version for engine in self._engines)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # a full disk under ``on_event``, say; raised again in the trainer's thread
            with self._lock:
                self._failure = error

    def _work(self) -> None:
        timeout = httpx.Timeout(self._config.deadline_s / 4, connect=5)
        broadcaster = WeightBroadcaster([engine.url for engine in self._engines], self._config.backend,
                                        self._config.deadline_s / 4)
        with httpx.Client(timeout=timeout, trust_env=False) as client:
            while True:
                with self._lock:
                    if self._stopped:
                        break
                    target, snapshot, self._snapshot = self._target, self._snapshot, None
                if target is not None:
                    if snapshot is not None and broadcaster.is_ready():
                        self._broadcast(client, broadcaster, snapshot)
                    for engine in self._engines:
                        self._bring(client, engine, target)
                with self._lock:
                    is_idle = all(engine.held is target for engine in self._engines)
                    if not self._stopped and self._target is target:
                        self._lock.wait(self._config.recheck_s if is_idle else RETRY_S)
        broadcaster.close()

    def _broadcast(self, client: httpx.Client, broadcaster: WeightBroadcaster, snapshot: Snapshot) -> None:
        """The fast path; whatever it does not reach is served from disk afterwards."""
        start, version = time.monotonic(), snapshot.published.version
        try:
            load_ms = broadcaster.send(client, snapshot)
        except WeightSyncError as error:
            self._on_event("weights_broadcast_failed", version=version, error=str(error),
                           seconds=round(time.monotonic() - start, 3))
            return
        self._on_event("weights_broadcast", version=version, load_ms=max(load_ms.values()),
                       seconds=round(time.monotonic() - start, 4))

    def _bring(self, client: httpx.Client, engine: _Engine, target: WeightVersion) -> None:
        """One attempt, or one look; failures are kept until the deadline passes."""
        url = engine.url
        try:
            current = int(_json(client.get(f"{url}/get_model_info", timeout=CANARY_TIMEOUT_S))["weight_version"])
            if current != target.version:
                report = push(client, url, target, self._config.canary_tolerance)
                self._on_event("weights_pushed", url=url, version=target.version, load_ms=report.load_ms,
                               push_s=round(report.push_s, 4), canary_error=report.canary_error)
            elif engine.held is not target or time.monotonic() - engine.checked_at >= self._config.recheck_s:
                check_canary(client, url, target, self._config.canary_tolerance)
                engine.steps = _steps(client, url)
            else:
                return
            with self._lock:
                engine.held, engine.checked_at = target, time.monotonic()
                engine.failing_since, engine.strikes = None, 0
        except (httpx.HTTPError, WeightSyncError, KeyError, TypeError, ValueError) as error:
            if isinstance(error, CanaryError):
                self._roll_back(client, engine, target)
            self._note_failure(client, engine, target, error)

    def _roll_back(self, client: httpx.Client, engine: _Engine, target: WeightVersion) -> None:
        """Bring back what the engine served before ``target``, if that is known and still on disk."""
        before = engine.held
        if before is None or before is target:
            return
        try:
            load(client, engine.url, before, rollback=True)
            error = check_canary(client, engine.url, before, self._config.canary_tolerance)
            self._on_event("weights_rolled_back", url=engine.url, version=target.version, to=before.version,
                           canary_error=error)
        except (httpx.HTTPError, WeightSyncError) as error:
            self._on_event("weights_roll_back_failed", url=engine.url, version=target.version, to=before.version,
                           error=f"{type(error).__name__}: {error}")

    def _has_stepped(self, client: httpx.Client, engine: _Engine) -> bool:
        """Whether an engine that did not answer in time works all the same: slow is not dead."""
        before, engine.steps = engine.steps, _steps(client, engine.url)
        return engine.steps not in (-1, before)

    def _note_failure(self, client: httpx.Client, engine: _Engine, target: WeightVersion, error: Exception) -> None:
        now = time.monotonic()
        with self._lock:
            if engine.held is target:
                engine.held = None
            is_new = engine.failing_since is None
            since = engine.failing_since = now if engine.failing_since is None else engine.failing_since
            if now - since > self._config.deadline_s:
                self._failure = error if isinstance(error, WeightSyncError) else WeightSyncError(
                    f"{engine.url}: weight version {target.version} did not arrive within "
                    f"{self._config.deadline_s:.0f} s: {type(error).__name__} {error}")
        said = f"{type(error).__name__}: {error}"
        if is_new:
            self._on_event("weights_push_failed", url=engine.url, version=target.version, error=said)
        if isinstance(error, CanaryError) or (isinstance(error, httpx.TimeoutException)
                                              and not self._has_stepped(client, engine)):
            engine.strikes += 1
            if engine.strikes == _STRIKES:
                engine.strikes = 0
                self._on_suspect(engine.url, f"looks well but fails its canary: {said}")


def _steps(client: httpx.Client, url: str) -> int:
    """Steps that an engine says it made, -1 when it does not say."""
    try:
        return int(_json(client.get(f"{url}/stats", timeout=CANARY_TIMEOUT_S))["steps"])
    except (httpx.HTTPError, WeightSyncError, KeyError, TypeError, ValueError):
        return -1


def _json(response: httpx.Response) -> dict[str, Any]:
    """Body of an answer. Raises WeightSyncError for an error status."""
    if response.status_code >= 400:
        raise WeightSyncError(f"{response.request.url}: HTTP {response.status_code} {response.text[:200]}")
    answer: dict[str, Any] = response.json()
    return answer
