"""The experts of one position, their weights read once: two kernels, no expert of another is touched.

Shared experts take part as if they were S more experts of the same width, whose weight is 1.

Shapes: D model width, E experts, F width of an expert, K experts of the position, S as above.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from agentinfer.ops.kernels.launch import Direct
from agentinfer.ops.kernels.tiles import GemvTile, gemv_tile, power_of_two


@triton.jit
def _gate_up(
    x, weight, shared, experts, out,
    D: tl.constexpr, F: tl.constexpr, K: tl.constexpr, S: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    ABSENT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (n, i): outputs n * BN and on of expert j, the shared ones (from K on) first: their weights are loaded
    while the choice is still made. ABSENT: some may be -1, of which the outputs are 0 and nothing is read.
    """
    if PDL:
        gdc_launch_dependents()
    i = tl.program_id(1)
    j = tl.where(i < S, K + i, i - S)
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = row < F
    row = tl.minimum(row, F - 1)
    dims = tl.arange(0, BK)
    at = shared + (i * F + row).to(tl.int64)[:, None] * D  # of an expert that is not shared: replaced below
    up = at + S * F * D
    first = tl.zeros((BN, BK), weight.dtype.element_ty)
    first_up = first
    if S > 0:
        early = ((dims < D) & (i < S))[None, :]
        first = tl.load(at + dims[None, :], mask=early, other=0.0, eviction_policy="evict_first")
        first_up = tl.load(up + dims[None, :], mask=early, other=0.0, eviction_policy="evict_first")
    if PDL:
        gdc_wait()
    expert = tl.load(experts + tl.maximum(i - S, 0))
    here = True
    if ABSENT:
        here = (i < S) | (expert >= 0)
        expert = tl.maximum(expert, 0)
    if i >= S:
        at = weight + (expert * (2 * F) + row)[:, None] * D
        up = at + F * D
        there = (dims < D) & here
        first = tl.load(at + dims[None, :], mask=there[None, :], other=0.0, eviction_policy="evict_first")
        first_up = tl.load(up + dims[None, :], mask=there[None, :], other=0.0, eviction_policy="evict_first")
    acc = tl.zeros((BN, BK), tl.float32)
    acc_up = tl.zeros((BN, BK), tl.float32)
    for c in tl.static_range((D + BK - 1) // BK):
        col = c * BK + dims
        there = (col < D) & here
        xc = tl.load(x + col, mask=there, other=0.0, cache_modifier=".cg").to(tl.float32)[None, :]
        w, v = first, first_up
        if c > 0:
            w = tl.load(at + col[None, :], mask=there[None, :], other=0.0, eviction_policy="evict_first")
            v = tl.load(up + col[None, :], mask=there[None, :], other=0.0, eviction_policy="evict_first")
        acc += w.to(tl.float32) * xc
        acc_up += v.to(tl.float32) * xc
    y = tl.sum(acc, 1)
    y = y * tl.sigmoid(y) * tl.sum(acc_up, 1)
    tl.store(out + j * F + row, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _down(
    act, weight, shared, weights, experts, out,
    D: tl.constexpr, F: tl.constexpr, K: tl.constexpr, S: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    ABSENT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program n: numbers n * BN and on of the sum, onto what *out* holds. One expert after the other, the shared ones
    first: their weights are loaded before there is anything to multiply them by.
    """
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = row < D
    row = tl.minimum(row, D - 1).to(tl.int64)
    dims = tl.arange(0, BK)
    first = tl.zeros((BN, BK), weight.dtype.element_ty)
    if S > 0:
        there = (dims < F)[None, :]
        first = tl.load(shared + row[:, None] * (S * F) + dims[None, :], mask=there, other=0.0)
    if PDL:
        gdc_wait()
    before = tl.load(out + row, cache_modifier=".cg")
    acc = tl.zeros((BN, BK), tl.float32)
    for i in tl.static_range(S + K):
        here = True
        if i < S:
            at, j = shared + row[:, None] * (S * F) + i * F, K + i
            share = 1.0
        else:
            j = i - S
            expert = tl.load(experts + j)
            if ABSENT:
                here = expert >= 0
                expert = tl.maximum(expert, 0)
            at = weight + (expert * D + row)[:, None] * F
            share = tl.load(weights + j)
        for c in tl.static_range((F + BK - 1) // BK):
            col = c * BK + dims
            there = (col < F) & here
            xc = tl.load(act + j * F + col, mask=there, other=0.0, cache_modifier=".cg").to(tl.float32)
            w = first
            if S == 0 or i > 0 or c > 0:
                w = tl.load(at + col[None, :], mask=there[None, :], other=0.0, eviction_policy="evict_first")
            acc += w.to(tl.float32) * (xc * share)[None, :]
    tl.store(out + row, before + tl.sum(acc, 1), mask=inside)


_run_gate_up = Direct(_gate_up)
_run_down = Direct(_down)


def down_tile(n: int, k: int) -> GemvTile:
    """A rule, not measured yet: whole rows of an expert where they are short, so that there are programs enough."""
    chunk = min(2048, power_of_two(k))
    return GemvTile(4 if n >= 2048 else 2, chunk, 4)


def expert_gemv(
    x_1D: Tensor, weights_1K: Tensor, experts_1K: Tensor, gate_up_EFD: Tensor, down_EDF: Tensor,
    shared_gate_up: Tensor | None, shared_down: Tensor | None, add_to: Tensor, *,
    absent: bool = False, pdl: bool = False, tiles: tuple[GemvTile, GemvTile] | None = None,
) -> Tensor:  # fmt: skip
    """The weighted experts of one position and the shared ones, onto *add_to* ([1, D] float32) in place, which is what
    is returned. Float32 inside, but for what is between the two products, which is of x's dtype.

    *gate_up* [E, 2F, D], gate rows first, *down* [E, D, F]; shared ones [2 * S * F, D] and [D, S * F] (S any whole
    number), or None; all contiguous, of one dtype. *weights* float32, *experts* int64. The sum begins with the shared
    ones, the others follow in their order. *absent*: some of *experts* may be -1, of which nothing is added. *pdl*: the
    weights are complete before the kernel before this one began.
    """
    (_, width, model), chosen = down_EDF.transpose(1, 2).shape, experts_1K.shape[1]
    more = 0 if shared_down is None else shared_down.shape[1] // width
    first, second = tiles or (gemv_tile((chosen + more) * width, model, True), down_tile(model, width))  # noqa: FBT003 - gated
    act = torch.empty((chosen + more, width), dtype=x_1D.dtype, device=x_1D.device)
    _run_gate_up(
        (-(-width // first.rows), chosen + more, 1),
        (x_1D, gate_up_EFD, gate_up_EFD if shared_gate_up is None else shared_gate_up, experts_1K, act), (),
        (model, width, chosen, more, first.rows, first.chunk, absent, pdl),
        warps=first.warps, pdl=pdl,
    )  # fmt: skip
    _run_down(
        (-(-model // second.rows), 1, 1),
        (act, down_EDF, down_EDF if shared_down is None else shared_down, weights_1K, experts_1K, add_to), (),
        (model, width, chosen, more, second.rows, second.chunk, absent, pdl),
        warps=second.warps, pdl=pdl,
    )  # fmt: skip
    return add_to
