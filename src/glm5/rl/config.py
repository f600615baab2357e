"""Configuration of a reinforcement-learning run: what ``configs/<size>/rl.toml`` and its like may say. No torch here.

One unit for sizes: groups. A batch is ``groups_per_batch`` groups of ``group_size`` episodes, a step trains one batch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from glm5.config import build_config, load_config, require_at_least
from glm5.device import AUTO
from glm5.env.rewards.config import RewardConfig
from glm5.errors import ConfigError
from glm5.rl.advantages import GroupAdvantage
from glm5.rl.credit import CriticConfig, TeacherConfig, prompt_mixture
from glm5.rl.operation import ClusterConfig, EngineSource, ObservationConfig, SupervisionConfig, WeightsConfig
from glm5.train.config import OptimizerConfig, ScheduleConfig

NO_BOUND = 2**62
"""Staleness that nothing reaches."""


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
    oversample: float = 1.0
    """Groups that may run for each one that is wanted, at most, in the expectation that some will be dropped for equal
    rewards; the rate is measured. 1: a dropped group is replaced only when it has ended."""
    filter_budget: float = 0.0
    """Groups of equal rewards that are dropped in one trainer step at most, in batches; further ones are trained
    without a gradient, so that a step costs a bounded number of episodes. 0: no limit."""

    def __post_init__(self) -> None:
        require_at_least(1, max_visits=self.max_visits, balance=self.balance, oversample=self.oversample)
        require_at_least(0, revisit_after_steps=self.revisit_after_steps, screen=self.screen,
                         filter_budget=self.filter_budget)
        if self.screen == 1:
            raise ConfigError("screen=1: the reward of one episode differs from no other; give 2 or more, or 0")
        if not 0 <= self.revisit_share < 1:
            raise ConfigError(f"revisit_share={self.revisit_share} must lie in [0, 1)")


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerConfig:
    """How much the ledger keeps, and where; see ``rl/payloads.py``."""

    budget_bytes: int = 256 * 2**20
    """Compressed tokens of episodes that ``ledger.sqlite`` holds; what is beyond moves to files beside it."""
    retain_bytes: int = 0
    """Compressed tokens of trained and dropped groups that stay on disk at all, the oldest are removed first; 0: all.
    Groups that wait or may be trained again keep theirs, and the books keep every group."""

    def __post_init__(self) -> None:
        require_at_least(0, budget_bytes=self.budget_bytes, retain_bytes=self.retain_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayConfig:
    """Training on groups that were trained before, or that another run recorded."""

    share: float = 0.0
    """Share of each batch that is trained again, as far as there are such groups; 0 trains every group once."""
    max_uses: int = 2
    """Batches that one group may be in, the first included; offline: how often each recorded group is trained."""
    max_age: int = 8
    """Steps between the trainer and the oldest policy version of a group that is trained again, at most."""
    source: str = ""
    """mode = "offline": the run directory, or the file of ``glm5 ledger export``, whose episodes are trained on."""

    def __post_init__(self) -> None:
        if not 0 <= self.share < 1:
            raise ConfigError(f"share={self.share} must lie in [0, 1)")
        require_at_least(1, max_uses=self.max_uses)
        require_at_least(0, max_age=self.max_age)


@dataclass(frozen=True, kw_only=True, slots=True)
class BreakerConfig:
    """When a task service gets no more work for a while; see ``rl/breaker.py``."""

    window: int = 20
    """Last attempts that are looked at; a quarter of them must be known before a service is judged."""
    failure_share: float = 0.5
    """Share of them that failed for reasons of the service, from which on it is left alone."""
    backoff_s: float = 2.0
    """Seconds until one attempt is tried again; doubled every time that fails too."""
    max_backoff_s: float = 60.0
    """Longest such pause."""

    def __post_init__(self) -> None:
        require_at_least(4, window=self.window)
        if not 0 < self.failure_share <= 1:
            raise ConfigError(f"failure_share={self.failure_share} must lie in (0, 1]")
        if not 0 < self.backoff_s <= self.max_backoff_s:
            raise ConfigError(f"backoff_s={self.backoff_s}, max_backoff_s={self.max_backoff_s}: expected "
                              "0 < backoff_s <= max_backoff_s")


@dataclass(frozen=True, kw_only=True, slots=True)
class RLConfig:
    """One run of asynchronous reinforcement learning."""

    name: str
    """Name of the run."""
    init: str = "stage:sft"
    """A checkpoint directory, or ``stage:NAME``: the final checkpoint of run NAME beside this one."""
    tasksets: dict[str, float] = field(default_factory=dict)
    """Tasksets to practise and their shares of the groups, for example ``{calculator = 1.0, shell = 2.0}``; with
    teachers those of the teachers."""
    teachers: dict[str, TeacherConfig] = field(default_factory=dict)
    """Cross-stage distillation: the advantage of a token is what its episode's teacher thinks of it."""
    mode: Literal["async", "sync", "offline"] = "async"
    """``async``: episodes run while the trainer steps. ``sync``: the same code with pacing and staleness 0.
    ``offline``: no episodes run; ``replay.source`` is trained on."""
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
    advantage: GroupAdvantage = "mean"
    """How rewards become advantages: of the episodes of a group, of turns (``turn``), or, without comparing, of tokens
    (``critic``); unused with teachers."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    """advantage = "critic": the value model."""
    reset_optimizer: bool = False
    """Forget the moments of the optimizer after each weight publication (GLM-5 report, agentic RL)."""
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    """Choice of tasks and automatic shares."""
    ledger: LedgerConfig = field(default_factory=LedgerConfig)
    """Budgets of what is recorded."""
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    """Groups that are trained again, and training from a record."""
    breaker: BreakerConfig = field(default_factory=BreakerConfig)
    """Treatment of task services that fail."""
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
    rewards: dict[str, RewardConfig] = field(default_factory=dict)
    """Blended rewards by taskset; the others are rewarded by their own verifier."""
    reward_model: str = ""
    """Outcome reward model: a checkpoint directory, or ``stage:NAME``, the final checkpoint of run NAME beside this
    one."""
    anchors_per_group: int = 0
    """Episodes of each group that answer with the task's anchor, where it has one, instead of sampling."""
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    """How policy versions reach the engines."""
    supervision: SupervisionConfig = field(default_factory=SupervisionConfig)
    """When a component counts as dead, and how it comes back."""
    observation: ObservationConfig = field(default_factory=ObservationConfig)
    """What is shown while the run goes on."""

    def __post_init__(self) -> None:
        if self.teachers:
            object.__setattr__(self, "tasksets", prompt_mixture(self.tasksets, self.teachers))
        self._check_rewards()
        if not self.tasksets or any(ratio <= 0 for ratio in self.tasksets.values()):
            raise ConfigError(f"tasksets={self.tasksets}: name at least one taskset with a share above 0")
        require_at_least(0, pacing_eta=self.pacing_eta, max_staleness=self.max_staleness, max_minutes=self.max_minutes,
                          evaluation_count=self.evaluation_count, evaluation_temperature=self.evaluation_temperature)
        require_at_least(1, groups_per_batch=self.groups_per_batch, steps=self.steps, publish_every=self.publish_every,
                          max_new_tokens=self.max_new_tokens, max_turns=self.max_turns, concurrency=self.concurrency,
                          max_attempts=self.max_attempts, checkpoint_every=self.checkpoint_every,
                          keep_checkpoints=self.keep_checkpoints, trainer_threads=self.trainer_threads,
                          engine_threads=self.engine_threads, max_tokens_per_microbatch=self.max_tokens_per_microbatch)
        require_at_least(2 if self.compares_episodes else 1, group_size=self.group_size)
        require_at_least(2, max_context=self.max_context)
        for name, value in (("temperature", self.temperature), ("episode_timeout_s", self.episode_timeout_s),
                            ("stall_minutes", self.stall_minutes)):
            if value <= 0:
                raise ConfigError(f"{name}={value} must be above 0")
        if self.engine.kind != "built-in" and self.weights.transport != "disk":
            raise ConfigError(f'weights.transport={self.weights.transport!r} with engine.kind={self.engine.kind!r}: '
                              'engines of others load whole checkpoints; set weights.transport = "disk"')
        if self.launch == "ray" and self.supervision.watch_trainer:
            raise ConfigError('supervision.watch_trainer=true with launch="ray": the watchdog sees processes of '
                              "its own machine only; set it to false")
        if (self.mode == "offline") != bool(self.replay.source):
            raise ConfigError(f'mode={self.mode!r}, replay.source={self.replay.source!r}: mode "offline" and a source '
                              "need each other; give both or neither")
        if self.mode == "offline" and self.teachers:
            raise ConfigError('mode="offline" with teachers: distillation needs episodes of the student itself; leave '
                              "one of them out")
        needed = self.pacing_eta + self.publish_every - 1
        if self.mode == "async" and self.max_staleness < needed:
            raise ConfigError(f"max_staleness={self.max_staleness} is below pacing_eta + publish_every - 1 = {needed}: "
                              "every sample would be dropped as stale; raise it or lower the others")

    def _check_rewards(self) -> None:
        unknown = self.rewards.keys() - self.tasksets.keys()
        if unknown:
            raise ConfigError(f"rewards.{min(unknown)}: no such taskset here; tasksets: {', '.join(self.tasksets)}")
        if any(rewards.model for rewards in self.rewards.values()) and not self.reward_model:
            raise ConfigError("rewards: a reward model has a weight but reward_model is empty; name a checkpoint or "
                              "stage:NAME")
        if not 0 <= self.anchors_per_group < self.group_size:
            raise ConfigError(f"anchors_per_group={self.anchors_per_group} must lie in [0, group_size)")
        if self.anchors_per_group and (self.temperature != 1 or self.enable_thinking):
            raise ConfigError("anchors_per_group needs temperature = 1 and enable_thinking = false: anchors are scored "
                              "by the policy as it is and have no reasoning")

    @property
    def comparison(self) -> GroupAdvantage | None:
        """How the episodes of a group are compared; None with teachers, where every episode teaches by itself."""
        return None if self.teachers else self.advantage

    @property
    def compares_episodes(self) -> bool:
        """Whether equal rewards leave nothing to learn."""
        return self.comparison not in (None, "critic")

    def for_evaluation(self, tasksets: Iterable[str]) -> RLConfig:
        """The same limits of episodes, for other tasksets under their own verifiers: nothing is compared, blended,
        answered by an anchor or distilled."""
        return replace(self, tasksets=dict.fromkeys(tasksets, 1.0), teachers={}, group_size=max(self.group_size, 2),
                       rewards={}, reward_model="", anchors_per_group=0)

    @property
    def screened(self) -> int:
        """Episodes of a group that start first: all, unless groups are screened by their rewards."""
        by_reward = self.curriculum.screen if self.compares_episodes and self.advantage != "turn" else 0
        return min(by_reward or self.group_size, self.group_size)

    @property
    def eta(self) -> int:
        """Batches ahead, 0 in synchronous mode."""
        return self.pacing_eta if self.mode == "async" else 0

    @property
    def tau(self) -> int:
        """Hard staleness bound, 0 in synchronous mode; what is recorded has an age but no bound."""
        return {"async": self.max_staleness, "sync": 0, "offline": NO_BOUND}[self.mode]

    @property
    def fresh_groups(self) -> int:
        """Groups of a batch that have never been trained; the others are trained again."""
        return self.groups_per_batch - self.reused_groups

    @property
    def reused_groups(self) -> int:
        """Groups of a batch that were trained before, at most."""
        return int(self.replay.share * self.groups_per_batch)

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
