"""Training stages: from a ``StageConfig`` to a checkpoint. What differs between stages is data here, not code.

``run_stage`` builds model, data and optimizer, continues from the newest complete checkpoint of the run directory if
there is one, runs the loop, and scores held-out text before the first and after the last step (events ``held_out``).
The run directory gets config.json, metrics.jsonl, events.jsonl, checkpoints/ and, when finished, final.json; runs of
one pipeline lie beside each other and share ``token-cache/``.

Invariants: held-out files are the same in every stage, so no stage trains on what another one is scored on; parameters
that a stage does not train have no optimizer state and are bit-identical afterwards.
"""

from __future__ import annotations

import dataclasses
import json
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import nn

from glm5.data.config import CorpusConfig
from glm5.data.conversations import ConversationDataset, read_conversations, render_conversation
from glm5.data.loader import Loader, build_shards
from glm5.data.long_context import RecallSource
from glm5.data.mixture import Mixture
from glm5.data.packing import Batch, RowSource, batches, row_ranges
from glm5.data.prepare import Preparation, PreparedData, prepare
from glm5.data.preview import show_row, summary_rows, view_row
from glm5.data.shards import Shard
from glm5.device import peak_memory_bytes
from glm5.errors import CheckpointError, ConfigError
from glm5.model.checkpoint import load_model
from glm5.model.config import preset
from glm5.model.dense import DenseCausalLM, is_dense
from glm5.model.families import CausalLM, load_causal_lm
from glm5.model.quantize.fake import rounded
from glm5.model.quantize.plan import trained_for
from glm5.model.transformer import GlmMoeDsaForCausalLM
from glm5.process import lock_directory
from glm5.runlog import RunLog
from glm5.tokenizer.bpe import Tokenizer, load_tokenizer
from glm5.tokenizer.fit import require_same_tokenizer
from glm5.train.checkpoint import TrainerState, final_checkpoint, latest_checkpoint, load_trainer_state, mark_final
from glm5.train.config import DataConfig, StageConfig
from glm5.train.guard import replay, replay_weights
from glm5.train.loop import Evaluate, Training, objective_of
from glm5.train.parallel.layout import Layout, connect
from glm5.train.parallel.spread import Spread
from glm5.train.schedules import rows_of_step
from glm5.train.scoring import load_scorer

_SPLIT_SEED = 0
_HELD_OUT_BATCH_ROWS = 8
_HOW_NOT_WHAT = {"workers", "ahead"}
"""Keys of the data that change how rows are made, not which."""


def run_stage(config: StageConfig, run_dir: Path, evaluate: Evaluate | None = None) -> Path:
    """Run one stage to its end, or continue it; give the checkpoint that it hands on.

    ``evaluate`` is called every ``evaluation.every`` steps with the model and the step and gives named numbers; with
    ``evaluation.patience`` it decides when to stop and which checkpoint is the best. A finished run is returned as it
    is. Raises ConfigError, DataError, CheckpointError, or ServiceError when another process runs there, in one line.
    """
    finished = final_checkpoint(run_dir)
    if finished is not None:
        _require_same_config(config, run_dir)
        return finished
    with connect(config.parallel, config.device) as layout:
        with lock_directory(run_dir) if layout.is_first else nullcontext():
            return _train(config, run_dir, layout, evaluate)


def _train(config: StageConfig, run_dir: Path, layout: Layout, evaluate: Evaluate | None) -> Path:
    latest = latest_checkpoint(run_dir)
    if latest:
        _require_same_data(config, run_dir)
    start = latest or resolve_init(config.init, run_dir)
    if start and config.tokenizer:
        require_same_tokenizer(start, Path(config.tokenizer))
    tokenizer_dir = start or Path(config.tokenizer)
    tokenizer = load_tokenizer(tokenizer_dir)
    model = _start_model(config, start, tokenizer)
    if isinstance(model, DenseCausalLM):
        _check_dense(config, layout)
    else:
        layout.check(config, model.config)
    cache_dir = run_dir.parent / "token-cache"
    with layout.first_alone():  # the others find what it prepares
        train_rows = training_rows(config, tokenizer, cache_dir)
        held_out = held_out_batches(config.data, config.length, tokenizer, cache_dir)
    log = RunLog(run_dir, writes=layout.is_first)
    log.write_config(config)

    if not isinstance(model, DenseCausalLM):
        model.config = trained_for(model.config, config.quantization)
    # The workers start and tokenise while the model is made and scored.
    shards = untokenised_shards(config, tokenizer, cache_dir) if layout.is_first else ()
    with Loader(train_rows, config.length, config.seed, config.data.workers, config.data.ahead, shards) as loader:
        freeze(model, config)
        parameters = _count(model)
        spread = Spread(model, layout, config.parallel)
        optimizer = spread.optimizer(config.optimizer)
        state = load_trainer_state(latest, optimizer) if latest else TrainerState()
        log.event("stage_started", step=state.step, init=str(start or "random"), parameters=parameters,
                  processes=layout.size)
        if state.step == 0:
            report_held_out(log, "initial", spread, config, held_out, tokenizer)
        training = Training(config, run_dir, model, optimizer, state, tokenizer_dir, evaluate, spread)
        final = training.run(loader.batches(row_ranges(partial(rows_of_step, config), state.data_step, layout.row_part,
                                                    layout.row_parts)))
    report_held_out(log, "final", spread, config, held_out, tokenizer)
    log.event("stage_finished", step=training.state.step, tokens=training.state.tokens, checkpoint=final.name,
              train_s=training.state.elapsed_s, skipped=training.state.skipped, data_wait_s=training.data_wait_s,
              peak_memory_bytes=peak_memory_bytes(layout.device))
    if layout.is_first:
        mark_final(run_dir, final)
    layout.wait()
    return final


def replay_step(config: StageConfig, run_dir: Path, step: int) -> list[dict[str, Any]]:
    """Run the batch of a step that the guard refused again, row by row; give result rows. Raises CheckpointError."""
    init = resolve_init(config.init, run_dir)
    weights = replay_weights(run_dir, step, init)
    model = load_model(weights, dtype=torch.float32, config_overrides=config.model if weights == init else None)
    with rounded(model, config.quantization):
        return replay(run_dir, step, objective_of(config), model, int(weights.name) if weights != init else 0)


def _start_model(config: StageConfig, start: Path | None, tokenizer: Tokenizer) -> CausalLM:
    """The weights to begin or go on with, in fp32 whatever the checkpoint stores: a step of 1e-5 is below the
    resolution of bf16."""
    if start is None:
        return fresh_model(config, tokenizer)
    if is_dense(start):
        return load_causal_lm(start, dtype=torch.float32)
    return load_model(start, dtype=torch.float32, config_overrides=config.model)


def resolve_init(init: str, run_dir: Path) -> Path | None:
    """Directory that ``init`` names, None for random weights. Raises ConfigError or CheckpointError."""
    if init == "random":
        return None
    prefix, separator, name = init.partition("stage:")
    if separator and not prefix:
        final = final_checkpoint(run_dir.parent / name)
        if final is None:
            raise ConfigError(f"init={init!r}: {run_dir.parent / name} holds no finished run; run stage {name!r} first")
        return final
    if not (Path(init) / "config.json").is_file():
        raise CheckpointError(f"init={init!r}: no config.json there; give a checkpoint directory, stage:NAME or random")
    return Path(init)


def fresh_model(config: StageConfig, tokenizer: Tokenizer) -> GlmMoeDsaForCausalLM:
    """Random weights in the shape of the preset, with the special ids of ``tokenizer``. Raises CheckpointError."""
    special = {"eos_token_id": tokenizer.stop_ids, "pad_token_id": tokenizer.pad_id}
    shape = preset(config.preset).replace(**{**special, **config.model})
    if tokenizer.vocab_size > shape.vocab_size:
        raise CheckpointError(f"{config.tokenizer}: the tokenizer has {tokenizer.vocab_size} ids, the model vocab_size="
                              f"{shape.vocab_size}; raise model.vocab_size or train a smaller tokenizer")
    return GlmMoeDsaForCausalLM(shape, generator=torch.Generator().manual_seed(config.seed))


def _check_dense(config: StageConfig, layout: Layout) -> None:
    """Raise ConfigError for what a dense model of Transformers cannot do here."""
    wrong = {"model": config.model, "mtp_steps": config.mtp_steps, "train_indexer": config.trains_indexer,
             "quantization": config.quantization, "processes": layout.size - 1,
             "parallel.activation_checkpointing": config.parallel.activation_checkpointing}
    for name, value in wrong.items():
        if value:
            raise ConfigError(f"{name}: a Llama or Qwen checkpoint is trained whole, in one process, without indexers "
                              "and multi-token prediction; leave it out")


def freeze(model: CausalLM, config: StageConfig) -> None:
    """Let exactly those parameters require a gradient that the stage trains."""
    if isinstance(model, DenseCausalLM):
        model.requires_grad_(True)
        return
    mtp_prefix = f"model.layers.{model.config.num_hidden_layers}."
    if config.mtp_steps and not model.config.num_nextn_predict_layers:
        raise ConfigError(f"mtp_steps={config.mtp_steps} but the model has no MTP layer; set mtp_steps = 0")
    for name, parameter in model.named_parameters():
        reached = config.mtp_steps > 0 or not name.startswith(mtp_prefix)
        trained = config.trains_indexer if ".indexer." in name else config.recipe.trains_main
        parameter.requires_grad_(reached and trained)


def training_rows(config: StageConfig, tokenizer: Tokenizer, cache_dir: Path) -> RowSource:
    """Rows of the stage, by random access."""
    data = config.data
    if config.recipe.conversations:
        samples = [render_conversation(conversation, tokenizer, declare_tools=data.declare_tools)
                   for path in data.conversations for conversation in read_conversations(path)]
        return ConversationDataset(samples, config.length, tokenizer.pad_id)
    text = Mixture(prepare_documents(data, config.length, tokenizer, cache_dir).datasets("train"))
    if not data.recall_fraction:
        return text
    recall = RecallSource(tokenizer, data.recall_kinds, haystack=text)
    return Mixture([(text, 1 - data.recall_fraction), (recall, data.recall_fraction)])


def prepare_documents(data: DataConfig, length: int, tokenizer: Tokenizer, cache_dir: Path) -> PreparedData:
    """The filtered documents of a stage on disk, split into training and held-out files."""
    corpora = data.corpora or (CorpusConfig(sources=data.sources),)
    preparation = Preparation(corpora=corpora, dedup=data.dedup, length=length, split_seed=_SPLIT_SEED,
                              held_out_fraction=data.held_out_fraction, shard_chars=data.shard_chars)
    return prepare(preparation, tokenizer, cache_dir, load_scorer)


def untokenised_shards(config: StageConfig, tokenizer: Tokenizer, cache_dir: Path) -> list[Shard]:
    """What the data workers tokenise beside training; without workers everything is tokenised now."""
    if config.recipe.conversations:
        return []
    pending = prepare_documents(config.data, config.length, tokenizer, cache_dir).pending("train")
    if config.data.workers:
        return pending
    for shard in pending:
        shard.build()
    return []


def prepare_stage(config: StageConfig, tokenizer: Tokenizer, run_dir: Path) -> list[dict[str, Any]]:
    """Filter and tokenise everything that a stage reads; give the counts as result rows."""
    if config.recipe.conversations:
        raise ConfigError(f"stage={config.stage!r} reads conversations when it starts; there is nothing to prepare")
    cache_dir = run_dir.parent / "token-cache"
    prepared = prepare_documents(config.data, config.length, tokenizer, cache_dir)
    build_shards([*prepared.pending("train"), *prepared.pending("held_out")], config.data.workers)
    tokens = {part: sum(shards.num_tokens for shards, _ in prepared.datasets(part)) for part in ("train", "held_out")}
    return [*prepared.rows(), *({"name": f"data.tokens.{part}", "value": count, "unit": "tokens"}
                                for part, count in tokens.items())]


def inspect_stage(config: StageConfig, tokenizer: Tokenizer, run_dir: Path, steps: range,
                  out: TextIO) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Write the batches of ``steps`` to ``out`` for people; give result rows, and every row's documents as objects."""
    source = training_rows(config, tokenizer, run_dir.parent / "token-cache")
    rows, shown = [], []
    for step in steps:
        for index, number in enumerate(next(row_ranges(partial(rows_of_step, config), step))):
            row = source.row(number, config.length, config.seed)
            views = view_row(row, tokenizer)
            print(*show_row(row, views, f"step {step} row {index}"), sep="\n", file=out)
            rows.append(row)
            shown.append({"step": step, "row": index, "documents": [dataclasses.asdict(view) for view in views]})
    return summary_rows(rows), shown


def held_out_batches(data: DataConfig, length: int, tokenizer: Tokenizer, cache_dir: Path) -> list[Batch]:
    """``held_out_rows`` rows of ``length`` tokens of held-out files, always the same ones."""
    if not data.held_out_rows:
        return []
    parts = prepare_documents(data, length, tokenizer, cache_dir).datasets("held_out")
    rows = min(data.held_out_rows, sum(dataset.num_rows(length) for dataset, _ in parts))
    stream = batches(Mixture(parts), _HELD_OUT_BATCH_ROWS, length)
    return [next(stream) for _ in range(-(-rows // _HELD_OUT_BATCH_ROWS))]


def report_held_out(log: RunLog, when: str, spread: Spread, config: StageConfig, held_out: list[Batch],
                    tokenizer: Tokenizer) -> None:
    """Score ``held_out`` with dense attention, and with sparse where the stage has trained for it, as events."""
    if not held_out:
        return
    text_bytes = sum(_label_bytes(batch, tokenizer) for batch in held_out)
    for attention in ("dense", "sparse") if config.recipe.trains_indexer else ("dense",):
        started = time.perf_counter()
        with rounded(spread.model, config.quantization):
            result = spread.evaluate(held_out, attention)
        log.event("held_out", when=when, attention=attention, nats_per_token=result.nats_per_token,
                  bits_per_byte=result.bits_per_byte(text_bytes / max(result.tokens, 1)), tokens=result.tokens,
                  bytes=text_bytes, seconds=time.perf_counter() - started)


def _label_bytes(batch: Batch, tokenizer: Tokenizer) -> int:
    """UTF-8 bytes of the text that the labels of ``batch`` stand for; the end of a document stands for none."""
    labels = [row[1:][mask[:-1]].tolist() for row, mask in zip(batch.ids_BT, batch.loss_mask_BT, strict=True)]
    return sum(len(tokenizer.decode(ids, skip_special=True).encode()) for ids in labels)


def _require_same_config(config: StageConfig, run_dir: Path) -> None:
    """A finished run of other settings is not what was asked for; where it ran changes nothing in it."""
    try:
        before: dict[str, Any] = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    now = json.loads(json.dumps(dataclasses.asdict(config), default=str))
    keys = (before.keys() & now.keys()) - {"parallel", "device"}  # a key that did not exist then had its default
    changed = sorted(key for key in keys if before[key] != now[key])
    if changed:
        raise ConfigError(f"{run_dir}: holds a finished run with another value of {changed[0]}; choose another run "
                          "directory or remove this one")


def _require_same_data(config: StageConfig, run_dir: Path) -> None:
    """An unfinished run goes on with the rows that follow: what decides their order must not have changed."""
    try:
        before: dict[str, Any] = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    now = json.loads(json.dumps(dataclasses.asdict(config), default=str))
    for old, new, where, keys in ((before, now, "", ("stage", "length", "seed", "batch_rows", "batch_ramp")),
                                  (before.get("data", {}), now["data"], "data.", now["data"].keys() - _HOW_NOT_WHAT)):
        changed = sorted(key for key in keys if key in old and old[key] != new[key])
        if changed:
            key = changed[0]
            raise ConfigError(f"{run_dir}: holds an unfinished run with {where}{key}={old[key]!r}, now {new[key]!r}, "
                              "which would skip or repeat rows; set it back or choose another run directory")


def _count(model: nn.Module) -> dict[str, int]:
    return {"total": sum(parameter.numel() for parameter in model.parameters()),
            "trained": sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)}
