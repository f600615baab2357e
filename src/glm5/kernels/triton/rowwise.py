"""RMSNorm, RoPE, SwiGLU and sampling in Triton, one program per row. Letters as in ``reference``."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable


@triton.jit
def _rms_norm(x, weight, y, inverse, eps, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    value = tl.load(x + row * size + column, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / size + eps)
    normal = (value * scale).to(x.dtype.element_ty)
    factor = tl.load(weight + column, mask=inside, other=0.0)
    tl.store(y + row * size + column, (factor * normal).to(y.dtype.element_ty), mask=inside)
    tl.store(inverse + row, scale)


@triton.jit
def _rms_norm_backward(x, weight, inverse, dy, dx, partial, rows, size, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """One program takes ROWS rows and writes its share of the weight's gradient."""
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(ROWS):
        row = program * ROWS + i
        here = column < tl.where(row < rows, size, 0)
        scale = tl.load(inverse + tl.minimum(row, rows - 1))
        normal = tl.load(x + row * size + column, mask=here, other=0.0).to(tl.float32) * scale
        slope = tl.load(dy + row * size + column, mask=here, other=0.0).to(tl.float32)
        total += slope * normal
        mean = tl.sum(slope * factor * normal, 0) / size
        tl.store(
            dx + row * size + column, ((slope * factor - normal * mean) * scale).to(dx.dtype.element_ty), mask=here
        )
    tl.store(partial + program * size + column, total, mask=inside)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows_MD = x.reshape(-1, x.shape[-1]).contiguous()
        rows, size = rows_MD.shape
        y = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype), device=x.device)
        inverse_M = torch.empty(rows, dtype=torch.float32, device=x.device)
        if rows:
            _rms_norm[(rows,)](rows_MD, weight, y, inverse_M, eps, size, BLOCK=triton.next_power_of_2(size))
        ctx.save_for_backward(rows_MD, weight, inverse_M)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        rows_MD, weight, inverse_M = ctx.saved_tensors
        (rows, size), step = rows_MD.shape, 32
        programs = triton.cdiv(rows, step)
        dx, partial_PD = torch.empty_like(rows_MD), torch.empty(programs, size, dtype=torch.float32, device=dy.device)
        if rows:
            _rms_norm_backward[(programs,)](
                rows_MD,
                weight,
                inverse_M,
                dy.contiguous(),
                dx,
                partial_PD,
                rows,
                size,
                ROWS=step,
                BLOCK=triton.next_power_of_2(size),
            )
        return dx.view(dy.shape), partial_PD.sum(0).to(weight.dtype), None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ``reference.rms_norm``."""
    return _RmsNorm.apply(x, weight, eps)


@triton.jit
def _rope(x, cosine, sine, y, heads, pairs, pair, partner, out_pair, out_partner, sign, BLOCK: tl.constexpr):
    """Rotates the pairs of one head by ``sign`` times the angle of its token."""
    row = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, BLOCK)
    inside = j < pairs
    base = row * 2 * pairs
    first = tl.load(x + base + j * pair, mask=inside, other=0.0)
    second = tl.load(x + base + j * pair + partner, mask=inside, other=0.0)
    c = tl.load(cosine + row // heads * pairs + j, mask=inside, other=0.0)
    s = (tl.load(sine + row // heads * pairs + j, mask=inside, other=0.0) * sign).to(c.dtype)
    tl.store(y + base + j * out_pair, first * c - second * s, mask=inside)
    tl.store(y + base + j * out_pair + out_partner, second * c + first * s, mask=inside)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTHR: Tensor, cos_BTR2: Tensor, sin_BTR2: Tensor, interleaved: bool) -> Tensor:
        pairs = x_BTHR.shape[-1] // 2
        angles = [angle.expand(*x_BTHR.shape[:-2], pairs).contiguous() for angle in (cos_BTR2, sin_BTR2)]
        layout = (2, 1) if interleaved else (1, pairs)
        ctx.save_for_backward(*angles)
        ctx.layout = layout
        return _rotate(x_BTHR, *angles, layout, (1, pairs), 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return _rotate(dy, *ctx.saved_tensors, (1, dy.shape[-1] // 2), ctx.layout, -1.0), None, None, None


def _rotate(
    x: Tensor, cosine: Tensor, sine: Tensor, layout: tuple[int, int], out_layout: tuple[int, int], sign: float
) -> Tensor:
    x, y, pairs = x.contiguous(), torch.empty(x.shape, dtype=x.dtype, device=x.device), x.shape[-1] // 2
    if x.numel():
        _rope[(x.numel() // x.shape[-1],)](
            x, cosine, sine, y, x.shape[-2], pairs, *layout, *out_layout, sign, BLOCK=triton.next_power_of_2(pairs)
        )
    return y


def apply_rope(x_BTHR: Tensor, cos_BTR2: Tensor, sin_BTR2: Tensor, interleaved: bool = True) -> Tensor:
    """See ``reference.apply_rope``."""
    return _Rope.apply(x_BTHR, cos_BTR2, sin_BTR2, interleaved)


@triton.jit
def _swiglu(gate_up, y, size, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(gate_up + row * 2 * size + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * size + column, (gate / (1.0 + tl.exp(-gate)) * up).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_backward(gate_up, dy, dgate_up, size, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(gate_up + row * 2 * size + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + column, mask=inside, other=0.0).to(tl.float32)
    slope = tl.load(dy + row * size + column, mask=inside, other=0.0).to(tl.float32)
    s = 1.0 / (1.0 + tl.exp(-gate))
    out = dgate_up.dtype.element_ty
    tl.store(dgate_up + row * 2 * size + column, (slope * up * s * (1.0 + gate * (1.0 - s))).to(out), mask=inside)
    tl.store(dgate_up + row * 2 * size + size + column, (slope * gate * s).to(out), mask=inside)


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate_up = gate_up.contiguous()
        size, block = gate_up.shape[-1] // 2, min(1024, triton.next_power_of_2(gate_up.shape[-1] // 2))
        y = torch.empty(*gate_up.shape[:-1], size, dtype=gate_up.dtype, device=gate_up.device)
        ctx.save_for_backward(gate_up)
        if y.numel():
            _swiglu[(y.numel() // size, triton.cdiv(size, block))](gate_up, y, size, BLOCK=block)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        dgate_up, size = torch.empty_like(gate_up), dy.shape[-1]
        block = min(1024, triton.next_power_of_2(size))
        if dy.numel():
            _swiglu_backward[(dy.numel() // size, triton.cdiv(size, block))](
                gate_up, dy.contiguous(), dgate_up, size, BLOCK=block
            )
        return dgate_up


def swiglu(gate_up: Tensor) -> Tensor:
    """See ``reference.swiglu``."""
    return _Swiglu.apply(gate_up)


@triton.jit
def _sample(logits, temperature, top_k, top_p, min_p, uniform, ids, logprobs, width, BLOCK: tl.constexpr):
    """One row at once: cuts are thresholds on the scaled logits found by bisection, so nothing is sorted."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    heat = tl.load(temperature + row)
    raw = tl.load(logits + row * width + column, mask=inside, other=-float("inf"))
    scaled = raw / tl.where(heat == 0.0, 1.0, heat)
    peak = tl.max(scaled, 0)
    weight = tl.where(inside, tl.exp(scaled - peak), 0.0).to(tl.float64)
    whole = tl.sum(weight, 0)
    bits = scaled.to(tl.int32, bitcast=True)
    key = tl.where(inside, bits ^ ((bits >> 31) & 0x7FFFFFFF), -2147483648).to(tl.int64)
    limit = tl.load(top_k + row)
    limit = tl.where((limit <= 0) | (limit > width), width, limit)
    low, high = tl.min(key, 0), tl.max(key, 0)
    for _ in range(33):  # largest threshold that at least `limit` tokens reach
        middle = low + (high - low + 1) // 2
        enough = tl.sum((key >= middle).to(tl.int64), 0) >= limit
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle - 1)
    above = tl.sum((key > low).to(tl.int64), 0)
    tied = (key == low).to(tl.int64)
    kept = (key > low) | ((key == low) & (tl.cumsum(tied, 0) <= limit - above))
    mass = tl.sum(tl.where(kept, weight, 0.0), 0) * tl.load(top_p + row).to(tl.float64)
    low, high = tl.min(key, 0), tl.max(key, 0)
    for _ in range(33):  # smallest threshold with less than `mass` above it
        middle = low + (high - low) // 2
        less = tl.sum(tl.where(kept & (key > middle), weight, 0.0), 0) < mass
        low, high = tl.where(less, low, middle + 1), tl.where(less, middle, high)
    higher = tl.where(kept & (key > low), weight, 0.0)
    ties = tl.where(kept & (key == low), weight, 0.0)
    kept = (higher > 0.0) | (kept & (key == low) & (tl.sum(higher, 0) + tl.cumsum(ties, 0) - ties < mass))
    kept = kept & (weight >= tl.load(min_p + row).to(tl.float64))
    best = tl.min(tl.where((scaled == peak) & inside, column, width), 0)
    kept = tl.where(heat == 0.0, column == best, kept | ((tl.sum(kept.to(tl.int32), 0) == 0) & (column == best)))
    cumulative = tl.cumsum(tl.where(kept, weight, 0.0), 0)
    goal = tl.load(uniform + row).to(tl.float64) * tl.max(cumulative, 0)
    chosen = tl.min(tl.where((cumulative > goal) & kept & (weight > 0.0), column, width), 0)
    chosen = tl.minimum(chosen, width - 1)
    tl.store(ids + row, chosen.to(tl.int64))
    value = tl.sum(tl.where(column == chosen, scaled - peak, 0.0), 0)
    tl.store(logprobs + row, (value.to(tl.float64) - tl.log(whole)).to(tl.float32))


def sample(
    logits_BW: Tensor, temperature_B: Tensor, top_k_B: Tensor, top_p_B: Tensor, min_p_B: Tensor, uniform_B: Tensor
) -> tuple[Tensor, Tensor]:
    """See ``reference.sample``. A row must fit a program: up to 2^18 tokens."""
    rows, width = logits_BW.shape
    ids_B = torch.empty(rows, dtype=torch.int64, device=logits_BW.device)
    logprobs_B = torch.empty(rows, dtype=torch.float32, device=logits_BW.device)
    if rows:
        _sample[(rows,)](
            logits_BW.float().contiguous(),
            temperature_B.float(),
            top_k_B.long(),
            top_p_B.float(),
            min_p_B.float(),
            uniform_B.float(),
            ids_B,
            logprobs_B,
            width,
            BLOCK=triton.next_power_of_2(width),
            num_warps=8,
        )
    return ids_B, logprobs_B
