"""Configuration of continual learning: what one TOML file of ``glm5 continual`` may say. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from glm5.config import require_at_least
from glm5.env.rewards.rules import RuleConfig
from glm5.errors import ConfigError
from glm5.train.config import StageConfig
from glm5.train.preference_config import PreferenceConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class FilterConfig:
    """Which recorded answers are learnt from."""

    min_score: float = 0.5
    """Least mean feedback, from 0 (thumbs down) to 1 (thumbs up), of an answer that is learnt."""
    require_feedback: bool = True
    """Only answers with feedback; False also takes those that nobody judged and that satisfy ``rules``."""
    rules: tuple[RuleConfig, ...] = ()
    """Verifiers that every learnt answer must satisfy in full."""
    min_characters: int = 1
    """Least length of an answer."""
    secrets: Literal["drop", "scrub"] = "drop"
    """What happens to a conversation with a key, a token or a password."""
    personal: Literal["scrub", "drop", "keep"] = "scrub"
    """What happens to e-mail addresses, telephone, card and bank account numbers."""
    max_per_owner: int = 0
    """Answers that one API key may contribute, the newest ones; 0 sets no limit."""

    def __post_init__(self) -> None:
        require_at_least(0, min_characters=self.min_characters, max_per_owner=self.max_per_owner)
        if not 0 <= self.min_score <= 1:
            raise ConfigError(f"min_score={self.min_score} must lie in [0, 1]")
        if not self.require_feedback and not self.rules:
            raise ConfigError("require_feedback = false needs rules: answers that nobody judged must satisfy something")


@dataclass(frozen=True, kw_only=True, slots=True)
class GateConfig:
    """The regression gate: the same held-out tasks before and after."""

    rollouts: str
    """RL file, relative to this one, whose tasksets are evaluated and whose limits hold."""
    tasks: int = 120
    """Held-out tasks of each taskset."""
    temperature: float = 0.0
    """Sampling temperature; 0 makes the comparison free of chance."""
    max_drop: float = 0.02
    """Largest fall of pass@1 of any taskset with which a model is still published."""

    def __post_init__(self) -> None:
        require_at_least(1, tasks=self.tasks)
        require_at_least(0, temperature=self.temperature)
        if not 0 <= self.max_drop < 1:
            raise ConfigError(f"max_drop={self.max_drop} must lie in [0, 1)")


@dataclass(frozen=True, kw_only=True, slots=True)
class ContinualConfig:
    """One round of learning from deployment."""

    name: str
    """Name of the round."""
    collections: tuple[str, ...]
    """Directories of ``glm5 serve --collect``."""
    filter: FilterConfig = field(default_factory=FilterConfig)
    """Which answers are learnt from."""
    min_conversations: int = 8
    """Fewest answers that are worth a round."""
    sft: StageConfig
    """How the kept answers are learnt, from the deployed model in ``init``; the files of ``data.conversations`` are
    replayed beside them, against forgetting."""
    preference: PreferenceConfig | None = None
    """How preferred answers are learnt after that; the round sets ``init`` and ``pairs``. None: not at all."""
    gate: GateConfig
    """The regression gate."""

    def __post_init__(self) -> None:
        require_at_least(1, min_conversations=self.min_conversations)
        if not self.collections:
            raise ConfigError("collections: name at least one directory of glm5 serve --collect")
        if self.sft.stage != "sft":
            raise ConfigError(f"sft.stage={self.sft.stage!r}: expected sft")
        if self.sft.init == "random" or self.sft.init.startswith("stage:"):
            raise ConfigError(f"sft.init={self.sft.init!r}: expected the directory of the deployed model")
        if self.preference is not None and self.preference.objective != "dpo":
            raise ConfigError(f"preference.objective={self.preference.objective!r}: expected dpo, which trains the "
                              "policy")
