"""Configuration of training from preference pairs: a reward model, or the policy itself. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from glm5.config import require_at_least
from glm5.device import AUTO
from glm5.errors import ConfigError
from glm5.train.config import OptimizerConfig, ScheduleConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class PreferenceConfig:
    """One run over preference pairs."""

    name: str
    """Name of the run, and of the stage for ``reward_model = "stage:NAME"``."""
    init: str = "stage:sft"
    """A checkpoint directory, or ``stage:NAME``: the final checkpoint of run NAME beside this one."""
    objective: Literal["reward", "dpo"] = "reward"
    """``reward``: a reward model with a Bradley-Terry head; ``dpo``: the policy itself (arXiv:2305.18290)."""
    pairs: tuple[str, ...] = ()
    """``.jsonl`` files of preference pairs; a stage of a pipeline or a round of continual learning brings its own."""
    held_out_fraction: float = 0.15
    """Share of the conversations whose pairs are only scored."""
    declare_tools: bool = False
    """Render the tools of a conversation into its prompt."""
    steps: int
    """Optimizer steps."""
    max_minutes: float = 0.0
    """Stop after this long even if steps remain, time of earlier starts included; 0: no limit."""
    batch_pairs: int = 16
    """Pairs of one optimizer step."""
    length: int = 256
    """Tokens per row; the longest conversation must fit."""
    beta: float = 0.1
    """dpo: strength of the tie to the starting policy."""
    centre_weight: float = 0.01
    """reward: weight of the mean square of the sum of a pair's two scores, which keeps scores near 0
    (arXiv:2312.09244)."""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=3e-4, kind="adamw", weight_decay=0.0))
    """Optimizer; the indexers, the MTP layer and the router bias are frozen."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Learning rate over the steps."""
    checkpoint_every: int = 50
    """Steps between checkpoints; one more is written at the end."""
    device: str = AUTO
    """Where the model is trained: a name of ``glm5.device``."""
    seed: int = 0
    """Seed of the order of the pairs."""

    def __post_init__(self) -> None:
        require_at_least(1, steps=self.steps, batch_pairs=self.batch_pairs, checkpoint_every=self.checkpoint_every)
        require_at_least(8, length=self.length)
        require_at_least(0, max_minutes=self.max_minutes, centre_weight=self.centre_weight)
        if not 0 < self.held_out_fraction < 1:
            raise ConfigError(f"held_out_fraction={self.held_out_fraction} must lie in (0, 1)")
        if self.beta <= 0:
            raise ConfigError(f"beta={self.beta} must be above 0")
