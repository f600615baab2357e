"""A checkpoint as its difference to another one: only the bits that changed are stored.

``delta.safetensors`` holds, for every tensor that changed, ``new XOR base`` of its bytes: sorted into planes (first all
first bytes of the elements, then all second ones …), because sign, exponent and high mantissa rarely change and so
become runs of zeros, then deflated. ``delta.json`` names the base, a checkpoint directory beside this one that may be
a difference itself, and the SHA-256 of every changed tensor before and after. Reading is exact to the bit or an error.
The other files of the directory are hard links to those of the base.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from glm5.errors import CheckpointError
from glm5.model.shards import ShardReader, TensorSpec

DELTA_FILE = "delta.safetensors"
DELTA_INDEX = "delta.json"
_FORMAT = 1
_LEVEL = 1
"""Of zlib: what helps is the runs of zeros; higher levels find little more and take several times as long."""


class DeltaReader(ShardReader):
    """The tensors of a difference, each rebuilt when it is asked for and checked against its checksum."""

    def __init__(self, directory: Path) -> None:
        self._index = _read_index(directory)
        self._directory = directory
        base = directory.parent / self._index["base"]
        if not (base / "config.json").exists():
            raise CheckpointError(f"{directory}: is a difference to {base}, which is missing; use a whole checkpoint")
        self._base = open_tensors(base)
        self.specs, self.files = dict(self._base.specs), dict(self._base.files)
        self._changes = _load(directory / DELTA_FILE)
        for name in self._index["tensors"]:
            if name not in self.specs or name not in self._changes:
                raise CheckpointError(f"{directory / DELTA_INDEX}: tensor {name} is not in {base} or {DELTA_FILE}; "
                                      "publish it again")
            self.files[name] = directory / DELTA_FILE

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._base[name]
        sums = self._index["tensors"].get(name)
        if sums is None:
            return tensor
        self._require(name, "base", sums["base_sha256"], tensor)
        changed = _apply(tensor, self._changes[name])
        if changed is None:
            raise CheckpointError(f"{self._directory / DELTA_FILE}: tensor {name} is damaged; publish it again")
        self._require(name, "result", sums["sha256"], changed)
        return changed

    def _require(self, name: str, what: str, expected: str, tensor: Tensor) -> None:
        found = hash_tensor(tensor)
        if found != expected:
            raise CheckpointError(f"{self._directory}: tensor {name}: SHA-256 of the {what} is {found}, {DELTA_INDEX} "
                                  f"says {expected}; use a whole checkpoint")


def open_tensors(directory: Path) -> ShardReader:
    """The tensors of a checkpoint directory, whole or a difference. Raises CheckpointError."""
    return DeltaReader(directory) if (directory / DELTA_INDEX).exists() else ShardReader(directory)


def write_delta(tensors: Mapping[str, Tensor], base: Path, directory: Path) -> int:
    """Write ``tensors`` (published names) into ``directory`` as a difference to ``base`` beside its final place.

    Gives the bytes of the stored differences. Raises CheckpointError when the base is missing, damaged, or has other
    tensors.
    """
    before = open_tensors(base)
    specs = {name: TensorSpec(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    if specs != before.specs:
        raise CheckpointError(f"{base}: its tensors differ in name, shape or type from those to be written; write a "
                              "whole checkpoint")
    changes: dict[str, Tensor] = {}
    index: dict[str, dict[str, str]] = {}
    for name, tensor in tensors.items():
        old = before[name]
        change = _difference(old, tensor)
        if change is not None:
            changes[name] = change
            index[name] = {"base_sha256": hash_tensor(old), "sha256": hash_tensor(tensor)}
    save_file(changes, directory / DELTA_FILE)
    (directory / DELTA_INDEX).write_text(json.dumps({"format": _FORMAT, "base": base.name, "tensors": index}) + "\n",
                                         encoding="utf-8")
    for path in base.iterdir():
        if path.is_file() and path.suffix != ".safetensors" and path.name not in (DELTA_INDEX, "manifest.json"):
            _link(path, directory / path.name)
    return sum(change.numel() for change in changes.values())


def hash_tensor(tensor: Tensor) -> str:
    """SHA-256 of the bytes of a tensor."""
    return hashlib.sha256(_bytes_of(tensor)).hexdigest()


def chain(directory: Path) -> Iterator[Path]:
    """``directory``, what it is a difference to, and so on down to a whole checkpoint. Raises CheckpointError."""
    yield directory
    while (directory / DELTA_INDEX).exists():
        directory = directory.parent / _read_index(directory)["base"]
        yield directory


def _difference(old: Tensor, new: Tensor) -> Tensor | None:
    """Deflated planes of the changed bits, uint8 [bytes]; None when nothing changed."""
    bits = np.bitwise_xor(_bytes_of(old), _bytes_of(new))
    if not bits.any():
        return None
    planes = np.ascontiguousarray(bits.reshape(-1, new.dtype.itemsize).T)
    return torch.frombuffer(bytearray(zlib.compress(planes, _LEVEL)), dtype=torch.uint8)


def _apply(old: Tensor, change: Tensor) -> Tensor | None:
    """Undo ``_difference``; None when the data is damaged."""
    size = old.dtype.itemsize
    try:
        planes = np.frombuffer(zlib.decompress(change.numpy()), np.uint8).reshape(size, -1)
    except (zlib.error, ValueError):
        return None
    if planes.size != old.numel() * size:
        return None
    bits = np.bitwise_xor(np.ascontiguousarray(planes.T).reshape(-1), _bytes_of(old))
    return torch.from_numpy(bits).view(old.dtype).reshape(old.shape)


def _bytes_of(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _load(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); publish it again") from None


def _read_index(directory: Path) -> dict[str, Any]:
    path = directory / DELTA_INDEX
    try:
        index: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        is_ours = index["format"] == _FORMAT and isinstance(index["base"], str) and isinstance(index["tensors"], dict)
    except (OSError, ValueError, KeyError, TypeError):
        is_ours = False
    if not is_ours:
        raise CheckpointError(f"{path}: not an index of differences of format {_FORMAT}; publish it again")
    return index


def _link(source: Path, target: Path) -> None:
    """Share a small file between versions; a file system without hard links gets a copy."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
