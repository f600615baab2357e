"""The trainer: leases batches from the ledger, steps, publishes weights, writes checkpoints.

One step: lease → (teachers score the samples) → forward over packed samples with sparse attention → log-probs of the
sampled tokens → policy loss → backward → clip → optimizer. Episodes keep running meanwhile: services are processes,
weights are pushed by a thread. Indexers, MTP layer and router bias are frozen.

Order at a restart-critical point: the checkpoint with the batch ids is on disk before their batches are acked, and a
version is in the ledger before an engine can sample with it. After a crash at any instruction the next start loads the
newest complete checkpoint, tells the ledger which batches it holds, publishes its weights under a new version and goes
on. In synchronous mode the progress row moves only when every engine holds the new version.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from glm5.device import find_device
from glm5.engine.broadcast import snapshot
from glm5.errors import ConfigError, ServiceError
from glm5.model.transformer import GlmMoeDsaForCausalLM
from glm5.process import lock_directory
from glm5.records import Episode
from glm5.rl.config import RLConfig
from glm5.rl.critic import Critic, Together
from glm5.rl.exporter import exporting
from glm5.rl.launch.local import RolloutStack
from glm5.rl.ledger import LeasedBatch, Ledger
from glm5.rl.policy import load_policy
from glm5.rl.push import WeightPusher
from glm5.rl.self_test import self_test
from glm5.rl.spans import Track
from glm5.rl.step import StepResult, policy_step
from glm5.rl.supervisor import poll_until
from glm5.rl.teachers import Teachers, teacher_services
from glm5.rl.transcripts import write_transcripts
from glm5.rl.watchdog import Heartbeat
from glm5.rl.weights import WeightVersion, newest_version, publish, retain
from glm5.rl.writers import Writers, open_writers
from glm5.runlog import ProgressBar, RunLog, progress_bar, write_atomic
from glm5.tokenizer.bpe import load_tokenizer
from glm5.tokenizer.fit import require_same_tokenizer
from glm5.train.checkpoint import (
    TrainerState,
    final_checkpoint,
    latest_checkpoint,
    load_trainer_state,
    mark_final,
    prune_checkpoints,
    save_checkpoint,
)
from glm5.train.optimizers import build_optimizer
from glm5.train.schedules import lr_factor

POLL_S = 0.02
MAX_SKIPPED = 20
"""Updates with a gradient that is not finite before the run gives up."""


def run_rl(config: RLConfig, run_dir: Path, init_dir: Path | None = None) -> Path:
    """Train to the end, or go on where an earlier start stopped; gives the final checkpoint.

    ``init_dir`` overrides ``config.init``. Raises ConfigError, CheckpointError, ServiceError, WeightSyncError.
    """
    finished = final_checkpoint(run_dir)
    if finished is not None:
        _require_same_config(config, run_dir)
        return finished
    resolved = init_dir or resolve_init(config.init, run_dir)
    load_tokenizer(resolved)  # one that is missing or another model's is reported before anything is written
    teachers = _resolve_teachers(config, run_dir, resolved)
    with lock_directory(run_dir):
        return _train(config, run_dir, resolved, teachers)


def _train(config: RLConfig, run_dir: Path, resolved: Path, teachers: Mapping[str, Path]) -> Path:
    torch.set_num_threads(config.trainer_threads)
    torch.manual_seed(config.seed)
    from glm5.rl.offline import OfflineTrainer  # here, because it builds on this module

    trainer = (OfflineTrainer if config.mode == "offline" else Trainer)(config, run_dir, resolved, teachers)
    try:
        checkpoint = trainer.run()
    finally:
        trainer.close()
    mark_final(run_dir, checkpoint)
    return checkpoint


def _require_same_config(config: RLConfig, run_dir: Path) -> None:
    """A finished run of other settings is not what was asked for."""
    before = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))
    now = json.loads(json.dumps(dataclasses.asdict(config), default=str))
    changed = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    if changed:
        raise ConfigError(f"{run_dir}: holds a finished run with another value of {changed[0]}; choose another run "
                          "directory or remove this one")


def resolve_init(init: str, run_dir: Path) -> Path:
    """Directory of ``init``: a path, or ``stage:NAME`` for the final checkpoint of run NAME beside ``run_dir``."""
    if not init.startswith("stage:"):
        if not (Path(init) / "config.json").is_file():
            raise ConfigError(f"init={init!r}: no checkpoint there (config.json is missing); give a checkpoint "
                              "directory")
        return Path(init)
    stage_dir = run_dir.parent / init.removeprefix("stage:")
    found = final_checkpoint(stage_dir)
    if found is None:
        raise ConfigError(f"init={init!r}: {stage_dir} has no finished run; run that stage first or give a checkpoint "
                          "directory")
    return found


def _resolve_teachers(config: RLConfig, run_dir: Path, init_dir: Path) -> dict[str, Path]:
    """Checkpoint of every teacher. Raises ConfigError when one is missing, CheckpointError when its ids mean other text
    than the student's."""
    checkpoints = {name: resolve_init(teacher.checkpoint, run_dir) for name, teacher in config.teachers.items()}
    for checkpoint in checkpoints.values():
        require_same_tokenizer(checkpoint, init_dir)
    return checkpoints


class Trainer:
    """One start of a run: model, optimizer, ledger, and the services it keeps alive."""

    def __init__(self, config: RLConfig, run_dir: Path, init_dir: Path, teachers: Mapping[str, Path]) -> None:
        self.config, self.run_dir = config, run_dir
        self._teacher_dirs = teachers
        self._log = RunLog(run_dir)
        self._log.write_config(config)
        start = latest_checkpoint(run_dir)
        if start is not None:
            require_same_tokenizer(start, init_dir)
        self._tokenizer_dir = init_dir
        self._model = load_policy(start or init_dir, find_device(config.device))
        self._optimizer = build_optimizer(self._model, config.optimizer)
        self._critic = self._build_critic(init_dir) if config.comparison == "critic" else None
        self._learning = Together(self._optimizer, self._critic)
        self.state = load_trainer_state(start, self._learning) if start else TrainerState()
        self._ledger = Ledger.of_run(config, run_dir)
        self._started = time.monotonic()
        self._elapsed_before = self.state.elapsed_s
        self._last_batch = max((int(batch) for batch in self.state.batch_ids), default=0)
        self._mark = self._ledger.rewards_since(0)[1]
        self._engine_seen: dict[str, Any] = {}
        self._tokenizer = load_tokenizer(init_dir)
        self._track = Track(self._log.event, "trainer")
        self._heartbeat = Heartbeat(60 * config.stall_minutes)
        self._writers = Writers([])

    def close(self) -> None:
        """Close the ledger."""
        self._ledger.close()

    def run(self) -> Path:
        """Start the services, train, stop them; gives the last checkpoint."""
        returned = self._ledger.recover(self._last_batch, self.state.step)
        self._ledger.set_progress(self.state.step, -1)  # nothing may start before the services are up
        published = self._publish()
        self._log.event("rl_started", step=self.state.step, version=published.version, returned_groups=returned)
        stack = RolloutStack(self.config, published.directory, self.run_dir, weight_version=published.version,
                             orchestrate=True, beside=teacher_services(self.config, self._teacher_dirs))
        with ExitStack() as opened:
            opened.enter_context(self._heartbeat)
            self._writers = opened.enter_context(open_writers(self.config.observation.writers, self.run_dir,
                                                              self.config.name))
            with self._track.span("start", "services"):
                opened.enter_context(stack)
            teachers = opened.enter_context(Teachers(self.config, stack.urls_beside, stack.tend))
            if self.config.observation.prometheus_port:
                opened.enter_context(exporting(self.run_dir, self.config.observation.prometheus_host,
                                               self.config.observation.prometheus_port, stack.heartbeats))
            pusher = opened.enter_context(WeightPusher([stack.engine_url], self._log.event, self.config.weights,
                                                       stack.condemn))
            pusher.submit(published)
            self._await_push(stack, pusher, published)
            if self.config.engine.kind != "built-in":
                self._log.event("engine_self_test", **dataclasses.asdict(self_test(
                    self._model, self._tokenizer_dir, stack.engine_url, self.config)))
            self._ledger.set_progress(self.state.step, published.version)
            self._engine_seen = stack.engine_stats()
            with progress_bar(self.config.name, self.config.steps) as bar:
                path = self._loop(stack, teachers, pusher, bar)
        self._log.event("rl_finished", step=self.state.step, elapsed_s=self.state.elapsed_s)
        return path

    def _loop(self, stack: RolloutStack, teachers: Teachers, pusher: WeightPusher, bar: ProgressBar) -> Path:
        tokens_before = self.state.tokens
        path = latest_checkpoint(self.run_dir)
        while not self._is_finished():
            step_started = time.monotonic()
            with self._track.span("wait for a batch", "episodes"):
                batch = self._next_batch(stack)
            if batch is None:
                break
            scored_started = time.monotonic()
            batch = self._scored(teachers, batch)
            train_started = time.monotonic()
            with self._track.span("train"):
                result = self._update(batch)
            train_s = time.monotonic() - train_started
            self._last_batch = batch.batch_id
            self.state = dataclasses.replace(
                self.state, step=self.state.step + 1, tokens=self.state.tokens + result.tokens,
                skipped=self.state.skipped + (not result.finite), batch_ids=(str(batch.batch_id),),
                elapsed_s=self._elapsed_before + time.monotonic() - self._started)
            shared_started = time.monotonic()
            with self._track.span("publish"):
                self._share(stack, pusher)
            publish_s = time.monotonic() - shared_started
            if self.state.skipped >= MAX_SKIPPED:
                raise ServiceError(f"{self.run_dir}: {self.state.skipped} updates had a gradient that is not finite; "
                                   "lower optimizer.lr and run again from an earlier checkpoint")
            if self.state.step % self.config.checkpoint_every == 0 or self._is_finished():
                with self._track.span("checkpoint"):
                    path = self._checkpoint()
            self._report(stack, batch, result, {
                "train_s": train_s, "wait_s": scored_started - step_started,
                "teacher_s": train_started - scored_started, "publish_s": publish_s,
                "step_s": time.monotonic() - step_started})
            bar.advance(self.state.step, self.state.tokens - tokens_before, self._note(batch))
        if path is None or int(path.name) != self.state.step:  # a time limit can end the loop between checkpoints
            path = self._checkpoint()
        return path

    def _build_critic(self, init_dir: Path) -> Critic:
        trunk = load_policy(init_dir, find_device(self.config.device))
        if not isinstance(trunk, GlmMoeDsaForCausalLM):
            raise ConfigError(f'advantage = "critic": a value model starts from a GLM-5 checkpoint and {init_dir} is '
                              'none; use "mean"')
        return Critic(trunk, self.config.critic)

    def _update(self, batch: LeasedBatch) -> StepResult:
        """One optimizer step; of the critic alone while it warms up."""
        step = self.state.step
        waits = self._critic is not None and step < self.config.critic.warmup_steps
        return policy_step(self._model, self._optimizer, batch, self.config,
                           0.0 if waits else lr_factor(self.config.schedule, step, self.config.steps), self._critic)

    def _is_finished(self) -> bool:
        elapsed_s = self._elapsed_before + time.monotonic() - self._started
        out_of_time = bool(self.config.max_minutes) and elapsed_s >= 60 * self.config.max_minutes
        return self.state.step >= self.config.steps or out_of_time

    def _next_batch(self, stack: RolloutStack) -> LeasedBatch | None:
        """Wait for a whole batch of trainable groups; keep the services alive meanwhile. None when the time is up.

        Raises ServiceError, after a dump of the state into ``stall.json``, when none came within ``stall_minutes``.
        """
        deadline = time.monotonic() + 60 * self.config.stall_minutes
        while True:
            stack.tend()
            self._heartbeat.note()
            if self._ledger.ready_groups() >= self.config.fresh_groups:
                batch = self._ledger.lease(self.config.fresh_groups, self.state.step, reuse=self.config.reused_groups)
                if batch is not None:
                    return batch
            if self._is_finished():
                return None
            if time.monotonic() > deadline:
                raise self._stalled(stack)
            time.sleep(POLL_S)

    def _scored(self, teachers: Teachers, batch: LeasedBatch) -> LeasedBatch:
        if not self.config.teachers:
            return batch
        with self._track.span("wait for scores", "teachers"):
            return teachers.score(batch)

    def _stalled(self, stack: RolloutStack) -> ServiceError:
        counts = self._ledger.counts()
        dump = {"step": self.state.step, "services": stack.state(), "engine": stack.engine_stats(),
                "orchestrator": stack.orchestrator_stats(), "ledger": dataclasses.asdict(counts),
                "violations": self._ledger.check(), "progress": dataclasses.asdict(self._ledger.progress())}
        path = self.run_dir / "stall.json"
        write_atomic(path, json.dumps(dump, indent=1) + "\n")
        return ServiceError(f"no trainable batch for {self.config.stall_minutes:g} minutes at step {self.state.step}: "
                            f"groups {counts.groups}, dropped {counts.dropped_groups}; read {path} and the logs "
                            "beside it")

    def _publish(self) -> WeightVersion:
        """Give the current weights a new version, on disk and in the ledger."""
        parent = max(newest_version(self.run_dir), self._ledger.newest_version())
        published = publish(self._model, self.run_dir, version=max(parent, 0) + 1, step=self.state.step,
                            parent=parent if parent > 0 else None, tokenizer_dir=self._tokenizer_dir,
                            full_every=self.config.weights.whole_every)
        self._ledger.record_version(published.version, published.step)
        self.state = dataclasses.replace(self.state, policy_version=published.version)
        retain(self.run_dir, self.config.tau + 2)
        return published

    def _share(self, stack: RolloutStack, pusher: WeightPusher) -> None:
        """After a step: publish when it is due, and move the progress row that pacing follows."""
        if self.state.step % self.config.publication_interval == 0:
            published = self._publish()
            pusher.submit(published, snapshot(self._model) if pusher.wants_snapshot else None)
            if self.config.reset_optimizer:
                self._optimizer.reset()
            if self.config.mode == "sync":
                self._await_push(stack, pusher, published)
        self._ledger.set_progress(self.state.step, self.state.policy_version)

    def _await_push(self, stack: RolloutStack, pusher: WeightPusher, published: WeightVersion) -> None:
        def tend() -> None:
            stack.tend()
            self._heartbeat.note()

        with self._track.span("wait for a push", "engine"):
            poll_until(lambda: pusher.is_held(published.version), tend, 1.5 * self.config.weights.deadline_s,
                       f"weight version {published.version} in every engine")

    def _checkpoint(self) -> Path:
        """Write the weights with the ids of the batches in them, then ack those."""
        facts = {"stage": "rl", "name": self.config.name, "parent": self.config.init}
        path = save_checkpoint(self.run_dir, self.state, self._model, self._learning.state_dict(), self._tokenizer_dir,
                               facts)
        self._ledger.ack(self._last_batch, self.state.step)
        prune_checkpoints(self.run_dir, self.config.keep_checkpoints)
        return path

    def _report(self, stack: RolloutStack, batch: LeasedBatch, result: StepResult, seconds: dict[str, float]) -> None:
        rewards, self._mark = self._ledger.rewards_since(self._mark)
        everything = [reward for values in rewards.values() for reward in values]
        means = {f"reward.{name}": sum(values) / len(values) for name, values in sorted(rewards.items())}
        if everything:
            means["reward"] = sum(everything) / len(everything)
        ages = list(batch.staleness.values())
        values = {
            **means, **result.metrics, "samples": len(batch.samples), "episodes": batch.episodes,
            "reused_groups": batch.reused,
            "finished_episodes": len(everything), "staleness_mean": sum(ages) / len(ages), "staleness_max": max(ages),
            "tokens": result.tokens, "tokens_per_s": result.tokens / seconds["train_s"], **seconds,
            "policy_version": self.state.policy_version, "update_applied": result.finite,
            "elapsed_s": self.state.elapsed_s, **self._engine_metrics(stack)}
        self._log.metrics(step=self.state.step, **values)
        self._writers.write(self.state.step, values)
        write_transcripts(self.run_dir, self.state.step, batch, self.config.observation.transcripts, self._tokenizer)
        if not result.finite:
            self._log.event("update_skipped", step=self.state.step, batch_id=batch.batch_id)

    def _engine_metrics(self, stack: RolloutStack) -> dict[str, float]:
        """What the engine did since the last step; a restarted engine counts from zero."""
        seen, before = stack.engine_stats(), self._engine_seen
        if not seen:
            return {}
        self._engine_seen = seen
        base = before if before and before["uptime_s"] <= seen["uptime_s"] else dict.fromkeys(seen, 0)
        return {f"engine_{name}": seen[name] - base[name]
                for name in ("busy_s", "uptime_s", "generated_tokens", "prefilled_tokens", "cached_tokens")}

    def _note(self, batch: LeasedBatch) -> str:
        if not self.config.compares_episodes:
            return f"version {self.state.policy_version}"
        positive = sum(sample.advantage > 0 for sample in batch.samples)
        return f"version {self.state.policy_version}, {positive}/{len(batch.samples)} better than their group"


def compare_modes(config: RLConfig, run_dir: Path,
                  interval: Callable[[int, int], tuple[float, float]] | None = None) -> list[dict[str, Any]]:
    """Train asynchronously and synchronously from the same checkpoint and evaluate both on the held-out tasks.

    ``interval(successes, n)`` gives the bounds of a rate; without it rows have none. Rows: ``pass_at_1.MODE.NAME``,
    ``pass_at_1.MODE.mean``, ``wall_s.MODE``, and ``wall_s.sync`` over ``wall_s.async`` as ``speedup``.
    """
    init_dir = resolve_init(config.init, run_dir)
    rows: list[dict[str, Any]] = []
    wall: dict[str, float] = {}
    for mode in ("async", "sync"):
        chosen = dataclasses.replace(config, mode=mode, name=f"{config.name}-{mode}")
        checkpoint = run_rl(chosen, run_dir / mode, init_dir)
        state = json.loads((checkpoint / "trainer" / "state.json").read_text(encoding="utf-8"))
        wall[mode] = float(state["elapsed_s"])
        with RolloutStack(chosen, checkpoint, run_dir / f"evaluate-{mode}") as stack:
            episodes = stack.evaluate(label=f"evaluate {mode}")
        rows += pass_rows(f"pass_at_1.{mode}", episodes, interval)
        rows += [{"name": f"wall_s.{mode}", "value": wall[mode], "unit": "s"},
                 {"name": f"steps.{mode}", "value": int(state["step"]), "unit": "steps"}]
        config = dataclasses.replace(config, steps=int(state["step"]), max_minutes=0.0)  # the same work, however long
    rows.append({"name": "speedup", "value": wall["sync"] / wall["async"], "unit": "ratio"})
    return rows


def pass_rows(prefix: str, episodes: Sequence[Episode],
              interval: Callable[[int, int], tuple[float, float]] | None) -> list[dict[str, Any]]:
    """Rows of the share of episodes with full reward, per taskset and over all; unmeasured episodes do not count."""
    by_taskset: dict[str, list[bool]] = {}
    for episode in episodes:
        if episode.reward is not None:
            by_taskset.setdefault(episode.taskset, []).append(episode.reward >= 1.0)
    named = [*sorted(by_taskset.items()), ("mean", [passed for results in by_taskset.values() for passed in results])]
    rows: list[dict[str, Any]] = []
    for name, passed in named:
        row: dict[str, Any] = {"name": f"{prefix}.{name}", "value": sum(passed) / max(len(passed), 1),
                               "unit": "fraction", "n": len(passed)}
        if interval is not None:
            row["low"], row["high"] = interval(sum(passed), len(passed))
        rows.append(row)
    return rows
