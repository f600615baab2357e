"""``glm5 bench train``: what one optimizer step costs, against Transformers and against itself.

Sections, each by the name of its rows:

- ``train.LENGTH.…``: our step (sparse attention, language-model loss, backward, AdamW) and the same step of
  Transformers' ``GlmMoeDsaForCausalLM`` on the same bf16 checkpoint and batch. The two alternate; a ratio is the median
  of the ratios of neighbouring steps. Ours reads the bf16 weights into fp32 master weights and computes in fp32, which
  is faster on a CPU without bf16 matrix units; Transformers runs in bf16, as loaded, and in fp32 for comparison.
- ``train.peak_memory.LENGTH``: largest resident memory of a process that does nothing but these steps.
- ``tokens_per_s.SIZE``: all losses (MTP and indexers too), Muon, for models of 1M to 100M parameters.
- ``train.sparse.16384.…``: a step of the dsa-sparse stage on one document of 16,384 tokens, nano preset; time per
  token over that of one document of 4,096.
- ``train.scaling.2``: tokens per second of two processes (FSDP2, started by ``torchrun``) over those of one;
  5M model, all losses, Muon, eight rows of 512 tokens a step, one thread per process.

Run on an idle machine: times are wall times.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from glm5.data.packing import Batch, collate, make_row
from glm5.data.sources import read_documents
from glm5.device import HOST, peak_memory_bytes
from glm5.errors import ConfigError
from glm5.model.checkpoint import load_model, save_model
from glm5.model.config import ModelConfig, preset
from glm5.model.counts import parameter_counts
from glm5.model.transformer import GlmMoeDsaForCausalLM
from glm5.train.config import OptimizerConfig, ParallelConfig
from glm5.train.loop import compute_gradients
from glm5.train.losses import Objective
from glm5.train.optimizers import build_optimizer
from glm5.train.parallel.layout import connect
from glm5.train.parallel.rows import part_of_batch
from glm5.train.parallel.spread import Spread

Step = Callable[[], float]
"""One optimizer step; gives its loss."""

SECTIONS = ("transformers", "memory", "tokens", "sparse", "scaling")
GOALS = {512: 2.5, 2048: 5.0}
"""Times faster than Transformers, by length."""
_ROWS = {512: 4, 2048: 1}
_LANGUAGE = Objective(attention="sparse", main=True, indexer=False, mtp_steps=0, mtp_weight=0.0, balance_weight=0.0)
_EVERYTHING = Objective(attention="sparse", main=True, indexer=True, mtp_steps=3, mtp_weight=0.3, balance_weight=1e-4)
_SPARSE = Objective(attention="sparse", main=True, indexer=True, mtp_steps=2, mtp_weight=0.3, balance_weight=1e-4)
_ADAMW = OptimizerConfig(kind="adamw", lr=1e-4, weight_decay=0.0, clip_norm=0.0)
_LONG, _SHORT = 16384, 4096
_MEMORY_GOAL = 4e9
_GROWTH_GOAL = 1.5
_SCALING_STEPS = 3
"""Timed steps of every start."""


def shapes() -> Mapping[str, ModelConfig]:
    """Models by their rough number of parameters, MTP layer included."""
    base = preset("nano")

    def shape(hidden: int, layers: int, heads: int, experts: int, inner: int, vocab_size: int) -> ModelConfig:
        return base.replace(
            vocab_size=vocab_size, hidden_size=hidden, intermediate_size=3 * hidden, moe_intermediate_size=inner,
            num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads, q_lora_rank=hidden // 2,
            kv_lora_rank=hidden // 2, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=64, n_routed_experts=experts,
            num_experts_per_tok=4, index_n_heads=16, index_head_dim=64, index_topk=256, max_position_embeddings=16384)

    return {"1M": base, "5M": shape(192, 4, 4, 16, 80, 2048), "20M": shape(320, 6, 8, 16, 144, 4096),
            "100M": shape(576, 10, 8, 20, 200, 8192)}


@dataclass(frozen=True, slots=True)
class Options:
    """What is measured and for how long."""

    sections: tuple[str, ...] = SECTIONS
    rounds: int = 5
    """Pairs of alternating steps, and steps of each model size."""
    sizes: tuple[str, ...] = ("1M", "5M", "20M", "100M")

    def __post_init__(self) -> None:
        for kind, given, known in (("section", self.sections, SECTIONS), ("size", self.sizes, tuple(shapes()))):
            unknown = sorted(set(given) - set(known))
            if unknown:
                raise ConfigError(f"{kind} {unknown[0]!r} does not exist; choose of: {', '.join(known)}")
        if self.rounds < 1:
            raise ConfigError(f"rounds={self.rounds} is below 1; raise it")


def measure(options: Options) -> list[dict[str, Any]]:
    """Result rows of the chosen sections. Raises ConfigError when Transformers is needed and not installed."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="glm5-bench-") as folder:
        checkpoint = Path(folder)
        if {"transformers", "memory"} & set(options.sections):
            _require_transformers()
            model = GlmMoeDsaForCausalLM(shapes()["5M"], generator=torch.Generator().manual_seed(0))
            save_model(model.to(torch.bfloat16), checkpoint)
        for length in GOALS:
            if "transformers" in options.sections:
                rows += _against_transformers(checkpoint, length, options.rounds)
            if "memory" in options.sections:
                rows.append(_peak_memory(checkpoint, length))
    if "tokens" in options.sections:
        rows += [row for name in options.sizes for row in _tokens_per_s(name, options.rounds)]
    if "sparse" in options.sections:
        rows += _sparse_rows(options.rounds)
    if "scaling" in options.sections:
        rows.append(_scaling(options.rounds))
    return rows


def text_batch(rows: int, length: int, vocab_size: int) -> Batch:
    """Rows that are one document each: UTF-8 bytes of the standard library's sources, spread over the vocabulary."""
    data = bytearray()
    for document in islice(read_documents(("stdlib",)), 400):
        data += document.text.encode("utf-8", "replace")
        if len(data) > 2 * rows * length:
            break
    pairs = torch.frombuffer(data, dtype=torch.uint8)[: 2 * rows * length].long().view(rows, length, 2)
    ids_BT = (pairs[..., 0] * 31 + pairs[..., 1] * 257) % vocab_size  # two bytes a token, as a small BPE has
    zeros_T = torch.zeros(length, dtype=torch.long).numpy()
    return collate([make_row(ids_T.numpy(), zeros_T, length, 0) for ids_T in ids_BT])


def our_step(model: GlmMoeDsaForCausalLM, objective: Objective, batch: Batch, optimizer: OptimizerConfig) -> Step:
    """A whole optimizer step of ``glm5.train``."""
    built = build_optimizer(model, optimizer)

    def step() -> float:
        result, _ = compute_gradients(model, built, objective, batch, 0)
        built.step()
        return result.losses["loss"]

    return step


def transformers_step(checkpoint: Path, batch: Batch, dtype: torch.dtype) -> Step:
    """The same step of the model of Transformers: its own loss, PyTorch's fused AdamW."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=_ADAMW.lr, betas=_ADAMW.betas, eps=_ADAMW.eps,
                                  weight_decay=0.0, fused=True)

    def step() -> float:
        optimizer.zero_grad()
        loss = model(input_ids=batch.ids_BT, labels=batch.ids_BT, use_cache=False).loss
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def _bench_model(checkpoint: Path) -> GlmMoeDsaForCausalLM:
    """The bf16 checkpoint as fp32 master weights; what the language-model loss does not reach is frozen, as there."""
    model = load_model(checkpoint, dtype=torch.float32)
    mtp_prefix = f"model.layers.{model.config.num_hidden_layers}."
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".indexer." not in name and not name.startswith(mtp_prefix))
    return model


def _against_transformers(checkpoint: Path, length: int, rounds: int) -> list[dict[str, Any]]:
    batch = text_batch(_ROWS[length], length, shapes()["5M"].vocab_size)
    ours = our_step(_bench_model(checkpoint), _LANGUAGE, batch, _ADAMW)
    theirs = {"transformers": transformers_step(checkpoint, batch, torch.bfloat16),
              "transformers_fp32": transformers_step(checkpoint, batch, torch.float32)}
    first_losses = {"ours": ours(), **{name: step() for name, step in theirs.items()}}  # warm-up, on equal weights
    times: dict[str, list[float]] = {"ours": [], **{name: [] for name in theirs}}
    for _ in range(rounds):
        for name, step in {"ours": ours, **theirs}.items():
            times[name].append(_seconds(step))
    tokens = batch.ids_BT.numel()
    rows = []
    for name in theirs:
        ratios = [their_s / our_s for our_s, their_s in zip(times["ours"], times[name], strict=True)]
        ratio = statistics.median(ratios)
        row = {"name": f"train.{length}.vs_{name}", "value": tokens / statistics.median(times["ours"]),
               "unit": "tokens/s", "n": rounds, "baseline": tokens / statistics.median(times[name]), "ratio": ratio}
        rows.append(row | {"goal": GOALS[length], "met": ratio >= GOALS[length]} if name == "transformers" else row)
    rows.append({"name": f"train.{length}.loss_difference", "unit": "nats", "goal": 1e-3,
                 "value": abs(first_losses["ours"] - first_losses["transformers_fp32"]),
                 "met": abs(first_losses["ours"] - first_losses["transformers_fp32"]) <= 1e-3})
    return rows


def _peak_memory(checkpoint: Path, length: int) -> dict[str, Any]:
    ours, theirs = (_measure_apart(which, str(checkpoint), str(length))["peak_rss_bytes"]
                    for which in ("ours", "transformers"))
    return {"name": f"train.peak_memory.{length}", "value": ours, "unit": "bytes", "baseline": theirs,
            "ratio": ours / theirs, "goal": theirs, "met": ours < theirs}


def _tokens_per_s(size: str, rounds: int) -> list[dict[str, Any]]:
    config = shapes()[size]
    model = GlmMoeDsaForCausalLM(config, generator=torch.Generator().manual_seed(0))
    batch = text_batch(4, 512, config.vocab_size)
    step = our_step(model, _EVERYTHING, batch, OptimizerConfig())
    step()
    seconds = statistics.median(_seconds(step) for _ in range(rounds))
    return [{"name": f"tokens_per_s.{size}", "value": batch.ids_BT.numel() / seconds, "unit": "tokens/s", "n": rounds},
            {"name": f"parameters.{size}", "value": parameter_counts(config)["with_mtp"], "unit": "parameters"}]


def _sparse_rows(rounds: int) -> list[dict[str, Any]]:
    config = preset("nano").replace(max_position_embeddings=_LONG)
    steps = {}
    for length in (_SHORT, _LONG):
        model = GlmMoeDsaForCausalLM(config, generator=torch.Generator().manual_seed(0))
        batch = text_batch(1, length, config.vocab_size)
        steps[length] = our_step(model, _SPARSE, batch, OptimizerConfig())
    for step in steps.values():
        step()
    pairs = [(_seconds(steps[_SHORT]) / _SHORT, _seconds(steps[_LONG]) / _LONG) for _ in range(rounds)]
    ratio = statistics.median(long / short for short, long in pairs)
    short, long = (statistics.median(side) for side in zip(*pairs, strict=True))
    peak = _measure_apart("sparse")["peak_rss_bytes"]
    return [{"name": f"train.sparse.{_LONG}.time_per_token_ratio", "value": ratio, "unit": "ratio", "n": rounds,
             "goal": _GROWTH_GOAL, "met": ratio < _GROWTH_GOAL},
            {"name": f"train.sparse.{_LONG}.tokens_per_s", "value": 1 / long, "unit": "tokens/s",
             "baseline": 1 / short},
            {"name": f"train.sparse.{_LONG}.peak_rss_bytes", "value": peak, "unit": "bytes", "goal": _MEMORY_GOAL,
             "met": peak < _MEMORY_GOAL}]


def _scaling(rounds: int) -> dict[str, Any]:
    """One process and two, alternating, each start measured after a step of warm-up."""
    speeds: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(rounds):
        for processes, found in speeds.items():
            found.append(_measure_apart("scaling", processes=processes)["tokens_per_s"])
    ratio = statistics.median(two / one for one, two in zip(speeds[1], speeds[2], strict=True))
    return {"name": "train.scaling.2", "value": statistics.median(speeds[2]), "unit": "tokens/s", "n": rounds,
            "baseline": statistics.median(speeds[1]), "ratio": ratio}


def _seconds(step: Step) -> float:
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


def _measure_apart(*arguments: str, processes: int = 0) -> dict[str, float]:
    """Steps in a process of its own, or in ``processes`` of one thread that ``torchrun`` starts; what it found."""
    program = ["-m", "glm5.train.benchmark", *arguments]
    environment = dict(os.environ)
    if processes:
        program = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), *program]
        environment["OMP_NUM_THREADS"] = "1"
    result = subprocess.run([sys.executable, *program], capture_output=True, text=True, timeout=3600, env=environment)
    if result.returncode:
        raise ConfigError(f"bench train: {arguments[0]} failed: {result.stderr.strip().splitlines()[-1]}")
    answer: dict[str, float] = json.loads(result.stdout.splitlines()[-1])
    return answer


def _require_transformers() -> None:
    try:
        import transformers  # noqa: F401
    except ImportError:
        raise ConfigError("bench train: transformers is not installed; pip install 'glm5[test]', or leave out the "
                          "sections transformers and memory") from None


def _steps_together() -> None:
    """Steps of one process among those that ``torchrun`` started; the first tells the speed of all."""
    torch.set_num_threads(1)
    config = shapes()["5M"]
    with connect(ParallelConfig(), HOST) as layout:
        model = GlmMoeDsaForCausalLM(config, generator=torch.Generator().manual_seed(0))
        spread = Spread(model, layout, ParallelConfig())
        optimizer = spread.optimizer(OptimizerConfig())
        whole = text_batch(8, 512, config.vocab_size)
        part = part_of_batch(whole, layout.row_part, layout.row_parts, layout.device)

        def step() -> float:
            result, _ = compute_gradients(model, optimizer, _EVERYTHING, part, 0, spread)
            optimizer.step()
            return result.loss

        step()
        seconds = statistics.median(_seconds(step) for _ in range(_SCALING_STEPS))
        if layout.is_first:
            print(json.dumps({"tokens_per_s": whole.ids_BT.numel() / seconds}))


def _steps_alone(which: str, checkpoint: str = "", length: str = "0") -> None:
    if which == "scaling":
        _steps_together()
        return
    if which == "sparse":
        config = preset("nano").replace(max_position_embeddings=_LONG)
        batch = text_batch(1, _LONG, config.vocab_size)
        step = our_step(GlmMoeDsaForCausalLM(config), _SPARSE, batch, OptimizerConfig())
    else:
        batch = text_batch(_ROWS[int(length)], int(length), shapes()["5M"].vocab_size)
        step = (our_step(_bench_model(Path(checkpoint)), _LANGUAGE, batch, _ADAMW) if which == "ours"
                else transformers_step(Path(checkpoint), batch, torch.bfloat16))
    step()
    step()
    print(json.dumps({"peak_rss_bytes": peak_memory_bytes()}))


if __name__ == "__main__":
    _steps_alone(*sys.argv[1:])
