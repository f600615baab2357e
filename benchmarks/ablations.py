"""Ablations of the training recipe on the nano model: three seeds, the same tokens for every variant.

``python benchmarks/ablations.py FOLDER [--scale 1.0] [--seeds 3] [--processes 2] [--only TEXT]``

Every training run is a stage with a run directory of its own below ``FOLDER/SEED/``: a run that is finished is not run
again, one that was interrupted goes on, so the command can be stopped and started at any time. Runs that need nothing
of each other share ``--processes`` processes of one thread. ``--scale`` multiplies the steps of every stage; at 1.0 all
takes about 40 minutes on two idle cores. Writes ``FOLDER/ablations.md`` (a table) and prints it; the last line is one
JSON object whose rows are ``ablation.VARIANT.METRIC``: the mean over the seeds; the table has smallest and largest too.

What is compared:

- ``optimizer.*``: pre-training with Muon Split, plain Muon, AdamW (at a rate of its own, picked by hand).
- ``mtp.*``: one or three multi-token steps with shared parameters; tokens kept per verification of 4 drafts.
- ``rope.*``: mid-training on longer rows with the RoPE base raised to 1e6 or left.
- ``dsa.*``: from the same mid-trained model: dense attention, trained for as many tokens as sparse training has; sparse
  attention after the indexer's warm-up only; sparse attention after sparse training. Held-out loss at 4 x
  ``index_topk`` tokens, and needles.

A needle row is held-out text with one fact at a random depth of its first half and the question at the end; counted are
the answer's tokens that are the model's first choice, and their loss.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from glm5.data.packing import Batch, collate, make_row
from glm5.data.sources import read_documents
from glm5.engine.speculative import mtp_acceptance
from glm5.eval.report import Row, results_object
from glm5.model.checkpoint import load_model
from glm5.model.config import preset
from glm5.runlog import read_jsonl, write_atomic
from glm5.tokenizer.bpe import Tokenizer, load_tokenizer, train_tokenizer
from glm5.train.checkpoint import final_checkpoint
from glm5.train.config import DataConfig, OptimizerConfig, ScheduleConfig, StageConfig
from glm5.train.losses import token_logprobs
from glm5.train.stages import held_out_batches, run_stage

TOPK = preset("nano").index_topk
LONG = 4 * TOPK
NEEDLES = 256
DRAFTS = 4
RAISED = {"rope_parameters": {"rope_theta": 1_000_000, "rope_type": "default"}}
DATA = DataConfig(sources=("stdlib",), held_out_rows=64)
MUON = OptimizerConfig(lr=8e-3)
LINE, FLAT = ScheduleConfig(kind="linear", final=0.25), ScheduleConfig(kind="constant")


@dataclass(frozen=True)
class Run:
    """One training run of every seed."""

    name: str
    config: StageConfig
    after: str | None = None
    """The run whose final checkpoint it starts from."""


@dataclass(frozen=True)
class Variant:
    """One line of the table: which run, read with which attention."""

    name: str
    run: str
    attention: str
    metrics: tuple[str, ...]


def runs(scale: float, tokenizer: Path) -> tuple[Run, ...]:
    """Every run, each after the one that it needs."""
    def config(stage: str, name: str, steps: int, length: int, optimizer: OptimizerConfig, schedule: ScheduleConfig,
               mtp_steps: int = 1, recall: float = 0.0, **changes: object) -> StageConfig:
        data = dataclasses.replace(DATA, recall_fraction=recall)
        return StageConfig(stage=stage, name=name, init="random", tokenizer=str(tokenizer), preset="nano", data=data,
                           steps=max(4, round(steps * scale)), length=length, batch_rows=8, mtp_steps=mtp_steps,
                           optimizer=optimizer, schedule=schedule, bias_rate=0.01, checkpoint_every=80, log_every=10,
                           **changes)

    cosine = ScheduleConfig(kind="cosine", warmup_steps=min(20, max(4, round(480 * scale))), final=0.2)
    optimizers = {"split": MUON, "muon": dataclasses.replace(MUON, muon_split=False),
                  "adamw": OptimizerConfig(lr=3e-3, kind="adamw")}
    pretrain = [Run(name, config("pretrain", name, 480, 256, optimizer, cosine))
                for name, optimizer in optimizers.items()]
    pretrain.append(Run("mtp3", config("pretrain", "mtp3", 480, 256, MUON, cosine, mtp_steps=3)))
    middle = dataclasses.replace(MUON, lr=1.6e-3)
    midtrain = [Run("raised", config("midtrain", "raised", 160, LONG, middle, LINE, recall=0.3, model=RAISED), "split"),
                Run("kept", config("midtrain", "kept", 160, LONG, middle, LINE, recall=0.3), "split")]
    late = OptimizerConfig(lr=4e-4, indexer_lr=1e-3)
    warm = OptimizerConfig(lr=5e-3)
    adapted = [Run("dense", config("midtrain", "dense", 80, LONG, late, FLAT, recall=0.3), "raised"),
               Run("warmup", config("dsa-warmup", "warmup", 60, LONG, warm, ScheduleConfig(kind="linear", final=0.04),
                                    recall=0.3), "raised"),
               Run("sparse", config("dsa-sparse", "sparse", 80, LONG, late, FLAT, recall=0.3), "warmup")]
    return (*pretrain, *midtrain, *adapted)


VARIANTS = (
    Variant("optimizer.muon_split", "split", "dense", ("loss",)),
    Variant("optimizer.muon", "muon", "dense", ("loss",)),
    Variant("optimizer.adamw", "adamw", "dense", ("loss",)),
    Variant("mtp.shared_x1", "split", "dense", ("loss", "acceptance_length")),
    Variant("mtp.shared_x3", "mtp3", "dense", ("loss", "acceptance_length")),
    Variant("rope.raised", "raised", "dense", ("long_loss", "needle_accuracy", "needle_loss")),
    Variant("rope.kept", "kept", "dense", ("long_loss", "needle_accuracy", "needle_loss")),
    Variant("dsa.dense", "dense", "dense", ("long_loss", "needle_accuracy", "needle_loss")),
    Variant("dsa.warmup_only", "warmup", "sparse", ("long_loss", "needle_accuracy", "needle_loss")),
    Variant("dsa.sparse", "sparse", "sparse", ("long_loss", "needle_accuracy", "needle_loss")),
)


def train(folder: Path, run: Run, seed: int) -> None:
    """Run or continue one training run in this process."""
    place = folder / str(seed)
    init = "random" if run.after is None else f"stage:{run.after}"
    torch.set_num_threads(1)
    run_stage(dataclasses.replace(run.config, init=init, seed=seed), place / run.name)


def train_all(folder: Path, plan: tuple[Run, ...], seeds: int, processes: int, arguments: list[str]) -> None:
    """Every unfinished run in a process of its own, ``processes`` at a time, each after the one that it needs."""
    ready: dict[str | None, list[Run]] = {}
    for run in plan:
        ready.setdefault(run.after, []).append(run)

    def chain(seed: int, run: Run) -> None:
        if final_checkpoint(folder / str(seed) / run.name) is None:
            command = [sys.executable, __file__, str(folder), *arguments, "--train", run.name, str(seed)]
            subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        for following in ready.get(run.name, ()):
            chain(seed, following)

    with ThreadPoolExecutor(processes) as pool:
        starts = [pool.submit(chain, seed, run) for seed in range(seeds) for run in ready[None]]
        for start in starts:
            start.result()


def needle_batches(tokenizer: Tokenizer, filler: list[int], seed: int) -> Iterator[tuple[Batch, torch.Tensor]]:
    """Rows of LONG tokens cut from ``filler``, and where in each the answer's labels stand (bool [B, T])."""
    generator = np.random.default_rng(seed)
    for _ in range(NEEDLES // 8):
        rows, places = [], []
        for _ in range(8):
            key, value = f"k{generator.integers(100, 1000)}", str(generator.integers(1000, 10000))
            fact = tokenizer.encode(f"\nThe code of {key} is {value}.\n")
            question, answer = tokenizer.encode(f"\nThe code of {key} is "), tokenizer.encode(value)
            room = LONG - len(fact) - len(question) - len(answer)
            begin, depth = int(generator.integers(len(filler) - room)), int(generator.integers(room // 2))
            text = filler[begin : begin + room]
            ids = np.array([*text[:depth], *fact, *text[depth:], *question, *answer])
            rows.append(make_row(ids, np.zeros(LONG, dtype=np.int64), LONG, tokenizer.pad_id))
            places.append(torch.arange(LONG) >= LONG - len(answer) - 1)
            places[-1][-1] = False
        yield collate(rows), torch.stack(places)


@torch.no_grad()
def measure_variant(variant: Variant, checkpoint: Path, run_dir: Path) -> Mapping[str, float]:
    """The metrics of one variant and seed."""
    held_out = [event for event in read_jsonl(run_dir / "events.jsonl")
                if event["kind"] == "held_out" and event["when"] == "final" and event["attention"] == variant.attention]
    values = {"loss": held_out[-1]["nats_per_token"], "long_loss": held_out[-1]["nats_per_token"]}
    model, tokenizer = load_model(checkpoint), load_tokenizer(checkpoint)
    held_out_rows = held_out_batches(DATA, LONG, tokenizer, run_dir.parent / "token-cache")
    rows_BT = torch.cat([batch.ids_BT for batch in held_out_rows])
    if "acceptance_length" in variant.metrics:
        values["acceptance_length"] = mtp_acceptance(model, rows_BT[:, :64].tolist(), drafts=DRAFTS)
    if "needle_accuracy" in variant.metrics:
        right, nats, count = 0, 0.0, 0
        for batch, answers_BT in needle_batches(tokenizer, rows_BT.flatten().tolist(), seed=7):
            hidden_BTD = model.hidden(batch.ids_BT, batch.positions_BT, batch.documents_BT,
                                      attention=variant.attention).hidden_BTD
            hidden_MD, labels = hidden_BTD[answers_BT], batch.ids_BT.roll(-1, 1)[answers_BT]
            right += int((model.lm_head(hidden_MD).argmax(-1) == labels).sum())
            nats -= float(token_logprobs(hidden_MD, model.lm_head.weight, labels).sum())
            count += len(labels)
        values |= {"needle_accuracy": right / count, "needle_loss": nats / count}
    return {name: values[name] for name in variant.metrics}


def measured(folder: Path, variant: Variant, seed: int) -> Mapping[str, float]:
    """``measure_variant``, kept in a file beside the run."""
    run_dir = folder / str(seed) / variant.run
    path = run_dir / f"measured.{variant.name}.json"
    if not path.is_file():
        checkpoint = final_checkpoint(run_dir)
        if checkpoint is None:
            raise SystemExit(f"{run_dir}: not finished; run without --only first")
        write_atomic(path, json.dumps(measure_variant(variant, checkpoint, run_dir)) + "\n")
    values: Mapping[str, float] = json.loads(path.read_text())
    return values


def report(folder: Path, variants: tuple[Variant, ...], seeds: int) -> list[Row]:
    """Rows and the table ``ablations.md``."""
    units = {"acceptance_length": f"tokens per {DRAFTS} drafts", "needle_accuracy": "share"}
    rows, lines = [], [f"| variant | metric | mean of {seeds} seeds | smallest to largest |", "|---|---|---|---|"]
    for variant in variants:
        of_seeds = [measured(folder, variant, seed) for seed in range(seeds)]
        for metric in variant.metrics:
            values = [value[metric] for value in of_seeds]
            mean, unit = statistics.fmean(values), units.get(metric, "nats per token")
            rows.append(Row(name=f"ablation.{variant.name}.{metric}", value=mean, unit=unit, n=seeds))
            spread = f"{min(values):.4f} to {max(values):.4f}"
            lines.append(f"| {variant.name} | {metric} ({unit}) | {mean:.4f} | {spread} |")
    write_atomic(folder / "ablations.md", "\n".join(lines) + "\n")
    print("\n".join(lines))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the steps of every stage")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", default="", help="variants whose name contains this text; nothing is trained")
    parser.add_argument("--train", nargs=2, metavar=("RUN", "SEED"), help="one run, in this process")
    options = parser.parse_args()
    tokenizer = options.folder / "tokenizer"
    if not (tokenizer / "tokenizer.json").is_file():
        texts = (document.text for document in read_documents(("stdlib",)))
        train_tokenizer(texts, preset("nano").vocab_size).save(tokenizer)
    plan = runs(options.scale, tokenizer)
    if options.train:
        name, seed = options.train
        train(options.folder, next(run for run in plan if run.name == name), int(seed))
        return
    if not options.only:
        train_all(options.folder, plan, options.seeds, options.processes, ["--scale", str(options.scale)])
    rows = report(options.folder, tuple(variant for variant in VARIANTS if options.only in variant.name), options.seeds)
    print(json.dumps(results_object("ablations", rows)))


if __name__ == "__main__":
    main()
