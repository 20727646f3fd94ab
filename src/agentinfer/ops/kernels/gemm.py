"""Some rows (2 to 128) times a weight, at the speed of memory: tiles arrive by TMA, columns may be split among
programs.

Split sums are not added up here: whoever norms the residual next does it (`add_norm`), in fixed order.

Shapes: M rows, N outputs, K columns, P parts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from agentinfer.ops.kernels.tiles import GemmTile, gemm_tile


@triton.jit(do_not_specialize=["M"])
def _gemm(
    x, weight, bias, out, M,
    N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    SPLIT: tl.constexpr, BIAS: tl.constexpr, GLU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (n, m, p): a block of BM x BN from part p of the columns. x and weight are descriptors, which read zeros
    past the end. GLU: rows of the gate at 0, of up at N.
    """
    if PDL:
        gdc_launch_dependents()
    n = tl.program_id(0) * BN
    m = tl.program_id(1) * BM
    part = tl.program_id(2)
    SHARE: tl.constexpr = ((K + BK - 1) // BK + SPLIT - 1) // SPLIT * BK
    if PDL:
        gdc_wait()
    acc = tl.zeros((BM, BN), tl.float32)
    acc_up = tl.zeros((BM, BN), tl.float32)
    for k in tl.range(0, SHARE, BK, num_stages=STAGES):
        rows = x.load([m, part * SHARE + k])
        acc = tl.dot(rows, weight.load([n, part * SHARE + k]).T, acc, input_precision="ieee")
        if GLU:
            acc_up = tl.dot(rows, weight.load([N + n, part * SHARE + k]).T, acc_up, input_precision="ieee")
    at = n + tl.arange(0, BN)
    row = m + tl.arange(0, BM)
    inside = at < N
    if BIAS:
        first = part == 0
        acc += tl.load(bias + at, mask=inside & first, other=0.0).to(tl.float32)[None, :]
        if GLU:
            acc_up += tl.load(bias + N + at, mask=inside & first, other=0.0).to(tl.float32)[None, :]
    if GLU:
        acc = acc * tl.sigmoid(acc) * acc_up
    place = out + (part.to(tl.int64) * M + row)[:, None] * N + at[None, :]
    tl.store(place, acc.to(out.dtype.element_ty), mask=(row < M)[:, None] & inside[None, :])


def fits(x: Tensor, weight: Tensor) -> bool:
    """Whether TMA can read these: two bytes a number, rows of a multiple of 16 bytes at such an address."""
    rows_aligned = weight.shape[1] * 2 % 16 == 0 and weight.data_ptr() % 16 == 0
    return x.dtype.itemsize == 2 and weight.dtype == x.dtype and rows_aligned


def gemm(
    x: Tensor,
    weight: Tensor,
    dtype: torch.dtype,
    *,
    bias: Tensor | None = None,
    gated: bool = False,
    partial: bool = False,
    out: Tensor | None = None,
    pdl: bool = False,
    tile: GemmTile | None = None,
) -> Tensor:
    """x @ weight^T + bias, [M, N] of *dtype*, accumulated in float32. *gated* makes silu(gate) * up of the two halves.

    *x* is [M, K], *weight* [N, K] ([2N, K] if gated: rows of the gate, then of up), both contiguous, of one dtype, with
    rows of a multiple of 16 bytes. *partial*: [P, M, N] instead, whose sum over P is the product. *out*: where to write
    it, of that shape and *dtype*, contiguous; None: to new memory.

    *pdl*: take part in programmatic dependent launch.
    """
    rows, k = x.shape
    n = weight.shape[0] // 2 if gated else weight.shape[0]
    t = gemm_tile(rows, n, k, gated, partial=partial) if tile is None else tile
    if out is None:
        out = torch.empty((t.split, rows, n) if partial else (rows, n), dtype=dtype, device=x.device)
    _gemm[(-(-n // t.n), -(-rows // t.m), t.split if partial else 1)](
        TensorDescriptor(x, [rows, k], [k, 1], [t.m, t.k]),
        TensorDescriptor(weight, [weight.shape[0], k], [k, 1], [t.n, t.k]),
        weight if bias is None else bias, out, rows,
        n, k, t.m, t.n, t.k, t.stages, t.split if partial else 1, bias is not None, gated, pdl,
        num_warps=t.warps, launch_pdl=pdl,
    )  # fmt: skip
    return out
