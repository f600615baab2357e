"""Training on episodes that were recorded before: no engine, no gateway, no task service.

The groups of ``replay.source`` (a run directory, or a file of ``glm5 ledger export``) enter the ledger of this run
under the rules of any other group, so that the accounting is the same: which of them are trained, how often, and that a
crash trains none of them once too often. What their policy versions were in the other run has no meaning for the steps
of this one: their age is counted from step 0 and has no bound. Every group is trained ``replay.max_uses`` times, or
until the steps are done. The weights that sampled them are known by their log-probs, so any policy loss applies.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path

from glm5.errors import ConfigError, DataError, ServiceError
from glm5.records import episode_from_json
from glm5.rl.admission import sampled_versions
from glm5.rl.ledger import LeasedBatch, Ledger
from glm5.rl.replay import EpisodeFilter, LedgerEpisode, read_episodes
from glm5.rl.step import StepResult
from glm5.rl.trainer import Trainer
from glm5.runlog import progress_bar
from glm5.train.checkpoint import latest_checkpoint

_FATE = {item.name for item in dataclasses.fields(LedgerEpisode)} - {"episode"}


def read_source(source: Path) -> Iterator[LedgerEpisode]:
    """Recorded episodes in the order in which they ended, or that of the file.

    Raises ConfigError for a source that is not there, DataError for a line that holds no episode.
    """
    if source.is_dir():
        yield from read_episodes(source, EpisodeFilter(oldest_first=True))
        return
    try:
        file = open(source, encoding="utf-8")  # noqa: SIM115  closed by the next statement
    except OSError as error:
        raise ConfigError(f"replay.source={str(source)!r}: cannot be read ({error.strerror}); give a run directory or "
                          "a file of glm5 ledger export") from None
    with file:
        for number, line in enumerate(file, 1):
            try:
                data = json.loads(line)
                fate = {name: data.pop(name) for name in _FATE}
                yield LedgerEpisode(episode_from_json(data), **fate)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise DataError(f"{source}:{number}: no episode of glm5 ledger export ({error!r})") from None


def import_groups(source: Path, ledger: Ledger) -> int:
    """Enter every group of ``source`` that this ledger does not hold yet, as it ended there. Returns how many.

    A group enters whole or not at all, so that an import which was cut off goes on. Raises DataError when the episodes
    of a group do not stand together.
    """
    seen: set[str] = set()
    new = 0
    for group_id, items in itertools.groupby(read_source(source), lambda item: item.episode.group_id):
        if group_id in seen:
            raise DataError(f"{source}: the episodes of group {group_id} do not stand together; export them again")
        seen.add(group_id)
        state = ledger.group_state(group_id)
        if state not in (None, "open"):
            continue
        recorded = sorted(items, key=lambda item: (item.slot, item.final))
        slots = [[item.episode for item in attempts]
                 for _, attempts in itertools.groupby(recorded, lambda item: item.slot)]
        if state is None:
            episode = slots[0][0]
            ledger.open_group(group_id, taskset=episode.taskset, task_id=episode.task_id,
                              task_index=ledger.next_task_index(episode.taskset), size=len(slots))
        ledger.adopt_versions({version for attempts in slots for version in sampled_versions(attempts[-1])})
        ledger.close_group(group_id, slots)
        new += 1
    return new


class OfflineTrainer(Trainer):
    """A run without services; checkpoints, batches and books are those of any other."""

    def run(self) -> Path:
        """Import, train, give the last checkpoint. Raises ServiceError when nothing in the source can be trained on."""
        self._ledger.recover(self._last_batch, self.state.step)
        imported = import_groups(Path(self.config.replay.source), self._ledger)
        counts = self._ledger.counts()
        self._log.event("offline_started", step=self.state.step, source=self.config.replay.source, imported=imported,
                        groups=counts.groups, dropped=counts.dropped_groups)
        path = latest_checkpoint(self.run_dir)
        tokens_before = self.state.tokens
        with progress_bar(self.config.name, self.config.steps) as bar:
            while not self._is_finished():
                batch = self._ledger.lease(self.config.groups_per_batch, self.state.step, fill=True)
                if batch is None:
                    break
                self._step(batch)
                if self.state.step % self.config.checkpoint_every == 0:
                    path = self._checkpoint()
                bar.advance(self.state.step, self.state.tokens - tokens_before, self._note(batch))
        if not self.state.step:
            raise ServiceError(f"{self.config.replay.source}: no group can be trained on; dropped "
                               f"{counts.dropped_groups}")
        if path is None or int(path.name) != self.state.step:
            path = self._checkpoint()
        self._log.event("offline_finished", step=self.state.step, elapsed_s=self.state.elapsed_s)
        return path

    def _step(self, batch: LeasedBatch) -> None:
        started = time.monotonic()
        result = self._update(batch)
        self._last_batch = batch.batch_id
        self.state = dataclasses.replace(
            self.state, step=self.state.step + 1, tokens=self.state.tokens + result.tokens,
            skipped=self.state.skipped + (not result.finite), batch_ids=(str(batch.batch_id),),
            elapsed_s=self._elapsed_before + time.monotonic() - self._started)
        self._record(batch, result, time.monotonic() - started)

    def _record(self, batch: LeasedBatch, result: StepResult, train_s: float) -> None:
        self._log.metrics(step=self.state.step, **result.metrics, samples=len(batch.samples), episodes=batch.episodes,
                          reused_groups=batch.reused, tokens=result.tokens, tokens_per_s=result.tokens / train_s,
                          train_s=train_s, step_s=train_s, update_applied=result.finite,
                          elapsed_s=self.state.elapsed_s)
