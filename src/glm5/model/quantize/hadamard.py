"""Hadamard rotations: orthogonal, so they change no product, but spread an outlier over its whole block (QuaRot).

``H`` is Sylvester's matrix over ``sqrt(block)``, its own inverse; where a width is not a power of two the rotation is
block-diagonal with the largest block that divides it. ``rotate_layer`` folds rotations into the weights of one decoder
layer where the function stays the same without any work at run time:

* query latent: rows of ``q_a_proj``; the weight of ``q_a_layernorm`` goes into ``q_b_proj`` and the indexer's ``wq_b``
  (a norm without weight commutes with a rotation), whose columns take the inverse;
* key-value latent: the same with ``kv_a_proj_with_mqa``, ``kv_a_layernorm`` and ``kv_b_proj``, so that the latent cache
  has no outlier channels either;
* values: the value rows of ``kv_b_proj`` and the columns of ``o_proj``, head by head.

The residual stream is left alone: its rotation would have to pass the weight of the final norm, which the MTP layer
reads too. The inputs of ``down_proj`` come out of a nonlinearity, so ``rotate_down`` needs ``hadamard`` at run time.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from glm5.model.config import ModelConfig
from glm5.model.layers import Mlp, Projection, RmsNorm
from glm5.model.moe import SparseMlp
from glm5.model.mtp import DecoderLayer


def hadamard(x: Tensor, block: int) -> Tensor:
    """``x`` [..., n] rotated in blocks of ``block`` (a power of two that divides n), in the type of ``x``.

    Two small products instead of one of block x block, as H of a * b is the Kronecker product of H of a and H of b.
    """
    outer = 2 ** (block.bit_length() // 2)
    parts = x.unflatten(-1, (-1, outer, block // outer))
    left, right = _matrix(outer, x.dtype, x.device), _matrix(block // outer, x.dtype, x.device)
    return (left @ (parts @ right)).flatten(-3)


def block_of(*widths: int) -> int:
    """The largest power of two that divides every width."""
    common = math.gcd(*widths)
    return common & -common


def down_block(config: ModelConfig) -> int:
    """The block of ``rotate_down``: one for all ``down_proj`` of a model."""
    return block_of(config.intermediate_size, config.moe_intermediate_size)


@torch.no_grad()
def rotate_layer(layer: DecoderLayer) -> None:
    """Fold the rotations of the module docstring into ``layer`` in place. Exact but for rounding: use fp32 weights."""
    attention = layer.self_attn
    readers = [attention.q_b_proj] + ([attention.indexer.wq_b] if attention.indexer is not None else [])
    _rotate_latent(attention.q_a_proj.weight, attention.q_a_layernorm, readers)
    latent_rows = attention.kv_a_proj_with_mqa.weight[: attention.latent_dim]
    _rotate_latent(latent_rows, attention.kv_a_layernorm, [attention.kv_b_proj])
    values_HVC = _value_rows(attention.kv_b_proj.weight, attention.heads, attention.nope_dim)
    block = block_of(attention.value_dim)
    values_HVC.copy_(hadamard(values_HVC.transpose(1, 2), block).transpose(1, 2))
    attention.o_proj.weight.copy_(hadamard(attention.o_proj.weight, block))


@torch.no_grad()
def rotate_down(layer: DecoderLayer, block: int) -> None:
    """Rotate the columns of every ``down_proj`` of ``layer`` in place; its inputs must then be rotated at run time."""
    for weight in _down_weights(layer):
        weight.copy_(hadamard(weight, block))


def _rotate_latent(rows: Tensor, norm: RmsNorm, readers: list[Projection]) -> None:
    """``rows`` [n, D] produce the latent, ``norm`` follows, ``readers`` multiply it."""
    block = block_of(rows.shape[0])
    rows.copy_(hadamard(rows.T, block).T)
    for reader in readers:
        reader.weight.copy_(hadamard(reader.weight * norm.weight, block))
    norm.weight.fill_(1.0)


def _value_rows(kv_b: Tensor, heads: int, nope_dim: int) -> Tensor:
    """The value part [H, V, C] of ``kv_b_proj``, a view."""
    return kv_b.unflatten(0, (heads, -1))[:, nope_dim:]


def _down_weights(layer: DecoderLayer) -> list[Tensor]:
    if isinstance(layer.mlp, SparseMlp):
        return [layer.mlp.experts.down_proj, layer.mlp.shared_experts.down_proj.weight]
    assert isinstance(layer.mlp, Mlp)
    return [layer.mlp.down_proj.weight]


@functools.cache
def _matrix(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Sylvester's matrix of ``size`` (a power of two), symmetric and orthogonal."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (matrix / math.sqrt(size)).to(dtype=dtype, device=device)
