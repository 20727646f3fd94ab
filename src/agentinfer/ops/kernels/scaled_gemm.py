"""Several rows times a weight of 8 bits, which is what is read: tiles arrive by TMA, 128 columns at a time, so that
each product of two tiles has one scale of the weight, and is added up in float32.

========= ==================================================== ==================================================
rows      activations                                          products
========= ==================================================== ==================================================
2 to 64   as they are: reading the weights is what takes time  of the activations' dtype, which holds all that 8
                                                               bits can
more      rounded to 8 bits by `quantize`                      of 8 bits, twice as fast on Hopper
========= ==================================================== ==================================================

Tiles are computed with the weight's rows first: there are always enough of them for products of warp groups.

Shapes: M rows, N outputs, K columns, P parts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from attrs import frozen
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from agentinfer.errors import InvalidSetting
from agentinfer.ops.kernels.quantize import quantize
from agentinfer.ops.scaled import BLOCK, Scaled

EXACT_ROWS = 64
"""Most rows whose activations are not rounded."""


@frozen
class ScaledTile:
    """A program computes a block of m x n numbers from one of *split* parts of the columns. n divides 128."""

    m: int
    n: int
    stages: int
    warps: int
    split: int


def scaled_tile(rows: int, n: int, k: int, gated: bool, *, partial: bool) -> ScaledTile:
    """A rule, not measured yet. *partial*: the columns may be split, until there are programs for all multiprocessors,
    because whoever reads the result adds up the parts.
    """
    if rows > EXACT_ROWS:
        return ScaledTile(64 if gated else 128, 128, 4, 8, 1)
    split = 1
    while partial and split < 8 and -(-n // 64) * split < 128 and k >= 512 * split:
        split *= 2
    return ScaledTile(16 if rows <= 16 else 32 if rows <= 32 else 64, 64, 6, 4, split)


@triton.jit
def scaled_dot(weight, rows) -> tl.tensor:
    """weight [N, 128] of 8 bits times rows [M, 128], [N, M] float32, without their scales."""
    if weight.dtype != rows.dtype:
        weight = weight.to(tl.float32).to(rows.dtype)
    return tl.dot(weight, rows.T, input_precision="ieee")


@triton.jit(do_not_specialize=["M"])
def _scaled_gemm(
    x, weight, scales, row_scales, bias, out, M,
    N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    SPLIT: tl.constexpr, BIAS: tl.constexpr, GLU: tl.constexpr, ROUNDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (m, n, p): a block of BM x BN from part p of the columns. x and weight are descriptors, which read zeros
    past the end. GLU: rows of the gate at 0, of up at N. ROUNDED: x is of 8 bits.
    """
    if PDL:
        gdc_launch_dependents()
    m = tl.program_id(0) * BM
    n = tl.program_id(1) * BN
    part = tl.program_id(2)
    BLOCKS: tl.constexpr = (K + BLOCK - 1) // BLOCK
    SHARE: tl.constexpr = (BLOCKS + SPLIT - 1) // SPLIT
    at = n + tl.arange(0, BN)
    row = m + tl.arange(0, BM)
    own = scales + n // BLOCK * BLOCKS
    up = scales + (N + n) // BLOCK * BLOCKS
    if PDL:
        gdc_wait()
    acc = tl.zeros((BN, BM), tl.float32)
    acc_up = tl.zeros((BN, BM), tl.float32)
    for b in tl.range(0, SHARE, num_stages=STAGES):
        block = part * SHARE + b
        there = block < BLOCKS
        rows = x.load([m, block * BLOCK])
        scale = tl.load(own + block, mask=there, other=0.0)
        if ROUNDED:
            of_rows = tl.load(row_scales + block.to(tl.int64) * M + row, mask=there & (row < M), other=0.0)[None, :]
        else:
            of_rows = 1.0
        acc += scaled_dot(weight.load([n, block * BLOCK]), rows) * (scale * of_rows)
        if GLU:
            scale = tl.load(up + block, mask=there, other=0.0)
            acc_up += scaled_dot(weight.load([N + n, block * BLOCK]), rows) * (scale * of_rows)
    inside = at < N
    if BIAS:
        first = part == 0
        acc += tl.load(bias + at, mask=inside & first, other=0.0).to(tl.float32)[:, None]
        if GLU:
            acc_up += tl.load(bias + N + at, mask=inside & first, other=0.0).to(tl.float32)[:, None]
    if GLU:
        acc = acc * tl.sigmoid(acc) * acc_up
    place = out + (part.to(tl.int64) * M + row)[None, :] * N + at[:, None]
    tl.store(place, acc.to(out.dtype.element_ty), mask=(row < M)[None, :] & inside[:, None])


def check_columns(k: int) -> None:
    """Raises InvalidSetting if TMA can not read rows of *k* numbers of 8 bits."""
    if k % 16:
        raise InvalidSetting("fp8", f"native: rows of {k} numbers of 8 bits are no multiple of 16 bytes")


def scaled_gemm(
    x: Tensor,
    weight: Scaled[Tensor],
    dtype: torch.dtype,
    *,
    bias: Tensor | None = None,
    gated: bool = False,
    partial: bool = False,
    out: Tensor | None = None,
    pdl: bool = False,
    tile: ScaledTile | None = None,
    rounded: bool | None = None,
) -> Tensor:
    """As `gemm`, for a weight of 8 bits; gated, its halves are of a multiple of 128 rows. Raises InvalidSetting for
    columns that are no multiple of 16.

    *rounded*: activations are, to 8 bits; None: beyond EXACT_ROWS.
    """
    rows, k = x.shape
    check_columns(k)
    n = len(weight) // 2 if gated else len(weight)
    if gated and n % BLOCK:
        raise ValueError(f"gate and up of {n} rows each: their scales would share blocks")
    t = scaled_tile(rows, n, k, gated, partial=partial) if tile is None else tile
    rounded = rows > EXACT_ROWS if rounded is None else rounded
    x, row_scales = quantize(x, pdl=pdl) if rounded else (x, weight.scales)
    if out is None:
        out = torch.empty((t.split, rows, n) if partial else (rows, n), dtype=dtype, device=x.device)
    _scaled_gemm[(-(-rows // t.m), -(-n // t.n), t.split if partial else 1)](
        TensorDescriptor(x, [rows, k], [k, 1], [t.m, BLOCK]),
        TensorDescriptor(weight.stored, [len(weight), k], [k, 1], [t.n, BLOCK]),
        weight.scales, row_scales, weight.scales if bias is None else bias, out, rows,
        n, k, t.m, t.n, BLOCK, t.stages, t.split if partial else 1, bias is not None, gated, rounded, pdl,
        num_warps=t.warps, launch_pdl=pdl,
    )  # fmt: skip
    return out
