"""``glm5 bench attention``: sparse against dense attention of one layer, decode, prefill and training, in one run.

Dimensions are those of ``LAYER`` (GLM-like, a quarter of the heads). Dense and sparse alternate; a speed-up is the
median of the ratios of the rounds. The dense baseline is the fastest of PyTorch's forms of the same layer on this
machine at that size: ``scaled_dot_product_attention`` over expanded keys and values, over the latent cache with heads
as query rows, or two products with a softmax, each in fp32 and bf16, with values padded to the key dim where that
selects the fused kernel. The native dense form is the absorbed kernel over all keys. Projections and the expansion of
keys are in neither.

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


FULL = Plan(
    lengths=(256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072),
    topks=(2048, 256),
    queries=128,
    train_length=16384,
    train_queries=256,
    rounds=5,
)
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


def bench_attention(
    quick: bool = False,
    threads: int = 0,
    progress: Callable[[str], None] = lambda line: None,
) -> list[dict[str, Any]]:
    """Rows of the whole table. ``threads``: 0 takes torch's. Raises ConfigError for a negative count."""
    if threads < 0:
        raise ConfigError(f"threads={threads}; expected 0 (all) or more")
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        return _measure(QUICK if quick else FULL, progress)
    finally:
        torch.set_num_threads(before)


def _measure(plan: Plan, progress: Callable[[str], None]) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    ceilings = measure_ceilings(1024 if plan is FULL else 256)
    rows: list[dict[str, Any]] = [
        _row("ceiling.flops", ceilings.flops, "flop/s"),
        _row("ceiling.bytes", ceilings.bytes, "B/s"),
    ]
    with torch.no_grad():
        for length in plan.lengths:
            progress(f"decode and prefill at {length} keys")
            rounds = plan.rounds * (1 if length >= 8192 else 3)
            rows += _decode_rows(length, plan, rounds, ceilings)
            rows += _prefill_rows(length, plan, plan.rounds, ceilings)
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


def _decode_rows(length: int, plan: Plan, rounds: int, ceilings: Ceilings) -> list[dict[str, Any]]:
    """One query over ``length`` cached tokens in bf16."""
    latent_PSK, keys_PSX = (
        torch.randn(1, length, LAYER.key).bfloat16(),
        torch.randn(1, length, LAYER.index_dim).bfloat16(),
    )
    q_MHK, iq_MJX = torch.randn(1, LAYER.heads, LAYER.key), torch.randn(1, LAYER.index_heads, LAYER.index_dim)
    iw_MJ, place = torch.randn(1, LAYER.index_heads), (torch.zeros(1, dtype=torch.int64), torch.full((1,), length))
    scale = (LAYER.nope + LAYER.rope) ** -0.5
    dense = _fastest(_rows_forms(q_MHK.view(1, 1, LAYER.heads, LAYER.key), latent_PSK, scale))
    forms: dict[str, Thunk] = {
        "torch_dense": dense[1],
        "native_dense": lambda: dispatch.ragged_attention(q_MHK, latent_PSK, *place, None, scale, LAYER.latent),
    }
    for topk in plan.topks:
        forms[f"k{topk}"] = lambda topk=topk: dispatch.ragged_dsa(
            q_MHK, iq_MJX, iw_MJ, latent_PSK, keys_PSX, *place, topk, scale, LAYER.latent
        )
    times = alternate(forms, rounds)
    entry = 2.0 * LAYER.key
    limits = {"native_dense": ceilings.seconds(LAYER.attention_flops(length), entry * length)}
    for topk in plan.topks:
        limits[f"k{topk}"] = (
            limits["native_dense"]
            if length <= topk
            else ceilings.seconds(
                LAYER.attention_flops(topk) + LAYER.index_flops(length), entry * topk + 2.0 * LAYER.index_dim * length
            )
        )
    return [
        row
        for topk in plan.topks
        for row in _comparison("decode", topk, length, times, limits, f"PyTorch {dense[0]}, 1 query")
    ]


def _prefill_rows(length: int, plan: Plan, rounds: int, ceilings: Ceilings) -> list[dict[str, Any]]:
    """``queries`` rows at each of four contexts; see the module's docstring."""
    contexts = [max(1, int(length * share)) for share in CONTEXTS]
    T, longest, scale = plan.queries, contexts[-1], (LAYER.nope + LAYER.rope) ** -0.5
    latent_PSK, keys_PSX = (
        torch.randn(1, longest, LAYER.key).bfloat16(),
        torch.randn(1, longest, LAYER.index_dim).bfloat16(),
    )
    q_MHK, iq_MJX = torch.randn(T, LAYER.heads, LAYER.key), torch.randn(T, LAYER.index_heads, LAYER.index_dim)
    iw_MJ, slots_M = torch.randn(T, LAYER.index_heads), torch.zeros(T, dtype=torch.int64)
    lengths = [torch.full((T,), context) for context in contexts]
    probe = min(longest, 8192)  # the fastest dense form is chosen there
    candidates = {
        name: lambda form=form: form(probe) for name, form in _prefill_forms(q_MHK, latent_PSK, scale).items()
    }
    name, _ = _fastest(candidates)
    dense = _prefill_forms(q_MHK, latent_PSK, scale)[name]
    forms: dict[str, Thunk] = {
        "torch_dense": lambda: [dense(context) for context in contexts],
        "native_dense": lambda: [
            dispatch.ragged_attention(q_MHK, latent_PSK, slots_M, lengths_M, None, scale, LAYER.latent)
            for lengths_M in lengths
        ],
    }
    for topk in plan.topks:
        forms[f"k{topk}"] = lambda topk=topk: [
            dispatch.ragged_dsa(
                q_MHK, iq_MJX, iw_MJ, latent_PSK, keys_PSX, slots_M, lengths_M, topk, scale, LAYER.latent
            )
            for lengths_M in lengths
        ]
    times = alternate(forms, rounds)
    limits = {"native_dense": sum(ceilings.seconds(T * LAYER.attention_flops(context), 0.0) for context in contexts)}
    for topk in plan.topks:
        limits[f"k{topk}"] = sum(
            ceilings.seconds(
                T
                * (LAYER.attention_flops(min(topk, context)) + (LAYER.index_flops(context) if context > topk else 0.0)),
                0.0,
            )
            for context in contexts
        )
    where = f"PyTorch {name}, {T} queries at each of L/8 3L/8 5L/8 7L/8"
    return [row for topk in plan.topks for row in _comparison("prefill", topk, length, times, limits, where)]


def _rows_forms(q_BTHK: Tensor, latent_BSK: Tensor, scale: float) -> dict[str, Thunk]:
    """PyTorch's forms of absorbed dense attention with heads (and queries) as rows of one head, by name."""
    forms: dict[str, Thunk] = {}
    for dtype in (torch.float32, torch.bfloat16):
        q_B1RK, k_B1SK = q_BTHK.to(dtype).flatten(1, 2).unsqueeze(1), latent_BSK.to(dtype).unsqueeze(1)
        v_B1SC, kind = k_B1SK[..., : LAYER.latent], str(dtype).removeprefix("torch.")
        forms[f"sdpa, heads as rows, {kind}"] = lambda q=q_B1RK, k=k_B1SK, v=v_B1SC: F.scaled_dot_product_attention(
            q, k, v, scale=scale
        )
        forms[f"sdpa, heads as rows, padded values, {kind}"] = lambda q=q_B1RK, k=k_B1SK: (
            F.scaled_dot_product_attention(q, k, k, scale=scale)[..., : LAYER.latent]
        )
        forms[f"products, {kind}"] = lambda q=q_B1RK, k=k_B1SK, v=v_B1SC: (
            ((q @ k.transpose(2, 3)).float() * scale).softmax(-1).to(q.dtype) @ v
        )
    return forms


def _prefill_forms(q_MHK: Tensor, latent_PSK: Tensor, scale: float) -> dict[str, Callable[[int], object]]:
    """PyTorch's forms of dense prefill as functions of the context."""
    T, group = q_MHK.shape[0], 4
    forms: dict[str, Callable[[int], object]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        kind = str(dtype).removeprefix("torch.")
        rows_11RK, k_11SK = q_MHK.to(dtype).reshape(1, 1, -1, LAYER.key), latent_PSK.to(dtype).unsqueeze(1)
        forms[f"sdpa, heads as rows, {kind}"] = lambda n, q=rows_11RK, k=k_11SK: F.scaled_dot_product_attention(
            q, k[:, :, :n], k[:, :, :n], scale=scale
        )
        size = LAYER.nope + LAYER.rope
        q_1HTK = torch.randn(1, group, T, size).to(dtype)
        k_1HSK, v_1HSK = (torch.randn(1, group, latent_PSK.shape[1], size, dtype=dtype) for _ in range(2))
        forms[f"sdpa, expanded, {kind}"] = lambda n, q=q_1HTK, k=k_1HSK, v=v_1HSK: [
            F.scaled_dot_product_attention(q, k[:, :, :n], v[:, :, :n], scale=scale)
            for _ in range(LAYER.heads // group)
        ]
    return forms


def _train_rows(plan: Plan, ceilings: Ceilings) -> list[dict[str, Any]]:
    """Forward and backward of attention (selection included) for a block of queries at context L/2."""
    length, T, topk, group = plan.train_length // 2, plan.train_queries, plan.topks[-1], 4
    scale, size = (LAYER.nope + LAYER.rope) ** -0.5, LAYER.nope + LAYER.rope
    q_BTHK, latent_BSK = torch.randn(1, T, LAYER.heads, LAYER.key), torch.randn(1, length, LAYER.key)
    iq_MJX, iw_MJ = torch.randn(T, LAYER.index_heads, LAYER.index_dim), torch.randn(T, LAYER.index_heads)
    keys_BSX, slots_M, lengths_M = (
        torch.randn(1, length, LAYER.index_dim),
        torch.zeros(T, dtype=torch.int64),
        torch.full((T,), length),
    )
    leaves = q_BTHK.requires_grad_(), latent_BSK.requires_grad_()

    def sparse() -> None:
        positions_MK = dispatch.ragged_select(iq_MJX, iw_MJ, keys_BSX, slots_M, lengths_M, topk)
        assert positions_MK is not None, "the training row has more keys than it selects"
        out = dispatch.sparse_attention(q_BTHK, latent_BSK, positions_MK.unsqueeze(0), scale, LAYER.latent)
        torch.autograd.grad(out, leaves, torch.ones_like(out))

    def dense(q: Tensor, k: Tensor, v: Tensor, repeats: int) -> None:
        for _ in range(repeats):
            out = F.scaled_dot_product_attention(q, k, v, scale=scale)
            torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    candidates: dict[str, Thunk] = {}
    for dtype in (torch.float32, torch.bfloat16):
        kind = str(dtype).removeprefix("torch.")
        expanded = [torch.randn(1, group, n, size, dtype=dtype).requires_grad_() for n in (T, length, length)]
        candidates[f"sdpa, expanded, {kind}"] = lambda a=expanded: dense(*a, LAYER.heads // group)
        rows = [
            torch.randn(1, 1, n, LAYER.key, dtype=dtype).requires_grad_() for n in (T * LAYER.heads, length, length)
        ]
        candidates[f"sdpa, heads as rows, {kind}"] = lambda a=rows: dense(*a, 1)
    name, best = _fastest(candidates)
    times = alternate({"torch_dense": best, f"k{topk}": sparse}, plan.rounds)
    flops = T * (LAYER.attention_flops(topk) + LAYER.index_flops(length))
    flops += T * 2.0 * topk * LAYER.heads * (3 * LAYER.key + 2 * LAYER.latent)
    return _comparison(
        "train",
        topk,
        plan.train_length,
        times,
        {f"k{topk}": ceilings.seconds(flops, 0.0)},
        f"PyTorch {name}, {T} queries at L/2",
    )


def _memory_row(length: int, topk: int, queries: int) -> dict[str, Any]:
    """Growth of the largest resident memory while the last ``queries`` tokens of a prefill attend, caches excluded."""
    latent_PSK, keys_PSX = (
        torch.randn(1, length, LAYER.key).bfloat16(),
        torch.randn(1, length, LAYER.index_dim).bfloat16(),
    )
    before = _resident(reset=True)
    q_MHK, iq_MJX = (
        torch.randn(queries, LAYER.heads, LAYER.key),
        torch.randn(queries, LAYER.index_heads, LAYER.index_dim),
    )
    lengths_M = torch.arange(length - queries, length) + 1
    dispatch.ragged_dsa(
        q_MHK,
        iq_MJX,
        torch.randn(queries, LAYER.index_heads),
        latent_PSK,
        keys_PSX,
        torch.zeros(queries, dtype=torch.int64),
        lengths_M,
        topk,
        0.06,
        LAYER.latent,
    )
    after = _resident()
    grown = after - before if before is not None and after is not None else None
    return _row(
        f"prefill.k{topk}.{length}.memory",
        grown,
        "B",
        baseline=f"caches, last {queries} queries",
        goal=MEMORY_BYTES,
        met=None if grown is None else grown < MEMORY_BYTES,
    )


def _resident(reset: bool = False) -> int | None:
    """Largest resident memory of this process since the last reset, where Linux tells."""
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))


def _comparison(
    kind: str, topk: int, length: int, times: dict[str, list[float]], limits: dict[str, float], baseline: str
) -> list[dict[str, Any]]:
    """Rows of one sparse form against the dense ones."""
    name, sparse = f"{kind}.k{topk}.{length}", times[f"k{topk}"]
    torch_ratio = _median_ratio(times["torch_dense"], sparse)
    goal = GOALS[kind].get(topk, {}).get(length, 1.0)
    rows = [
        _row(
            f"{name}.vs_torch_dense",
            torch_ratio,
            "x",
            n=len(sparse),
            baseline=baseline,
            goal=goal,
            met=torch_ratio >= goal,
        ),
        _row(f"{name}.ms", statistics.median(sparse) * 1e3, "ms", n=len(sparse)),
        _row(f"{name}.ms.torch_dense", statistics.median(times["torch_dense"]) * 1e3, "ms", n=len(sparse)),
    ]
    if "native_dense" in times:
        ratio, allowed = _median_ratio(times["native_dense"], sparse), limits["native_dense"] / limits[f"k{topk}"]
        rows.append(
            _row(
                f"{name}.vs_native_dense",
                ratio,
                "x",
                n=len(sparse),
                baseline=f"counts allow {allowed:.2f}",
                goal=NATIVE_SHARE * allowed,
                met=ratio >= NATIVE_SHARE * allowed,
            )
        )
        rows.append(
            _row(
                f"{name}.ceiling_share.native_dense",
                limits["native_dense"] / statistics.median(times["native_dense"]),
                "share",
            )
        )
    share = limits[f"k{topk}"] / statistics.median(sparse)
    has_goal = length >= LONG
    rows.append(
        _row(
            f"{name}.ceiling_share",
            share,
            "share",
            goal=CEILING_SHARE if has_goal else None,
            met=share >= CEILING_SHARE if has_goal else None,
        )
    )
    return rows


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
    return {
        "name": name,
        "value": value if value is None else float(f"{value:.4g}"),
        "unit": unit,
        **{key: item for key, item in rest.items() if item is not None},
    }
