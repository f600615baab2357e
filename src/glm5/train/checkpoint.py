"""Checkpoints of training: the published model directory plus what continues the run exactly.

``<run>/checkpoints/000100/`` holds the Hugging Face files and, beside them, ``trainer/optimizer.safetensors`` (moments
and the random-number state), ``trainer/state.json`` (counters, data position, batch ids) and ``meta.json``.

Invariants: a directory is written under a temporary name, flushed to disk with ``meta.json`` last, and renamed whole,
so that a directory with its final name and ``meta.json`` is complete whatever happened; a failed write leaves nothing
behind; what a killed process leaves, ``glm5.runlog.remove_leftovers`` removes. ``format`` is an integer: a newer one is
refused, an older one would be migrated here. ``<run>/final.json`` names the checkpoint that a finished run hands on.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

import glm5
from glm5.errors import CheckpointError
from glm5.model.families import CausalLM, save_causal_lm
from glm5.model.reward import HEAD_FILE
from glm5.runlog import flush_to_disk, remove_directory, replace_directory, temporary_path, write_atomic
from glm5.tokenizer.fit import tokenizer_sha256

FORMAT = 1
_RNG = "rng.torch"


class Stateful(Protocol):
    """What a run continues exactly: an optimizer, or one with what learns beside it."""

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take the tensors of an earlier start. Raises CheckpointError when names or shapes differ."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerState:
    """Counters that continue a run."""

    step: int = 0
    """Steps done, skipped ones included."""
    tokens: int = 0
    """Tokens trained on, padding not counted."""
    data_step: int = 0
    """Position in the data: the step whose batch comes next."""
    skipped: int = 0
    """Steps that the guard kept from changing anything."""
    recent_losses: tuple[float, ...] = ()
    """Losses of the last applied steps, oldest first: what the guard compares with."""
    recent_norms: tuple[float, ...] = ()
    """Gradient norms of the same steps."""
    elapsed_s: float = 0.0
    """Seconds of training so far, over all starts."""
    policy_version: int = 0
    """Identity of the published weight set that these weights are (reinforcement learning)."""
    batch_ids: tuple[str, ...] = ()
    """Batches of the ledger that these weights have learnt from last; acknowledged after this is on disk."""
    best_metric: float | None = None
    """Best value of the evaluation hook's metric so far."""
    best_step: int = 0
    """Step of the checkpoint with the best value."""
    evaluations_without_rise: int = 0
    """Evaluations since the best one."""


def checkpoint_path(run_dir: Path, step: int) -> Path:
    """Where the checkpoint of ``step`` lies."""
    return run_dir / "checkpoints" / f"{step:06d}"


def save_checkpoint(run_dir: Path, state: TrainerState, model: CausalLM,
                    optimizer_state: Mapping[str, Tensor], tokenizer_dir: Path | None,
                    meta: Mapping[str, Any] | None = None, head: Mapping[str, Tensor] | None = None) -> Path:
    """Write the checkpoint of ``state.step`` and give its directory; an existing one of that step is replaced.

    Model and optimizer state are whole, wherever they were trained.

    ``meta`` adds facts to meta.json, for example the parent; ``head`` are the tensors of a reward model's head.
    Raises CheckpointError when it cannot be written, a full disk included; then nothing is left behind.
    """
    target = checkpoint_path(run_dir, state.step)
    temporary = temporary_path(target)
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        save_causal_lm(model, temporary, tokenizer_source=tokenizer_dir)
        if head is not None:
            save_file({name: tensor.contiguous() for name, tensor in head.items()}, temporary / HEAD_FILE)
        (temporary / "trainer").mkdir()
        tensors = {name: tensor.contiguous() for name, tensor in optimizer_state.items()}
        save_file({**tensors, _RNG: torch.get_rng_state()}, temporary / "trainer" / "optimizer.safetensors")
        _write_json(temporary / "trainer" / "state.json", dataclasses.asdict(state))
        facts = {"format": FORMAT, "step": state.step, "tokens_seen": state.tokens,
                 "policy_version": state.policy_version, "tokenizer_sha256": tokenizer_sha256(temporary),
                 "package_version": glm5.__version__, **(meta or {})}
        _flush(temporary)
        _write_json(temporary / "meta.json", facts)
        _flush(temporary)
        replace_directory(temporary, target)
    except (OSError, SafetensorError, CheckpointError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(f"{target}: not written ({error}); free disk space or choose another run directory, then "
                              "start again: the run continues from the checkpoint before") from None
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return target


def latest_checkpoint(run_dir: Path) -> Path | None:
    """The newest complete checkpoint of a run, None if there is none."""
    found = complete_checkpoints(run_dir)
    return found[-1] if found else None


def complete_checkpoints(run_dir: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    folder = run_dir / "checkpoints"
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if path.name.isdigit() and (path / "meta.json").is_file()),
                  key=lambda path: int(path.name))


def prune_checkpoints(run_dir: Path, keep_last: int, keep_steps: frozenset[int] = frozenset()) -> None:
    """Remove all but the newest ``keep_last`` checkpoints and those of ``keep_steps``."""
    for path in complete_checkpoints(run_dir)[:-keep_last]:
        if int(path.name) not in keep_steps:
            remove_directory(path)


def load_trainer_state(checkpoint: Path, optimizer: Stateful) -> TrainerState:
    """Restore ``optimizer`` and torch's random-number state in place; give the counters. Raises CheckpointError."""
    read_meta(checkpoint)
    path = checkpoint / "trainer"
    try:
        tensors: dict[str, Tensor] = load_file(path / "optimizer.safetensors")
        values = json.loads((path / "state.json").read_text(encoding="utf-8"))
        state = TrainerState(**{name: tuple(value) if isinstance(value, list) else value
                                for name, value in values.items()})
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); remove {checkpoint} to continue from the checkpoint "
                              "before it") from None
    torch.set_rng_state(tensors.pop(_RNG))
    try:
        optimizer.load_state_dict(tensors)
    except CheckpointError as error:
        raise CheckpointError(f"{path / 'optimizer.safetensors'}: {error}") from None
    return state


def read_meta(checkpoint: Path) -> dict[str, Any]:
    """``meta.json`` of a checkpoint. Raises CheckpointError when it is missing, unreadable or of a newer format."""
    try:
        meta: dict[str, Any] = json.loads((checkpoint / "meta.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{checkpoint}: not a complete checkpoint ({error}); give another directory") from None
    if meta.get("format") not in range(1, FORMAT + 1):
        raise CheckpointError(f"{checkpoint}: format {meta.get('format')!r}, this version reads up to {FORMAT}; "
                              f"install glm5 {meta.get('package_version', '')} or newer")
    return meta


def mark_final(run_dir: Path, checkpoint: Path) -> None:
    """Record that the run is finished and which of its checkpoints it hands on."""
    write_atomic(run_dir / "final.json", json.dumps({"checkpoint": checkpoint.name}) + "\n")


def final_checkpoint(run_dir: Path) -> Path | None:
    """The checkpoint that a finished run hands on; None while it is not finished."""
    path = run_dir / "final.json"
    if not path.is_file():
        return None
    checkpoint = run_dir / "checkpoints" / str(json.loads(path.read_text(encoding="utf-8"))["checkpoint"])
    return checkpoint if (checkpoint / "meta.json").is_file() else None


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def _flush(directory: Path) -> None:
    for path in directory.rglob("*"):
        if path.is_file():
            flush_to_disk(path)
    flush_to_disk(directory)
