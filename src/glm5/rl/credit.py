"""Configuration of where advantages come from, other than from comparing the episodes of a group. No torch here.

``[teachers.NAME]`` (``rl/teachers.py``) and ``[critic]`` (``rl/critic.py``) of an RL file.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from glm5.config import require_at_least
from glm5.errors import ConfigError
from glm5.train.config import OptimizerConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherConfig:
    """A checkpoint that the policy is distilled from, on prompts of its own tasksets."""

    checkpoint: str
    """A checkpoint directory, or ``stage:NAME``: the final checkpoint of run NAME beside this one."""
    tasksets: dict[str, float]
    """Tasksets whose episodes this teacher scores, and their shares of its prompts."""
    share: float = 1.0
    """Share of the prompts that are this teacher's."""
    threads: int = 1
    """CPU threads of its engine."""

    def __post_init__(self) -> None:
        if not self.tasksets or any(share <= 0 for share in self.tasksets.values()) or self.share <= 0:
            raise ConfigError(f"share={self.share}, tasksets={self.tasksets}: give shares above 0 and at least one "
                              "taskset")
        require_at_least(1, threads=self.threads)


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticConfig:
    """The value model of critic PPO."""

    gamma: float = 1.0
    """Discount from one sampled token to the next."""
    lam: float = 0.95
    """GAE: how far, from 0 to 1, advantages trust what was earned over what the critic expects."""
    length_alpha: float = 0.0
    """Above 0: lambda = 1 - 1 / (length_alpha * sampled tokens of the sample) instead of ``lam``."""
    clip: float = 0.5
    """How far a value may move in one update before it earns nothing."""
    warmup_steps: int = 10
    """First steps of the run in which only the critic learns."""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=3e-4, kind="adamw", weight_decay=0.0))
    """Optimizer of the critic; its rate is constant."""

    def __post_init__(self) -> None:
        if not (0 < self.gamma <= 1 and 0 <= self.lam <= 1):
            raise ConfigError(f"gamma={self.gamma}, lam={self.lam}: expected 0 < gamma <= 1 and 0 <= lam <= 1")
        if self.clip <= 0:
            raise ConfigError(f"clip={self.clip} must be above 0")
        require_at_least(0, length_alpha=self.length_alpha, warmup_steps=self.warmup_steps)


def prompt_mixture(tasksets: dict[str, float], teachers: dict[str, TeacherConfig]) -> dict[str, float]:
    """Shares of all prompts: of each teacher its share, divided over its tasksets.

    Raises ConfigError when a taskset has two teachers, or when ``tasksets`` says something else.
    """
    mixture: dict[str, float] = {}
    for name, teacher in teachers.items():
        twice = sorted(mixture.keys() & teacher.tasksets.keys())
        if twice:
            raise ConfigError(f"teachers.{name}: taskset {twice[0]!r} has another teacher; name it once")
        total = sum(teacher.tasksets.values())
        mixture |= {taskset: teacher.share * share / total for taskset, share in teacher.tasksets.items()}
    if tasksets and tasksets != mixture:
        raise ConfigError(f"tasksets={tasksets} beside teachers: leave it out, their tasksets are practised")
    return mixture
