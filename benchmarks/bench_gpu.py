"""Sparse attention of one layer on a CUDA device: the Triton forms against PyTorch's dense attention.

``python benchmarks/bench_gpu.py [--rounds 10]`` prints a table and, as the last line, one JSON object. One layer with
16 heads, latent 512, 64 rotary dims, 32 index heads of 128 dims, 2,048 selected keys, bf16; forms alternate, ``ratio``
is the median over the rounds of PyTorch's time over ours.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F

from glm5.eval.report import Row, results_object
from glm5.kernels import dispatch

HEADS, LATENT, ROPE, INDEX_HEADS, INDEX_DIM, TOPK = 16, 512, 64, 32, 128, 2048


def milliseconds(thunk: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    thunk()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))


def measure(name: str, dense: Callable[[], object], sparse: Callable[[], object], rounds: int) -> Row:
    for thunk in (dense, sparse):  # compile and warm up
        milliseconds(thunk)
    pairs = [(milliseconds(dense), milliseconds(sparse)) for _ in range(rounds)]
    baseline, value = (statistics.median(side) for side in zip(*pairs, strict=True))
    ratio = statistics.median(a / b for a, b in pairs)
    print(f"{name:28}{baseline:12.3f}{value:12.3f}{ratio:9.2f}x", flush=True)
    return Row(
        name=name, value=round(value, 4), unit="ms", n=rounds, baseline=round(baseline, 4), ratio=round(ratio, 3)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench_gpu: no CUDA device", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    torch.set_default_device("cuda")
    rows = []
    print(f"{'operation':28}{'PyTorch ms':>12}{'Triton ms':>12}{'speed-up':>10}")
    for length in (8192, 32768, 131072):
        latent_PSK = torch.randn(1, length, LATENT + ROPE).bfloat16()
        keys_PSX = torch.randn(1, length, INDEX_DIM).bfloat16()
        for kind, tokens in (("decode", 1), ("prefill", 128)):
            q_MHK = torch.randn(tokens, HEADS, LATENT + ROPE).bfloat16()
            iq_MJX, iw_MJ = torch.randn(tokens, INDEX_HEADS, INDEX_DIM).bfloat16(), torch.randn(tokens, INDEX_HEADS)
            place = torch.zeros(tokens, dtype=torch.int64), torch.full((tokens,), length)
            rows_11RK, keys_11SK = q_MHK.reshape(1, 1, -1, LATENT + ROPE), latent_PSK.unsqueeze(1)
            rows.append(
                measure(
                    f"{kind}.k{TOPK}.{length}",
                    lambda q=rows_11RK, k=keys_11SK: F.scaled_dot_product_attention(q, k, k[..., :LATENT], scale=0.06),
                    lambda a=(q_MHK, iq_MJX, iw_MJ, latent_PSK, keys_PSX, *place): dispatch.ragged_dsa(
                        *a, TOPK, 0.06, LATENT
                    ),
                    options.rounds,
                )
            )
    print(json.dumps(results_object("bench_gpu", rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
