"""Publication of policy versions: ``<run>/weights/v00000012/``, a complete checkpoint directory plus ``manifest.json``.

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

from glm5.errors import WeightSyncError
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


def publish(model: CausalLM, run_dir: Path, *, version: int, step: int, parent: int | None,
            tokenizer_dir: Path) -> WeightVersion:
    """Write ``model`` as ``version`` and point ``LATEST`` at it.

    Raises WeightSyncError when the version exists already or is not newer than the newest.
    """
    newest = newest_version(run_dir)
    if version <= newest:
        raise WeightSyncError(f"weight version {version} is not newer than {newest} in {run_dir}; versions only grow")
    from glm5.model.families import save_causal_lm

    target = version_directory(run_dir, version)
    temporary = temporary_path(target)
    try:
        save_causal_lm(model, temporary, tokenizer_source=tokenizer_dir)
        ids, logprobs = score_canary(model)
        published = WeightVersion(version=version, step=step, parent=parent, directory=target,
                                  sha256=_hash_files(temporary), canary_ids=ids, canary_logprobs=logprobs)
        manifest = {**dataclasses.asdict(published), "directory": target.name}
        write_atomic(temporary / "manifest.json", json.dumps(manifest) + "\n")
        os.rename(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    write_atomic(target.parent / "LATEST", target.name + "\n")
    return published


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
    """Compare every file with its checksum. Raises WeightSyncError naming the first that differs."""
    found = _hash_files(published.directory)
    for name in sorted(published.sha256.keys() | found.keys()):
        if published.sha256.get(name) != found.get(name):
            raise WeightSyncError(f"{published.directory / name}: SHA-256 {found.get(name)}, the manifest says "
                                  f"{published.sha256.get(name)}; publish the weights again")


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
    """Remove all but the newest ``keep`` versions; engines load only the newest, the others serve inspection."""
    directories = sorted(path for path in (run_dir / "weights").glob("v*") if path.name[1:].isdigit())
    for directory in directories[:-keep]:
        remove_directory(directory)


def _hash_files(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(directory.iterdir()) if path.is_file() and path.name != "manifest.json"}
