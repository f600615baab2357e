"""What an engine says about itself. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass


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
