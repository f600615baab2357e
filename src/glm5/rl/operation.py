"""How a run is operated: which engine samples and where things run, how weights travel, when a component counts as
dead, what is shown. Configuration only.

These are the sections ``[engine]``, ``[cluster]``, ``[weights]``, ``[supervision]`` and ``[observation]`` of
``rl.toml``; nothing in them changes what is learnt. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from glm5.config import require_at_least
from glm5.device import BACKENDS, HOST_BACKEND
from glm5.errors import ConfigError

CANARY_TOLERANCE = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsConfig:
    """How policy versions reach the engines; see ``rl/weights.py``, ``rl/push.py``, ``rl/broadcast.py``."""

    transport: Literal["disk", "delta", "collective"] = "disk"
    """``disk``: whole checkpoints; ``delta``: differences to the version before; ``collective``: broadcast from the
    trainer's memory, from disk where that fails."""
    full_every: int = 8
    """delta: every so-manyth version is a whole checkpoint."""
    backend: str = HOST_BACKEND
    """collective: the communication library, one of ``device.BACKENDS``; the default sends through main memory."""
    deadline_s: float = 120.0
    """An engine that holds no good version for longer ends the run; a quarter of it bounds one load or broadcast."""
    canary_tolerance: float = CANARY_TOLERANCE
    """Largest accepted mean |log-prob difference| over the canary, in nats."""
    recheck_s: float = 3.0
    """Seconds between two looks at the version and the canary of every engine."""

    def __post_init__(self) -> None:
        require_at_least(2, full_every=self.full_every)
        if self.backend not in BACKENDS:
            raise ConfigError(f"backend={self.backend!r}: expected one of {', '.join(BACKENDS)}")
        for name, value in (("deadline_s", self.deadline_s), ("canary_tolerance", self.canary_tolerance),
                            ("recheck_s", self.recheck_s)):
            if value <= 0:
                raise ConfigError(f"{name}={value} must be above 0")

    @property
    def whole_every(self) -> int:
        """Every so-manyth version is a whole checkpoint; 1: all."""
        return self.full_every if self.transport == "delta" else 1


@dataclass(frozen=True, kw_only=True, slots=True)
class SupervisionConfig:
    """When a component counts as dead, and how often it comes back; see ``rl/supervisor.py``, ``rl/watchdog.py``."""

    max_restarts: int = 5
    """Deaths of one component within ``restart_window_s`` that are answered by a restart; one more ends the run."""
    restart_window_s: float = 300.0
    """Seconds after which a death is forgotten."""
    backoff_s: float = 0.25
    """Wait before the first restart; it doubles with every death that is not forgotten."""
    max_backoff_s: float = 30.0
    """Longest wait before a restart."""
    probe_timeout_s: float = 2.0
    """A service that takes longer to answer three times in a row hangs; raise it where steps take that long."""
    watch_trainer: bool = False
    """Run the trainer as a child that is started again when it is killed or stops giving signs of life."""

    def __post_init__(self) -> None:
        require_at_least(0, max_restarts=self.max_restarts)
        for name, value in (("restart_window_s", self.restart_window_s), ("backoff_s", self.backoff_s),
                            ("probe_timeout_s", self.probe_timeout_s)):
            if value <= 0:
                raise ConfigError(f"{name}={value} must be above 0")
        if self.max_backoff_s < self.backoff_s:
            raise ConfigError(f"max_backoff_s={self.max_backoff_s} is below backoff_s={self.backoff_s}; raise it")


@dataclass(frozen=True, kw_only=True, slots=True)
class ObservationConfig:
    """What of a run is shown while it runs; see ``rl/exporter.py``, ``rl/writers.py``, ``rl/transcripts.py``."""

    prometheus_port: int = 0
    """Port of ``/metrics`` for Prometheus; 0: none."""
    prometheus_host: str = "127.0.0.1"
    """Address of that port."""
    writers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Where metrics go besides ``metrics.jsonl``; both write below the run directory and need no network."""
    transcripts: int = 2
    """Trained episodes of every step that are kept as text."""

    def __post_init__(self) -> None:
        require_at_least(0, prometheus_port=self.prometheus_port, transcripts=self.transcripts)
        if self.prometheus_port > 65535:
            raise ConfigError(f"prometheus_port={self.prometheus_port} must be at most 65535")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSource:
    """Which engine samples the policy; see ``docs/policies.md``."""

    kind: Literal["built-in", "sglang", "vllm"] = "built-in"
    """``built-in`` starts ``glm5 serve``; the others are servers that run already."""
    url: str = ""
    """Address of the external server."""
    tolerance: float = 0.02
    """Mean |log-prob difference| in nats, between trainer and external engine, above which a run does not start."""

    def __post_init__(self) -> None:
        if (self.kind == "built-in") != (not self.url):
            raise ConfigError(f"engine: kind={self.kind!r} with url={self.url!r}; give a url for sglang and vllm, and "
                              "none for the built-in engine")
        if self.tolerance <= 0:
            raise ConfigError(f"engine.tolerance={self.tolerance} must be above 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterConfig:
    """Where ``launch = "ray"`` places trainer and services; see ``docs/policies.md``.

    Each table names Ray resources, ``{GPU = 1}`` or custom ones such as ``{big_memory = 1}``; processors follow from
    ``trainer_threads`` and ``engine_threads``.
    """

    address: str = "auto"
    """Address of the cluster; ``auto`` takes the one that runs on this machine."""
    trainer: dict[str, float] = field(default_factory=dict)
    """Resources of the trainer."""
    engine: dict[str, float] = field(default_factory=dict)
    """Resources of the engine, and of the reward model where there is one."""
    tasks: dict[str, float] = field(default_factory=dict)
    """Resources of each task service; they are spread over the nodes that have them."""
