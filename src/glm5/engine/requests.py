"""What a request is inside the engine, and how one is refused. Free of torch: the HTTP layer reads these too.

A ``Sequence`` is written by the engine's thread alone. Its output lists only grow and ``versions`` grows last,
so a reader in another thread may take the first ``len(versions)`` items of each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from glm5.errors import EngineError
from glm5.records import FinishReason, SamplingParams, TopLogprobs, sampling_violation

if TYPE_CHECKING:
    from glm5.engine.grammar import Constraint

MAX_TOP_LOGPROBS = 20
"""As many as OpenAI's API reports."""


class InvalidRequestError(EngineError):
    """The request itself is wrong; repeating it cannot help."""

    status, code = 400, "invalid_request"


class ContextLengthError(InvalidRequestError):
    """The prompt leaves no room for an answer in the engine's context."""

    code = "context_length_exceeded"


class QueueFullError(EngineError):
    """Too many requests wait for a slot; try again later."""

    status, code = 429, "queue_full"


class DeadlineError(EngineError):
    """The answer was not complete in the time allowed."""

    status, code = 504, "deadline_exceeded"


class EngineClosedError(EngineError):
    """The engine is stopping or has stopped."""

    status, code = 503, "shutting_down"


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """One request from submission to its last token."""

    request_id: int
    prompt: np.ndarray
    """int64 ids, at least one."""
    params: SamplingParams
    stop_ids: frozenset[int]
    seed: int
    """64-bit seed of this request's random stream."""
    max_new_tokens: int
    """``params.max_new_tokens``, cut to what the context leaves."""
    priority: int = 0
    """Higher ones go first and may take the place of lower ones."""
    session_id: str | None = None
    wants_prompt_logprobs: bool = False
    constraint: Constraint | None = None
    """State of ``params.grammar``."""

    slot: int = -1
    """Row of the block table while running, else -1."""
    filling: np.ndarray = field(init=False)
    """Ids to compute before the next one is sampled: the prompt, after a preemption the answer so far as well."""
    computed: int = 0
    """Leading ids of ``filling`` whose keys are in the slot."""
    cached_tokens: int = 0
    """Leading prompt tokens that were found rather than computed."""
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    """One entry an output id if ``params.top_logprobs``, else empty."""
    versions: list[int] = field(default_factory=list)
    prompt_logprobs: list[float | None] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: EngineError | None = None

    def __post_init__(self) -> None:
        self.filling = self.prompt

    @property
    def is_finished(self) -> bool:
        """True once nothing more will be appended."""
        return self.finish_reason is not None or self.error is not None

    @property
    def is_filling(self) -> bool:
        """True while ids remain to be computed before the next one can be sampled."""
        return self.computed < len(self.filling)

    @property
    def wants_prompt_scores(self) -> bool:
        """True while log-probs of the prompt remain to be computed."""
        return self.wants_prompt_logprobs and len(self.prompt_logprobs) < len(self.prompt)

    def known_ids(self) -> np.ndarray:
        """Prompt and answer so far."""
        return np.concatenate([self.prompt, np.array(self.output_ids, np.int64)])


def check_prompt(ids: list[int] | np.ndarray, vocab_size: int, max_context: int) -> np.ndarray:
    """``ids`` as int64. Raises InvalidRequestError unless all are known, ContextLengthError when too many."""
    prompt = np.asarray(ids)
    if prompt.ndim != 1 or prompt.dtype.kind not in "iu" or not prompt.size:
        got = "an empty list" if prompt.size == 0 else f"{prompt.ndim}-dimensional {prompt.dtype}"
        raise InvalidRequestError(f"input_ids: got {got}, expected a non-empty list of integers; send token ids")
    if int(prompt.min()) < 0 or int(prompt.max()) >= vocab_size:
        wrong = int(prompt.min()) if int(prompt.min()) < 0 else int(prompt.max())
        raise InvalidRequestError(
            f"input_ids: got id {wrong}, expected 0 <= id < {vocab_size}; use this model's tokenizer"
        )
    if len(prompt) >= max_context:
        raise ContextLengthError(
            f"This model's maximum context length is {max_context} tokens and the prompt has {len(prompt)}; "
            "shorten the messages or start the server with a larger --max-context"
        )
    return prompt.astype(np.int64)


def check_version(version: int) -> None:
    """Raises InvalidRequestError for a policy version that records of turns cannot hold (32 bits)."""
    if not 0 <= version < 2**31:
        raise InvalidRequestError(f"weight_version: got {version}, expected 0 to {2**31 - 1}; correct it")


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Raises InvalidRequestError when a sampling parameter is out of range."""
    violation = sampling_violation(params)
    if violation is not None:
        raise InvalidRequestError(f"{violation}; correct it")
    most = min(MAX_TOP_LOGPROBS, vocab_size)
    if params.top_logprobs > most:
        raise InvalidRequestError(f"top_logprobs: got {params.top_logprobs}, expected 0 to {most}; correct it")
    for stop in params.stop_token_ids or ():
        if not 0 <= stop < vocab_size:
            raise InvalidRequestError(f"stop_token_ids: got id {stop}, expected 0 <= id < {vocab_size}; correct it")
    for token, bias in params.logit_bias:
        if not 0 <= token < vocab_size or not math.isfinite(bias):
            raise InvalidRequestError(
                f"logit_bias: got {token}: {bias}, expected 0 <= id < {vocab_size} and a finite number; correct it"
            )
