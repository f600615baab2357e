"""``glm5 bench attention``: sparse against dense attention of one layer, decode, prefill and training, in one run.

Dimensions are those of ``LAYER`` (GLM-like, a quarter of the heads). Dense and sparse alternate; a speed-up is the
median of the ratios of the rounds. The dense baseline is the fastest of PyTorch's forms of the same layer on this
machine at that size: ``scaled_dot_product_attention`` over expanded keys and values, over the latent cache with heads
as query rows, or two products with a softmax, each in fp32 and bf16, with values padded to the key dim where that
selects the fused kernel. Prefill is also compared with expanded keys and values in bf16, the usual form, where that
is not the fastest. The native dense form is the absorbed kernel over all keys. Projections and the expansion of keys
are in neither. The native forms read a paged cache (blocks of 32 in random order), PyTorch's a contiguous one.

Prefill rows stand for a whole causal prefill of that length: ``queries`` rows at each of the contexts L/8, 3L/8, 5L/8
and 7L/8 (a prefill's cost is piecewise linear in the context), without a mask for the dense form, whose expanded keys
and values are visited a few heads at a time to bound memory. Training rows take one block of queries at context L/2,
forward and backward, selection included.

``ceiling_share`` is the time that operations and bytes allow at the machine's measured ceilings over the time taken.
The ceilings are the fastest matrix product of PyTorch (fp32 or bf16, same threads) and a sum over memory.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from glm5.errors import ConfigError
from glm5.kernels import dispatch

Thunk = Callable[[], object]
Rows = list[dict[str, Any]]
BLOCK = 32
"""Entries of a cache block."""
CONTEXTS = (1 / 8, 3 / 8, 5 / 8, 7 / 8)
GOALS = {  # speed-up over PyTorch's dense form
    "decode": {2048: {32768: 4.0, 65536: 7.0, 131072: 11.0}, 256: {131072: 12.0}},
    "prefill": {2048: {32768: 3.0, 65536: 6.0, 131072: 12.0}, 256: {131072: 16.0}},
    "train": {256: {16384: 3.0}},
}
NATIVE_SHARE, CEILING_SHARE, MEMORY_BYTES = 0.8, 0.5, 1e9
LONG = 65536
"""Context from which the share of the ceiling has a goal."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Sizes of one attention layer."""

    heads: int = 16
    latent: int = 256
    rope: int = 64
    nope: int = 192
    value: int = 192
    index_heads: int = 8
    index_dim: int = 128

    @property
    def key(self) -> int:
        """Elements of an absorbed key: what the cache holds of a token."""
        return self.latent + self.rope

    def attention_flops(self, keys: float) -> float:
        """Operations of absorbed attention of one query."""
        return 2.0 * keys * self.heads * (self.key + self.latent)

    def index_flops(self, keys: float) -> float:
        """Operations of scoring the keys for one query."""
        return 2.0 * keys * self.index_heads * self.index_dim


LAYER = Layer()
SCALE = (LAYER.nope + LAYER.rope) ** -0.5


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to measure."""

    lengths: tuple[int, ...]
    """Contexts, ascending."""
    topks: tuple[int, ...]
    """Selected keys per query."""
    queries: int
    """Rows around each context of a prefill."""
    train_length: int
    """Context of the training row; 0 leaves it out."""
    train_queries: int
    """Rows of the training step."""
    rounds: int
    """Alternations at the longest contexts; short ones take more."""


FULL = Plan(lengths=(256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072), topks=(2048, 256), queries=128,
            train_length=16384, train_queries=256, rounds=5)
QUICK = Plan(lengths=(256, 1024, 4096), topks=(256,), queries=16, train_length=2048, train_queries=64, rounds=3)


@dataclass(frozen=True)
class Ceilings:
    """What this machine does at best, with the threads of this run."""

    flops: float
    """Operations per second of a large matrix product."""
    bytes: float
    """Bytes per second of reading memory."""

    def seconds(self, flops: float, bytes_read: float) -> float:
        """Least time of work that overlaps perfectly."""
        return max(flops / self.flops, bytes_read / self.bytes)


def bench_attention(quick: bool = False, threads: int = 0,
                    progress: Callable[[str], None] = lambda line: None) -> Rows:
    """Rows of the whole table. ``threads``: 0 takes torch's. Raises ConfigError for a negative count."""
    if threads < 0:
        raise ConfigError(f"threads={threads}; expected 0 (all) or more")
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        return _measure(QUICK if quick else FULL, progress)
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Problem:
    """Queries over one slot of ``length`` entries, all bf16, and the ways to attend."""

    length: int
    q_MHK: Tensor
    iq_MJX: Tensor
    iw_MJ: Tensor
    latent_SK: Tensor
    """Contiguous, for PyTorch."""
    latent_PSK: Tensor
    """The same entries in blocks."""
    index_keys_PSX: Tensor
    table_1Z: Tensor

    @classmethod
    def random(cls, queries: int, length: int) -> Problem:
        """Normally distributed entries and queries, blocks in random order."""
        blocks = -(-length // BLOCK)
        table_1Z = torch.randperm(blocks, dtype=torch.int32).unsqueeze(0)
        latent_SK = torch.randn(blocks * BLOCK, LAYER.key).bfloat16()
        latent_PSK = torch.empty(blocks, BLOCK, LAYER.key, dtype=torch.bfloat16)
        latent_PSK[table_1Z[0].long()] = latent_SK.view(blocks, BLOCK, LAYER.key)
        return cls(length, torch.randn(queries, LAYER.heads, LAYER.key).bfloat16(),
                   torch.randn(queries, LAYER.index_heads, LAYER.index_dim).bfloat16(),
                   torch.randn(queries, LAYER.index_heads),
                   latent_SK[:length], latent_PSK, torch.randn(blocks, BLOCK, LAYER.index_dim).bfloat16(), table_1Z)

    def sparse(self, topk: int, lengths_M: Tensor) -> Tensor:
        """One sparse layer."""
        return dispatch.ragged_dsa(self.q_MHK, self.iq_MJX, self.iw_MJ, self.latent_PSK, self.index_keys_PSX,
                                   torch.zeros_like(lengths_M), lengths_M, topk, SCALE, LAYER.latent, self.table_1Z)

    def dense(self, lengths_M: Tensor) -> Tensor:
        """One dense layer by the native kernel."""
        return dispatch.ragged_attention(self.q_MHK, self.latent_PSK, torch.zeros_like(lengths_M), lengths_M, None,
                                         SCALE, LAYER.latent, self.table_1Z)


def _measure(plan: Plan, progress: Callable[[str], None]) -> Rows:
    torch.manual_seed(0)
    ceilings = measure_ceilings(2048 if plan is FULL else 256)
    rows = [_row("ceiling.flops", ceilings.flops, "flop/s"), _row("ceiling.bytes", ceilings.bytes, "B/s")]
    with torch.no_grad():
        for length in plan.lengths:
            progress(f"decode and prefill at {length} keys")
            rows += _decode_rows(length, plan, plan.rounds * (1 if length >= 8192 else 3), ceilings)
            rows += _prefill_rows(length, plan, ceilings)
        progress("memory of a prefill")
        rows.append(_memory_row(plan.lengths[-1], plan.topks[0], 512 if plan is FULL else 64))
    if plan.train_length:
        progress(f"training at {plan.train_length} keys")
        rows += _train_rows(plan, ceilings)
    return rows


def measure_ceilings(size: int) -> Ceilings:
    """Fastest of the fp32 and the bf16 product of squares, and the rate of a sum over memory that no cache holds."""
    flops = 0.0
    for dtype in (torch.float32, torch.bfloat16):
        a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
        if _seconds(lambda a=a, b=b: a[:128] @ b) < 1.0:  # some machines emulate bf16
            flops = max(flops, 2.0 * size**3 / min(_seconds(lambda a=a, b=b: a @ b) for _ in range(10)))
    memory = torch.ones(size << 16)
    return Ceilings(flops, memory.nbytes / min(_seconds(memory.sum) for _ in range(5)))


def alternate(forms: dict[str, Thunk], rounds: int) -> dict[str, list[float]]:
    """Seconds of every form in every round, one after the other within a round, after one round to warm up."""
    times: dict[str, list[float]] = {name: [] for name in forms}
    for number in range(rounds + 1):
        for name, thunk in forms.items():
            seconds = _seconds(thunk)
            if number:
                times[name].append(seconds)
    return times


def _decode_rows(length: int, plan: Plan, rounds: int, ceilings: Ceilings) -> Rows:
    """One query over ``length`` cached tokens."""
    problem, lengths_M = Problem.random(1, length), torch.full((1,), length)
    name, dense = _fastest(_rows_forms(problem.q_MHK.view(1, 1, LAYER.heads, LAYER.key), problem.latent_SK[None]))
    forms: dict[str, Thunk] = {"torch_dense": dense, "native_dense": lambda: problem.dense(lengths_M)}
    forms |= {f"k{topk}": lambda topk=topk: problem.sparse(topk, lengths_M) for topk in plan.topks}
    times, entry, index = alternate(forms, rounds), 2.0 * LAYER.key, 2.0 * LAYER.index_dim
    limits = {"native_dense": ceilings.seconds(LAYER.attention_flops(length), entry * length)}
    for topk in plan.topks:
        flops = LAYER.attention_flops(topk) + LAYER.index_flops(length)
        selected = ceilings.seconds(flops, entry * topk + index * length)
        limits[f"k{topk}"] = selected if length > topk else limits["native_dense"]
    baseline = f"PyTorch {name}, 1 query"
    return [row for topk in plan.topks for row in _comparison("decode", topk, length, times, limits, baseline)]


def _prefill_rows(length: int, plan: Plan, ceilings: Ceilings) -> Rows:
    """``queries`` rows at each of four contexts; see the module's docstring."""
    contexts = [max(1, int(length * share)) for share in CONTEXTS]
    T, problem = plan.queries, Problem.random(plan.queries, contexts[-1])
    lengths = [torch.full((T,), context) for context in contexts]
    candidates = _prefill_forms(problem)
    probe = min(contexts[-1], 8192)  # the fastest dense form is chosen there
    name, _ = _fastest({name: lambda form=form: form(probe) for name, form in candidates.items()})
    forms: dict[str, Thunk] = {"torch_dense": lambda: [candidates[name](context) for context in contexts],
                               "native_dense": lambda: [problem.dense(lengths_M) for lengths_M in lengths]}
    for topk in plan.topks:
        forms[f"k{topk}"] = lambda topk=topk: [problem.sparse(topk, lengths_M) for lengths_M in lengths]
    if "expanded" not in name:
        forms["torch_expanded"] = lambda: [candidates["sdpa, expanded, bfloat16"](context) for context in contexts]
    times = alternate(forms, plan.rounds)
    limits = {"native_dense": sum(ceilings.seconds(T * LAYER.attention_flops(n), 0.0) for n in contexts)}
    for topk in plan.topks:
        flops = sum(LAYER.attention_flops(min(topk, n)) + (LAYER.index_flops(n) if n > topk else 0.0) for n in contexts)
        limits[f"k{topk}"] = ceilings.seconds(T * flops, 0.0)
    baseline = f"PyTorch {name}, {T} queries at each of L/8 3L/8 5L/8 7L/8"
    return [row for topk in plan.topks for row in _comparison("prefill", topk, length, times, limits, baseline)]


def _rows_forms(q_BTHK: Tensor, latent_BSK: Tensor) -> dict[str, Thunk]:
    """PyTorch's forms of absorbed dense attention with heads (and queries) as rows of one head, by name."""
    forms: dict[str, Thunk] = {}
    for dtype in (torch.float32, torch.bfloat16):
        q, k = q_BTHK.to(dtype).flatten(1, 2).unsqueeze(1), latent_BSK.to(dtype).unsqueeze(1)
        v, kind = k[..., : LAYER.latent], str(dtype).removeprefix("torch.")
        forms[f"sdpa, heads as rows, {kind}"] = lambda q=q, k=k, v=v: _sdpa(q, k, v)
        forms[f"sdpa, heads as rows, padded values, {kind}"] = lambda q=q, k=k: _sdpa(q, k, k)[..., : LAYER.latent]
        forms[f"products, {kind}"] = lambda q=q, k=k, v=v: (
            ((q @ k.transpose(2, 3)).float() * SCALE).softmax(-1).to(q.dtype) @ v)
    return forms


def _prefill_forms(problem: Problem) -> dict[str, Callable[[int], object]]:
    """PyTorch's forms of dense prefill as functions of the context."""
    T, group, size = problem.q_MHK.shape[0], 4, LAYER.nope + LAYER.rope
    forms: dict[str, Callable[[int], object]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        kind = str(dtype).removeprefix("torch.")
        rows, latent = problem.q_MHK.to(dtype).reshape(1, 1, -1, LAYER.key), problem.latent_SK.to(dtype)[None, None]
        forms[f"sdpa, heads as rows, {kind}"] = lambda n, q=rows, k=latent: _sdpa(q, k[:, :, :n], k[:, :, :n])
        q = torch.randn(1, group, T, size).to(dtype)
        k, v = (torch.randn(1, group, problem.length, size, dtype=dtype) for _ in range(2))
        forms[f"sdpa, expanded, {kind}"] = lambda n, q=q, k=k, v=v: [
            _sdpa(q, k[:, :, :n], v[:, :, :n]) for _ in range(LAYER.heads // group)]
    return forms


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, scale=SCALE)


def _train_rows(plan: Plan, ceilings: Ceilings) -> Rows:
    """Forward and backward of attention (selection included) for a block of queries at context L/2, fp32."""
    length, T, topk, group = plan.train_length // 2, plan.train_queries, plan.topks[-1], 4
    q_BTHK, latent_BSK = torch.randn(1, T, LAYER.heads, LAYER.key), torch.randn(1, length, LAYER.key)
    iq_BTJX, iw_BTJ = torch.randn(1, T, LAYER.index_heads, LAYER.index_dim), torch.randn(1, T, LAYER.index_heads)
    keys_BSX, first_BT = torch.randn(1, length, LAYER.index_dim), torch.zeros(1, T, dtype=torch.int64)
    leaves = q_BTHK.requires_grad_(), latent_BSK.requires_grad_()

    def sparse() -> None:
        positions_BTK = dispatch.select_positions(iq_BTJX, keys_BSX, iw_BTJ, 1.0, first_BT, first_BT + length, topk)
        out_BTHC = dispatch.sparse_attention(q_BTHK, latent_BSK, positions_BTK, SCALE, LAYER.latent)
        torch.autograd.grad(out_BTHC, leaves, torch.ones_like(out_BTHC))

    def dense(q: Tensor, k: Tensor, v: Tensor, repeats: int) -> None:
        for _ in range(repeats):
            out = _sdpa(q, k, v)
            torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    def leaf(heads: int, rows: int, size: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(1, heads, rows, size, dtype=dtype).requires_grad_()

    candidates: dict[str, Thunk] = {}
    for dtype in (torch.float32, torch.bfloat16):
        kind = str(dtype).removeprefix("torch.")
        expanded = [leaf(group, n, LAYER.nope + LAYER.rope, dtype) for n in (T, length, length)]
        candidates[f"sdpa, expanded, {kind}"] = lambda a=expanded: dense(*a, LAYER.heads // group)
        rows = [leaf(1, n, LAYER.key, dtype) for n in (T * LAYER.heads, length, length)]
        candidates[f"sdpa, heads as rows, {kind}"] = lambda a=rows: dense(*a, 1)
    name, best = _fastest(candidates)
    times = alternate({"torch_dense": best, f"k{topk}": sparse}, plan.rounds)
    flops = T * (LAYER.attention_flops(topk) + LAYER.index_flops(length))
    flops += T * 2.0 * topk * LAYER.heads * (3 * LAYER.key + 2 * LAYER.latent)
    return _comparison("train", topk, plan.train_length, times, {f"k{topk}": ceilings.seconds(flops, 0.0)},
                       f"PyTorch {name}, {T} queries at L/2")


def _memory_row(length: int, topk: int, queries: int) -> dict[str, Any]:
    """Growth of the largest resident memory while the last ``queries`` tokens of a prefill attend, caches excluded."""
    problem = Problem.random(queries, length)
    before = _resident(reset=True)
    problem.sparse(topk, torch.arange(length - queries, length) + 1)
    after = _resident()
    grown = after - before if before is not None and after is not None else None
    return _row(f"prefill.k{topk}.{length}.memory", grown, "B", baseline=f"caches, last {queries} queries",
                goal=MEMORY_BYTES, met=None if grown is None else grown < MEMORY_BYTES)


def _resident(reset: bool = False) -> int | None:
    """Largest resident memory of this process since the last reset, where Linux tells."""
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))


def _comparison(kind: str, topk: int, length: int, times: dict[str, list[float]], limits: dict[str, float],
                baseline: str) -> Rows:
    """Rows of one sparse form against the dense ones."""
    name, sparse, dense = f"{kind}.k{topk}.{length}", times[f"k{topk}"], times["torch_dense"]
    n, ratio, goal = len(sparse), _median_ratio(dense, sparse), GOALS[kind].get(topk, {}).get(length, 1.0)
    rows = [_row(f"{name}.vs_torch_dense", ratio, "x", n=n, baseline=baseline, goal=goal, met=ratio >= goal),
            _row(f"{name}.ms", statistics.median(sparse) * 1e3, "ms", n=n),
            _row(f"{name}.ms.torch_dense", statistics.median(dense) * 1e3, "ms", n=n)]
    if "torch_expanded" in times:
        rows.append(_row(f"{name}.vs_torch_expanded", _median_ratio(times["torch_expanded"], sparse), "x", n=n,
                         baseline="PyTorch sdpa, expanded, bfloat16"))
    if "native_dense" in times:
        native, allowed = times["native_dense"], limits["native_dense"] / limits[f"k{topk}"]
        ratio, goal = _median_ratio(native, sparse), NATIVE_SHARE * allowed
        rows += [_row(f"{name}.vs_native_dense", ratio, "x", n=n, baseline=f"counts allow {allowed:.2f}", goal=goal,
                      met=ratio >= goal),
                 _row(f"{name}.ceiling_share.native_dense", limits["native_dense"] / statistics.median(native),
                      "share")]
    share = limits[f"k{topk}"] / statistics.median(sparse)
    goals = {"goal": CEILING_SHARE, "met": share >= CEILING_SHARE} if length >= LONG else {}
    return [*rows, _row(f"{name}.ceiling_share", share, "share", **goals)]


def _fastest(forms: dict[str, Thunk]) -> tuple[str, Thunk]:
    """The form that takes least time, by its second call."""
    taken = {}
    for name, thunk in forms.items():
        first = _seconds(thunk)
        taken[name] = first if taken and first > 4 * min(taken.values()) else _seconds(thunk)
    best = min(taken, key=lambda name: taken[name])
    return best, forms[best]


def _seconds(thunk: Thunk) -> float:
    start = time.perf_counter()
    thunk()
    return time.perf_counter() - start


def _median_ratio(baseline: Sequence[float], candidate: Sequence[float]) -> float:
    return statistics.median(b / c for b, c in zip(baseline, candidate, strict=True))


def _row(name: str, value: float | None, unit: str, **rest: Any) -> dict[str, Any]:
    rounded = value if value is None else float(f"{value:.4g}")
    known = {key: item for key, item in rest.items() if item is not None}
    return {"name": name, "value": rounded, "unit": unit, **known}
