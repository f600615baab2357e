"""Asynchronous against synchronous training when tools are slow, and what the double-sided mask is for.

``python benchmarks/bench_async.py FOLDER --init CHECKPOINT [--seeds 3] [--steps 40] [--groups 32]
[--latency-scale 1.0] [--old-steps 120] [--quick] [--json]``

The taskset is the calculator whose every call takes as long as a draw from the log-normal distribution with a median of
1 s and a 99th percentile of 30 s, times ``--latency-scale`` (stated in the rows; the same for both modes). Everything
else is real: engine, gateway, task service, orchestrator, trainer. Per seed:

- ``sync`` and ``async`` (at most 2 steps stale) train the same number of steps, so of samples, from ``CHECKPOINT``;
- ``old.masked`` and ``old.unmasked`` train without latency on samples that are 8 steps old, the first with the
  double-sided mask, the second with the same loss and bounds so wide that they never apply.

Then each policy is evaluated on held-out tasks, without latency. Rows, all over the seeds: ``async.wall_s.MODE`` (sum
of the steps), ``async.speedup``, ``async.reward.RUN`` and ``async.reward_difference`` (held-out, with intervals),
``async.busy.WHAT`` (share of the time of the asynchronous steps), ``async.busy.bottleneck`` (the larger one),
``async.staleness_max``, ``async.dropped_stale``, ``async.last_reward.RUN`` (training reward of the last quarter of the
steps), ``async.mask_gain`` (held-out, masked - unmasked). The intervals of wall times and of the speed-up are Student's
over the seeds.

Every run has its own directory below ``FOLDER``: a finished one is not run again, an interrupted one goes on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from glm5.env.sandbox.base import Sandbox
from glm5.env.tasks import Task
from glm5.env.tasksets.calculator import Calculator
from glm5.eval.report import Row, results_object
from glm5.eval.statistics import Interval, difference, wilson_interval
from glm5.rl.config import CurriculumConfig, LossConfig, RLConfig
from glm5.rl.launch.local import RolloutStack
from glm5.rl.summary import summary_rows
from glm5.rl.trainer import run_rl
from glm5.runlog import read_jsonl, write_atomic
from glm5.train.config import OptimizerConfig, ScheduleConfig

SCALE_VARIABLE, SEED_VARIABLE = "BENCH_ASYNC_LATENCY_SCALE", "BENCH_ASYNC_SEED"
MEDIAN_S, P99_S = 1.0, 30.0
SIGMA = math.log(P99_S / MEDIAN_S) / statistics.NormalDist().inv_cdf(0.99)
STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776}
"""97.5% quantiles of Student's t by degrees of freedom."""
GOAL = 2.8
MODES = ("sync", "async")
OLD = ("old.masked", "old.unmasked")
UNMASKED = LossConfig(kind="double_sided", eps_low=1.0, eps_high=1e9)


class SlowCalculator(Calculator):
    """The calculator on a slow machine."""

    name = "slow_calculator"

    def __init__(self) -> None:
        self._scale = float(os.environ[SCALE_VARIABLE])
        self._random = random.Random(int(os.environ[SEED_VARIABLE]))

    async def call(self, task: Task, sandbox: Sandbox | None, tool: str, arguments: dict[str, Any]) -> str:
        """After a long-tailed while, what the calculator says."""
        await asyncio.sleep(self._scale * latency_s(self._random))
        return await super().call(task, sandbox, tool, arguments)


def latency_s(choose: random.Random) -> float:
    """One draw: median 1 s, 99th percentile 30 s."""
    return choose.lognormvariate(math.log(MEDIAN_S), SIGMA)


def build_run(name: str, seed: int, options: argparse.Namespace) -> RLConfig:
    """Configuration of one run; the recipe is that of ``configs/nano/rl.toml``."""
    is_old = name in OLD
    return RLConfig(
        name=name.replace(".", "-"), tasksets={"slow_calculator": 1.0}, seed=seed,
        mode="sync" if name == "sync" else "async", steps=options.old_steps if is_old else options.steps,
        pacing_eta=8 if is_old else 2, max_staleness=8 if is_old else 2,
        groups_per_batch=options.old_groups if is_old else options.groups, group_size=8,
        loss=UNMASKED if name == "old.unmasked" else LossConfig(),
        # every slot may wait for a tool, and the books must not depend on what the machine could hold
        concurrency=8 * (9 * options.old_groups if is_old else 3 * options.groups),
        episode_timeout_s=1800.0, max_new_tokens=40, max_turns=3, max_context=448, checkpoint_every=10, sandbox="none",
        curriculum=CurriculumConfig(max_visits=1), evaluation_count=options.evaluate, evaluation_temperature=1.0,
        stall_minutes=20.0,
        optimizer=OptimizerConfig(kind="adamw", lr=3e-4, betas=(0.9, 0.98), weight_decay=0.0),
        schedule=ScheduleConfig(kind="constant", warmup_steps=6))


def train_and_evaluate(name: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run one run unless it is finished; what is reported of it."""
    directory = options.folder / f"seed{seed}" / name
    result_file = directory / "result.json"
    if result_file.exists():
        found: dict[str, Any] = json.loads(result_file.read_text())
        return found
    config = build_run(name, seed, options)
    os.environ[SEED_VARIABLE] = str(seed)
    os.environ[SCALE_VARIABLE] = "0" if name in OLD else str(options.latency_scale)
    checkpoint = run_rl(config, directory, options.init)
    os.environ[SCALE_VARIABLE] = "0"
    with RolloutStack(config, checkpoint, directory / "evaluate") as stack:
        rewards = [episode.reward for episode in stack.evaluate(label=f"evaluate {name} {seed}")
                   if episode.reward is not None]
    records = read_jsonl(directory / "metrics.jsonl")
    last = records[-max(len(records) // 4, 1):]
    rows = {row["name"]: row["value"] for row in summary_rows(directory)}
    result = {
        "wall_s": sum(record["step_s"] for record in records), "passed": sum(reward >= 1.0 for reward in rewards),
        "measured": len(rewards), "staleness_max": max(record["staleness_max"] for record in records),
        "last_reward": statistics.fmean(record["reward"] for record in last if "reward" in record),
        "busy": {"trainer": rows["busy.trainer"], "engine": rows["busy.engine"]},
        "dropped_stale": rows["groups.dropped.stale"], "violations": rows["ledger.violations"],
        "trained": rows["episodes.trained"]}
    write_atomic(result_file, json.dumps(result) + "\n")
    return result


def over_seeds(name: str, values: Sequence[float], unit: str, **more: Any) -> Row:
    """Mean with Student's interval; no interval for a single seed."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Row(name=name, value=mean, unit=unit, n=len(values), **more)
    half = STUDENT[min(len(values) - 1, max(STUDENT))] * statistics.stdev(values) / math.sqrt(len(values))
    return Row(name=name, value=mean, unit=unit, n=len(values), low=mean - half, high=mean + half, **more)


def held_out(results: Sequence[dict[str, Any]]) -> Interval:
    """Share of held-out tasks solved, all seeds together."""
    return wilson_interval(sum(one["passed"] for one in results), sum(one["measured"] for one in results))


def interval_row(name: str, interval: Interval, **more: Any) -> Row:
    """A share or a difference of shares as a row."""
    return Row(name=name, value=interval.value, unit="fraction", n=interval.n, low=interval.low, high=interval.high,
               **more)


def rows_of(results: dict[str, list[dict[str, Any]]], scale: float) -> list[Row]:
    """Everything that is reported."""
    speedups = [sync["wall_s"] / run["wall_s"] for sync, run in zip(results["sync"], results["async"], strict=True)]
    mean = statistics.fmean(speedups)
    gap = difference(held_out(results["async"]), held_out(results["sync"]))
    gain = difference(held_out(results["old.masked"]), held_out(results["old.unmasked"]))
    busy = {what: [run["busy"][what] for run in results["async"]] for what in ("trainer", "engine")}
    bottleneck = [max(pair) for pair in zip(busy["trainer"], busy["engine"], strict=True)]
    stalest = max(run["staleness_max"] for run in results["async"])
    return [
        over_seeds("async.speedup", speedups, "ratio", goal=f"at least {GOAL}", met=mean >= GOAL),
        *(over_seeds(f"async.wall_s.{mode}", [run["wall_s"] for run in results[mode]], "s") for mode in MODES),
        *(interval_row(f"async.reward.{name}", held_out(runs)) for name, runs in results.items()),
        interval_row("async.reward_difference", gap, goal="async not below sync beyond the interval",
                     met=gap.high >= 0),
        *(over_seeds(f"async.busy.{what}", values, "fraction") for what, values in busy.items()),
        over_seeds("async.busy.bottleneck", bottleneck, "fraction", goal="at least 0.95",
                   met=statistics.fmean(bottleneck) >= 0.95),
        Row(name="async.staleness_max", value=stalest, unit="steps", goal="at most 2", met=stalest <= 2),
        over_seeds("async.dropped_stale", [run["dropped_stale"] for run in results["async"]], "groups"),
        *(over_seeds(f"async.last_reward.{name}", [run["last_reward"] for run in runs], "reward")
          for name, runs in results.items()),
        interval_row("async.mask_gain", gain, goal="the mask prevents the collapse", met=gain.low > 0),
        Row(name="async.latency_scale", value=scale, unit="ratio"),
        Row(name="async.ledger_violations", value=sum(run["violations"] for runs in results.values() for run in runs),
            unit="invariants", goal=0)]


def install(folder: Path) -> None:
    """Make the taskset known to the processes that are started, as an installed distribution would."""
    info = folder / "bench_async-1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bench-async\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[glm5.tasksets]\nslow_calculator = bench_async:SlowCalculator\n")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder.resolve()), str(Path(__file__).parent.resolve()), *sys.path])


def main() -> None:
    """Run what is missing, then report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the runs live")
    parser.add_argument("--init", type=Path, required=True, help="checkpoint directory of the base policy")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40, help="of the comparison")
    parser.add_argument("--groups", type=int, default=32, help="per batch, of the comparison")
    parser.add_argument("--old-steps", type=int, default=120, help="of the runs on old samples")
    parser.add_argument("--old-groups", type=int, default=8, help="per batch, of the runs on old samples")
    parser.add_argument("--latency-scale", type=float, default=1.0)
    parser.add_argument("--evaluate", type=int, default=400, help="held-out tasks")
    parser.add_argument("--quick", action="store_true", help="one seed, a few steps, short latencies: does it run?")
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    options = parser.parse_args()
    if options.quick:
        quick = {"seeds": 1, "steps": 4, "groups": 4, "old_steps": 10, "old_groups": 2, "latency_scale": 0.1,
                 "evaluate": 40}
        options = argparse.Namespace(**{**vars(options), **quick})
    install(options.folder)
    results = {name: [train_and_evaluate(name, seed, options) for seed in range(options.seeds)]
               for name in (*MODES, *OLD)}
    rows = rows_of(results, options.latency_scale)
    if not options.json:
        for row in rows:
            bounds = f"[{row.low:.3f}, {row.high:.3f}]" if row.low is not None else ""
            print(f"{row.name:32} {row.value:10.3f} {row.unit:10} {bounds:20} {row.goal or ''}")
    print(json.dumps(results_object("bench_async", rows)))


if __name__ == "__main__":
    main()
