"""The engine: a thread that runs steps, and the doors through which other threads reach it.

Everything that changes scheduling state happens on the engine's thread between two steps: submissions, aborts and
weight swaps arrive through one inbox. New weights are loaded and verified beside the running ones and then take their
place at a step boundary; every token carries the version that sampled it. Running sequences continue with the keys
they have; keys of an older version are never given to a new request. Whatever fails while loading leaves the old
weights in place.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from glm5.engine.broadcast import with_tensors
from glm5.engine.config import EngineConfig
from glm5.engine.drafting import DraftControl
from glm5.engine.generation import Generation, wake
from glm5.engine.grammar import Grammars
from glm5.engine.handover import CachedPrefix
from glm5.engine.prefix_cache import PrefixCache
from glm5.engine.replacement import load_replacement, load_weights
from glm5.engine.requests import (
    EngineClosedError,
    InvalidRequestError,
    Sequence,
    check_prompt,
    check_sampling,
    check_version,
)
from glm5.engine.runner import Runner, StepResult
from glm5.engine.sampler import mix_seed
from glm5.engine.scheduler import Scheduler, StepPlan
from glm5.engine.tensor_parallel import LedModel
from glm5.errors import ConfigError, EngineError, Glm5Error
from glm5.model.cache import bytes_per_token
from glm5.model.families import CausalLM
from glm5.records import FinishReason, SamplingParams

_IDLE_WAIT_S = 1.0
T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counters since the start, and the present load."""

    busy_s: float
    uptime_s: float
    steps: int
    generated_tokens: int
    prefilled_tokens: int
    cached_tokens: int
    preemptions: int
    drafted_tokens: int
    accepted_tokens: int
    acceptance_length: float
    """Mean tokens per sequence and step with drafts, the model's own included; 0 before the first."""
    speculative_speedup: float
    """Time per token without drafts over that with drafts; 0 before both were measured."""
    is_drafting: bool
    running: int
    queued: int
    weight_version: int
    weight_updates: int
    is_paused: bool
    cache_bytes: int
    cache_blocks: int
    cache_blocks_used: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate:
    """Outcome of a weight update; ``weight_version`` is the version in force afterwards."""

    success: bool
    message: str
    weight_version: int
    load_ms: float


class Engine:
    """Continuous batching over one model. Thread-safe; ``close`` it, or use it as a context manager."""

    def __init__(
        self,
        model: CausalLM | LedModel,
        stop_ids: SequenceOf[int],
        config: EngineConfig | None = None,
        *,
        weight_version: int = 0,
        model_path: str = "",
        grammars: Grammars | None = None,
    ) -> None:
        """``grammars`` is needed by requests that carry one."""
        check_version(weight_version)
        self.config = config or EngineConfig()
        self.vocab_size = model.config.vocab_size
        self.max_context = self.config.max_context or model.config.max_position_embeddings
        self.model_path = model_path
        self.failure: EngineError | None = None
        """What ended the engine's thread, when something did."""
        self._stop_ids = frozenset(stop_ids)
        self._grammars = grammars
        _check_drafting(model, self.config)
        self._cache = PrefixCache(
            self.config.max_slots,
            self.max_context,
            _count_blocks(model, self.config, self.max_context),
            self.config.block_size,
            weight_version,
            enabled=self.config.prefix_cache,
            recompute_last=self.config.speculative > 0,
        )
        self.max_context = min(self.max_context, self._cache.capacity)
        lookahead = 1 + 2 * self.config.speculative  # drafts of this step, and those of the next behind them
        self._scheduler = Scheduler(self._cache, self.config.prefill_chunk, self.config.max_waiting, lookahead)
        self._runner = Runner(model.eval(), self._cache, self.config)
        self._control = DraftControl() if self.config.speculative else None
        self._drafted = self._accepted = self._draft_rows = 0
        self._seed_base = mix_seed(secrets.randbits(64) if self.config.seed is None else self.config.seed)
        self._inbox: deque[Callable[[], None]] = deque()
        self._wakeup = threading.Event()
        self._open: dict[int, Generation] = {}
        self._id_lock = threading.Lock()
        self._next_id = 0
        self._update_lock = threading.Lock()
        self._is_paused = self._is_closing = self._is_closed = False
        self._busy_s = 0.0
        self._steps = self._generated = self._prefilled = self._updates = 0
        self._started = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="glm5-engine", daemon=True)
        self._thread.start()

    @classmethod
    def from_directory(
        cls,
        directory: str | Path,
        stop_ids: SequenceOf[int],
        config: EngineConfig | None = None,
        weight_version: int = 0,
        grammars: Grammars | None = None,
    ) -> Engine:
        """An engine over the checkpoint in ``directory``. Raises CheckpointError as ``load_model`` does."""
        config = config or EngineConfig()
        return cls(
            load_weights(directory, config),
            stop_ids,
            config,
            weight_version=weight_version,
            model_path=str(directory),
            grammars=grammars,
        )

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def weight_version(self) -> int:
        """Version of the weights in force."""
        return self._cache.version

    def submit(
        self,
        ids: list[int],
        params: SamplingParams | None = None,
        *,
        session_id: str | None = None,
        prompt_logprobs: bool = False,
        priority: int = 0,
    ) -> Generation:
        """Queue a request. A wrong one raises InvalidRequestError at once; a full queue fails the handle.

        Raises ContextLengthError for a prompt that is too long, EngineClosedError after ``close``.
        """
        params = params or SamplingParams()
        prompt = check_prompt(ids, self.vocab_size, self.max_context)
        check_sampling(params, self.vocab_size)
        constraint = None
        if params.grammar is not None:
            if self._grammars is None:
                raise InvalidRequestError("grammar: this engine has no tokenizer; start it with one, or leave it out")
            constraint = self._grammars.start(params.grammar)
        if self._is_closing:
            raise EngineClosedError("engine: it is shutting down; send requests to another one")
        with self._id_lock:
            self._next_id += 1
            request_id = self._next_id
        stop_ids = self._stop_ids if params.stop_token_ids is None else frozenset(params.stop_token_ids)
        sequence = Sequence(
            request_id=request_id,
            prompt=prompt,
            params=params,
            stop_ids=stop_ids,
            seed=self._seed_base + request_id if params.seed is None else params.seed,
            max_new_tokens=min(params.max_new_tokens, self.max_context - len(prompt)),
            session_id=session_id,
            priority=priority,
            wants_prompt_logprobs=prompt_logprobs,
            constraint=constraint,
        )
        generation = Generation(sequence, self.abort)
        self._post(lambda: self._enter(generation))
        if self._is_closed:  # the thread may have looked into the inbox for the last time before the post
            raise EngineClosedError("engine: it has shut down; send requests to another one")
        return generation

    def abort(self, request_id: int) -> None:
        """Stop a request at the next step boundary; unknown and finished ones are ignored."""
        self._post(lambda: self._stop(request_id, "abort"))

    def pause(self) -> None:
        """Run no more steps until ``resume``; requests stay where they are."""
        self._is_paused = True

    def resume(self) -> None:
        """Undo ``pause``."""
        self._is_paused = False
        self._wakeup.set()

    def update_weights(self, directory: str | Path, version: int, timeout_s: float = 60, *,
                       rollback: bool = False) -> WeightUpdate:
        """Load ``directory``, verify it, swap it in as ``version``. A bad checkpoint is a result, not an exception.

        Versions only grow, except that ``rollback`` brings back an earlier one.
        """
        return self._update(
            lambda: load_replacement(directory, self.config, self._runner.model),
            version, str(directory), timeout_s, rollback,
        )

    def replace_tensors(self, tensors: Mapping[str, torch.Tensor], version: int, timeout_s: float = 60) -> WeightUpdate:
        """Swap in the weights ``tensors`` (published names) as ``version``; what is wrong with them is a result."""

        def load() -> CausalLM:
            if isinstance(self._runner.model, LedModel):
                raise EngineError("a broadcast reaches one process, this engine has several; load them from disk")
            return with_tensors(self._runner.model, tensors)

        return self._update(load, version, self.model_path, timeout_s, False)

    def _update(
        self, load: Callable[[], CausalLM], version: int, model_path: str, timeout_s: float, rollback: bool
    ) -> WeightUpdate:
        start = time.perf_counter()
        with self._update_lock:
            try:
                check_version(version)
                if version < self.weight_version and not rollback:
                    raise EngineError(
                        f"weight_version {version}: {self.weight_version} is in force and versions only grow; raise it"
                    )
                shadow = load()
                self._call(lambda: self._swap(shadow, version, model_path), timeout_s)
            except (Glm5Error, OSError, ValueError, RuntimeError, KeyError, TimeoutError) as error:
                message = f"{error}".splitlines()[0] if f"{error}" else type(error).__name__
                return WeightUpdate(
                    success=False,
                    message=f"{message}; version {self.weight_version} stays in force",
                    weight_version=self.weight_version,
                    load_ms=(time.perf_counter() - start) * 1e3,
                )
        return WeightUpdate(
            success=True, message="", weight_version=version, load_ms=(time.perf_counter() - start) * 1e3
        )

    def cached_length(self, ids: list[int], timeout_s: float = 60) -> int:
        """How many leading tokens of ``ids`` are in the prefix cache."""
        return self._call(lambda: self._cache.find(np.array(ids, np.int64))[0], timeout_s)

    def export_prefix(self, ids: list[int], timeout_s: float = 60) -> CachedPrefix:
        """The keys of the leading tokens of ``ids`` that are in the prefix cache."""

        def read() -> CachedPrefix:
            length, blocks = self._cache.find(np.array(ids, np.int64))
            entries = self._runner.read_blocks(blocks) if length else []
            return CachedPrefix(length=length, version=self.weight_version, entries=entries)

        return self._call(read, timeout_s)

    def import_prefix(self, ids: list[int], prefix: CachedPrefix, timeout_s: float = 60) -> None:
        """Put ``prefix``, keys of the beginning of ``ids``, into the prefix cache.

        Raises EngineError when it comes from other weights or from a cache of another layout. A full cache takes
        nothing.
        """

        def write() -> None:
            if prefix.version != self.weight_version:
                raise EngineError(
                    f"cached prefix: computed by weight version {prefix.version}, {self.weight_version} is in force"
                )
            if prefix.length:
                tokens = np.array(ids[: prefix.length], np.int64)
                self._cache.adopt(tokens, lambda blocks: self._runner.write_blocks(blocks, prefix.entries))

        try:
            self._call(write, timeout_s)
        except ValueError as error:
            raise EngineError(f"cached prefix: {error}") from None

    def ping(self, timeout_s: float) -> None:
        """Return at the next step boundary. Raises EngineError past the deadline or after the end."""
        if self._is_closed:
            raise EngineClosedError("engine: its thread has ended; start the server again")
        self._call(lambda: None, timeout_s)

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
            weight_version=self.weight_version,
            weight_updates=self._updates,
            is_paused=self._is_paused,
            cache_bytes=self._runner.cache_bytes,
            cache_blocks=self._cache.num_blocks,
            cache_blocks_used=self._cache.num_used,
        )

    def close(self, timeout_s: float = 10) -> None:
        """Abort what is unfinished and end the thread."""
        self._is_closing = True
        self._wakeup.set()
        self._thread.join(timeout_s)

    # ---- everything below runs on the engine's thread, except _post and _call ----

    def _post(self, action: Callable[[], None]) -> None:
        self._inbox.append(action)
        self._wakeup.set()

    def _call(self, action: Callable[[], T], timeout_s: float) -> T:
        """Run ``action`` at the next step boundary and wait for it; past the deadline it will not run."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(action())
            except Exception as error:
                future.set_exception(error)

        self._post(run)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            if not future.cancel():  # it started meanwhile and is about to end
                return future.result(timeout_s)
            raise EngineError(f"engine: no step boundary within {timeout_s:.0f} s; it is overloaded or stuck") from None

    def _run(self) -> None:
        if self.config.threads:
            torch.set_num_threads(self.config.threads)
        try:
            self._loop()
        except Exception as error:  # a defect: nothing runs any more, and whoever serves this engine must see it
            _log.exception("the engine's thread ended")
            self.failure = EngineError(f"engine: its thread ended ({type(error).__name__}: {error}); start it again")
        finally:
            self._is_closing = self._is_closed = True
            self._drain()
            for request_id in list(self._open):
                self._stop(request_id, None if self.failure else "abort", self.failure)

    def _loop(self) -> None:
        while True:
            self._drain()
            if self._is_closing:
                return
            plan = StepPlan([]) if self._is_paused else self._scheduler.plan()
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

    def _enter(self, generation: Generation) -> None:
        try:
            self._scheduler.add(generation.sequence)
        except EngineError as error:
            generation.sequence.error = error
            self._publish([generation])
            return
        self._open[generation.sequence.request_id] = generation

    def _stop(self, request_id: int, reason: FinishReason | None, error: EngineError | None = None) -> None:
        generation = self._open.pop(request_id, None)
        if generation is not None and self._scheduler.stop(generation.sequence, reason, error):
            self._publish([generation])

    def _swap(self, model: CausalLM, version: int, model_path: str) -> None:
        self._runner.model = model.eval()
        self._cache.set_version(version)
        self.model_path = model_path
        self._updates += 1

    def _step(self, plan: StepPlan) -> None:
        try:
            result = self._runner.step(plan, self._control is not None and self._control.is_drafting)
        except Exception as error:  # one broken step must not end the service: its requests fail, the rest go on
            _log.exception("a step failed")
            failure = EngineError(f"engine: a step failed ({type(error).__name__}: {error}); see the server's log")
            for sequence in [*plan.decode, *(chunk.sequence for chunk in plan.prefill)]:
                self._stop(sequence.request_id, None, failure)
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
        version = self._cache.version
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
            self._stop(
                request_id,
                None,
                EngineError(
                    f"request {request_id}: logits that are not finite under weight version {self.weight_version}; "
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


def _check_drafting(model: CausalLM | LedModel, config: EngineConfig) -> None:
    if config.speculative and not model.config.num_nextn_predict_layers:
        raise ConfigError(
            f"speculative={config.speculative}: the model has no MTP layer to draft with; leave it 0 or serve a "
            "checkpoint with num_nextn_predict_layers 1"
        )
