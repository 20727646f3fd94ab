"""The experts of many positions: one product for all experts, tile by tile of `expert_rows`, weights by TMA.

What comes out of the second product is one number a pair, weighted: whoever norms the residual next adds the K parts of
a position (`add_norm`), in fixed order. Nothing is dropped, and nothing is added by atomics.

Shapes: T positions, D model width, E experts, F width of an expert, K experts a position.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from attrs import frozen
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from agentinfer.ops.kernels.expert_rows import ExpertRows


@frozen
class ExpertTile:
    """Of both products: *n* outputs of a tile's rows, *k* columns at a time."""

    rows: int
    """Rows a tile: those of one expert are padded to a multiple."""
    n: int
    k: int
    stages: int
    warps: int


def expert_tile(pairs: int, num_experts: int, itemsize: int) -> ExpertTile:
    """A rule, not measured yet: room for a third more rows than an expert has on average, so that most need one tile
    while there are few; the large tile where the weights are no longer what takes time.
    """
    each = pairs / num_experts
    few = 16 if each <= 10 else 32 if each <= 24 else 64 if each <= 48 else 128
    shrink = itemsize // 2
    if few <= 32:
        return ExpertTile(few, 64, 128 // shrink, 3, 4)
    return ExpertTile(few, 64, 64 // shrink, 4, 4 if few == 64 else 8)


@triton.jit(do_not_specialize=["M"])
def _gate_up(
    x, weight, pairs, experts, used, out, M,
    D: tl.constexpr, F: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (n, i): outputs n * BN and on of tile i. weight is a descriptor of [E * 2F, D]."""
    if PDL:
        gdc_launch_dependents()
    n = tl.program_id(0) * BN
    i = tl.program_id(1)
    if PDL:
        gdc_wait()
    if i >= tl.load(used):
        return
    row = i * ROWS + tl.arange(0, ROWS)
    pair = tl.load(pairs + row)
    there = (pair < M)[:, None]
    at = x + (pair // K).to(tl.int64)[:, None] * D
    first = tl.load(experts + i) * (2 * F) + n
    dims = tl.arange(0, BK)[None, :]
    acc = tl.zeros((ROWS, BN), tl.float32)
    acc_up = tl.zeros((ROWS, BN), tl.float32)
    for k in tl.range(0, D, BK, num_stages=STAGES):
        part = tl.load(at + k + dims, mask=there & (k + dims < D), other=0.0)
        acc = tl.dot(part, weight.load([first, k]).T, acc, input_precision="ieee")
        acc_up = tl.dot(part, weight.load([first + F, k]).T, acc_up, input_precision="ieee")
    y = acc * tl.sigmoid(acc) * acc_up
    col = n + tl.arange(0, BN)[None, :]
    tl.store(out + row.to(tl.int64)[:, None] * F + col, y.to(out.dtype.element_ty), mask=col < F)


@triton.jit(do_not_specialize=["M", "T"])
def _down(
    act, weight, pairs, experts, used, weights, out, M,
    T, D: tl.constexpr, F: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (n, i): outputs n * BN and on of tile i, each row to its part and position. act and weight are
    descriptors of [rows, F] and [E * D, F].
    """
    if PDL:
        gdc_launch_dependents()
    n = tl.program_id(0) * BN
    i = tl.program_id(1)
    if PDL:
        gdc_wait()
    if i >= tl.load(used):
        return
    pair = tl.load(pairs + i * ROWS + tl.arange(0, ROWS))
    there = pair < M
    first = tl.load(experts + i) * D + n
    acc = tl.zeros((ROWS, BN), tl.float32)
    for k in tl.range(0, F, BK, num_stages=STAGES):
        acc = tl.dot(act.load([i * ROWS, k]), weight.load([first, k]).T, acc, input_precision="ieee")
    share = tl.load(weights + pair, mask=there, other=0.0)
    acc *= share[:, None]
    place = (pair % K).to(tl.int64) * T + pair // K
    col = n + tl.arange(0, BN)[None, :]
    tl.store(out + place[:, None] * D + col, acc.to(out.dtype.element_ty), mask=there[:, None] & (col < D))


def expert_gemm(
    x_TD: Tensor, weights_TK: Tensor, rows: ExpertRows, gate_up_EFD: Tensor, down_EDF: Tensor, out_KTD: Tensor, *,
    pdl: bool = False, tile: ExpertTile,
) -> None:  # fmt: skip
    """The weighted output of each position's experts into *out* ([K, T, D], float32 or x's dtype), part k of position t
    that of pair t * K + k.

    *gate_up* is [E, 2F, D], gate rows first, *down* [E, D, F]: contiguous, of x's dtype, with rows of a multiple of 16
    bytes. *rows* are of *tile*. Products accumulate in float32 and are weighted there; what is between them is of x's
    dtype.
    """
    (experts, model, width), (count, chosen) = down_EDF.shape, weights_TK.shape
    tiles = len(rows.experts)
    act = torch.empty((tiles * rows.rows, width), dtype=x_TD.dtype, device=x_TD.device)
    box = [tile.n, tile.k]
    _gate_up[(-(-width // tile.n), tiles)](
        x_TD, TensorDescriptor(gate_up_EFD, [experts * 2 * width, model], [model, 1], box), rows.pairs, rows.experts,
        rows.used, act, count * chosen,
        model, width, chosen, rows.rows, tile.n, tile.k, tile.stages, pdl,
        num_warps=tile.warps, launch_pdl=pdl,
    )  # fmt: skip
    _down[(-(-model // tile.n), tiles)](
        TensorDescriptor(act, [len(act), width], [width, 1], [rows.rows, tile.k]),
        TensorDescriptor(down_EDF, [experts * model, width], [width, 1], box), rows.pairs, rows.experts, rows.used,
        weights_TK, out_KTD, count * chosen,
        count, model, width, chosen, rows.rows, tile.n, tile.k, tile.stages, pdl,
        num_warps=tile.warps, launch_pdl=pdl,
    )  # fmt: skip
