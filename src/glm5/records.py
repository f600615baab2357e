"""Records that cross layers: what the gateway records, the ledger keeps and the trainer consumes.

All are frozen. ``to_json``/``from_json`` give the wire form; token streams are plain lists of numbers there.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Outcome = Literal["ok", "truncated", "agent_error", "infra_error", "cancelled", "stale"]
OUTCOMES: tuple[str, ...] = get_args(Outcome)
TRAINABLE_OUTCOMES = frozenset({"ok", "truncated", "agent_error"})
TurnKind = Literal["root", "extend", "rewrite", "fork"]
TurnRole = Literal["main", "sub", "aux"]
"""Whose call a turn is: the agent's, a sub-agent's, or an auxiliary one such as a title or a summary."""
FinishReason = Literal["stop", "length", "abort"]
TopLogprobs = list[tuple[int, float]]
"""The most likely ids of one position and their log-probs, most likely first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the engine samples one request."""

    temperature: float = 1.0
    """0 is greedy; log-probs are those of the temperature-scaled distribution (of the unscaled one when greedy)."""
    top_p: float = 1.0
    """Nucleus mass; 1 keeps the full softmax, which is what the trainer assumes."""
    top_k: int = -1
    """Keep the k most likely tokens; -1 keeps all."""
    max_new_tokens: int = 128
    """Upper bound on sampled tokens."""
    stop_token_ids: tuple[int, ...] | None = None
    """Ids that end the answer, kept as its last id; None means the tokenizer's stop ids."""
    seed: int | None = None
    """Seed of this request; None draws from the engine's generator."""
    min_p: float = 0.0
    """Keep tokens at least this likely relative to the most likely one; 0 keeps all."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in the prompt or the answer; 1 changes nothing."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens in the answer."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each time it stands in the answer."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(id, what is added to its logit)."""
    grammar: str | None = None
    """Lark grammar, as ``llguidance`` reads it, that the answer follows."""
    top_logprobs: int = 0
    """How many of the most likely tokens are reported for each position."""


_TEMPERATURES = (1e-4, 1e4)
"""Beyond these, scaled logits overflow in single precision or carry no information."""


def sampling_violation(params: SamplingParams) -> str | None:
    """What is out of range whatever the vocabulary, as "name: got …, expected …"; None when all is well."""
    low, high = _TEMPERATURES
    has_temperature = params.temperature == 0 or low <= params.temperature <= high
    rules = (
        (has_temperature, "temperature", params.temperature, f"0 (greedy) or {low} to {high}"),
        (0 < params.top_p <= 1, "top_p", params.top_p, "0 < top_p <= 1"),
        (params.top_k == -1 or 1 <= params.top_k < 2**31, "top_k", params.top_k, "-1 (all) or 1 to 2147483647"),
        (params.max_new_tokens >= 0, "max_new_tokens", params.max_new_tokens, "0 or more"),
        (0 <= params.min_p <= 1, "min_p", params.min_p, "0 <= min_p <= 1"),
        (0 < params.repetition_penalty <= 10, "repetition_penalty", params.repetition_penalty, "0 to 10, 0 excluded"),
        (-2 <= params.presence_penalty <= 2, "presence_penalty", params.presence_penalty, "-2 to 2"),
        (-2 <= params.frequency_penalty <= 2, "frequency_penalty", params.frequency_penalty, "-2 to 2"),
        (params.top_logprobs >= 0, "top_logprobs", params.top_logprobs, "0 or more"),
    )
    return next((f"{name}: got {value}, expected {expected}" for holds, name, value, expected in rules if not holds),
                None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One model call of a session: exact ids in, exact ids out."""

    turn_id: str
    session_id: str
    parent: str | None
    """Turn whose prompt + output this prompt extends or branches from."""
    kind: TurnKind
    prompt_ids: list[int]
    output_ids: list[int]
    logprobs: list[float]
    """Behaviour log-prob of each output id, as the engine sampled it."""
    versions: list[int]
    """Policy version that sampled each output id."""
    finish_reason: FinishReason
    role: TurnRole = "main"


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What a finished request produced. The three lists have equal length; a stop id is the last output id."""

    output_ids: list[int]
    logprobs: list[float]
    weight_versions: list[int]
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    prompt_logprobs: list[float | None]
    """None for the first prompt token, then one log-prob a token; empty unless asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Tokens that arrived since the last chunk of a stream; ``finish_reason`` is set on the last one only."""

    output_ids: list[int]
    logprobs: list[float]
    weight_versions: list[int]
    finish_reason: FinishReason | None
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    """One entry an output id if the request asked for them, else empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One token-exact path root → leaf. All four lists have the same length; non-sampled tokens have mask False,
    log-prob 0.0 and version -1."""

    ids: list[int]
    loss_mask: list[bool]
    logprobs: list[float]
    versions: list[int]
    turn_ids: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One attempt at one task, terminal."""

    episode_id: str
    group_id: str
    task_id: str
    taskset: str
    outcome: Outcome
    reward: float | None
    """None means that nothing was measured; it is never read as 0."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    reason: str = ""
    """Why the outcome is what it is, one line."""
    trajectories: list[Trajectory] = field(default_factory=list)
    started_at: float = 0.0
    """Unix seconds."""
    duration_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A trajectory ready for the trainer."""

    sample_id: str
    episode_id: str
    group_id: str
    taskset: str
    trajectory: Trajectory
    advantage: float
    weight: float
    """Share of this row in its rollout: the loss of an episode is the mean over all its sampled tokens."""


def to_json(record: Any) -> dict[str, Any]:
    """Plain dict of a record, ready for ``json.dumps``."""
    return dataclasses.asdict(record)


def turn_from_json(data: dict[str, Any]) -> Turn:
    """Inverse of ``to_json`` for a turn."""
    return Turn(**data)


def trajectory_from_json(data: dict[str, Any]) -> Trajectory:
    """Inverse of ``to_json`` for a trajectory."""
    return Trajectory(**data)


def episode_from_json(data: dict[str, Any]) -> Episode:
    """Inverse of ``to_json`` for an episode."""
    trajectories = [trajectory_from_json(item) for item in data.get("trajectories", [])]
    return Episode(**{**data, "trajectories": trajectories})
