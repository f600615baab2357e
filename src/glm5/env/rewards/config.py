"""What a configuration may say about the rewards of a taskset: ``[rewards.TASKSET]`` of an RL file.

With correctness c (the taskset's own verifier and the rules) and quality q (the reward model and the judge), each the
mean of its parts by weight,

    reward = (C c + Q g q) / (C + Q),    g = the taskset's own reward if ``gate`` else 1,

where C and Q are the sums of their parts' weights: correctness is the gate of everything else (GLM-5 report, general
RL: rules are exact and narrow, a reward model has low variance and can be hacked, a judge is robust and noisy). With
``verification`` of weight w, an episode gets (1 - w) reward + w agreement.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from glm5.config import build_config, require_at_least
from glm5.env.rewards.rules import RuleConfig
from glm5.errors import ConfigError

_RUBRIC = ("Judge how well the answer serves the user: is it correct and complete, does it follow the instruction, is "
           "it clear and no longer than it needs to be?")


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeConfig:
    """A model behind an OpenAI-compatible endpoint that reads answers."""

    url: str
    """Base URL, for example ``http://127.0.0.1:8000/v1``."""
    model: str
    """Model that the endpoint is asked for."""
    key_variable: str = ""
    """Environment variable that holds the API key; empty sends none."""
    weight: float = 1.0
    """Weight in the blend (unused in a monitor)."""
    mode: Literal["score", "against_anchor"] = "score"
    """Give a grade, or say whether the answer is better than the anchor, asked in both orders."""
    rubric: str = _RUBRIC
    """What the judge is told to look at."""
    low: int = 1
    """Worst grade."""
    high: int = 5
    """Best grade."""
    samples: int = 1
    """Grades that are averaged; more lower the variance."""
    temperature: float = 0.0
    """Sampling temperature of the judge."""
    max_tokens: int = 256
    """Tokens that one answer of the judge may have."""
    timeout_s: float = 30.0
    """Seconds that one call may take."""
    attempts: int = 3
    """Calls for one verdict; an answer that is not exactly what was asked for counts as failed."""
    concurrency: int = 16
    """Calls at once."""
    cache: str = ""
    """SQLite file that keeps verdicts between runs; empty keeps them in memory."""

    def __post_init__(self) -> None:
        require_at_least(1, samples=self.samples, max_tokens=self.max_tokens, attempts=self.attempts,
                          concurrency=self.concurrency)
        require_at_least(0, weight=self.weight, temperature=self.temperature)
        if self.high <= self.low:
            raise ConfigError(f"low={self.low}, high={self.high}: expected low < high")
        if self.timeout_s <= 0:
            raise ConfigError(f"timeout_s={self.timeout_s} must be above 0")
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"url={self.url!r}: expected http://HOST:PORT/v1")


@dataclass(frozen=True, kw_only=True, slots=True)
class VerificationConfig:
    """Self-play verification: the model is asked about its own answer, and is paid for being right about it."""

    weight: float = 0.2
    """Share of the reward that depends on the verdict."""
    question: str = "Is that right? Answer yes or no."
    """The user message after the answer."""
    yes: str = "yes"
    """Verdict that claims a right answer."""
    no: str = "no"
    """Verdict that claims a wrong one."""

    def __post_init__(self) -> None:
        if not 0 < self.weight < 1:
            raise ConfigError(f"weight={self.weight} must lie in (0, 1)")
        if not self.question.strip() or not self.yes or not self.no or self.yes == self.no:
            raise ConfigError("question, yes and no: expected three texts, yes and no different")


@dataclass(frozen=True, kw_only=True, slots=True)
class MonitorConfig:
    """The reward-hacking monitor of tool calls: a rule filter, then a judge if there is one."""

    action: Literal["block", "dummy", "flag"] = "block"
    """What happens to a suspicious call: refused with a notice, not run and answered by ``dummy``, or run."""
    dummy: str = "ok"
    """Result of a call that is not run."""
    patterns: tuple[str, ...] = ()
    """Regular expressions beside the built-in ones."""
    builtin: bool = True
    """Use the built-in filter: verifier files, tests, recorded answers, other processes, the history of the task."""
    zero_reward: bool = False
    """An episode with a confirmed call gets reward 0."""
    judge: JudgeConfig | None = None
    """Confirms what the filter suspects; without one, or when it fails, a suspicion counts as confirmed."""

    def __post_init__(self) -> None:
        for text in self.patterns:
            try:
                re.compile(text)
            except re.error as error:
                raise ConfigError(f"patterns: {text!r} is no regular expression: {error}") from None
        if not self.builtin and not self.patterns:
            raise ConfigError("monitor: builtin = false and no patterns: nothing would be looked for")


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardConfig:
    """How the episodes of one taskset are rewarded."""

    task: float = 1.0
    """Weight of the taskset's own verifier."""
    rules: tuple[RuleConfig, ...] = ()
    """Further rules over the text of the final answer."""
    model: float = 0.0
    """Weight of the outcome reward model."""
    judge: JudgeConfig | None = None
    """Generative judge."""
    gate: bool = True
    """Quality counts only as far as the taskset's own verifier is satisfied."""
    verification: VerificationConfig | None = None
    """Self-play verification."""
    anchors: str = ""
    """Human-written answers: ``solution`` takes the taskset's own, else a ``.jsonl`` file with ``instruction`` and
    ``answer``."""
    monitor: MonitorConfig | None = None
    """Reward-hacking monitor."""

    def __post_init__(self) -> None:
        require_at_least(0, task=self.task, model=self.model)
        if not (self.task or self.rules or self.model or (self.judge and self.judge.weight)):
            raise ConfigError("rewards: every weight is 0; give at least one part of the reward a weight")
        if self.judge is not None and self.judge.mode == "against_anchor" and not self.anchors:
            raise ConfigError("judge.mode='against_anchor' needs anchors: name a file, or solution")


def read_rewards(path: Path) -> dict[str, RewardConfig]:
    """Rewards by taskset from the JSON file that a run hands to its task services. Raises ConfigError."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); give a JSON object of rewards by taskset") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected an object of rewards by taskset")
    return {name: build_config(RewardConfig, value, f"{path}: {name}") for name, value in data.items()}
