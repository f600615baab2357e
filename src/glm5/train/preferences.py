"""Training from preference pairs, one loop with two objectives.

Both minimise -log sigmoid(s(chosen) - s(rejected)), the negative log-likelihood of Bradley and Terry. A reward model
has s(y) = w · h(y), its head; the policy itself has s(y) = beta (log pi(y) - log pi_ref(y)), which is direct preference
optimisation with the starting policy as pi_ref. The accuracy on held-out pairs counts a tie as wrong.

A run continues from its newest complete checkpoint; the pairs of a step are a function of step and seed. The final
checkpoint of a reward model carries the centre and spread of its scores over held-out answers.

Letters: P pairs, N = 2P conversations, the chosen ones first, M trained tokens.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from glm5.data.packing import ShuffledOrder
from glm5.data.preferences import Pair, PairBatch, pair_batch, read_pairs, split_pairs
from glm5.device import find_device
from glm5.errors import ConfigError, DataError, ServiceError
from glm5.model.checkpoint import load_model
from glm5.model.reward import HEAD_FILE, RewardModel
from glm5.model.transformer import GlmMoeDsaForCausalLM
from glm5.process import lock_directory
from glm5.runlog import RunLog, progress_bar, write_atomic
from glm5.tokenizer.bpe import load_tokenizer
from glm5.train.checkpoint import (
    TrainerState,
    final_checkpoint,
    latest_checkpoint,
    load_trainer_state,
    mark_final,
    prune_checkpoints,
    save_checkpoint,
)
from glm5.train.losses import token_logprobs
from glm5.train.optimizers import Optimizer
from glm5.train.preference_config import PreferenceConfig
from glm5.train.schedules import lr_factor
from glm5.train.stages import resolve_init

_MAX_SKIPPED = 20
_HELD_OUT_PAIRS = 16
"""Held-out pairs that are scored in one pass."""


def preference_loss(scores_N: Tensor, centre_weight: float = 0.0) -> Tensor:
    """Mean over the pairs of -log sigmoid(chosen - rejected), plus ``centre_weight`` times the mean of
    (chosen + rejected)²; chosen scores are the first half."""
    chosen_P, rejected_P = scores_N.chunk(2)
    loss = softplus(rejected_P - chosen_P).mean()
    return loss + centre_weight * (chosen_P + rejected_P).square().mean() if centre_weight else loss


def answer_logprobs(model: GlmMoeDsaForCausalLM, batch: PairBatch, conversations: int) -> Tensor:
    """Sum of the log-probs of the tokens that the model would have sampled in each conversation, fp32 [N]."""
    rows = batch.rows
    hidden_BTD = model.hidden(rows.ids_BT, rows.positions_BT, rows.documents_BT, attention="sparse").hidden_BTD
    labels_BT = rows.ids_BT.roll(-1, dims=1)
    logprobs_M = token_logprobs(hidden_BTD[rows.loss_mask_BT], model.lm_head.weight, labels_BT[rows.loss_mask_BT])
    return logprobs_M.new_zeros(conversations).index_add(0, batch.owners_BT[rows.loss_mask_BT], logprobs_M)


class Objective(Protocol):
    """What a run trains: a scale of answers on which the chosen one should lie higher."""

    policy: GlmMoeDsaForCausalLM
    centre_weight: float

    def trained(self) -> dict[str, nn.Parameter]:
        """Parameters that learn, by name."""

    def scores(self, pairs: Sequence[Pair]) -> Tensor:
        """Scores fp32 [N] of the answers of ``pairs``."""

    def head(self) -> dict[str, Tensor] | None:
        """Tensors that a checkpoint has beside the model."""

    def finish(self, held_out_scores_N: Tensor) -> None:
        """Called once, before the final checkpoint."""


class BradleyTerry:
    """A reward model."""

    def __init__(self, policy: GlmMoeDsaForCausalLM, config: PreferenceConfig, pad_id: int,
                 checkpoint: Path | None) -> None:
        """``checkpoint``: one of this run, whose head is read."""
        self.policy, self.centre_weight = policy, config.centre_weight
        self.model = RewardModel(policy)
        if checkpoint is not None:
            self.model.load_head(checkpoint / HEAD_FILE)
        policy.lm_head.weight.requires_grad_(False)
        self._length, self._pad_id = config.length, pad_id

    def trained(self) -> dict[str, nn.Parameter]:
        """The trunk without its output head, and the reward head."""
        return {**_trained(self.policy), "reward_head.weight": self.model.weight}

    def scores(self, pairs: Sequence[Pair]) -> Tensor:
        """Scores of the head."""
        batch = _to(pair_batch(pairs, self._length, self._pad_id), self.model.weight.device)
        scores: Tensor = self.model(batch.rows.ids_BT, batch.rows.positions_BT, batch.rows.documents_BT, batch.ends_N)
        return scores

    def head(self) -> dict[str, Tensor]:
        """The head."""
        return self.model.head()

    def finish(self, held_out_scores_N: Tensor) -> None:
        """Give the rewards a scale."""
        self.model.calibrate(held_out_scores_N)


class DirectPreference:
    """The policy, tied to where it started."""

    centre_weight = 0.0

    def __init__(self, policy: GlmMoeDsaForCausalLM, reference: GlmMoeDsaForCausalLM, config: PreferenceConfig,
                 pad_id: int) -> None:
        self.policy = policy
        self._reference = reference
        self._beta, self._length, self._pad_id = config.beta, config.length, pad_id
        self._known: dict[int, Tensor] = {}

    def trained(self) -> dict[str, nn.Parameter]:
        """The policy."""
        return _trained(self.policy)

    def scores(self, pairs: Sequence[Pair]) -> Tensor:
        """beta (log pi - log pi_ref); the reference is computed once for each pair."""
        device = self.policy.lm_head.weight.device
        missing = [pair for pair in pairs if id(pair) not in self._known]
        if missing:
            with torch.no_grad():
                batch = _to(pair_batch(missing, self._length, self._pad_id), device)
                found = answer_logprobs(self._reference, batch, 2 * len(missing)).view(2, -1).T
            self._known |= {id(pair): values for pair, values in zip(missing, found, strict=True)}
        reference_N = torch.stack([self._known[id(pair)] for pair in pairs], dim=1).flatten()
        batch = _to(pair_batch(pairs, self._length, self._pad_id), device)
        return self._beta * (answer_logprobs(self.policy, batch, 2 * len(pairs)) - reference_N)

    def head(self) -> None:
        """Nothing."""
        return

    def finish(self, held_out_scores_N: Tensor) -> None:
        """Nothing to do."""


def run_preferences(config: PreferenceConfig, run_dir: Path) -> Path:
    """Train to the end, or go on where an earlier start stopped; gives the final checkpoint.

    Raises ConfigError, CheckpointError, DataError, ServiceError.
    """
    finished = final_checkpoint(run_dir)
    if finished is not None:
        _require_same_config(config, run_dir)
        return finished
    if not config.pairs:
        raise ConfigError("pairs: name at least one .jsonl file of preference pairs")
    init = resolve_init(config.init, run_dir)
    if init is None:
        raise ConfigError(f"init={config.init!r}: preferences need a trained model; give a checkpoint or stage:NAME")
    with lock_directory(run_dir):
        return _train(config, run_dir, init)


def held_out_result(run_dir: Path) -> tuple[int, int]:
    """(right, all) held-out pairs of a finished run. Raises ServiceError when there is no such result."""
    try:
        result = json.loads((run_dir / "held_out.json").read_text(encoding="utf-8"))
        return int(result["right"]), int(result["pairs"])
    except (OSError, ValueError, KeyError) as error:
        raise ServiceError(f"{run_dir / 'held_out.json'}: cannot be read ({error}); run the training again") from None


@torch.no_grad()
def score_pairs(objective: Objective, pairs: Sequence[Pair]) -> Tensor:
    """Scores fp32 [N] of any number of pairs, chosen ones first."""
    parts = [objective.scores(pairs[start:start + _HELD_OUT_PAIRS]).view(2, -1)
             for start in range(0, len(pairs), _HELD_OUT_PAIRS)]
    return torch.cat(parts, dim=1).flatten()


def count_right(scores_N: Tensor) -> int:
    """Pairs whose chosen answer has the higher score."""
    chosen_P, rejected_P = scores_N.chunk(2)
    return int((chosen_P > rejected_P).sum())


def _train(config: PreferenceConfig, run_dir: Path, init: Path) -> Path:
    latest = latest_checkpoint(run_dir)
    tokenizer = load_tokenizer(init)
    pairs = [pair for path in config.pairs for pair in read_pairs(path, tokenizer, config.length, config.declare_tools)]
    train, held_out = split_pairs(pairs, config.held_out_fraction)
    if not train or not held_out:
        raise DataError(f"{config.pairs[0]}: {len(train)} training and {len(held_out)} held-out pairs; give pairs of "
                        "more conversations or change held_out_fraction")
    device = find_device(config.device)
    policy = load_model(latest or init, dtype=torch.float32, device=device)
    _freeze(policy)
    objective: Objective
    if config.objective == "reward":
        objective = BradleyTerry(policy, config, tokenizer.pad_id, latest)
    else:
        reference = load_model(init, dtype=torch.float32, device=device)
        objective = DirectPreference(policy, reference, config, tokenizer.pad_id)
    optimizer = Optimizer(objective.trained(), policy.config, config.optimizer)
    state = load_trainer_state(latest, optimizer) if latest else TrainerState()
    log = RunLog(run_dir)
    log.write_config(config)
    log.event("preferences_started", step=state.step, pairs=len(train), held_out=len(held_out))
    state = _loop(config, run_dir, init, objective, optimizer, state, train, log)
    scores_N = score_pairs(objective, held_out)
    objective.finish(scores_N)
    final = _save(config, run_dir, init, objective, optimizer, state)
    result = {"right": count_right(scores_N), "pairs": len(held_out), "loss": float(preference_loss(scores_N))}
    write_atomic(run_dir / "held_out.json", json.dumps(result) + "\n")
    log.event("preferences_finished", step=state.step, **result)
    mark_final(run_dir, final)
    return final


def _loop(config: PreferenceConfig, run_dir: Path, init: Path, objective: Objective, optimizer: Optimizer,
          state: TrainerState, train: Sequence[Pair], log: RunLog) -> TrainerState:
    order = ShuffledOrder(len(train))
    started, before = time.monotonic(), state.elapsed_s
    with progress_bar(config.name, config.steps, "pairs") as bar:
        while state.step < config.steps and not (config.max_minutes and state.elapsed_s >= 60 * config.max_minutes):
            first = state.step * config.batch_pairs
            batch = [train[order.item(first + number, config.seed)] for number in range(config.batch_pairs)]
            optimizer.zero_grad()
            scores_N = objective.scores(batch)
            loss = preference_loss(scores_N, objective.centre_weight)
            torch.autograd.backward(loss)
            norms = optimizer.clip_gradients()
            if norms.finite:
                optimizer.step(lr_factor(config.schedule, state.step, config.steps))
            state = dataclasses.replace(
                state, step=state.step + 1, data_step=state.step + 1, skipped=state.skipped + (not norms.finite),
                tokens=state.tokens + sum(len(pair.chosen.ids) + len(pair.rejected.ids) for pair in batch),
                elapsed_s=before + time.monotonic() - started)
            if state.skipped >= _MAX_SKIPPED:
                raise ServiceError(f"{run_dir}: {state.skipped} updates had a gradient that is not finite; lower "
                                   "optimizer.lr and start again in another run directory")
            right = count_right(scores_N.detach())
            log.metrics(step=state.step, loss=float(loss.detach()), accuracy=right / len(batch), grad_norm=norms.main,
                        update_applied=norms.finite, elapsed_s=state.elapsed_s)
            if state.step % config.checkpoint_every == 0 and state.step < config.steps:
                _save(config, run_dir, init, objective, optimizer, state)
            bar.advance(state.step, state.step * config.batch_pairs, f"loss {float(loss.detach()):.3f}")
    return state


def _save(config: PreferenceConfig, run_dir: Path, init: Path, objective: Objective, optimizer: Optimizer,
          state: TrainerState) -> Path:
    facts = {"stage": config.objective, "name": config.name, "parent": str(init)}
    path = save_checkpoint(run_dir, state, objective.policy, optimizer.state_dict(), init, facts, objective.head())
    prune_checkpoints(run_dir, 2)
    return path


def _freeze(model: GlmMoeDsaForCausalLM) -> None:
    mtp_prefix = f"model.layers.{model.config.num_hidden_layers}."
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".indexer." not in name and not name.startswith(mtp_prefix))


def _trained(model: GlmMoeDsaForCausalLM) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _to(batch: PairBatch, device: torch.device) -> PairBatch:
    rows = dataclasses.replace(batch.rows, **{field.name: getattr(batch.rows, field.name).to(device)
                                              for field in dataclasses.fields(batch.rows)})
    return dataclasses.replace(batch, rows=rows, owners_BT=batch.owners_BT.to(device), ends_N=batch.ends_N.to(device))


def _require_same_config(config: PreferenceConfig, run_dir: Path) -> None:
    before = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))
    now = json.loads(json.dumps(dataclasses.asdict(config), default=str))
    changed = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    if changed:
        raise ConfigError(f"{run_dir}: holds a finished run with another value of {changed[0]}; choose another run "
                          "directory or remove this one")
