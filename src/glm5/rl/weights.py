"""Publication of policy versions: ``<run>/weights/v00000012/``, a checkpoint directory plus ``manifest.json``.

A version is a whole checkpoint, or the difference to the version before (``model/delta.py``): then only changed bits
are written. Every ``full_every``-th one is whole, and so is one whose base is not on the disk or is damaged.

The manifest holds version, trainer step, parent, a SHA-256 per file, and a canary: fixed token ids with the log-probs
that the trainer gives them. A directory is written under a temporary name and renamed whole, manifest last, so that a
directory with its final name is complete; ``LATEST`` is replaced after that. Versions grow for the life of a run
directory, restarts and rollbacks included: the next one is larger than any that the disk or the ledger has seen.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glm5.errors import CheckpointError, WeightSyncError
from glm5.runlog import remove_directory, temporary_path, write_atomic

if TYPE_CHECKING:
    from glm5.model.families import CausalLM

CANARY_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightVersion:
    """One published policy version."""

    version: int
    step: int
    """Optimizer steps in these weights."""
    parent: int | None
    """Version published before, None for the first."""
    directory: Path
    """Loadable checkpoint."""
    sha256: dict[str, str]
    """By file name, of every file but the manifest."""
    canary_ids: list[int]
    canary_logprobs: list[float]
    """Of ``canary_ids[1:]`` given what precedes each, as the trainer computes them."""
    links: int = 0
    """Differences between this version and the whole checkpoint that it builds on; 0: it is whole."""
    weight_bytes: int = 0
    """Bytes of the files with tensors."""


def publish(model: CausalLM, run_dir: Path, *, version: int, step: int, parent: int | None,
            tokenizer_dir: Path, full_every: int = 1) -> WeightVersion:
    """Write ``model`` as ``version`` and point ``LATEST`` at it.

    With ``full_every`` above 1 it is written as the difference to ``parent`` where that is possible and fewer than
    ``full_every - 1`` differences precede it. Raises WeightSyncError when the version exists already or is not newer
    than the newest.
    """
    newest = newest_version(run_dir)
    if version <= newest:
        raise WeightSyncError(f"weight version {version} is not newer than {newest} in {run_dir}; versions only grow")
    from glm5.model.families import save_causal_lm

    target = version_directory(run_dir, version)
    temporary = temporary_path(target)
    base = _usable_base(run_dir, parent, full_every)
    try:
        links = base.links + 1 if base and _write_difference(model, base, temporary) else 0
        if not links:
            save_causal_lm(model, temporary, tokenizer_source=tokenizer_dir)
        ids, logprobs = score_canary(model)
        published = WeightVersion(
            version=version, step=step, parent=parent, directory=target, sha256=_hash_files(temporary),
            canary_ids=ids, canary_logprobs=logprobs, links=links,
            weight_bytes=sum(path.stat().st_size for path in temporary.glob("*.safetensors")))
        manifest = {**dataclasses.asdict(published), "directory": target.name}
        write_atomic(temporary / "manifest.json", json.dumps(manifest) + "\n")
        os.rename(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    write_atomic(target.parent / "LATEST", target.name + "\n")
    return published


def _usable_base(run_dir: Path, parent: int | None, full_every: int) -> WeightVersion | None:
    """The parent if a difference to it may be written; None asks for a whole checkpoint."""
    if parent is None or full_every == 1:
        return None
    try:
        base = read_version(version_directory(run_dir, parent))
    except WeightSyncError:
        return None
    return base if base.links + 1 < full_every else None


def _write_difference(model: CausalLM, base: WeightVersion, directory: Path) -> bool:
    """Write ``model`` as the difference to ``base``; False, leaving nothing, when the base cannot be used."""
    from glm5.model.checkpoint import replacing
    from glm5.model.delta import write_delta
    from glm5.model.families import published_tensors

    try:
        with replacing(directory) as temporary:
            write_delta(published_tensors(model), base.directory, temporary)
    except CheckpointError:  # a missing or damaged base; a full disk is met again by the whole checkpoint
        return False
    return True


def score_canary(model: CausalLM) -> tuple[list[int], list[float]]:
    """Fixed ids, spread over the vocabulary, and the log-probs of all but the first."""
    import torch

    vocabulary = model.config.vocab_size
    length = min(CANARY_TOKENS, model.config.max_position_embeddings)
    ids = [(7919 * index + 104729) % vocabulary for index in range(length)]
    with torch.no_grad():
        logits_BTW = model(torch.tensor([ids], device=model.lm_head.weight.device)).logits.float()
        logprobs_TW = torch.log_softmax(logits_BTW[0, :-1], dim=-1)
        logprobs = logprobs_TW.gather(-1, torch.tensor(ids[1:], device=logits_BTW.device)[:, None])[:, 0]
    return ids, logprobs.tolist()


def read_version(directory: Path) -> WeightVersion:
    """The manifest of a version directory. Raises WeightSyncError when it is missing or unreadable."""
    try:
        data: dict[str, Any] = json.loads((directory / "manifest.json").read_text(encoding="utf-8"))
        return WeightVersion(**{**data, "directory": directory})
    except (OSError, ValueError, TypeError) as error:
        raise WeightSyncError(f"{directory}: no readable manifest.json ({error}); publish the weights again") from None


def verify(published: WeightVersion) -> None:
    """Compare every file, and those of the versions it builds on, with its checksum.

    Raises WeightSyncError naming the first that differs.
    """
    for part in [published, *(read_version(path) for path in _bases(published.directory))]:
        found = _hash_files(part.directory)
        for name in sorted(part.sha256.keys() | found.keys()):
            if part.sha256.get(name) != found.get(name):
                raise WeightSyncError(f"{part.directory / name}: SHA-256 {found.get(name)}, the manifest says "
                                      f"{part.sha256.get(name)}; publish the weights again")


def _bases(directory: Path) -> list[Path]:
    """The version directories that ``directory`` is a difference to, nearest first. Raises WeightSyncError."""
    from glm5.model.delta import chain

    try:
        return list(chain(directory))[1:]
    except CheckpointError as error:
        raise WeightSyncError(str(error)) from None


def latest(run_dir: Path) -> WeightVersion | None:
    """The version that ``LATEST`` names, None before the first publication."""
    pointer = run_dir / "weights" / "LATEST"
    if not pointer.exists():
        return None
    return read_version(pointer.parent / pointer.read_text(encoding="utf-8").strip())


def newest_version(run_dir: Path) -> int:
    """Largest version on disk, 0 when there is none."""
    folder = run_dir / "weights"
    return max((int(path.name[1:]) for path in folder.glob("v*") if path.name[1:].isdigit()), default=0)


def version_directory(run_dir: Path, version: int) -> Path:
    """Where ``version`` lies."""
    return run_dir / "weights" / f"v{version:08d}"


def retain(run_dir: Path, keep: int) -> None:
    """Remove all but the newest ``keep`` versions and those that they build on; engines load the newest, the others
    serve roll-back and inspection."""
    directories = sorted(path for path in (run_dir / "weights").glob("v*") if path.name[1:].isdigit())
    needed = {base for directory in directories[-keep:] for base in _bases(directory)}
    for directory in directories[:-keep]:
        if directory not in needed:
            remove_directory(directory)


def _hash_files(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(directory.iterdir()) if path.is_file() and path.name != "manifest.json"}
