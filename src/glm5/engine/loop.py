"""The engine's thread: it runs steps, and between two steps what others have posted.

Everything that changes scheduling state happens here: submissions, aborts and weight swaps arrive through one inbox.
``post`` and ``call`` may be used from any thread, ``is_paused`` be set from any; the rest belongs to the thread, or to
actions that are posted to it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch

from glm5.engine.config import EngineConfig
from glm5.engine.drafting import DraftControl
from glm5.engine.generation import Generation, wake
from glm5.engine.prefix_cache import PrefixCache
from glm5.engine.requests import Sequence
from glm5.engine.runner import Runner, StepResult
from glm5.engine.scheduler import Scheduler, StepPlan
from glm5.engine.stats import EngineStats
from glm5.engine.tensor_parallel import LedModel
from glm5.errors import ConfigError, EngineError
from glm5.model.cache import bytes_per_token
from glm5.model.families import CausalLM
from glm5.records import FinishReason

_IDLE_WAIT_S = 1.0
T = TypeVar("T")
_log = logging.getLogger(__name__)


class StepLoop:
    """Scheduler, key cache and runner of one engine, and the thread that they live on."""

    def __init__(
        self, model: CausalLM | LedModel, config: EngineConfig, max_context: int, weight_version: int
    ) -> None:
        """Raises ConfigError for a cache that holds no prompt and answer of ``model``."""
        self._config = config
        self.cache = PrefixCache(
            config.max_slots,
            max_context,
            _count_blocks(model, config, max_context),
            config.block_size,
            weight_version,
            enabled=config.prefix_cache,
            recompute_last=config.speculative > 0,
        )
        lookahead = 1 + 2 * config.speculative  # drafts of this step, and those of the next behind them
        self._scheduler = Scheduler(self.cache, config.prefill_chunk, config.max_waiting, lookahead)
        self.runner = Runner(model.eval(), self.cache, config)
        self._control = DraftControl() if config.speculative else None
        self._drafted = self._accepted = self._draft_rows = 0
        self._inbox: deque[Callable[[], None]] = deque()
        self._wakeup = threading.Event()
        self._open: dict[int, Generation] = {}
        self.is_paused = False
        """Run no steps while True."""
        self.is_closing = False
        self.is_closed = False
        """The inbox is looked at no more."""
        self.failure: EngineError | None = None
        """What ended the thread, when something did."""
        self._busy_s = 0.0
        self._steps = self._generated = self._prefilled = self._updates = 0
        self._started = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="glm5-engine", daemon=True)
        self._thread.start()

    def wake_up(self) -> None:
        """Have the thread look at the inbox and the flags."""
        self._wakeup.set()

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the thread."""
        self._thread.join(timeout_s)

    def stats(self) -> EngineStats:
        """A snapshot; its numbers may stem from neighbouring steps."""
        return EngineStats(
            busy_s=self._busy_s,
            uptime_s=time.monotonic() - self._started,
            steps=self._steps,
            generated_tokens=self._generated,
            prefilled_tokens=self._prefilled,
            cached_tokens=self._scheduler.reused_tokens,
            preemptions=self._scheduler.preemptions,
            drafted_tokens=self._drafted,
            accepted_tokens=self._accepted,
            acceptance_length=1 + self._accepted / self._draft_rows if self._draft_rows else 0.0,
            speculative_speedup=self._control.speedup if self._control else 0.0,
            is_drafting=self._control is not None and self._control.is_drafting,
            running=self._scheduler.num_running,
            queued=self._scheduler.num_waiting,
            weight_version=self.cache.version,
            weight_updates=self._updates,
            is_paused=self.is_paused,
            cache_bytes=self.runner.cache_bytes,
            cache_blocks=self.cache.num_blocks,
            cache_blocks_used=self.cache.num_used,
        )

    def post(self, action: Callable[[], None]) -> None:
        """Have the thread run ``action`` at the next step boundary."""
        self._inbox.append(action)
        self._wakeup.set()

    def call(self, action: Callable[[], T], timeout_s: float) -> T:
        """Run ``action`` at the next step boundary and wait for it; past the deadline it will not run."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(action())
            except Exception as error:
                future.set_exception(error)

        self.post(run)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            if not future.cancel():  # it started meanwhile and is about to end
                return future.result(timeout_s)
            raise EngineError(f"engine: no step boundary within {timeout_s:.0f} s; it is overloaded or stuck") from None

    def _run(self) -> None:
        if self._config.threads:
            torch.set_num_threads(self._config.threads)
        try:
            self._loop()
        except Exception as error:  # a defect: nothing runs any more, and whoever serves this engine must see it
            _log.exception("the engine's thread ended")
            self.failure = EngineError(f"engine: its thread ended ({type(error).__name__}: {error}); start it again")
        finally:
            self.is_closing = self.is_closed = True
            self._drain()
            for request_id in list(self._open):
                self.stop(request_id, None if self.failure else "abort", self.failure)

    def _loop(self) -> None:
        while True:
            self._drain()
            if self.is_closing:
                return
            plan = StepPlan([]) if self.is_paused else self._scheduler.plan()
            if plan.is_empty:
                self._wakeup.wait(_IDLE_WAIT_S)
                self._wakeup.clear()
                continue
            start, before = time.perf_counter(), self._generated
            self._step(plan)
            seconds = time.perf_counter() - start
            self._busy_s += seconds
            if self._control is not None and not plan.prefill:
                self._control.observe(seconds, self._generated - before)

    def _drain(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def enter(self, generation: Generation) -> None:
        """Take up a request; a full queue fails it."""
        try:
            self._scheduler.add(generation.sequence)
        except EngineError as error:
            generation.sequence.error = error
            self._publish([generation])
            return
        self._open[generation.sequence.request_id] = generation

    def stop(self, request_id: int, reason: FinishReason | None, error: EngineError | None = None) -> None:
        """End a request with ``reason`` or ``error``; unknown and finished ones are ignored."""
        generation = self._open.pop(request_id, None)
        if generation is not None and self._scheduler.stop(generation.sequence, reason, error):
            self._publish([generation])

    def swap(self, model: CausalLM, version: int) -> None:
        """Put ``model`` in force as ``version``."""
        self.runner.model = model.eval()
        self.cache.set_version(version)
        self._updates += 1

    def _step(self, plan: StepPlan) -> None:
        try:
            result = self.runner.step(plan, self._control is not None and self._control.is_drafting)
        except Exception as error:  # one broken step must not end the service: its requests fail, the rest go on
            _log.exception("a step failed")
            failure = EngineError(f"engine: a step failed ({type(error).__name__}: {error}); see the server's log")
            for sequence in [*plan.decode, *(chunk.sequence for chunk in plan.prefill)]:
                self.stop(sequence.request_id, None, failure)
            return
        self._steps += 1
        for chunk in plan.prefill:
            self._prefilled += chunk.stop - chunk.start
        if result.drafted:
            self._drafted += result.drafted
            self._draft_rows += len(plan.decode)
            self._accepted += len(result.ids) - len(plan.decode) - sum(chunk.is_sampled for chunk in plan.prefill)
        self._record(plan, result)

    def _record(self, plan: StepPlan, result: StepResult) -> None:
        """Append what was sampled, end what is complete, wake the readers."""
        result = self._fail_broken_rows(result)
        for sequence, values in result.prompt_logprobs:
            sequence.prompt_logprobs.extend(values if sequence.prompt_logprobs else [None, *values])
        finished: list[Sequence] = []
        version = self.cache.version
        for row, (sequence, token, logprob) in enumerate(
            zip(result.sequences, result.ids, result.logprobs, strict=True)
        ):
            if sequence.finish_reason is not None:
                self._generated -= 1  # a draft behind the end
                continue
            output_ids = sequence.output_ids
            output_ids.append(token)
            sequence.logprobs.append(logprob)
            if sequence.params.top_logprobs:
                sequence.top_logprobs.append(result.top_logprobs[row])
            sequence.versions.append(version)
            if token in sequence.stop_ids:
                sequence.finish_reason = "stop"
                finished.append(sequence)
            elif len(output_ids) >= sequence.max_new_tokens:
                sequence.finish_reason = "length"
                finished.append(sequence)
        self._generated += len(result.ids)
        silent = [chunk.sequence for chunk in plan.prefill if chunk.is_last and chunk.sequence.max_new_tokens == 0]
        for sequence in silent:
            if sequence.error is None:
                sequence.finish_reason = "length"
                finished.append(sequence)
        self._scheduler.advance(plan)
        readers = dict.fromkeys(result.sequences) if result.drafted else result.sequences
        grown = [self._open[sequence.request_id] for sequence in readers]
        if finished:
            self._scheduler.finish(finished)
            ended = [self._open.pop(sequence.request_id) for sequence in finished]
            grown += [generation for generation in ended if generation.sequence.max_new_tokens == 0]
        self._publish(grown)

    def _fail_broken_rows(self, result: StepResult) -> StepResult:
        """``result`` without the sequences whose logits were not finite; these fail, and their keys are not kept."""
        sums = [sum(values) for _, values in result.prompt_logprobs]
        if math.isfinite(sum(result.logprobs)) and math.isfinite(sum(sums)):
            return result
        rows = zip(result.sequences, result.logprobs, strict=True)
        broken = {sequence.request_id for sequence, logprob in rows if not math.isfinite(logprob)}
        broken |= {
            sequence.request_id
            for (sequence, _), total in zip(result.prompt_logprobs, sums, strict=True)
            if not math.isfinite(total)
        }
        for request_id in broken:
            self.stop(
                request_id,
                None,
                EngineError(
                    f"request {request_id}: logits that are not finite under weight version {self.cache.version}; "
                    "load other weights"
                ),
            )
        kept = [row for row, sequence in enumerate(result.sequences) if sequence.request_id not in broken]
        return StepResult(
            [result.sequences[row] for row in kept],
            [result.ids[row] for row in kept],
            [result.logprobs[row] for row in kept],
            [result.top_logprobs[row] for row in kept] if result.top_logprobs else [],
            [item for item in result.prompt_logprobs if item[0].request_id not in broken],
            result.drafted,
        )

    def _publish(self, generations: list[Generation]) -> None:
        wakeups: dict[asyncio.AbstractEventLoop, list[asyncio.Event]] = {}
        for generation in generations:
            generation.notify(wakeups)
        if wakeups:
            wake(wakeups)


def _count_blocks(model: CausalLM | LedModel, config: EngineConfig, max_context: int) -> int:
    """Blocks that ``config`` allows. Raises ConfigError when they hold no prompt and answer."""
    if not config.cache_bytes:
        return config.max_slots * -(-max_context // config.block_size) + (config.speculative > 0)
    per_token = bytes_per_token(
        model.config, model.lm_head.weight.dtype, max_context, config.speculative > 0, config.cache_dtype
    )
    blocks = config.cache_bytes // (per_token * config.block_size)
    if blocks < 2:
        raise ConfigError(
            f"cache_bytes={config.cache_bytes}: holds {blocks} blocks of {config.block_size} tokens at {per_token} "
            "bytes each; give room for at least two blocks"
        )
    return blocks
