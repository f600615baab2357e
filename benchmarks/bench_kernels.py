"""Native CPU kernels against PyTorch's best form of the same operation, at the sizes of the nano preset.

``python benchmarks/bench_kernels.py [--threads 1] [--seconds 0.5] [--only TEXT] [--crossovers]`` prints a table and, as
the last line, one JSON object. ``--crossovers`` adds the sizes where ``dispatch`` changes from one form to the other
(a minute more). Baseline and candidate alternate; ``value`` and ``baseline`` are medians in microseconds, ``ratio`` is
the median of value over baseline, ``n`` the number of pairs. On one thread the clock is the CPU time of the thread, so
that other processes disturb less; on several it is wall time. Training rows time forward and backward together. About
20 seconds on an idle core.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from glm5.eval.report import Row, results_object
from glm5.kernels import dispatch, fused, reference
from glm5.kernels.cpu import training

HEADS, LATENT, ROPE, NOPE, VALUE = 4, 48, 16, 16, 32
INDEX_HEADS, INDEX_DIM, TOPK = 8, 32, 64
HIDDEN, EXPERTS, CHOICES, EXPERT_HIDDEN = 128, 8, 2, 64
ROWS, LENGTH, DOCUMENT = 8, 512, 170
"""A training batch: rows of packed documents of about ``DOCUMENT`` tokens."""

SAMPLE_S = 2e-4
"""Short operations repeat within a sample until it lasts about this long."""

Thunk = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """One row: ``candidate`` is what the model calls, ``baseline`` the fastest PyTorch form."""

    name: str
    baseline: Thunk
    candidate: Thunk


def ragged_cases() -> Iterator[Case]:
    """One attention layer of a decode step: batch b, every query over l cached tokens."""
    for batch, length, dtype in [(1, 400, torch.float32), (16, 250, torch.float32), (64, 250, torch.float32),
                                 (128, 250, torch.float32), (64, 250, torch.bfloat16)]:
        latent_PSK = torch.randn(128, LENGTH, LATENT + ROPE).to(dtype)
        keys_PSX = torch.randn(128, LENGTH, INDEX_DIM).to(dtype)
        slots_M, lengths_M = torch.randperm(128)[:batch], torch.full((batch,), length)
        q_MHK = torch.randn(batch, HEADS, LATENT + ROPE).to(dtype)
        iq_MJX, iw_MJ = torch.randn(batch, INDEX_HEADS, INDEX_DIM).to(dtype), torch.randn(batch, INDEX_HEADS)
        arguments = (q_MHK, iq_MJX, iw_MJ, latent_PSK, keys_PSX, slots_M, lengths_M, TOPK, 0.2, LATENT)
        kind = "bf16" if dtype == torch.bfloat16 else "fp32"
        yield Case(f"decode.ragged_dsa.{kind}.b{batch}.l{length}", lambda a=arguments: reference.ragged_dsa(*a),
                   lambda a=arguments: dispatch.ragged_dsa(*a))


def expert_tensors(tokens: int, trained: bool, experts: int = EXPERTS, choices: int = CHOICES, hidden: int = HIDDEN,
                   inner: int = EXPERT_HIDDEN) -> tuple[Tensor, ...]:
    """Arguments of ``experts`` for random routing."""
    ids_MA = torch.randn(tokens, experts).topk(choices).indices
    tensors = [torch.randn(tokens, hidden), torch.rand(tokens, choices),
               torch.randn(experts, 2 * inner, hidden) * 0.1, torch.randn(experts, hidden, inner) * 0.1]
    x_MD, weights_MA, gate_up_EGD, down_EDF = (tensor.requires_grad_(trained) for tensor in tensors)
    return x_MD, ids_MA, weights_MA, gate_up_EGD, down_EDF


def token_cases() -> Iterator[Case]:
    """The other native operations of a decode step of M tokens."""
    for tokens in (1, 16, 128):
        arguments = expert_tensors(tokens, trained=False)
        yield Case(f"decode.experts.b{tokens}", lambda a=arguments: fused.experts(*a),
                   lambda a=arguments: dispatch.experts(*a))
    weight_D = torch.randn(HIDDEN)
    for tokens in (1, 128):
        x_MD = torch.randn(tokens, HIDDEN)
        yield Case(f"decode.rms_norm.b{tokens}",
                   lambda x=x_MD: torch.nn.functional.rms_norm(x, (HIDDEN,), weight_D, 1e-5),
                   lambda x=x_MD: dispatch.rms_norm(x, weight_D, 1e-5))
        x_MHR, cos_MR2, sin_MR2 = torch.randn(tokens, HEADS, ROPE), *torch.randn(2, tokens, ROPE // 2)
        yield Case(f"decode.rope.b{tokens}", lambda a=(x_MHR, cos_MR2, sin_MR2): reference.apply_rope(*a),
                   lambda a=(x_MHR, cos_MR2, sin_MR2): dispatch.apply_rope(*a))


def trained(function: Callable[..., Tensor], arguments: tuple[object, ...]) -> Thunk:
    """Forward and backward of ``function``."""
    leaves = [argument for argument in arguments if isinstance(argument, Tensor) and argument.requires_grad]
    cotangent = torch.ones_like(function(*arguments))
    return lambda: torch.autograd.grad(function(*arguments), leaves, cotangent)


def training_cases() -> Iterator[Case]:
    """The native operations of a training step over ROWS x LENGTH packed tokens."""
    tokens = ROWS * LENGTH
    x_MD, weight_D = torch.randn(tokens, HIDDEN, requires_grad=True), torch.randn(HIDDEN, requires_grad=True)
    yield Case("train.rms_norm", trained(torch.nn.functional.rms_norm, (x_MD, (HIDDEN,), weight_D, 1e-5)),
               trained(dispatch.rms_norm, (x_MD, weight_D, 1e-5)))
    rotated = (torch.randn(ROWS, LENGTH, HEADS, ROPE, requires_grad=True), *torch.randn(2, ROWS, LENGTH, ROPE // 2))
    yield Case("train.rope", trained(reference.apply_rope, rotated), trained(dispatch.apply_rope, rotated))
    arguments = expert_tensors(tokens, trained=True)
    yield Case("train.experts", trained(fused.experts, arguments), trained(dispatch.experts, arguments))

    documents_BT = (torch.rand(ROWS, LENGTH) < 1 / DOCUMENT).cumsum(-1)
    causal_TS = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    dense_BTS = causal_TS & (documents_BT[:, :, None] == documents_BT[:, None, :])
    index = tuple(torch.randn(ROWS, LENGTH, *rest, requires_grad=True)
                  for rest in ((INDEX_HEADS, INDEX_DIM), (INDEX_DIM,), (INDEX_HEADS,)))
    index = (*index, INDEX_DIM**-0.5, dense_BTS)
    yield Case("train.index_scores", trained(reference.index_scores, index), trained(dispatch.index_scores, index))
    scores_BTS = reference.index_scores(*index).detach()
    yield Case("train.select_topk", lambda: reference.select_topk(scores_BTS, dense_BTS, TOPK),
               lambda: dispatch.select_topk(scores_BTS, dense_BTS, TOPK))
    sparse_BTS = dispatch.select_topk(scores_BTS, dense_BTS, TOPK)
    for length in (4096, 16384):  # the last queries of a long document
        queries, last_BT = 256, torch.arange(length - 256, length)[None]
        choice = (torch.randn(1, queries, INDEX_HEADS, INDEX_DIM), torch.randn(1, length, INDEX_DIM),
                  torch.randn(1, queries, INDEX_HEADS), INDEX_DIM**-0.5, torch.zeros_like(last_BT), last_BT, TOPK)
        yield Case(f"train.select_positions.{length}", lambda a=choice: reference.select_positions(*a),
                   lambda a=choice: dispatch.select_positions(*a))
    q_BTHK, k_BSHK = (torch.randn(ROWS, LENGTH, HEADS, NOPE + ROPE, requires_grad=True) for _ in range(2))
    v_BSHV = torch.randn(ROWS, LENGTH, HEADS, VALUE, requires_grad=True)
    masks = {"dense": dense_BTS, "sparse": sparse_BTS, "one_document": causal_TS.expand(ROWS, -1, -1)}
    for name, mask_BTS in masks.items():
        attention = (q_BTHK, k_BSHK, v_BSHV, mask_BTS, 0.2)
        yield Case(f"train.attention.{name}", trained(fused.masked_attention, attention),
                   trained(dispatch.masked_attention, attention))
    targets = (q_BTHK.detach(), k_BSHK.detach(), sparse_BTS, 0.2)
    yield Case("train.attention_targets", lambda: reference.attention_targets(*targets),
               lambda: dispatch.attention_targets(*targets))
    loss = (scores_BTS.clone().requires_grad_(), reference.attention_targets(*targets), sparse_BTS)
    yield Case("train.indexer_kl", trained(reference.indexer_kl, loss), trained(dispatch.indexer_kl, loss))


def crossover_cases() -> Iterator[Case]:
    """The native forms on both sides of the sizes where ``dispatch`` leaves them."""
    for tokens, hidden, inner in [(2048, 256, 128), (2048, 512, 256), (512, 1024, 512)]:
        arguments = expert_tensors(tokens, True, 16, 4, hidden, inner)
        yield Case(f"crossover.experts.{hidden}x{inner}", trained(fused.experts, arguments),
                   trained(training.Experts.apply, arguments))
    for length, key_dim, value_dim in [(512, 128, 128), (1024, 192, 128), (1024, 256, 256)]:
        q_BTHK, k_BSHK = (torch.randn(1, length, 8, key_dim, requires_grad=True) for _ in range(2))
        v_BSHV = torch.randn(1, length, 8, value_dim, requires_grad=True)
        causal_BTS = torch.ones(1, length, length, dtype=torch.bool).tril()
        sparse_BTS = dispatch.select_topk(torch.randn(1, length, length), causal_BTS, TOPK)
        for name, mask_BTS in (("dense", causal_BTS), ("sparse", sparse_BTS)):
            attention = (q_BTHK, k_BSHK, v_BSHV, mask_BTS, 0.1)
            yield Case(f"crossover.attention.{name}.{length}x{key_dim}", trained(fused.masked_attention, attention),
                       trained(training.MaskedAttention.apply, attention))


def duration(thunk: Thunk, clock: Callable[[], float], calls: int) -> float:
    """Seconds of one of ``calls`` calls."""
    start = clock()
    for _ in range(calls):
        thunk()
    return (clock() - start) / calls


def measure(case: Case, seconds: float) -> Row:
    """Alternate both forms for about ``seconds``, at least three times."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    duration(case.baseline, clock, 1)  # warm up both
    calls = max(1, round(SAMPLE_S / duration(case.candidate, clock, 2)))
    pairs: list[tuple[float, float]] = []
    end = clock() + seconds
    while clock() < end or len(pairs) < 3:
        pairs.append((duration(case.baseline, clock, calls), duration(case.candidate, clock, calls)))
    baseline, value = (statistics.median(side) * 1e6 for side in zip(*pairs, strict=True))
    ratio = statistics.median(candidate / base for base, candidate in pairs)
    return Row(name=case.name, value=round(value, 2), unit="us", n=len(pairs), baseline=round(baseline, 2),
               ratio=round(ratio, 4))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.5, help="time for one row")
    parser.add_argument("--only", default="", help="rows whose name contains this text")
    parser.add_argument("--crossovers", action="store_true", help="also the sizes around the dispatcher's crossovers")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    rows = []
    print(f"{'operation':36}{'PyTorch us':>12}{'native us':>12}{'speed-up':>10}")
    for cases in (ragged_cases(), token_cases(), training_cases(), crossover_cases() if options.crossovers else ()):
        for case in cases:
            if options.only in case.name:
                row = measure(case, options.seconds)
                rows.append(row)
                print(f"{row.name:36}{row.baseline:12.1f}{row.value:12.1f}{1 / row.ratio:9.1f}x", flush=True)
    print(json.dumps(results_object("bench_kernels", rows)))


if __name__ == "__main__":
    main()
