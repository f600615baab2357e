"""The guard: which steps must not change the model, and what is kept of them.

A step is refused when its loss or a gradient norm is not finite, when its loss lies far above the mean of the last
applied steps, or when its norm is many times theirs (``GuardConfig``). The means belong to the trainer's state, so that
a resumed run decides as an uninterrupted one. The batch of a refused step is kept in ``skipped/`` of the run directory
with the reason; ``replay`` runs it again, row by row, on any checkpoint.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file, save_file

from glm5.data.packing import Batch
from glm5.errors import CheckpointError
from glm5.model.checkpoint import load_model
from glm5.model.transformer import GlmMoeDsaForCausalLM
from glm5.train.checkpoint import TrainerState, complete_checkpoints
from glm5.train.config import GuardConfig
from glm5.train.losses import Objective, count_step

FOLDER = "skipped"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a step may be applied."""

    reason: str
    """Why not, in words; empty when it may."""

    @property
    def applies(self) -> bool:
        """Whether the step may change the model."""
        return not self.reason


def judge(config: GuardConfig, state: TrainerState, loss: float, norms: tuple[float, ...]) -> Verdict:
    """Judge a step by its loss and its gradient norms, the main one first."""
    if not all(math.isfinite(value) for value in (loss, *norms)):
        return Verdict("not finite")
    if len(state.recent_losses) < config.window:
        return Verdict("")
    mean_loss, mean_norm = fmean(state.recent_losses), fmean(state.recent_norms)
    if config.loss_rise and loss > mean_loss + config.loss_rise:
        return Verdict(f"loss {loss:.4g} is more than {config.loss_rise:g} above the mean {mean_loss:.4g}")
    if config.norm_factor and norms[0] > mean_norm * config.norm_factor:
        return Verdict(f"gradient norm {norms[0]:.4g} is more than {config.norm_factor:g} times the mean "
                       f"{mean_norm:.4g}")
    return Verdict("")


def remember(config: GuardConfig, state: TrainerState, loss: float, norm: float) -> TrainerState:
    """The state after an applied step."""
    return dataclasses.replace(state, recent_losses=(*state.recent_losses, loss)[-config.window :],
                               recent_norms=(*state.recent_norms, norm)[-config.window :])


def keep_batch(run_dir: Path, step: int, batch: Batch, reason: str, suffix: str = "") -> Path:
    """Write the batch of a refused step, flushed to ``skipped/``; give the file."""
    path = run_dir / FOLDER / f"{step:06d}{suffix}.safetensors"
    path.parent.mkdir(exist_ok=True)
    save_file({"ids": batch.ids_BT.contiguous(), "positions": batch.positions_BT.contiguous(),
               "documents": batch.documents_BT.contiguous(), "loss_mask": batch.loss_mask_BT.contiguous()},
              path, metadata={"reason": reason})
    return path


def load_batch(path: Path) -> tuple[Batch, str]:
    """A kept batch and the reason why its step was refused. Raises CheckpointError when there is none."""
    if not path.is_file():
        kept = ", ".join(sorted(item.stem for item in path.parent.glob("*.safetensors"))) or "none"
        raise CheckpointError(f"{path}: no such batch; steps with one: {kept}")
    with safe_open(path, "pt") as file:
        reason = (file.metadata() or {}).get("reason", "")
    tensors = load_file(path)
    return Batch(ids_BT=tensors["ids"], positions_BT=tensors["positions"], documents_BT=tensors["documents"],
                 loss_mask_BT=tensors["loss_mask"]), reason


def replay(run_dir: Path, step: int, objective: Objective, init: Path | None = None) -> list[dict[str, Any]]:
    """Run the kept batch of ``step`` again on the newest checkpoint before it, or on ``init``; give result rows.

    One row for the loss of each row of the batch, so that the offending one is found. Nothing is changed on disk.
    Raises CheckpointError without a batch or without weights to run it on.
    """
    batch, _ = load_batch(run_dir / FOLDER / f"{step:06d}.safetensors")
    earlier = [path for path in complete_checkpoints(run_dir) if int(path.name) < step]
    checkpoint = earlier[-1] if earlier else init
    if checkpoint is None:
        raise CheckpointError(f"{run_dir}: no checkpoint before step {step}; give the weights to replay on")
    model = load_model(checkpoint)
    return [{"name": f"replay.{name}.row{row}", "value": value, "unit": "nats"}
            for row in range(batch.ids_BT.shape[0]) for name, value in _losses_of_row(model, objective, batch, row)]


def _losses_of_row(model: GlmMoeDsaForCausalLM, objective: Objective, batch: Batch,
                   row: int) -> list[tuple[str, float]]:
    one = Batch(**{field.name: getattr(batch, field.name)[row : row + 1] for field in dataclasses.fields(Batch)})
    losses = objective(model, one, count_step(one, objective.mtp_steps))
    return [(name, float(value)) for name, value in losses.parts.items()]
