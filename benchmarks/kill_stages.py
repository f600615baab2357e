"""``kill -9`` at random moments of every training stage: the loss curve must be that of a run nobody touched.

``python benchmarks/kill_stages.py [--kills 20] [--steps 600] [--stages pretrain …] [--seed 0] [--folder DIR]``

A small model goes through the stages in order, each on the checkpoint of the one before. Each stage runs twice: once
straight, once in processes that are killed after a random time, while they load, train or write a checkpoint, until
``--kills`` of them were hit; then to its end. Compared are all records of ``metrics.jsonl`` (times left out), every
record of a step that was trained twice, and all weights and optimizer tensors of the last checkpoint, bit for bit. The
last line is one JSON object with rows ``kill.STAGE.kills`` and ``kill.STAGE.differences``; exit code 1 when anything
differs or a stage was over before all kills.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from glm5.eval.report import Row, results_object
from glm5.model.config import preset
from glm5.runlog import read_jsonl
from glm5.tokenizer.bpe import train_tokenizer
from glm5.train.checkpoint import final_checkpoint
from glm5.train.config import RECIPES, DataConfig, OptimizerConfig, ScheduleConfig, StageConfig
from glm5.train.stages import run_stage

STAGES = tuple(RECIPES)
LENGTH = 48
MODEL = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 2,
         "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 16, "kv_lora_rank": 12,
         "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8, "n_routed_experts": 4, "index_n_heads": 16,
         "index_head_dim": 8, "index_topk": 8, "vocab_size": 320}
TIMES = ("time", "tokens_per_s", "data_wait")
"""Keys of a metrics record that depend on the clock."""


def write_world(folder: Path) -> None:
    """A corpus, a tokenizer and conversations."""
    corpus = folder / "corpus"
    corpus.mkdir(parents=True)
    for number in range(8):
        (corpus / f"{number}.txt").write_text(" ".join(f"word{(number * 7 + k) % 23} = value({k});" for k in range(60)))
    train_tokenizer((path.read_text() for path in sorted(corpus.iterdir())), 310).save(folder / "tokenizer")
    messages = [{"role": "user", "content": "sum"}, {"role": "assistant", "content": "wrong", "erroneous": True},
                {"role": "user", "content": "again"}, {"role": "assistant", "content": "ok"}]
    (folder / "conversations.jsonl").write_text((json.dumps({"messages": messages}) + "\n") * 12)


def stage_config(folder: Path, stage: str, steps: int) -> StageConfig:
    """The stage on this world, from the straight run of the one before."""
    position = STAGES.index(stage)
    init = str(final_checkpoint(folder / "straight" / STAGES[position - 1])) if position else "random"
    data = DataConfig(sources=(str(folder / "corpus"),), held_out_fraction=0.3, held_out_rows=4,
                      conversations=(str(folder / "conversations.jsonl"),))
    if RECIPES[stage].conversations:
        data = DataConfig(conversations=data.conversations, held_out_rows=0)
    shape = {key: value for key, value in preset("nano").replace(**MODEL).to_json().items() if key in MODEL}
    return StageConfig(stage=stage, name=stage, init=init, tokenizer=str(folder / "tokenizer"),
                       model={} if position else shape, steps=steps, batch_rows=4, micro_rows=2, length=LENGTH,
                       mtp_steps=2, checkpoint_every=3, data=data, optimizer=OptimizerConfig(lr=3e-3),
                       schedule=ScheduleConfig(kind="cosine", warmup_steps=5))


def start(config: StageConfig, run_dir: Path) -> int:
    """A process that runs the stage; its id."""
    child = os.fork()
    if child:
        return child
    try:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - the progress bar of a process that is about to die
        run_stage(config, run_dir)
        os._exit(0)
    except BaseException as error:
        print(f"{config.stage}: {error!r}", file=sys.__stderr__)
        os._exit(1)


def finish(child: int) -> None:
    """Wait for the end of a process that must succeed."""
    _, status = os.waitpid(child, 0)
    if status:
        raise SystemExit(f"a run that nobody killed ended with status {status}")


def is_running(child: int) -> bool:
    """Whether the process still runs; one that failed ends this command."""
    done, status = os.waitpid(child, os.WNOHANG)
    if done and status:
        raise SystemExit(f"a resumed run ended with status {status}")
    return not done


def kill_until(config: StageConfig, run_dir: Path, kills: int, straight_s: float, generator: random.Random) -> int:
    """Start the stage and kill it after a random time, until ``kills`` processes were hit or the stage was faster."""
    for hit in range(kills):
        child = start(config, run_dir)
        time.sleep(generator.uniform(0.02, 2.0 * straight_s / kills))
        if not is_running(child):
            return hit
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    finish(start(config, run_dir))
    return kills


def curve(run_dir: Path) -> tuple[dict[int, dict[str, Any]], int]:
    """Records by step, and how many records contradict an earlier one of the same step."""
    points: dict[int, dict[str, Any]] = {}
    contradictions = 0
    for record in read_jsonl(run_dir / "metrics.jsonl"):
        point = {key: value for key, value in record.items() if key not in TIMES}
        contradictions += points.setdefault(record["step"], point) != point
    return points, contradictions


def count_differences(straight: Path, killed: Path) -> int:
    """Steps and tensors in which the two runs differ."""
    (ours, _), (theirs, contradictions) = curve(straight), curve(killed)
    differences = contradictions + sum(ours.get(step) != theirs.get(step) for step in ours.keys() | theirs.keys())
    name = json.loads((straight / "final.json").read_text())["checkpoint"]
    for file in ("model.safetensors", "trainer/optimizer.safetensors"):
        first, second = (load_file(run / "checkpoints" / name / file) for run in (straight, killed))
        differences += sum(key not in second or not torch.equal(first[key], second[key]) for key in first)
    return differences


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--stages", nargs="*", default=STAGES, choices=STAGES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="keep everything here; it must not exist")
    options = parser.parse_args()
    torch.set_num_threads(1)  # a forked process must not wait for threads that it does not have
    generator, rows = random.Random(options.seed), []
    with tempfile.TemporaryDirectory(prefix="glm5-kill-") as temporary:
        folder = options.folder or Path(temporary)
        write_world(folder)
        for stage in STAGES[: max(map(STAGES.index, options.stages)) + 1]:
            config, straight = stage_config(folder, stage, options.steps), folder / "straight" / stage
            started = time.monotonic()
            finish(start(config, straight))
            if stage not in options.stages:
                continue
            killed = folder / "killed" / stage
            kills = kill_until(config, killed, options.kills, time.monotonic() - started, generator)
            differences = count_differences(straight, killed)
            points, _ = curve(straight)
            print(f"{stage}: {kills} kills, {len(points)} steps, {differences} differences", file=sys.stderr)
            rows += [Row(name=f"kill.{stage}.kills", value=kills, unit="kills", goal=options.kills,
                         met=kills >= options.kills),
                     Row(name=f"kill.{stage}.differences", value=differences, unit="steps and tensors", n=len(points),
                         goal=0, met=differences == 0)]
    print(json.dumps(results_object("kill_stages", rows)))
    sys.exit(not all(row.met for row in rows))


if __name__ == "__main__":
    main()
