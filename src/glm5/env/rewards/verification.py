"""Self-play verification: after its answer the model is asked whether it is right, in the same conversation.

The verdict is worth what it agrees with: the taskset's own verifier. A model that answers well and says so gets the
whole reward; one that answers badly and knows it gets the verdict's share. The first answer and the verdict are one
trajectory, so both are trained by the same advantage.
"""

from __future__ import annotations

from typing import Any

from glm5.env.rewards.config import VerificationConfig
from glm5.env.tasks import Message


def verification_turn(config: VerificationConfig) -> Message:
    """The message that asks for the verdict."""
    return {"role": "user", "content": config.question}


def verdict(config: VerificationConfig, answer: str) -> bool | None:
    """Whether the model says that its answer is right; None when its first word is neither verdict."""
    words = answer.strip().casefold().split()
    first = words[0].strip(".,;:!\"'*") if words else ""
    return {config.yes.casefold(): True, config.no.casefold(): False}.get(first)


def demonstrate(config: VerificationConfig, messages: list[Message], wrong: str | None) -> list[Message]:
    """A demonstration that goes on with a verdict: on its own answer, or on ``wrong`` in its place, which is then
    marked as erroneous so that it is never trained."""
    shown: list[dict[str, Any]] = [dict(message) for message in messages]
    if wrong is not None:
        shown[-1] |= {"content": wrong, "erroneous": True}
    return [*shown, verification_turn(config),
            {"role": "assistant", "content": config.yes if wrong is None else config.no}]
