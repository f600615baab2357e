"""A generation whose ids were decided beforehand, and whose cuts into chunks the test chooses."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from itertools import pairwise

import numpy as np

from glm5.engine.requests import Chunk, Completion, Sequence
from glm5.records import FinishReason, SamplingParams


class Replay:
    """Gives out ``ids`` in chunks that end at ``cuts``."""

    def __init__(self, ids: list[int], cuts: list[int], reason: FinishReason = "stop", cached: int = 0) -> None:
        self._edges = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})
        self._is_aborted = False
        self.sequence = Sequence(
            request_id=1,
            prompt=np.array([1, 2, 3]),
            params=SamplingParams(),
            stop_ids=frozenset(),
            seed=0,
            max_new_tokens=len(ids),
            output_ids=ids,
            logprobs=[-0.5] * len(ids),
            versions=[0] * len(ids),
            cached_tokens=cached,
            finish_reason=reason,
        )

    async def stream(self, timeout_s: float) -> AsyncGenerator[Chunk, None]:
        for start, stop in pairwise(self._edges):
            is_last = stop == self._edges[-1]
            yield Chunk(
                output_ids=self.sequence.output_ids[start:stop],
                logprobs=self.sequence.logprobs[start:stop],
                weight_versions=self.sequence.versions[start:stop],
                finish_reason=self.sequence.finish_reason if is_last else None,
            )

    async def wait(self, timeout_s: float) -> Completion:
        sequence = self.sequence
        assert sequence.finish_reason is not None
        return Completion(
            output_ids=sequence.output_ids,
            logprobs=sequence.logprobs,
            weight_versions=sequence.versions,
            finish_reason=sequence.finish_reason,
            prompt_tokens=len(sequence.prompt),
            cached_tokens=sequence.cached_tokens,
            prompt_logprobs=[],
        )

    def abort(self) -> None:
        self._is_aborted = True
