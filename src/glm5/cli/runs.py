"""Commands that train: whole pipelines, one stage, reinforcement learning; their results and benchmarks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from glm5.cli.options import AsJson, Device, Host, Overrides, Port, ReadyFile, default_run_dir, print_results


def run(config: Path, overrides: Overrides = None) -> None:
    """Run a whole pipeline: tokenizer, every training stage, RL, evaluation, report. Continues where it stopped."""
    from glm5.pipeline import run_pipeline

    print(run_pipeline(config, overrides or []))


def train(config: Path, run_dir: Annotated[Path | None, typer.Option(help="Run directory.")] = None,
          replay: Annotated[int, typer.Option(help="Run the batch of this skipped step again, row by row.")] = 0,
          device: Device = None, overrides: Overrides = None) -> None:
    """Run one training stage up to SFT. Continues from its newest complete checkpoint.

    On several processes: torchrun --nproc-per-node N -m glm5 train ...
    """
    from glm5.config import load_config
    from glm5.train.config import StageConfig
    from glm5.train.stages import replay_step, run_stage

    stage = load_config(StageConfig, config, [*(overrides or []), *([f"device={device}"] if device else [])])
    directory = run_dir or default_run_dir(config, stage.name)
    if replay:
        print_results(f"train --replay {replay}", replay_step(stage, directory, replay))
        return
    final = run_stage(stage, directory)
    if os.environ.get("RANK", "0") == "0":  # one of the processes that torchrun starts
        print(final)


def rl(config: Path, run_dir: Annotated[Path | None, typer.Option(help="Run directory.")] = None,
       compare_sync: Annotated[bool, typer.Option("--compare-sync", help="Train once asynchronously and once with "
                               'mode = "sync" from the same checkpoint, and compare.')] = False,
       as_json: AsJson = False, overrides: Overrides = None) -> None:
    """Asynchronous reinforcement learning from a checkpoint. Continues from its newest complete checkpoint."""
    from glm5.config import load_config
    from glm5.rl.config import RLConfig
    from glm5.rl.watchdog import is_watched, keep_running

    loaded = load_config(RLConfig, config, overrides or [])
    directory = run_dir or default_run_dir(config, f"{loaded.name}-compare" if compare_sync else loaded.name)
    if loaded.supervision.watch_trainer and not is_watched() and not compare_sync:
        keep_running(["rl", str(config), "--run-dir", str(directory), *(overrides or [])], directory,
                     loaded.supervision)
        return
    from glm5.rl.trainer import compare_modes, run_rl

    if compare_sync:
        from glm5.eval.statistics import wilson_interval

        def bounds(successes: int, n: int) -> tuple[float, float]:
            interval = wilson_interval(successes, n)
            return interval.low, interval.high

        print_results("rl --compare-sync", compare_modes(loaded, directory, bounds), as_json)
    elif loaded.launch == "ray":
        from glm5.rl.launch.cluster import train_on_cluster

        print(train_on_cluster(loaded, directory))
    else:
        print(run_rl(loaded, directory))


def orchestrator(config: Path, run_dir: Annotated[Path, typer.Option(help="Run directory with the ledger.")],
                 gateway_url: Annotated[str, typer.Option(help="URL of the gateway.")],
                 host: Host = "127.0.0.1", port: Port = 8200, ready_file: ReadyFile = None) -> None:
    """Start episodes, group them, pace them; task services register here. Usually started by ``glm5 rl``."""
    from glm5.rl.orchestrator import run_orchestrator

    run_orchestrator(config, run_dir, gateway_url, host, port, ready_file)


def results(first: Path, second: Path) -> None:
    """Show two result files (``report.json``, ``--json`` output) side by side."""
    from glm5.eval.report import compare

    print(compare(first, second))


def bench_train(section: Annotated[list[str] | None, typer.Option(help="transformers, memory, tokens, sparse or "
                                   "scaling; repeat for several, none for all.")] = None,
                rounds: Annotated[int, typer.Option(help="Steps that are timed.")] = 5,
                as_json: AsJson = False) -> None:
    """Training steps against Transformers, tokens per second by model size, sparse attention over 16K tokens, two
    processes against one."""
    from glm5.train.benchmark import SECTIONS, Options, measure

    print_results("bench train", measure(Options(tuple(section or SECTIONS), rounds)), as_json)
