"""What INT4 quantisation-aware training is worth: nano from random weights, then the same steps with and without it.

``python benchmarks/bench_qat.py WORKDIR [--pretrain-steps 240] [--steps 160] [--seeds 1]`` trains a tokenizer and, for
each seed, a nano model on the Python standard library, continues it twice on the same batches at the same rates, once
plainly and once with ``quantization`` set, and exports both as INT4 (experts, attention and dense layers, groups of
128, inputs rounded to 8 bits). It prints the held-out losses and, as the last line, one JSON object. Stages that are
finished in WORKDIR are not run again. About 5 minutes a seed on two idle cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from pathlib import Path

from glm5.data.sources import read_documents
from glm5.eval.quantization import CalibrationConfig, quantise_directory
from glm5.eval.report import Row, results_object
from glm5.model.quantize.plan import QuantisationPlan
from glm5.tokenizer.bpe import train_tokenizer
from glm5.train.config import DataConfig, OptimizerConfig, ScheduleConfig, StageConfig
from glm5.train.stages import run_stage

SOURCES = ("stdlib",)
PLAN = QuantisationPlan(experts="int4", attention="int4", mlp="int4")
LENGTH = 128
"""Not longer than ``index_topk`` of nano, so that sparse attention sees every key and the indexer needs no training."""


def stage(name: str, steps: int, seed: int, tokenizer: Path, init: str, lr: float, plan: QuantisationPlan | None
          ) -> StageConfig:
    """One language-model stage: rows of ``LENGTH`` tokens, no multi-token prediction."""
    return StageConfig(
        stage="pretrain", name=name, init=init, tokenizer=str(tokenizer), steps=steps, batch_rows=8, length=LENGTH,
        mtp_steps=0, seed=seed, bias_rate=0.01, checkpoint_every=80, quantization=plan,
        data=DataConfig(sources=SOURCES, held_out_rows=0), optimizer=OptimizerConfig(lr=lr),
        schedule=ScheduleConfig(kind="linear", warmup_steps=20 if init == "random" else 0, final=0.1))


def measure(work: Path, seed: int, pretrain_steps: int, steps: int) -> dict[str, float]:
    """Held-out losses of one seed, by row name."""
    tokenizer = work / "tokenizer"
    if not (tokenizer / "tokenizer.json").exists():
        train_tokenizer((document.text for document in read_documents(SOURCES)), 1024).save(tokenizer)
    run_stage(stage("start", pretrain_steps, seed, tokenizer, "random", 8e-3, None), work / f"{seed}" / "start")
    losses = {}
    text = CalibrationConfig(sources=SOURCES, rows=64, length=LENGTH)
    for name, plan in (("plain", None), ("qat", PLAN)):
        config = stage(name, steps, seed, tokenizer, "stage:start", 3e-3, plan)
        checkpoint = run_stage(config, work / f"{seed}" / name)
        choices = {} if plan else {field.name: getattr(PLAN, field.name) for field in dataclasses.fields(PLAN)}
        for kind, rotation, scaling in (("", "none", False), (".transformed", "folded", True)):
            if plan and kind:
                continue  # transforms would move the weights off the levels of the training
            rows = quantise_directory(checkpoint, work / f"{seed}" / f"{name}{kind}-int4", choices, rotation, scaling,
                                      text)
            values = {row.name: row.value for row in rows}
            losses[f"{name}.float"] = values["quantize.loss.original"]
            losses[f"{name}.int4{kind}"] = values["quantize.loss.quantized"]
    return losses


def main() -> None:
    """Train, export, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--pretrain-steps", type=int, default=240)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    seeds = [measure(options.work, seed, options.pretrain_steps, options.steps) for seed in range(options.seeds)]
    means = {name: statistics.mean(losses[name] for losses in seeds) for name in seeds[0]}
    rows = [Row(name=f"qat.loss.{name}", value=value, unit="nats/token", n=len(seeds)) for name, value in means.items()]
    lost = {name: means[name] - means["plain.float"] for name in ("plain.int4", "plain.int4.transformed", "qat.int4")}
    rows += [Row(name=f"qat.lost.{name}", value=value, unit="nats/token", n=len(seeds)) for name, value in lost.items()]
    wins = sum(losses["qat.int4"] < losses["plain.int4"] for losses in seeds)
    rows.append(Row(name="qat.gain", value=means["plain.int4"] - means["qat.int4"], unit="nats/token", n=len(seeds),
                    goal="above 0 for every seed", met=wins == len(seeds)))
    for row in rows:
        print(f"{row.name:36} {row.value:9.4f} {row.unit}")
    print(json.dumps(results_object("bench_qat", rows)))


if __name__ == "__main__":
    main()
