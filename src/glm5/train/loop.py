"""The one step loop of all training stages.

Batch -> losses (the stage's objective, in micro-batches) -> backward -> clip -> optimizer -> router bias -> metrics.

Invariants: a step is a function of the model, the optimizer state and the step's number alone, so that a run resumed
from a checkpoint repeats the uninterrupted one bit for bit (one process, same thread count); splitting a step into
micro-batches changes its result by rounding only; a step that the guard refuses changes nothing, keeps its batch in
``skipped/`` and is counted; a checkpoint is written after the evaluation of its step, with its
verdict, so that nothing is measured twice.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glm5.data.packing import Batch
from glm5.device import synchronize
from glm5.errors import ConfigError
from glm5.model.moe import update_router_bias
from glm5.model.quantize.fake import rounded
from glm5.model.transformer import GlmMoeDsaForCausalLM
from glm5.runlog import ProgressBar, RunLog, progress_bar
from glm5.train.checkpoint import (
    TrainerState,
    checkpoint_path,
    latest_checkpoint,
    prune_checkpoints,
    save_checkpoint,
)
from glm5.train.config import StageConfig
from glm5.train.guard import Verdict, judge, keep_batch, remember
from glm5.train.losses import Objective, count_step
from glm5.train.optimizers import GradientNorms, Optimizer
from glm5.train.parallel.spread import Spread
from glm5.train.schedules import lr_factor

Evaluate = Callable[[GlmMoeDsaForCausalLM, int], dict[str, Any]]
"""Evaluation hook: the model and the step give named numbers."""

_KEEP_LAST = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What one optimizer step did."""

    losses: dict[str, float]
    """Means over the step by their names in metrics.jsonl."""
    norms: GradientNorms
    """Gradient norms before clipping."""
    tokens: int
    """Tokens that are not padding."""
    expert_imbalance: float
    """Load of the fullest expert over the mean load, averaged over layers; 1 is balanced, 0 means no experts."""

    @property
    def loss(self) -> float:
        """The loss that the stage is about, of the language model or else of the indexers; NaN if any is not finite."""
        total = sum(self.losses.values())
        return self.losses.get("loss", self.losses.get("indexer_kl", total)) + 0.0 * total


def compute_gradients(model: GlmMoeDsaForCausalLM, optimizer: Optimizer, objective: Objective, batch: Batch,
                      micro_rows: int, spread: Spread | None = None) -> tuple[StepResult, Tensor]:
    """Gradients of the whole step, clipped, left in the parameters; and the load of each expert [L, E].

    ``batch`` are the rows of this process; ``micro_rows`` of them go through the model at a time, 0 takes all at once.
    ``spread`` says how ``model`` is spread over processes; None for one process.
    """
    spread = spread or Spread(model)
    layout = spread.layout
    optimizer.zero_grad()
    rows = batch.ids_BT.shape[0]
    counts = count_step(batch, objective.mtp_steps, layout.sum_rows)
    compute = spread.bind(objective)
    parts: list[dict[str, Tensor]] = []
    loads: list[Tensor] = []
    for start in range(0, rows, micro_rows or rows):
        part = _rows_of(batch, slice(start, start + (micro_rows or rows)), layout.device)
        losses = compute(model, part, counts)
        torch.autograd.backward(losses.total)
        parts.append(losses.parts)
        loads.append(losses.load_LE)
    load_LE = layout.sum(torch.stack(loads).sum(0))
    totals = layout.sum(torch.stack([torch.stack([part[name] for part in parts]).sum() for name in parts[0]]))
    sums = dict(zip(parts[0], totals.tolist(), strict=True))
    imbalance = float((load_LE.amax(1) / load_LE.mean(1).clamp_min(1e-9)).mean()) if load_LE.numel() else 0.0
    result = StepResult(losses=sums, norms=optimizer.clip_gradients(), tokens=counts.valid, expert_imbalance=imbalance)
    return result, load_LE


def objective_of(config: StageConfig) -> Objective:
    """The losses that a stage sums."""
    return Objective(attention=config.recipe.attention, main=config.recipe.trains_main, indexer=config.trains_indexer,
                     mtp_steps=config.mtp_steps, mtp_weight=config.mtp_weight, balance_weight=config.balance_weight,
                     indexer_weight=config.indexer_weight)


class Training:
    """One run of the loop: the model and optimizer it changes, its counters, its run directory."""

    def __init__(self, config: StageConfig, run_dir: Path, model: GlmMoeDsaForCausalLM, optimizer: Optimizer,
                 state: TrainerState, tokenizer_dir: Path, evaluate: Evaluate | None = None,
                 spread: Spread | None = None) -> None:
        self.spread = spread or Spread(model)
        self.config, self.run_dir, self.model, self.optimizer, self.state = config, run_dir, model, optimizer, state
        self._tokenizer_dir = tokenizer_dir
        self.data_wait_s = 0.0
        """Seconds that this start has waited for batches."""
        self._evaluate = evaluate if config.evaluation.every else None
        self._log = RunLog(run_dir, writes=self.spread.layout.is_first)
        self._objective = objective_of(config)

    def run(self, batches: Iterator[Batch]) -> Path:
        """Train to the end on ``batches``, the first being that of ``state.data_step``; give the checkpoint to hand on:
        the best one if the evaluation hook decides, else the last."""
        saved_step = self.state.step if self.state.step else -1
        tokens_before = self.state.tokens
        with progress_bar(self.config.name, self.config.steps, shown=self.spread.layout.is_first) as bar:
            while not self._is_finished():
                started = time.perf_counter()
                batch = next(batches)
                result = self._step(batch, time.perf_counter() - started)
                self._show(bar, result, self.state.tokens - tokens_before)
                evaluated = self._evaluate is not None and self._is_evaluation_due()
                if evaluated:
                    self._judge()
                if evaluated or self.state.step % self.config.checkpoint_every == 0 or self._is_finished():
                    self.save()
                    saved_step = self.state.step
        if saved_step != self.state.step:  # a time limit can end the loop between two checkpoints
            self.save()
        return checkpoint_path(self.run_dir, self.state.best_step or self.state.step)

    def save(self) -> None:
        """Write a checkpoint of this moment and remove those that are no longer needed."""
        facts = {"stage": self.config.stage, "name": self.config.name, "parent": self.config.init}
        model, optimizer_state = self.spread.whole_model(), self.optimizer.state_dict()
        if model is not None:
            # What the run started from may be gone.
            tokenizer_dir = latest_checkpoint(self.run_dir) or self._tokenizer_dir
            save_checkpoint(self.run_dir, self.state, model, optimizer_state, tokenizer_dir, facts)
            prune_checkpoints(self.run_dir, _KEEP_LAST, frozenset({self.state.best_step}))
        self.spread.layout.wait()

    def _step(self, batch: Batch, wait_s: float) -> StepResult:
        """One optimizer step on ``batch``, which took ``wait_s`` seconds to come."""
        started = time.perf_counter()
        config, state = self.config, self.state
        factor = lr_factor(config.schedule, self._schedule_step(), config.steps)
        with rounded(self.model, config.quantization):
            result, load_LE = compute_gradients(self.model, self.optimizer, self._objective, batch, config.micro_rows,
                                                self.spread)
        verdict = self.spread.layout.agree(
            judge(config.guard, state, result.loss, (result.norms.main, result.norms.indexer)))
        if verdict.applies:
            self.optimizer.step(factor)
            if config.recipe.trains_main and config.bias_rate:
                update_router_bias(self.model, load_LE, config.bias_rate)
        synchronize(self.spread.layout.device)
        seconds = self.spread.layout.agree(time.perf_counter() - started)
        self.data_wait_s += wait_s
        self.state = dataclasses.replace(
            state, step=state.step + 1, data_step=state.data_step + 1, tokens=state.tokens + result.tokens,
            elapsed_s=state.elapsed_s + seconds, skipped=state.skipped + (not verdict.applies))
        if not verdict.applies:
            self._report_skipped(batch, result, verdict)
            return result
        self.state = remember(config.guard, self.state, result.loss, result.norms.main)
        if self.state.step % config.log_every == 0 or self._is_finished():
            self._log.metrics(step=self.state.step, **result.losses, lr=config.optimizer.lr * factor,
                              grad_norm=result.norms.main, grad_norm_indexer=result.norms.indexer,
                              tokens=self.state.tokens, tokens_per_s=result.tokens / seconds,
                              data_wait=wait_s / (wait_s + seconds),
                              expert_imbalance=result.expert_imbalance)
        return result

    def _report_skipped(self, batch: Batch, result: StepResult, verdict: Verdict) -> None:
        """Keep the batch, say so, and give up when it happens too often."""
        keep_batch(self.run_dir, self.state.step, batch, verdict.reason, self.spread.layout.suffix)
        self._log.event("step_skipped", step=self.state.step, reason=verdict.reason, grad_norm=str(result.norms.main),
                        losses={name: str(value) for name, value in result.losses.items()})
        if self.state.skipped >= self.config.guard.max_skipped:
            raise ConfigError(f"{self.run_dir}: {self.state.skipped} steps were skipped (guard.max_skipped), the last "
                              f"one: {verdict.reason}; lower optimizer.lr, or replay the batches in skipped/")

    def _schedule_step(self) -> int:
        """Step that the schedule sees: with a time limit, the one that matches the time used if that is further on."""
        if not self.config.max_minutes:
            return self.state.step
        return max(self.state.step, int(self.config.steps * self.state.elapsed_s / (60 * self.config.max_minutes)))

    def _is_finished(self) -> bool:
        limit_s, patience = 60 * self.config.max_minutes, self.config.evaluation.patience
        return (self.state.step >= self.config.steps or (limit_s > 0 and self.state.elapsed_s >= limit_s)
                or (patience > 0 and self.state.evaluations_without_rise >= patience))

    def _is_evaluation_due(self) -> bool:
        return self.state.step % self.config.evaluation.every == 0 or self._is_finished()

    def _judge(self) -> None:
        """Call the evaluation hook and remember whether this step is the best one."""
        assert self._evaluate is not None
        started = time.perf_counter()
        with rounded(self.model, self.config.quantization):
            model = self.spread.whole_model()
            values = self.spread.layout.agree({} if model is None else self._evaluate(model, self.state.step))
        key = self.config.evaluation.metric
        if key not in values:
            raise ConfigError(f"evaluation.metric={key!r} is not measured by the hook; choose of: {', '.join(values)}")
        best = self.state.best_metric
        rose = best is None or values[key] > best + self.config.evaluation.min_rise
        self.state = dataclasses.replace(
            self.state, best_metric=float(values[key]) if rose else best,
            best_step=self.state.step if rose else self.state.best_step,
            evaluations_without_rise=0 if rose else self.state.evaluations_without_rise + 1)
        self._log.event("evaluation", step=self.state.step, best_step=self.state.best_step,
                        seconds=time.perf_counter() - started, **values)

    def _show(self, bar: ProgressBar, result: StepResult, tokens: int) -> None:
        note = " ".join(f"{name} {value:.3f}" for name, value in result.losses.items() if name != "balance_loss")
        bar.advance(self.config.steps if self._is_finished() else self.state.step, tokens, note)


def _rows_of(batch: Batch, rows: slice, device: torch.device) -> Batch:
    return Batch(ids_BT=batch.ids_BT[rows].to(device), positions_BT=batch.positions_BT[rows].to(device),
                 documents_BT=batch.documents_BT[rows].to(device), loss_mask_BT=batch.loss_mask_BT[rows].to(device))
