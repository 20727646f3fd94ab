"""The experts of many positions with weights of 8 bits: `expert_gemm` as `scaled_gemm` multiplies, few rows an expert
with activations as they are, many with activations rounded to 8 bits.

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
from agentinfer.ops.kernels.quantize import quantize
from agentinfer.ops.kernels.scaled_gemm import check_columns, scaled_dot
from agentinfer.ops.scaled import BLOCK, Scaled


@frozen
class ScaledExpertTile:
    """Of both products: *n* outputs of a tile's rows. n divides 128."""

    rows: int
    """Rows a tile: those of one expert are padded to a multiple."""
    n: int
    stages: int
    warps: int
    rounded: bool
    """Activations are, to 8 bits."""


def scaled_expert_tile(pairs: int, num_experts: int) -> ScaledExpertTile:
    """A rule, not measured yet, as `expert_tile`: activations are rounded where an expert has more than 48 rows on
    average, so that many need more than one tile of 64.
    """
    each = pairs / num_experts
    if each > 48:
        return ScaledExpertTile(64, 128, 4, 8, rounded=True)
    return ScaledExpertTile(16 if each <= 10 else 32 if each <= 24 else 64, 64, 4, 4, rounded=False)


@triton.jit(do_not_specialize=["M", "T"])
def _gate_up(
    x, x_scales, weight, scales, pairs, experts, used, out, M, T,
    D: tl.constexpr, F: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr, ROUNDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (n, i): outputs n * BN and on of tile i. weight is a descriptor of [E * 2F, D]. ROUNDED: x is of 8
    bits.
    """
    if PDL:
        gdc_launch_dependents()
    n = tl.program_id(0) * BN
    i = tl.program_id(1)
    BLOCKS: tl.constexpr = (D + BLOCK - 1) // BLOCK
    if PDL:
        gdc_wait()
    if i >= tl.load(used):
        return
    row = i * ROWS + tl.arange(0, ROWS)
    pair = tl.load(pairs + row)
    there = pair < M
    token = pair // K
    at = x + token.to(tl.int64)[:, None] * D
    first = tl.load(experts + i) * (2 * F) + n
    own = scales + first // BLOCK * BLOCKS
    up = scales + (first + F) // BLOCK * BLOCKS
    dims = tl.arange(0, BLOCK)[None, :]
    acc = tl.zeros((BN, ROWS), tl.float32)
    acc_up = tl.zeros((BN, ROWS), tl.float32)
    for block in tl.range(0, BLOCKS, num_stages=STAGES):
        col = block * BLOCK + dims
        rows = tl.load(at + col, mask=there[:, None] & (col < D), other=0.0)
        if ROUNDED:  # noqa: SIM108 - only one of the two is compiled
            of_rows = tl.load(x_scales + block * T + token, mask=there, other=0.0)[None, :]
        else:
            of_rows = 1.0
        acc += scaled_dot(weight.load([first, block * BLOCK]), rows) * (tl.load(own + block) * of_rows)
        acc_up += scaled_dot(weight.load([first + F, block * BLOCK]), rows) * (tl.load(up + block) * of_rows)
    y = acc * tl.sigmoid(acc) * acc_up
    outputs = n + tl.arange(0, BN)[:, None]
    tl.store(out + row.to(tl.int64)[None, :] * F + outputs, y.to(out.dtype.element_ty), mask=outputs < F)


@triton.jit(do_not_specialize=["M", "T"])
def _down(
    act, act_scales, weight, scales, pairs, experts, used, weights, out, M, T,
    D: tl.constexpr, F: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr, ROUNDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (n, i): outputs n * BN and on of tile i, each row to its part and position. act and weight are
    descriptors of [rows, F] and [E * D, F].
    """
    if PDL:
        gdc_launch_dependents()
    n = tl.program_id(0) * BN
    i = tl.program_id(1)
    BLOCKS: tl.constexpr = (F + BLOCK - 1) // BLOCK
    if PDL:
        gdc_wait()
    if i >= tl.load(used):
        return
    row = i * ROWS + tl.arange(0, ROWS)
    pair = tl.load(pairs + row)
    there = pair < M
    expert = tl.load(experts + i)
    own = scales + (expert * ((D + BLOCK - 1) // BLOCK) + n // BLOCK) * BLOCKS
    acc = tl.zeros((BN, ROWS), tl.float32)
    for block in tl.range(0, BLOCKS, num_stages=STAGES):
        if ROUNDED:  # noqa: SIM108 - only one of the two is compiled
            of_rows = tl.load(act_scales + block * (tl.num_programs(1) * ROWS) + row)[None, :]
        else:
            of_rows = 1.0
        part = scaled_dot(weight.load([expert * D + n, block * BLOCK]), act.load([i * ROWS, block * BLOCK]))
        acc += part * (tl.load(own + block) * of_rows)
    acc *= tl.load(weights + pair, mask=there, other=0.0)[None, :]
    place = (pair % K).to(tl.int64) * T + pair // K
    outputs = n + tl.arange(0, BN)[:, None]
    tl.store(
        out + place[None, :] * D + outputs, acc.to(out.dtype.element_ty), mask=there[None, :] & (outputs < D)
    )  # fmt: skip


def scaled_experts(
    x_TD: Tensor, weights_TK: Tensor, rows: ExpertRows, gate_up: Scaled[Tensor], down: Scaled[Tensor],
    out_KTD: Tensor, *, pdl: bool = False, tile: ScaledExpertTile,
) -> None:  # fmt: skip
    """As `expert_gemm`, for weights of 8 bits. F is a multiple of 128 or of 16 if there is one expert, D of 16."""
    (experts, model, width), (count, chosen) = down.shape, weights_TK.shape
    check_columns(model)
    check_columns(width)
    tiles = len(rows.experts)
    x, x_scales = quantize(x_TD, pdl=pdl) if tile.rounded else (x_TD, gate_up.scales)
    act = torch.empty((tiles * rows.rows, width), dtype=x_TD.dtype, device=x_TD.device)
    box = [tile.n, BLOCK]
    _gate_up[(-(-width // tile.n), tiles)](
        x, x_scales, TensorDescriptor(gate_up.stored, [experts * 2 * width, model], [model, 1], box), gate_up.scales,
        rows.pairs, rows.experts, rows.used, act, count * chosen, count,
        model, width, chosen, rows.rows, tile.n, BLOCK, tile.stages, tile.rounded, pdl,
        num_warps=tile.warps, launch_pdl=pdl,
    )  # fmt: skip
    act, act_scales = quantize(act, pdl=pdl) if tile.rounded else (act, down.scales)
    _down[(-(-model // tile.n), tiles)](
        TensorDescriptor(act, [len(act), width], [width, 1], [rows.rows, BLOCK]), act_scales,
        TensorDescriptor(down.stored, [experts * model, width], [width, 1], box), down.scales,
        rows.pairs, rows.experts, rows.used, weights_TK, out_KTD, count * chosen, count,
        model, width, chosen, rows.rows, tile.n, BLOCK, tile.stages, tile.rounded, pdl,
        num_warps=tile.warps, launch_pdl=pdl,
    )  # fmt: skip
