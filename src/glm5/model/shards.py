"""Sets of safetensors files, read and written one tensor at a time.

``ShardReader`` knows names, types and shapes of all tensors from the files' headers and maps a tensor when it is asked
for; it lets go of old mappings, so that reading a large checkpoint through keeps little memory. ``ShardWriter`` is told
all names, types and shapes first, writes the headers, and then takes the tensors in any order. Neither ever holds more
than the tensor at hand, which the library's own writer, that wants a whole file at once, cannot do.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from glm5.errors import CheckpointError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_MAPPED_BYTES = 256 * 2**20
"""Bytes of tensors that a reader hands out before it maps the files anew."""

DTYPES_BY_NAME = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}
NAMES_BY_DTYPE = {dtype: name for name, dtype in DTYPES_BY_NAME.items()}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Type and shape of a stored tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


class ShardReader(Mapping[str, Tensor]):
    """The tensors of a checkpoint directory by stored name, mapped from the files rather than copied.

    Raises CheckpointError for a missing or truncated file, or an index that does not fit the files.
    """

    def __init__(self, directory: Path) -> None:
        self.specs: dict[str, TensorSpec] = {}
        self.files: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}
        self._handed_out = 0
        weight_map = _read_index(directory)
        for path in sorted({directory / file for file in weight_map.values()}) or [directory / SINGLE_FILE]:
            self._read_header(path)
        for name, file_name in weight_map.items():
            if name not in self.files:
                raise CheckpointError(f"{directory / file_name}: tensor {name} is missing though {INDEX_FILE} lists "
                                      "it; copy or download the file again")

    def __getitem__(self, name: str) -> Tensor:
        path = self.files[name]
        self._handed_out += self.specs[name].nbytes
        if self._handed_out > _MAPPED_BYTES:
            self._open.clear()
            self._handed_out = self.specs[name].nbytes
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt")
        return self._open[path].get_tensor(name)

    def __contains__(self, name: object) -> bool:
        return name in self.specs

    def __iter__(self) -> Iterator[str]:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)

    def _read_header(self, path: Path) -> None:
        if not path.exists():
            raise CheckpointError(f"{path}: missing; a checkpoint has {SINGLE_FILE} or {INDEX_FILE} with its files")
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.offset_keys():
                    if name in self.files:
                        raise CheckpointError(f"{path}: tensor {name} is also in {self.files[name].name}; keep one of "
                                              "them")
                    part = file.get_slice(name)
                    if part.get_dtype() not in DTYPES_BY_NAME:
                        raise CheckpointError(f"{path}: tensor {name} has type {part.get_dtype()}; expected one of "
                                              f"{', '.join(DTYPES_BY_NAME)}")
                    self.specs[name] = TensorSpec(DTYPES_BY_NAME[part.get_dtype()], tuple(part.get_shape()))
                    self.files[name] = path
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: damaged or truncated safetensors file ({error}); copy or download it "
                                  "again") from None


class ShardWriter:
    """Files of at most ``max_shard_bytes`` (more for a single larger tensor) and their index, in ``directory``."""

    def __init__(self, directory: Path, specs: Mapping[str, TensorSpec], max_shard_bytes: int) -> None:
        self._specs = dict(specs)
        self._places: dict[str, tuple[Path, int]] = {}
        self._left = set(specs)
        shards = _split(self._specs, max_shard_bytes)
        files = [SINGLE_FILE] if len(shards) == 1 else [f"model-{number:05d}-of-{len(shards):05d}.safetensors"
                                                        for number in range(1, len(shards) + 1)]
        for file, names in zip(files, shards, strict=True):
            self._write_header(directory / file, names)
        if len(shards) > 1:
            weight_map = {name: path.name for name, (path, _) in self._places.items()}
            index = {"metadata": {"total_size": sum(spec.nbytes for spec in self._specs.values())},
                     "weight_map": {name: weight_map[name] for name in self._specs}}
            (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def write(self, name: str, tensor: Tensor) -> None:
        """Store one tensor; its type and shape are those announced."""
        spec = self._specs[name]
        if (tensor.dtype, tuple(tensor.shape)) != (spec.dtype, spec.shape):
            raise ValueError(f"{name}: {tensor.dtype} {tuple(tensor.shape)} given, {spec.dtype} {spec.shape} announced")
        path, offset = self._places[name]
        with open(path, "r+b") as file:
            file.seek(offset)
            file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        self._left.remove(name)

    def close(self) -> None:
        """Raises ValueError when an announced tensor was not written."""
        if self._left:
            raise ValueError(f"{min(self._left)} was announced and not written")

    def _write_header(self, path: Path, names: list[str]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        size = 0
        for name in sorted(names, key=lambda name: -self._specs[name].dtype.itemsize):  # keeps every tensor aligned
            spec = self._specs[name]
            header[name] = {"dtype": NAMES_BY_DTYPE[spec.dtype], "shape": list(spec.shape),
                            "data_offsets": [size, size + spec.nbytes]}
            size += spec.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        for name in names:
            self._places[name] = path, 8 + len(text) + header[name]["data_offsets"][0]
        with open(path, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + size)


def _split(specs: Mapping[str, TensorSpec], max_shard_bytes: int) -> list[list[str]]:
    """Names of each file, in the given order."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, spec in specs.items():
        if shards[-1] and size + spec.nbytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += spec.nbytes
    return shards


def _read_index(directory: Path) -> dict[str, str]:
    path = directory / INDEX_FILE
    if not path.exists():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError):
        raise CheckpointError(f"{path}: not a safetensors index (no weight_map); copy or download it again") from None
