"""Activations to 8 bits, on the way to a product of many rows: each 128 columns of a row have a scale of their own.

Shapes: T rows, K columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from agentinfer.ops.kernels.launch import Direct
from agentinfer.ops.scaled import BLOCK, FLOAT8, LARGEST, LEAST

GROUPS = 8
"""Groups of 128 columns a program."""


@triton.jit(do_not_specialize=["T"])
def _quantize(
    x, out, scales, largest, least, T,
    K: tl.constexpr, G: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (t, g): G groups of row t."""
    if PDL:
        gdc_launch_dependents()
    t = tl.program_id(0)
    group = tl.program_id(1) * G + tl.arange(0, G)
    col = group[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    at = t.to(tl.int64) * K + col
    if PDL:
        gdc_wait()
    wide = tl.load(x + at, mask=col < K, other=0.0).to(tl.float32)
    # Rounded as torch divides: many quotients of numbers of 16 bits lie in the middle of two of 8 bits.
    scale = tl.div_rn(tl.maximum(tl.max(tl.abs(wide), 1), least), tl.zeros((G,), tl.float32) + largest)
    wide = tl.div_rn(wide, tl.broadcast_to(scale[:, None], (G, BLOCK)))
    tl.store(out + at, wide.to(out.dtype.element_ty), mask=col < K)
    tl.store(scales + group.to(tl.int64) * T + t, scale, mask=group * BLOCK < K)


_run = Direct(_quantize)


def quantize(x_TK: Tensor, *, pdl: bool = False) -> tuple[Tensor, Tensor]:
    """`scaled.quantized_rows` of *x* (contiguous): [T, K] float8_e4m3fn, and scales [ceil(K / 128), T] float32, the
    other way round than there, so that the rows of a tile lie together.
    """
    rows, k = x_TK.shape
    groups = -(-k // BLOCK)
    out = torch.empty((rows, k), dtype=FLOAT8, device=x_TK.device)
    scales = torch.empty((groups, rows), dtype=torch.float32, device=x_TK.device)
    if rows:
        _run(
            (rows, -(-groups // GROUPS), 1), (x_TK, out, scales), (LARGEST, LEAST, rows), (k, GROUPS, BLOCK, pdl),
            warps=4, pdl=pdl,
        )  # fmt: skip
    return out, scales
