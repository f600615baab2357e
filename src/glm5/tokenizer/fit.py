"""Whether a tokenizer belongs to a model: same ids for the same text, or the weights mean nothing.

Two tokenizers of one size can differ in every merge, so counting ids proves little. A training checkpoint keeps the
SHA-256 of its ``tokenizer.json`` in ``meta.json``; every checkpoint names its special ids in ``config.json``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from glm5.errors import CheckpointError

TOKENIZER_FILE = "tokenizer.json"
OWN_MODEL_TYPE = "glm_moe_dsa"
_REMEDY = "put the tokenizer.json there that the model was trained with"


def require_fit(directory: Path, vocab_size: int, stop_ids: Sequence[int], pad_id: int) -> None:
    """Compare the tokenizer in ``directory`` with the model beside it, as far as one is described there.

    ``vocab_size`` counts the ids of the tokenizer. Raises CheckpointError naming both files.
    """
    file = directory / TOKENIZER_FILE
    model = _read(directory / "config.json")
    rows = model.get("vocab_size", vocab_size)
    if vocab_size > rows:
        raise CheckpointError(f"{file}: has {vocab_size} ids, {directory / 'config.json'} gives the model "
                              f"vocab_size={rows}; {_REMEDY}")
    eos = model.get("eos_token_id")
    for key, found, own in (("eos_token_id", eos if isinstance(eos, list) else [eos], list(stop_ids)),
                            ("pad_token_id", [model.get("pad_token_id")], [pad_id])):
        named = {index for index in found if index is not None}
        if not named <= set(own):
            raise CheckpointError(f"{directory / 'config.json'}: {key} {sorted(named)}, but {file} has {own} for it; "
                                  f"{_REMEDY}")
    expected = _read(directory / "meta.json").get("tokenizer_sha256")
    if expected is not None and expected != tokenizer_sha256(directory):
        raise CheckpointError(f"{file}: SHA-256 {str(tokenizer_sha256(directory))[:12]}…, but "
                              f"{directory / 'meta.json'} says {expected[:12]}… of the one in training; {_REMEDY}")


def is_foreign(directory: Path) -> bool:
    """Whether the model in ``directory`` is of another family, whose chat template decides the format."""
    return _read(directory / "config.json").get("model_type", OWN_MODEL_TYPE) != OWN_MODEL_TYPE


def require_same_tokenizer(model: Path, other: Path) -> None:
    """Compare the tokenizer of the checkpoint ``model`` with the one in ``other``. Raises CheckpointError."""
    if tokenizer_sha256(model) != tokenizer_sha256(other):
        raise CheckpointError(f"{other / TOKENIZER_FILE}: differs from {model / TOKENIZER_FILE}, with which the "
                              "weights were trained; leave the tokenizer key out, or start from another checkpoint")


def tokenizer_sha256(directory: Path) -> str | None:
    """SHA-256 of the tokenizer in ``directory``, None when there is none."""
    path = directory / TOKENIZER_FILE
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def _read(path: Path) -> dict[str, Any]:
    """A JSON object; empty when the file is missing or damaged, which is for its owner to say."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}
