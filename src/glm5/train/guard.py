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

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save

from glm5.data.packing import Batch
from glm5.errors import CheckpointError
from glm5.model.transformer import GlmMoeDsaForCausalLM
from glm5.runlog import write_atomic
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
    """Write the batch of a refused step to ``skipped/``, whole or not at all; give the file."""
    path = run_dir / FOLDER / f"{step:06d}{suffix}.safetensors"
    path.parent.mkdir(exist_ok=True)
    write_atomic(path, save({"ids": batch.ids_BT.contiguous(), "positions": batch.positions_BT.contiguous(),
                             "documents": batch.documents_BT.contiguous(),
                             "loss_mask": batch.loss_mask_BT.contiguous()}, metadata={"reason": reason}))
    return path


def load_batch(run_dir: Path, step: int) -> tuple[Batch, str]:
    """The batch of a refused step, joined from what each process kept, and the reason. Raises CheckpointError when
    there is none."""
    paths = sorted((run_dir / FOLDER).glob(f"{step:06d}*.safetensors"))
    if not paths:
        kept = ", ".join(sorted({item.name[:6] for item in (run_dir / FOLDER).glob("*.safetensors")})) or "none"
        raise CheckpointError(f"{run_dir / FOLDER}: no batch of step {step}; steps with one: {kept}")
    with safe_open(paths[0], "pt") as file:
        reason = (file.metadata() or {}).get("reason", "")
    parts = [load_file(path) for path in paths]
    joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    rows = [row.numpy().tobytes() for row in joined["ids"]]
    first = [number for number, row in enumerate(rows) if rows.index(row) == number]  # some processes share rows
    return Batch(ids_BT=joined["ids"][first], positions_BT=joined["positions"][first],
                 documents_BT=joined["documents"][first], loss_mask_BT=joined["loss_mask"][first]), reason


def replay_weights(run_dir: Path, step: int, init: Path | None) -> Path:
    """The newest checkpoint before ``step``, or else ``init``. Raises CheckpointError when there is neither."""
    earlier = [path for path in complete_checkpoints(run_dir) if int(path.name) < step]
    weights = earlier[-1] if earlier else init
    if weights is None:
        raise CheckpointError(f"{run_dir}: no checkpoint before step {step}; give the weights to replay on")
    return weights


def replay(run_dir: Path, step: int, objective: Objective, model: GlmMoeDsaForCausalLM,
           weights_step: int) -> list[dict[str, Any]]:
    """Run the kept batch of ``step`` again on ``model``, the weights after step ``weights_step``; give result rows.

    One row for the loss of each row of the batch, so that the offending one is found. Nothing is changed on disk.
    Raises CheckpointError without a batch.
    """
    batch, _ = load_batch(run_dir, step)
    rows = [{"name": "replay.weights_step", "value": weights_step, "unit": "steps"}]
    return rows + [{"name": f"replay.{name}.row{row}", "value": value, "unit": "nats"}
                   for row in range(batch.ids_BT.shape[0])
                   for name, value in _losses_of_row(model, objective, batch, row)]


def _losses_of_row(model: GlmMoeDsaForCausalLM, objective: Objective, batch: Batch,
                   row: int) -> list[tuple[str, float]]:
    one = Batch(**{field.name: getattr(batch, field.name)[row : row + 1] for field in dataclasses.fields(Batch)})
    losses = objective(model, one, count_step(one, objective.mtp_steps))
    return [(name, float(value)) for name, value in losses.parts.items()]
