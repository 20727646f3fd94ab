"""The residual stream between two products: partial sums added to it in fixed order, and its norm.

Shapes: T positions, n rows wanted, D model width, P partial sums.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from agentinfer.ops.kernels.launch import Direct
from agentinfer.ops.kernels.tiles import power_of_two


@triton.jit(do_not_specialize=["stride"])
def _add_norm(
    x, parts, total, weight, out, rows, eps, stride,
    D: tl.constexpr, BD: tl.constexpr, PARTS: tl.constexpr, GATHER: tl.constexpr, STORE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program i: row rows[i] (GATHER) or i. The sum is rounded to the type of *total* before it is normed."""
    if PDL:
        gdc_launch_dependents()
    at = tl.program_id(0)
    dims = tl.arange(0, BD)
    inside = dims < D
    w = tl.load(weight + dims, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    row = at.to(tl.int64)
    if GATHER:
        row = tl.load(rows + at)
    y = tl.load(x + row * D + dims, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    for i in tl.static_range(PARTS):
        place = parts + i * stride.to(tl.int64) + row * D + dims
        y += tl.load(place, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    if PARTS > 0:
        y = y.to(total.dtype.element_ty).to(tl.float32)
    if STORE:
        tl.store(total + row * D + dims, y.to(total.dtype.element_ty), mask=inside)
    r = tl.rsqrt(tl.sum(y * y) / D + eps)
    tl.store(out + at.to(tl.int64) * D + dims, (y * r * w).to(out.dtype.element_ty), mask=inside)


_run = Direct(_add_norm)


def _launch(
    x: Tensor, parts: Tensor | None, total: Tensor, weight_D: Tensor, out: Tensor, rows: Tensor | None, eps: float,
    *, store: bool, pdl: bool,
) -> None:  # fmt: skip
    count, width = out.shape
    if not count:
        return
    block = power_of_two(width)
    _run(
        (count, 1, 1),
        (x, x if parts is None else parts, total, weight_D, out, weight_D if rows is None else rows),
        (eps, 0 if parts is None else parts.stride(0)),
        (width, block, 0 if parts is None else len(parts), rows is not None, store, pdl),
        warps=max(1, min(8, block // 512)), pdl=pdl,
    )  # fmt: skip


def add_norm(
    residual_TD: Tensor,
    pending_PTD: Tensor | None,
    weight_D: Tensor,
    eps: float,
    dtype: torch.dtype,
    *,
    rows: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """Add the partial sums *pending* (none: nothing) to *residual* (float32) in place, in order, and norm it: [T, D]
    of *dtype*.

    *rows* ([n] int64): only those rows are normed, [n, D], and *residual* is not written. All contiguous.
    """
    count = len(residual_TD) if rows is None else len(rows)
    out = torch.empty((count, residual_TD.shape[1]), dtype=dtype, device=residual_TD.device)
    store = pending_PTD is not None and rows is None
    _launch(residual_TD, pending_PTD, residual_TD, weight_D, out, rows, eps, store=store, pdl=pdl)
    return out


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """norm.rms_norm: x over its root mean square, times the weight; x is [.., D], contiguous."""
    out = torch.empty_like(x)
    flat = out.view(-1, x.shape[-1])
    _launch(x, None, x, weight_D, flat, None, eps, store=False, pdl=False)
    return out


def fused_add_rms_norm(x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """norm.fused_add_rms_norm: the norm of residual + x, and that sum. New memory; arguments are contiguous."""
    dtype = torch.promote_types(x_TD.dtype, residual_TD.dtype)
    total = torch.empty_like(residual_TD, dtype=dtype)
    out = torch.empty_like(total)
    flat = out.view(-1, total.shape[-1])
    _launch(residual_TD, x_TD.view(1, *flat.shape), total, weight_D, flat, None, eps, store=True, pdl=False)
    return out, total
