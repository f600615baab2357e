"""Keys of a prompt on their way from an engine that fills to one that decodes.

A ``CachedPrefix`` holds the cache blocks of the first tokens of a prompt. The receiving engine puts them into its prefix
cache, where the request finds them as if it had computed them. Both engines must serve the same weights with the same
cache layout; the receiver checks version, shapes and types.
"""

from __future__ import annotations

from dataclasses import dataclass

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from glm5.errors import EngineError


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedPrefix:
    """Keys of the first ``length`` tokens of a prompt."""

    length: int
    version: int
    """Weight version that computed them."""
    entries: list[Tensor]
    """As ``KeyCache.read_blocks`` gives them; empty when ``length`` is 0."""

    def to_bytes(self) -> bytes:
        """The entries as a safetensors file."""
        return save({f"{number:04d}": tensor.contiguous() for number, tensor in enumerate(self.entries)})

    @classmethod
    def from_bytes(cls, data: bytes, length: int, version: int) -> CachedPrefix:
        """Undo ``to_bytes``. Raises EngineError for damaged data."""
        try:
            tensors = load(data)
        except SafetensorError as error:
            raise EngineError(f"cached prefix: damaged ({error}); send it again") from None
        return cls(length=length, version=version, entries=[tensors[name] for name in sorted(tensors)])
