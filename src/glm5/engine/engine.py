"""The engine: the doors through which other threads reach the one that runs steps.

New weights are loaded and verified beside the running ones and then take their place at a step boundary; every token
carries the version that sampled it. Running sequences continue with the keys they have; keys of an older version are
never given to a new request. Whatever fails while loading leaves the old weights in place.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from pathlib import Path

import numpy as np
import torch

from glm5.engine.broadcast import with_tensors
from glm5.engine.config import EngineConfig
from glm5.engine.generation import Generation
from glm5.engine.grammar import Grammars
from glm5.engine.handover import CachedPrefix
from glm5.engine.loop import StepLoop
from glm5.engine.replacement import load_replacement, load_weights
from glm5.engine.requests import (
    EngineClosedError,
    InvalidRequestError,
    Sequence,
    check_prompt,
    check_sampling,
    check_version,
)
from glm5.engine.sampler import mix_seed
from glm5.engine.stats import EngineStats, WeightUpdate
from glm5.engine.tensor_parallel import LedModel
from glm5.errors import ConfigError, EngineError, Glm5Error
from glm5.kernels.dispatch import require_forms
from glm5.model.families import CausalLM
from glm5.records import SamplingParams


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
        """``grammars`` is needed by requests that carry one. Raises ConfigError for settings that do not fit the model,
        KernelError when the kernels of its device are missing or out of date."""
        check_version(weight_version)
        require_forms(model.lm_head.weight.device)
        self.config = config or EngineConfig()
        self.vocab_size = model.config.vocab_size
        self.model_path = model_path
        self._stop_ids = frozenset(stop_ids)
        self._grammars = grammars
        _check_drafting(model, self.config)
        self._seed_base = mix_seed(secrets.randbits(64) if self.config.seed is None else self.config.seed)
        self._id_lock = threading.Lock()
        self._next_id = 0
        self._update_lock = threading.Lock()
        max_context = self.config.max_context or model.config.max_position_embeddings
        self._loop = StepLoop(model, self.config, max_context, weight_version)
        self.max_context = min(max_context, self._loop.cache.capacity)

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
        return self._loop.cache.version

    @property
    def failure(self) -> EngineError | None:
        """What ended the engine's thread, when something did."""
        return self._loop.failure

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
        if self._loop.is_closing:
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
        self._loop.post(lambda: self._loop.enter(generation))
        if self._loop.is_closed:  # the thread may have looked into the inbox for the last time before the post
            raise EngineClosedError("engine: it has shut down; send requests to another one")
        return generation

    def abort(self, request_id: int) -> None:
        """Stop a request at the next step boundary; unknown and finished ones are ignored."""
        self._loop.post(lambda: self._loop.stop(request_id, "abort"))

    def pause(self) -> None:
        """Run no more steps until ``resume``; requests stay where they are."""
        self._loop.is_paused = True

    def resume(self) -> None:
        """Undo ``pause``."""
        self._loop.is_paused = False
        self._loop.wake_up()

    def update_weights(self, directory: str | Path, version: int, timeout_s: float = 60, *,
                       rollback: bool = False) -> WeightUpdate:
        """Load ``directory``, verify it, swap it in as ``version``. A bad checkpoint is a result, not an exception.

        Versions only grow, except that ``rollback`` brings back an earlier one.
        """
        return self._update(
            lambda: load_replacement(directory, self.config, self._loop.runner.model),
            version, str(directory), timeout_s, rollback,
        )

    def replace_tensors(self, tensors: Mapping[str, torch.Tensor], version: int, timeout_s: float = 60) -> WeightUpdate:
        """Swap in the weights ``tensors`` (published names) as ``version``; what is wrong with them is a result."""

        def load() -> CausalLM:
            if isinstance(self._loop.runner.model, LedModel):
                raise EngineError("a broadcast reaches one process, this engine has several; load them from disk")
            return with_tensors(self._loop.runner.model, tensors)

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
                self._loop.call(lambda: self._swap(shadow, version, model_path), timeout_s)
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
        return self._loop.call(lambda: self._loop.cache.find(np.array(ids, np.int64))[0], timeout_s)

    def export_prefix(self, ids: list[int], timeout_s: float = 60) -> CachedPrefix:
        """The keys of the leading tokens of ``ids`` that are in the prefix cache."""

        def read() -> CachedPrefix:
            length, blocks = self._loop.cache.find(np.array(ids, np.int64))
            entries = self._loop.runner.read_blocks(blocks) if length else []
            return CachedPrefix(length=length, version=self.weight_version, entries=entries)

        return self._loop.call(read, timeout_s)

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
                self._loop.cache.adopt(tokens, lambda blocks: self._loop.runner.write_blocks(blocks, prefix.entries))

        try:
            self._loop.call(write, timeout_s)
        except ValueError as error:
            raise EngineError(f"cached prefix: {error}") from None

    def ping(self, timeout_s: float) -> None:
        """Return at the next step boundary. Raises EngineError past the deadline or after the end."""
        if self._loop.is_closed:
            raise EngineClosedError("engine: its thread has ended; start the server again")
        self._loop.call(lambda: None, timeout_s)

    def stats(self) -> EngineStats:
        """A snapshot; its numbers may stem from neighbouring steps."""
        return self._loop.stats()

    def close(self, timeout_s: float = 10) -> None:
        """Abort what is unfinished and end the thread."""
        self._loop.is_closing = True
        self._loop.wake_up()
        self._loop.join(timeout_s)

    def _swap(self, model: CausalLM, version: int, model_path: str) -> None:
        self._loop.swap(model, version)
        self.model_path = model_path


def _check_drafting(model: CausalLM | LedModel, config: EngineConfig) -> None:
    if config.speculative and not model.config.num_nextn_predict_layers:
        raise ConfigError(
            f"speculative={config.speculative}: the model has no MTP layer to draft with; leave it 0 or serve a "
            "checkpoint with num_nextn_predict_layers 1"
        )
