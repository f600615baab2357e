"""Configuration of the inference engine. Free of torch, so that command lines and launchers can read it cheaply."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from glm5.device import AUTO
from glm5.errors import ConfigError

MAX_DRAFTS = 7


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Sizes and switches of one engine."""

    max_slots: int = 64
    """Sequences that may run at once."""
    max_context: int = 0
    """Prompt plus answer tokens of one sequence; 0 takes the model's ``max_position_embeddings``."""
    prefill_chunk: int = 512
    """Prompt tokens computed per step beside the decoding tokens."""
    block_size: int = 32
    """Tokens of one block of the key cache."""
    cache_bytes: int = 0
    """Memory of the key cache; 0 takes what ``max_slots`` sequences of ``max_context`` tokens need."""
    speculative: int = 0
    """Tokens that the MTP layer drafts per step, at most 7; 0 drafts none. Drafting rests while it is slower."""
    max_waiting: int = 4096
    """Requests that may wait for a slot; one more is refused."""
    prefix_cache: bool = True
    """Reuse the keys of a shared prefix computed under the same weight version."""
    attention: Literal["sparse", "dense"] = "sparse"
    """``sparse`` attends to the indexer's top-k, ``dense`` to every key."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Weights and cache; ``auto`` keeps the dtype of the checkpoint, except that small models run in fp32 on a CPU."""
    device: str = AUTO
    """Where weights and cache live: a name of ``glm5.device``."""
    threads: int = 0
    """Threads of one step; 0 leaves the library's choice."""
    seed: int | None = None
    """Seeds requests that carry none; None draws from the operating system, so that replicas differ."""

    def __post_init__(self) -> None:
        names = ("max_slots", "prefill_chunk", "block_size", "max_waiting")
        counts = {name: getattr(self, name) for name in names}
        for name, value in counts.items():
            if value < 1:
                raise ConfigError(f"{name}={value}: must be at least 1; raise it")
        if self.max_context != 0 and self.max_context < 2:
            raise ConfigError(
                f"max_context={self.max_context}: must hold a prompt and an answer; give at least 2, "
                "or 0 for the model's"
            )
        if self.cache_bytes < 0:
            raise ConfigError(f"cache_bytes={self.cache_bytes}: must be 0 (automatic) or positive; correct it")
        if not 0 <= self.speculative <= MAX_DRAFTS:
            raise ConfigError(f"speculative={self.speculative}: expected 0 to {MAX_DRAFTS} drafted tokens; correct it")
        if self.threads < 0:
            raise ConfigError(f"threads={self.threads}: must be 0 (automatic) or positive; correct it")
