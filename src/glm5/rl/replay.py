"""Reading episodes back out of a ledger: what was recorded, as text or records, and how a checkpoint scores it now.

Everything opens the ledger read-only, so that a run may go on meanwhile.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm5.errors import ConfigError, ServiceError
from glm5.records import OUTCOMES, Episode, Trajectory, to_json
from glm5.rl.ledger import EPISODE_COLUMNS, episode_of_row
from glm5.rl.payloads import PayloadFiles
from glm5.rl.schema import reading
from glm5.runlog import write_atomic
from glm5.tokenizer.bpe import Tokenizer

GROUP_STATES = ("open", "ready", "leased", "acked", "dropped")
_QUERY = (f"SELECT {EPISODE_COLUMNS}, slot, final, excluded, multiplicity, groups.state, groups.reason, batch_id, "
          "trainer_step FROM episodes JOIN groups USING (group_id) LEFT JOIN batches USING (batch_id)")


@dataclass(frozen=True, slots=True)
class LedgerEpisode:
    """An episode and what became of it."""

    episode: Episode
    slot: int
    """Its place in the group."""
    final: bool
    """False for an attempt that failed and was run again."""
    excluded: str
    """Why it may not be trained on; empty when it may."""
    multiplicity: int
    """How often it counts in its group; 0 when it does not."""
    group_state: str
    """``ready``, ``leased``, ``acked`` or ``dropped``."""
    group_reason: str
    """Why the group was dropped."""
    batch_id: int | None
    """Batch that trains or trained it."""
    trainer_step: int | None
    """Step at which that batch was leased."""
    place: str
    """Where its tokens are: ``database``, ``file``, or ``removed`` by retention; they are empty then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeFilter:
    """Which episodes; None takes all."""

    taskset: str | None = None
    outcome: str | None = None
    state: str | None = None
    """State of the group."""
    limit: int | None = None
    """The first so many."""
    oldest_first: bool = False
    """In the order in which they ended; otherwise the newest first."""

    def __post_init__(self) -> None:
        for name, value, known in (("outcome", self.outcome, OUTCOMES), ("state", self.state, GROUP_STATES)):
            if value is not None and value not in known:
                raise ConfigError(f"{name}={value!r}: expected one of {', '.join(known)}")


def read_episodes(run_dir: Path, chosen: EpisodeFilter) -> Iterator[LedgerEpisode]:
    """Matching episodes, those of a group together. Raises ServiceError when there is no ledger, or none of the
    taskset."""
    conditions = {"taskset = ?": chosen.taskset, "outcome = ?": chosen.outcome, "groups.state = ?": chosen.state}
    used = {condition: value for condition, value in conditions.items() if value is not None}
    where = " WHERE " + " AND ".join(used) if used else ""
    limit = -1 if chosen.limit is None else chosen.limit
    order = "ASC" if chosen.oldest_first else "DESC"
    if chosen.taskset is not None:
        _require_taskset(run_dir, chosen.taskset)
    files = PayloadFiles(run_dir / "ledger.sqlite")
    with reading(run_dir) as database:
        for row in database.execute(f"{_QUERY}{where} ORDER BY episodes.rowid {order} LIMIT ?",
                                    (*used.values(), limit)):
            yield _ledger_episode(row, files)


def read_episode(run_dir: Path, episode_id: str) -> LedgerEpisode:
    """One episode. Raises ServiceError when the ledger does not hold it."""
    with reading(run_dir) as database:
        row = database.execute(f"{_QUERY} WHERE episodes.episode_id = ?", (episode_id,)).fetchone()
    if row is None:
        raise ServiceError(f"{run_dir}: no episode {episode_id!r}; list them with glm5 ledger list")
    return _ledger_episode(row, PayloadFiles(run_dir / "ledger.sqlite"))


def export_episodes(run_dir: Path, output: Path, chosen: EpisodeFilter) -> int:
    """Write matching episodes as JSON lines (the fields of ``Episode`` and of ``LedgerEpisode``); their number."""
    lines = []
    for item in read_episodes(run_dir, chosen):
        fate = {key: value for key, value in to_json(item).items() if key != "episode"}
        lines.append(json.dumps({**to_json(item.episode), **fate}) + "\n")
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(output, "".join(lines))
    return len(lines)


def transcript(item: LedgerEpisode, tokenizer: Tokenizer) -> str:
    """The episode as text; sampled tokens stand between ⟦ and ⟧."""
    episode = item.episode
    fate = item.excluded or item.group_reason or item.group_state
    lines = [f"{episode.episode_id}  task {episode.task_id}  outcome {episode.outcome}  "
             f"reward {episode.reward}  {fate}"]
    if episode.reason:
        lines.append(f"reason: {episode.reason}")
    for number, trajectory in enumerate(episode.trajectories):
        versions = sorted({version for version in trajectory.versions if version >= 0})
        lines.append(f"--- trajectory {number}: {len(trajectory.ids)} tokens, {sum(trajectory.loss_mask)} sampled, "
                     f"versions {versions}")
        lines.append("".join(f"⟦{tokenizer.decode(ids)}⟧" if sampled else tokenizer.decode(ids)
                             for sampled, ids in _spans(trajectory)))
    return "\n".join(lines)


def mismatch_rows(item: LedgerEpisode, checkpoint: Path) -> list[dict[str, Any]]:
    """How a checkpoint scores the sampled tokens now, against what the engine recorded: result rows.

    With the weights that sampled the episode, the mean difference shows the mismatch of engine and trainer alone.
    """
    import torch  # here, because listing and exporting need none of it

    from glm5.model.families import load_causal_lm
    from glm5.train.losses import token_logprobs

    model = load_causal_lm(checkpoint, dtype=torch.float32)
    differences: list[torch.Tensor] = []
    with torch.no_grad():
        for trajectory in item.episode.trajectories:
            sampled = [t for t, on in enumerate(trajectory.loss_mask) if on]
            hidden_BTD = model.hidden(torch.tensor([trajectory.ids]), attention="sparse").hidden_BTD
            scored = token_logprobs(hidden_BTD[0, [t - 1 for t in sampled]], model.lm_head.weight,
                                    torch.tensor([trajectory.ids[t] for t in sampled]), 1.0)
            differences.append(scored - torch.tensor([trajectory.logprobs[t] for t in sampled]))
    if not differences:
        raise ServiceError(f"episode {item.episode.episode_id}: has no trajectory to score")
    delta = torch.cat(differences)
    return [{"name": "replay.tokens", "value": delta.numel(), "unit": "tokens"},
            {"name": "replay.mean_abs_difference", "value": float(delta.abs().mean()), "unit": "nats"},
            {"name": "replay.max_abs_difference", "value": float(delta.abs().max()), "unit": "nats"},
            {"name": "replay.k3", "value": float((delta.double().expm1() - delta.double()).mean()), "unit": "nats"}]


def _require_taskset(run_dir: Path, taskset: str) -> None:
    with reading(run_dir) as database:
        known = [name for (name,) in database.execute("SELECT DISTINCT taskset FROM groups ORDER BY taskset")]
    if taskset not in known:
        raise ServiceError(f"{run_dir}: no group of taskset {taskset!r}; it has {', '.join(known) or 'none'}")


def _ledger_episode(row: tuple[Any, ...], files: PayloadFiles) -> LedgerEpisode:
    slot, final, *fate = row[11:]
    return LedgerEpisode(episode_of_row(row, files), slot, bool(final), *fate, place=row[9])


def _spans(trajectory: Trajectory) -> list[tuple[bool, list[int]]]:
    """Runs of sampled and of other tokens."""
    spans: list[tuple[bool, list[int]]] = []
    for token, sampled in zip(trajectory.ids, trajectory.loss_mask, strict=True):
        if not spans or spans[-1][0] != sampled:
            spans.append((sampled, []))
        spans[-1][1].append(token)
    return spans
