"""One row times a weight, read once at the speed of memory: norm in the prologue, bias, gate or residual in the
epilogue.

The square sum of the norm is gathered beside the products and applied at the end, so the row is read once. Weights do
not depend on the kernel before, so the first of them are loaded before waiting for it.

Shapes: N outputs, K columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from attrs import evolve
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from agentinfer.ops.kernels.launch import Direct
from agentinfer.ops.kernels.tiles import GemvTile, gemv_tile
from agentinfer.ops.scaled import BLOCK, Scaled, Weight


@triton.jit
def _weights(at, dims, CHUNK: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    """Columns CHUNK * BK and on of the rows that begin at *at*. They are used once: first to leave the cache."""
    if (CHUNK + 1) * BK <= K:
        w = tl.load(at + (CHUNK * BK + dims)[None, :], eviction_policy="evict_first")
    else:
        w = tl.load(
            at + (CHUNK * BK + dims)[None, :],
            mask=(CHUNK * BK + dims < K)[None, :],
            other=0.0,
            eviction_policy="evict_first",
        )
    return w


@triton.jit
def _scaled(x, scales, row, col, K: tl.constexpr, BLOCK: tl.constexpr):
    """Columns *col* of *x* times the scales that row *row* of the weight has there, one for BLOCK x BLOCK; 0: none."""
    if BLOCK:
        blocks = row // BLOCK * ((K + BLOCK - 1) // BLOCK) + col // BLOCK
        x *= tl.load(scales + blocks, mask=col < K, other=0.0)
    return x


@triton.jit
def _gemv(
    x, norm, weight, scales, bias, out, eps,
    N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BLOCK: tl.constexpr,
    NORM: tl.constexpr, BIAS: tl.constexpr, GLU: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program n: outputs n * BN and on. BLOCK: rows and columns of the weight that have one of *scales*; 0: none has.
    GLU: rows of the gate at 0, of up at N. ADD: onto what *out* holds.
    """
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = row < N
    if N % BN != 0:  # what is past the end repeats the last row and is not stored
        row = tl.minimum(row, N - 1)
    dims = tl.arange(0, BK)
    at = weight + row.to(tl.int64)[:, None] * K
    first = _weights(at, dims, 0, K, BK)
    first_up = first
    if GLU:
        first_up = _weights(at + N * K, dims, 0, K, BK)
    scale = first
    if NORM:
        scale = tl.load(norm + dims, mask=dims < K, other=0.0)
    if PDL:
        gdc_wait()
    if ADD:  # early, so that nobody waits for it at the end
        before = tl.load(out + row, cache_modifier=".cg")
    acc = tl.zeros((BN, BK), tl.float32)
    acc_up = tl.zeros((BN, BK), tl.float32)
    square = tl.zeros((BK,), tl.float32)
    for c in tl.static_range((K + BK - 1) // BK):
        col = c * BK + dims
        xc = tl.load(x + col, mask=col < K, other=0.0, cache_modifier=".cg").to(tl.float32)
        if NORM:
            square += xc * xc
            s = scale if c == 0 else tl.load(norm + col, mask=col < K, other=0.0)
            xc *= s.to(tl.float32)
        w = first if c == 0 else _weights(at, dims, c, K, BK)
        acc += w.to(tl.float32) * _scaled(xc, scales, tl.program_id(0) * BN, col, K, BLOCK)[None, :]
        if GLU:
            up = first_up if c == 0 else _weights(at + N * K, dims, c, K, BK)
            acc_up += up.to(tl.float32) * _scaled(xc, scales, N + tl.program_id(0) * BN, col, K, BLOCK)[None, :]
    y = tl.sum(acc, 1)
    y_up = tl.sum(acc_up, 1)
    if NORM:
        r = tl.rsqrt(tl.sum(square) / K + eps)
        y *= r
        y_up *= r
    if BIAS:
        y += tl.load(bias + row).to(tl.float32)
        if GLU:
            y_up += tl.load(bias + N + row).to(tl.float32)
    if GLU:
        y = y * tl.sigmoid(y) * y_up
    if ADD:
        y += before
    tl.store(out + row, y.to(out.dtype.element_ty), mask=inside)


_run = Direct(_gemv)


def tile_of(n: int, k: int, gated: bool, *, scaled: bool) -> GemvTile:
    """`gemv_tile`; gated and scaled, two sums and two rows of scales leave room for half as many rows."""
    tile = gemv_tile(n, k, gated)
    return evolve(tile, rows=max(1, tile.rows // 2)) if gated and scaled else tile


def gemv(
    x: Tensor,
    weight: Weight,
    dtype: torch.dtype,
    *,
    norm_K: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    gated: bool = False,
    add_to: Tensor | None = None,
    pdl: bool = False,
    tile: GemvTile | None = None,
) -> Tensor:
    """x @ weight^T, [1, N] of *dtype*. Float32 inside.

    *x* is [1, K], *weight* [N, K] ([2N, K] if gated: rows of the gate, then of up), contiguous; in 8 bits, N is a
    multiple of 128 if gated. In this order: x is normed (root mean square, *norm_K* and *eps*) unless there is no norm;
    *bias* is added; *gated* makes silu(gate) * up of the two halves; the result is added to *add_to* ([1, N] float32)
    in place, which is then what is returned.

    *pdl*: take part in programmatic dependent launch: *weight* must be complete before the kernel before this one
    began.
    """
    k = x.shape[1]
    n = weight.shape[0] // 2 if gated else weight.shape[0]
    w, scales, block = (weight.stored, weight.scales, BLOCK) if isinstance(weight, Scaled) else (weight, weight, 0)
    if gated and block and n % block:
        raise ValueError(f"gate and up of {n} rows each: their scales would share blocks")
    t = tile_of(n, k, gated, scaled=block > 0) if tile is None else tile
    out = torch.empty((1, n), dtype=dtype, device=x.device) if add_to is None else add_to
    _run(
        (-(-n // t.rows), 1, 1),
        (x, w if norm_K is None else norm_K, w, scales, w if bias is None else bias, out),
        (eps,),
        (n, k, t.rows, t.chunk, block, norm_K is not None, bias is not None, gated, add_to is not None, pdl),
        warps=t.warps, pdl=pdl,
    )  # fmt: skip
    return out
