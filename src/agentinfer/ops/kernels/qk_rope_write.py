"""Between the qkv product and ragged attention: q/k norm, neox rope and the KV write of T positions, in one pass.

Shapes: T positions, N query heads, H KV heads, D head dim, X = (N + 2 H) D.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from agentinfer.ops.kernels.launch import Direct

POSITIONS = 16
"""Positions a program: 16 x D numbers keep four warps busy, and one load of cos and sin serves them."""


@triton.jit
def _normed(x1, x2, weight, dims, eps, DIM: tl.constexpr):
    """Both halves of a head over their root mean square, times the weight."""
    square = (tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / DIM
    r = 1.0 / tl.sqrt(square + eps)
    w1 = tl.load(weight + dims).to(tl.float32)
    w2 = tl.load(weight + DIM // 2 + dims).to(tl.float32)
    return x1 * r[:, None] * w1[None, :], x2 * r[:, None] * w2[None, :]


@triton.jit(do_not_specialize=["count"])
def _qk_rope_write(
    qkv, q_out, k_out, k_cache, v_cache, positions, slots, cos_sin, q_norm, k_norm, count, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BT: tl.constexpr, NORM: tl.constexpr,
    KEEP: tl.constexpr,
):  # fmt: skip
    """Program (t, h): head h of positions t * BT and on. Heads are those of qkv: queries, keys, values."""
    HALF: tl.constexpr = DIM // 2
    head = tl.program_id(1)
    at = tl.program_id(0) * BT + tl.arange(0, BT)
    dims = tl.arange(0, HALF)
    valid = at < count
    mask = valid[:, None]
    source = at.to(tl.int64)[:, None] * ((HEADS + 2 * KV_HEADS) * DIM) + head * DIM + dims[None, :]
    x1 = tl.load(qkv + source, mask=mask, other=0.0)
    x2 = tl.load(qkv + source + HALF, mask=mask, other=0.0)
    if head >= HEADS + KV_HEADS:
        slot = tl.load(slots + at, mask=valid, other=0)
        target = slot[:, None] * (KV_HEADS * DIM) + (head - HEADS - KV_HEADS) * DIM + dims[None, :]
        tl.store(v_cache + target, x1.to(v_cache.dtype.element_ty), mask=mask)
        tl.store(v_cache + target + HALF, x2.to(v_cache.dtype.element_ty), mask=mask)
    else:
        y1 = x1.to(tl.float32)
        y2 = x2.to(tl.float32)
        position = tl.load(positions + at, mask=valid, other=0)
        angle = position[:, None] * DIM + dims[None, :]
        cos = tl.load(cos_sin + angle, mask=mask, other=0.0)
        sin = tl.load(cos_sin + angle + HALF, mask=mask, other=0.0)
        if head < HEADS:
            if NORM:
                y1, y2 = _normed(y1, y2, q_norm, dims, eps, DIM)
            target = at.to(tl.int64)[:, None] * (HEADS * DIM) + head * DIM + dims[None, :]
            tl.store(q_out + target, (y1 * cos - y2 * sin).to(q_out.dtype.element_ty), mask=mask)
            tl.store(q_out + target + HALF, (y2 * cos + y1 * sin).to(q_out.dtype.element_ty), mask=mask)
        else:
            if NORM:
                y1, y2 = _normed(y1, y2, k_norm, dims, eps, DIM)
            slot = tl.load(slots + at, mask=valid, other=0)
            target = slot[:, None] * (KV_HEADS * DIM) + (head - HEADS) * DIM + dims[None, :]
            k1 = (y1 * cos - y2 * sin).to(k_cache.dtype.element_ty)
            k2 = (y2 * cos + y1 * sin).to(k_cache.dtype.element_ty)
            tl.store(k_cache + target, k1, mask=mask)
            tl.store(k_cache + target + HALF, k2, mask=mask)
            if KEEP:
                row = at.to(tl.int64)[:, None] * (KV_HEADS * DIM) + (head - HEADS) * DIM + dims[None, :]
                tl.store(k_out + row, k1, mask=mask)
                tl.store(k_out + row + HALF, k2, mask=mask)


_run = Direct(_qk_rope_write)


def qk_rope_write(
    qkv_TX: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    positions_T: Tensor,
    slots_T: Tensor,
    num_heads: int,
    cos_sin: Tensor,
    q_norm_D: Tensor | None,
    k_norm_D: Tensor | None,
    eps: float,
    keys_THD: Tensor | None = None,
) -> Tensor:
    """The queries, normed (if there are weights) and rotated: [T, N, D] of qkv's dtype, new memory. Writes the keys,
    done alike, and the values to their slots of the caches ([blocks, B, H, D], contiguous) in place.

    *keys_THD*, if given, gets the keys too, in the order of positions. qkv is contiguous, positions and slots are
    int64, cos_sin is [max_positions, D] float32. Float32 inside, rounded once. Of positions that share a slot (the
    sink) any one wins.
    """
    count, (heads, dim) = len(qkv_TX), k_cache.shape[-2:]
    q = torch.empty((count, num_heads, dim), dtype=qkv_TX.dtype, device=qkv_TX.device)
    if count:
        _run(
            (-(-count // POSITIONS), num_heads + 2 * heads, 1),
            (qkv_TX, q, q if keys_THD is None else keys_THD, k_cache, v_cache, positions_T, slots_T, cos_sin,
             qkv_TX if q_norm_D is None else q_norm_D, qkv_TX if k_norm_D is None else k_norm_D),
            (count, eps),
            (num_heads, heads, dim, POSITIONS, q_norm_D is not None, keys_THD is not None),
            warps=4,
        )  # fmt: skip
    return q
