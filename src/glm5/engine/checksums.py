"""Whether a checkpoint directory is whole, from its files alone. Free of torch: whoever hands a directory on checks it.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from glm5.errors import CheckpointError


def tensor_shapes(directory: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Type and shape of every tensor, from the headers of the files. Raises CheckpointError when there is none or a
    file is truncated."""
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    for path in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(path, framework="numpy") as file:
                for name in file.keys():  # noqa: SIM118  (the handle is no mapping)
                    tensor = file.get_slice(name)
                    shapes[name] = tensor.get_dtype(), tuple(tensor.get_shape())
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: cannot be read ({error}); publish it again") from None
    if not shapes or not (directory / "config.json").is_file():
        raise CheckpointError(f"{directory}: no config.json or no *.safetensors; give a complete checkpoint directory")
    return shapes


def verify_checksums(directory: Path) -> None:
    """Compare the files named under ``sha256`` in ``manifest.json``, if there is one. Raises CheckpointError."""
    manifest = directory / "manifest.json"
    if not manifest.exists():
        return
    try:
        checksums = dict(json.loads(manifest.read_text(encoding="utf-8"))["sha256"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{manifest}: unreadable ({type(error).__name__}: {error}); publish it again") from None
    for name, checksum in checksums.items():
        try:
            with open(directory / name, "rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise CheckpointError(
                f"{directory / name}: {error.strerror}, the manifest names it; publish it again"
            ) from None
        if found != checksum:
            raise CheckpointError(
                f"{directory / name}: SHA-256 {found}, the manifest says {checksum}; publish it again"
            )
