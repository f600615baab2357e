"""Configuration of a reinforcement-learning run: what ``configs/<size>/rl.toml`` may say. No torch here.

One unit for sizes: groups. A batch is ``groups_per_batch`` groups of ``group_size`` episodes, a step trains one batch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from glm5.config import build_config, load_config, require_at_least
from glm5.device import AUTO
from glm5.errors import ConfigError
from glm5.train.config import OptimizerConfig, ScheduleConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class LossConfig:
    """Which policy loss, and its bounds; the formulas are in ``rl/losses.py``."""

    kind: Literal["double_sided", "ppo", "icepop", "tis", "gspo", "cispo"] = "double_sided"
    """``double_sided``: asynchronous agentic RL; ``icepop``: reasoning RL as published; the others for comparison."""
    eps_low: float = 0.2
    """Ratios at or below 1 - eps_low are masked (double_sided) or clipped."""
    eps_high: float = 0.28
    """Ratios at or above 1 + eps_high are masked (double_sided) or clipped."""
    beta: float = 2.0
    """icepop: tokens whose trainer-to-engine ratio lies outside [1/beta, beta] are dropped."""
    tis_low: float = 0.5
    """tis: least weight of a token."""
    tis_high: float = 2.0
    """tis: greatest weight of a token."""
    dual_clip: float = 0.0
    """ppo, icepop, tis, gspo: bound on the loss of a token of negative advantage, in advantages; 0: none."""
    reference: Literal["engine", "trainer"] = "trainer"
    """ppo, gspo, cispo: the log-probs that the ratio is taken against, the engine's at sampling or the trainer's own
    at the start of the update."""

    def __post_init__(self) -> None:
        if not 0 < self.eps_low <= 1:
            raise ConfigError(f"eps_low={self.eps_low} must lie in (0, 1]")
        if self.eps_high <= 0:
            raise ConfigError(f"eps_high={self.eps_high} must be above 0")
        if self.beta < 1:
            raise ConfigError(f"beta={self.beta} must be at least 1")
        if not 0 <= self.tis_low <= self.tis_high:
            raise ConfigError(f"tis_low={self.tis_low}, tis_high={self.tis_high}: expected 0 <= tis_low <= tis_high")
        if self.dual_clip and self.dual_clip <= 1:
            raise ConfigError(f"dual_clip={self.dual_clip} must be above 1, or 0 for none")


@dataclass(frozen=True, kw_only=True, slots=True)
class CurriculumConfig:
    """Which tasks are practised; see ``rl/curriculum.py``."""

    max_visits: int = 4
    """Groups that one task may have, as long as its rewards differ; 1 visits every task once."""
    revisit_share: float = 0.5
    """Share of the groups, at most, that practise a task again."""
    revisit_after_steps: int = 2
    """Trainer steps after a visit before the next one: the policy should have changed."""
    balance: float = 2.0
    """Tasksets whose groups more often have equal rewards start up to so many times more of them; 1: fixed shares."""
    screen: int = 0
    """Episodes of a group that start first; the others start when the rewards of these differ. 0: all start at once."""

    def __post_init__(self) -> None:
        require_at_least(1, max_visits=self.max_visits, balance=self.balance)
        require_at_least(0, revisit_after_steps=self.revisit_after_steps, screen=self.screen)
        if self.screen == 1:
            raise ConfigError("screen=1: the reward of one episode differs from no other; give 2 or more, or 0")
        if not 0 <= self.revisit_share < 1:
            raise ConfigError(f"revisit_share={self.revisit_share} must lie in [0, 1)")


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
    """Resources of the engine."""
    tasks: dict[str, float] = field(default_factory=dict)
    """Resources of each task service; they are spread over the nodes that have them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RLConfig:
    """One run of asynchronous reinforcement learning."""

    name: str
    """Name of the run."""
    init: str = "stage:sft"
    """A checkpoint directory, or ``stage:NAME``: the final checkpoint of run NAME beside this one."""
    tasksets: dict[str, float]
    """Tasksets to practise and their shares of the groups, for example ``{calculator = 1.0, shell = 2.0}``."""
    mode: Literal["async", "sync"] = "async"
    """``async``: episodes run while the trainer steps. ``sync``: the same code with pacing and staleness 0."""
    groups_per_batch: int = 16
    """Groups that one optimizer step trains."""
    group_size: int = 8
    """Episodes of one task that are compared with each other."""
    steps: int = 200
    """Optimizer steps."""
    max_minutes: float = 0.0
    """Stop after this long even if steps remain, time of earlier starts included; 0: no limit."""
    pacing_eta: int = 1
    """Batches that may be started ahead of the step that trains them (async)."""
    max_staleness: int = 2
    """Hard bound, in steps, between the trainer and the oldest policy version of a trained sample (async)."""
    publish_every: int = 1
    """Steps between weight publications (async; sync publishes every step)."""
    launch: Literal["local", "ray"] = "local"
    """``local``: all processes on this machine. ``ray``: on the nodes of a Ray cluster."""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    """Placement on a Ray cluster."""
    engine: EngineSource = field(default_factory=EngineSource)
    """The engine that samples."""
    loss: LossConfig = field(default_factory=LossConfig)
    """Policy loss."""
    advantage: Literal["mean", "mean_std", "leave_one_out"] = "mean"
    """How the rewards of a group become advantages."""
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    """Choice of tasks and automatic shares."""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=6e-5, kind="adamw", weight_decay=0.0))
    """Optimizer of the policy; the indexers, the MTP layer and the router bias are frozen."""
    schedule: ScheduleConfig = field(default_factory=lambda: ScheduleConfig(kind="constant"))
    """Learning rate over the steps."""
    temperature: float = 1.0
    """Sampling temperature of training episodes; the trainer scores under the same one. top_p and top_k stay off."""
    max_new_tokens: int = 64
    """Sampled tokens of one turn at most."""
    max_turns: int = 6
    """Turns of one episode at most."""
    episode_timeout_s: float = 60.0
    """Seconds that one attempt at an episode may take."""
    enable_thinking: bool = False
    """Let the model think before it answers; as in the demonstrations it learnt from."""
    declare_tools: bool = False
    """Render the tools into the prompt; as in the demonstrations it learnt from."""
    concurrency: int = 64
    """Episodes that run at once; also the slots of the engine."""
    max_context: int = 512
    """Prompt plus answer tokens of one episode in the engine."""
    pad_groups: bool = True
    """Fill a group that lost episodes to failures by repeating its valid ones; False keeps the valid ones only."""
    max_attempts: int = 3
    """Attempts at one slot of a group before it counts as an infrastructure failure."""
    sandbox: Literal["bwrap", "none"] = "bwrap"
    """Isolation of the task services; ``none`` runs the tools of the model without any."""
    max_tokens_per_microbatch: int = 8192
    """Tokens, padding included, of one forward and backward pass."""
    device: str = AUTO
    """Where the trainer computes: a name of ``glm5.device``."""
    engine_device: str = AUTO
    """Where the engine computes."""
    trainer_threads: int = 1
    """CPU threads of the trainer."""
    engine_threads: int = 1
    """CPU threads of the engine."""
    checkpoint_every: int = 10
    """Steps between checkpoints; one more is written at the end."""
    keep_checkpoints: int = 2
    """Newest checkpoints that stay on disk."""
    stall_minutes: float = 5.0
    """Stop with an error when no batch became trainable for this long."""
    evaluation_count: int = 200
    """Held-out tasks per taskset of an evaluation."""
    evaluation_temperature: float = 0.0
    """Sampling temperature of an evaluation."""
    seed: int = 0
    """Seed of the trainer."""

    def __post_init__(self) -> None:
        if not self.tasksets or any(ratio <= 0 for ratio in self.tasksets.values()):
            raise ConfigError(f"tasksets={self.tasksets}: name at least one taskset with a share above 0")
        require_at_least(0, pacing_eta=self.pacing_eta, max_staleness=self.max_staleness, max_minutes=self.max_minutes,
                          evaluation_count=self.evaluation_count, evaluation_temperature=self.evaluation_temperature)
        require_at_least(1, groups_per_batch=self.groups_per_batch, steps=self.steps, publish_every=self.publish_every,
                          max_new_tokens=self.max_new_tokens, max_turns=self.max_turns, concurrency=self.concurrency,
                          max_attempts=self.max_attempts, checkpoint_every=self.checkpoint_every,
                          keep_checkpoints=self.keep_checkpoints, trainer_threads=self.trainer_threads,
                          engine_threads=self.engine_threads, max_tokens_per_microbatch=self.max_tokens_per_microbatch)
        require_at_least(2, group_size=self.group_size, max_context=self.max_context)
        for name, value in (("temperature", self.temperature), ("episode_timeout_s", self.episode_timeout_s),
                            ("stall_minutes", self.stall_minutes)):
            if value <= 0:
                raise ConfigError(f"{name}={value} must be above 0")
        needed = self.pacing_eta + self.publish_every - 1
        if self.mode == "async" and self.max_staleness < needed:
            raise ConfigError(f"max_staleness={self.max_staleness} is below pacing_eta + publish_every - 1 = {needed}: "
                              "every sample would be dropped as stale; raise it or lower the others")

    @property
    def eta(self) -> int:
        """Batches ahead, 0 in synchronous mode."""
        return self.pacing_eta if self.mode == "async" else 0

    @property
    def tau(self) -> int:
        """Hard staleness bound, 0 in synchronous mode."""
        return self.max_staleness if self.mode == "async" else 0

    @property
    def publication_interval(self) -> int:
        """Steps between weight publications, 1 in synchronous mode."""
        return self.publish_every if self.mode == "async" else 1


def read_rl_config(path: Path) -> RLConfig:
    """From a TOML file, or from the resolved ``config.json`` of a run directory."""
    if path.suffix != ".json":
        return load_config(RLConfig, path)
    try:
        return build_config(RLConfig, json.loads(path.read_text(encoding="utf-8")), str(path))
    except (OSError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); give an RL configuration") from None
