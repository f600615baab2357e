"""The outcome reward model: a language model with one linear head that scores a whole conversation.

score = w · h, with h the state after the final norm of the conversation's last token, the role token that closes the
answer. Trained by preferences (Bradley and Terry 1952): P(a is preferred to b) = sigmoid(score(a) - score(b)), so
scores are only known up to a constant. ``reward`` = sigmoid((score - centre) / spread) has a scale: ``centre`` and
``spread`` are the mean and the deviation of the scores of held-out answers.

On disk it is a checkpoint directory with ``reward_head.safetensors`` beside it: ``weight`` [D], ``centre``, ``spread``,
all fp32.

Letters: B batch, T tokens, D hidden, N conversations.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from glm5.device import HOST
from glm5.errors import CheckpointError
from glm5.model.checkpoint import load_model
from glm5.model.transformer import GlmMoeDsaForCausalLM

HEAD_FILE = "reward_head.safetensors"


class RewardModel(nn.Module):
    """``trunk`` with a head of zeros, which gives every conversation score 0."""

    def __init__(self, trunk: GlmMoeDsaForCausalLM) -> None:
        super().__init__()
        self.trunk = trunk
        device = trunk.lm_head.weight.device
        self.weight = nn.Parameter(torch.zeros(trunk.config.hidden_size, dtype=torch.float32, device=device))
        self.register_buffer("centre", torch.zeros((), dtype=torch.float32, device=device))
        self.register_buffer("spread", torch.ones((), dtype=torch.float32, device=device))

    def forward(self, ids_BT: Tensor, positions_BT: Tensor, documents_BT: Tensor, ends_N: Tensor) -> Tensor:
        """Scores fp32 [N] of the conversations in packed rows; ``ends_N`` are the places of their last tokens in the
        flattened rows."""
        output = self.trunk.hidden(ids_BT, positions_BT, documents_BT, attention="sparse")
        return output.hidden_BTD.flatten(0, 1)[ends_N].float() @ self.weight

    def reward(self, scores_N: Tensor) -> Tensor:
        """Rewards in (0, 1) of scores; 0.5 at the centre."""
        centred: Tensor = (scores_N - self.centre) / self.spread
        return centred.sigmoid()

    def calibrate(self, scores_N: Tensor) -> None:
        """Take centre and spread from the scores of answers; equal or too few scores keep spread 1."""
        self.centre.copy_(scores_N.mean())
        deviation = scores_N.std() if len(scores_N) > 1 else torch.zeros(())
        self.spread.copy_(deviation if deviation > 1e-6 else torch.ones(()))

    def head(self) -> dict[str, Tensor]:
        """Tensors of the head, for ``reward_head.safetensors``."""
        return {"weight": self.weight.detach(), "centre": self.centre, "spread": self.spread}

    @torch.no_grad()
    def load_head(self, path: Path) -> None:
        """Read the head. Raises CheckpointError when it is missing, misshapen or not finite."""
        try:
            tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: cannot be read ({error}); give the checkpoint of a trained reward "
                                  "model") from None
        targets = self.head()
        found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        expected = {name: tuple(tensor.shape) for name, tensor in targets.items()}
        if found != expected:
            raise CheckpointError(f"{path}: holds {found}, expected {expected}; it belongs to another model")
        if not all(torch.isfinite(tensor).all() for tensor in tensors.values()) or tensors["spread"] <= 0:
            raise CheckpointError(f"{path}: values are not finite or spread is not above 0; train the head again")
        self.weight.copy_(tensors["weight"])
        self.centre.copy_(tensors["centre"])
        self.spread.copy_(tensors["spread"])


def load_reward_model(directory: str | Path, dtype: torch.dtype | None = None,
                      device: torch.device | str = HOST) -> RewardModel:
    """The reward model of a checkpoint directory, in evaluation mode. Raises as ``load_model``."""
    model = RewardModel(load_model(directory, dtype=dtype, device=device))
    model.load_head(Path(directory) / HEAD_FILE)
    return model.eval()
