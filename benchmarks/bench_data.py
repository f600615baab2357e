"""How fast documents become batches, and how long training waits for them.

``python benchmarks/bench_data.py [--workers 2] [--steps 40] [--rounds 3]`` prints a table and, as the last line, one
JSON object. Three parts in one run, baseline and candidate alternating, medians over the rounds:

- tokenising the standard library in one process and in ``--workers`` processes (documents and tokens per second; the
  library's own threads are off in both, so that the ratio is that of the processes, start-up included);
- making batches of the nano shape from tokens in one process and taking them from workers (tokens per second);
- training the nano model on the stage ``pretrain``: share of the time that the trainer waits for data, without and with
  a worker. The goal is 1%.

About two minutes on two idle cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import tempfile
import time
from itertools import islice
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # before the library is loaded, here and in the workers

from glm5.config import load_config
from glm5.data.config import CorpusConfig
from glm5.data.loader import Loader, build_shards
from glm5.data.mixture import Mixture
from glm5.data.packing import row_ranges
from glm5.data.prepare import PreparedData, prepare
from glm5.data.selection import Preparation
from glm5.data.sources import read_documents
from glm5.eval.report import Row, results_object
from glm5.runlog import read_jsonl
from glm5.tokenizer import Tokenizer, train_tokenizer
from glm5.train.config import StageConfig
from glm5.train.stages import run_stage

CONFIG = Path(__file__).parents[1] / "configs" / "nano" / "pretrain.toml"
SHARD_CHARS = 1 << 19
BATCHES = 200
WAIT_GOAL = 0.01


def library(tokenizer: Tokenizer, cache: Path) -> PreparedData:
    """The standard library as untokenised shards in a fresh cache."""
    preparation = Preparation(corpora=(CorpusConfig(sources=("stdlib",)),), length=256, shard_chars=SHARD_CHARS)
    return prepare(preparation, tokenizer, cache)


def tokenising(tokenizer: Tokenizer, root: Path, workers: int, rounds: int) -> tuple[list[Row], PreparedData]:
    """Rows of the first part, and the tokenised library."""
    seconds: dict[int, list[float]] = {0: [], workers: []}
    for number in range(rounds):
        for count in seconds:
            prepared = library(tokenizer, root / f"{number}-{count}")
            started = time.perf_counter()
            build_shards(prepared.pending("train"), count)
            seconds[count].append(time.perf_counter() - started)
    ((dataset, _),) = prepared.datasets("train")
    documents = int(prepared.facts["text"]["copies"])
    rows = []
    for name, amount in (("documents", documents), ("tokens", dataset.num_tokens)):
        one, many = (amount / statistics.median(seconds[count]) for count in (0, workers))
        rows.append(Row(name=f"tokenise.{name}_per_s", value=many, unit=f"{name}/s", n=rounds, baseline=one,
                        ratio=many / one))
    return rows, prepared


def packing(prepared: PreparedData, config: StageConfig, workers: int, rounds: int) -> Row:
    """Row of the second part: batches per second against a trainer that takes no time at all."""
    source = Mixture(prepared.datasets("train"))
    speed: dict[int, list[float]] = {0: [], workers: []}
    for _ in range(rounds):
        for count, found in speed.items():
            with Loader(source, config.length, config.seed, count, ahead=8) as loader:
                stream = loader.batches(row_ranges(config.batch_rows))
                next(stream)
                started = time.perf_counter()
                tokens = sum(batch.ids_BT.numel() for batch in islice(stream, BATCHES))
                found.append(tokens / (time.perf_counter() - started))
    one, many = (statistics.median(speed[count]) for count in (0, workers))
    return Row(name="pack.tokens_per_s", value=many, unit="tokens/s", n=rounds, baseline=one, ratio=many / one)


def waiting(tokenizer_dir: Path, root: Path, steps: int) -> list[Row]:
    """Rows of the third part: the share of a nano pre-training stage in which it waits."""
    rows = []
    for workers in (0, 1):
        base = load_config(StageConfig, CONFIG, [f"steps={steps}", f"checkpoint_every={steps}", "max_minutes=0",
                                                 "schedule.warmup_steps=0", "data.held_out_rows=0"])
        config = dataclasses.replace(base, tokenizer=str(tokenizer_dir),
                                     data=dataclasses.replace(base.data, workers=workers))
        run_dir = root / f"wait-{workers}" / "pretrain"
        run_stage(config, run_dir)
        finished = read_jsonl(run_dir / "events.jsonl")[-1]
        share = finished["data_wait_s"] / (finished["data_wait_s"] + finished["train_s"])
        later = statistics.median(record["data_wait"] for record in read_jsonl(run_dir / "metrics.jsonl")[1:])
        rows += [Row(name=f"data_wait.workers{workers}", value=share, unit="share", n=steps, goal=WAIT_GOAL,
                     met=share < WAIT_GOAL if workers == 0 else None),
                 Row(name=f"data_wait.workers{workers}.after_first_step", value=later, unit="share", n=steps - 1,
                     goal=WAIT_GOAL, met=later < WAIT_GOAL)]
    return rows


def main() -> None:
    """Run the three parts and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        tokenizer = train_tokenizer((document.text for document in read_documents(["stdlib"])), 1024)
        tokenizer.save(root / "tokenizer")
        config = load_config(StageConfig, CONFIG)
        rows, prepared = tokenising(tokenizer, root, options.workers, options.rounds)
        rows.append(packing(prepared, config, options.workers, options.rounds))
        rows += waiting(root / "tokenizer", root, options.steps)
    for row in rows:
        baseline = f"  one process {row.baseline:.4g}, ratio {row.ratio:.2f}" if row.ratio is not None else ""
        print(f"{row.name:36} {row.value:12.4g} {row.unit}{baseline}")
    print(json.dumps(results_object("bench_data", rows)))


if __name__ == "__main__":
    main()
