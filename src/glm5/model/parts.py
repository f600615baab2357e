"""The part of a model's work that one process does. By default all of it; ``glm5.train.parallel`` puts in others.

``TokenPart`` says which tokens of every row are computed here (context parallelism): queries are local, keys are
gathered, because an indexer must see every key to select among them. ``HeadPart`` says the same of attention heads
(tensor parallelism): its methods mark where an activation that all processes hold enters the heads and where their
outputs are added up.

Letters: B batch, T tokens of a row, t local tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


class TokenPart:
    """All tokens of a row."""

    def ranges(self, length: int) -> tuple[tuple[int, int], ...]:
        """[start, stop) of the tokens that are computed here, of rows of ``length``, in their local order."""
        return ((0, length),)

    def local(self, x_BT: Tensor) -> Tensor:
        """The local tokens of a tensor [B, T, ...] that holds whole rows -> [B, t, ...]."""
        ranges = self.ranges(x_BT.shape[1])
        if len(ranges) == 1:
            return x_BT[:, slice(*ranges[0])]
        return torch.cat([x_BT[:, start:stop] for start, stop in ranges], dim=1)

    def gather(self, x_Bt: Tensor) -> Tensor:
        """Whole rows from local tokens [B, t, ...] -> [B, T, ...]; backward adds up the gradients of all processes."""
        return x_Bt

    def sum(self, x: Tensor) -> Tensor:
        """Sum over the processes that share a row; no gradient."""
        return x


class HeadPart:
    """All attention heads."""

    def enter(self, x: Tensor) -> Tensor:
        """``x`` itself; backward adds up the gradients that the heads of all processes give it."""
        return x

    def leave(self, x: Tensor) -> Tensor:
        """Sum over the processes of what their heads add to the output; backward passes the gradient on."""
        return x

    def mean(self, x: Tensor) -> Tensor:
        """Mean over the processes; no gradient."""
        return x
