"""Causal latent attention of rows with several queries, over keys and values that were made of the latents.

Shapes: T positions, J keys of all rows one after the other, N heads, U unrotated and P rotated numbers of a query or
key head, L latent width, C = L + P, O value width.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from agentinfer.ops.kernels.latent_write import turned
from agentinfer.ops.kernels.launch import Direct

LOG2E = 1.4426950408889634
QUERIES = 64
"""A tile."""


@triton.jit
def _attend_made(
    q, made, latents, cos_sin, work, out, scale,
    STRIDE: tl.constexpr, HEADS: tl.constexpr, U: tl.constexpr, P: tl.constexpr, L: tl.constexpr, O: tl.constexpr,
    INTERLEAVED: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (h, i): head h of tile i."""
    h, tile = tl.program_id(0), tl.program_id(1)
    work += tile * 4
    flat = tl.load(work).to(tl.int64)
    count = tl.load(work + 1)
    position = tl.load(work + 2)
    start = tl.load(work + 3).to(tl.int64)
    i = tl.arange(0, QUERIES)
    there = (i < count)[:, None]
    u = tl.arange(0, U)[None, :]
    p = tl.arange(0, P)[None, :]
    o = tl.arange(0, O)[None, :]
    at = q + (flat + i)[:, None] * STRIDE + h * (U + P)
    qu = tl.load(at + u, mask=there, other=0.0)
    last = position + count
    mine = tl.minimum(position + i, last - 1)
    qp = turned(at + U, there, cos_sin + mine[:, None].to(tl.int64) * P, P, INTERLEAVED).to(qu.dtype)
    top = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    acc = tl.zeros((QUERIES, O), tl.float32)
    made += start * (HEADS * (U + O)) + h * (U + O)
    latents += start * (L + P) + L
    for j in tl.range(0, last, KEYS, num_stages=STAGES):
        key = j + tl.arange(0, KEYS)
        real = (key < last)[:, None]
        row = made + key.to(tl.int64)[:, None] * (HEADS * (U + O))
        ku = tl.load(row + u, mask=real, other=0.0)
        kp = tl.load(latents + key.to(tl.int64)[:, None] * (L + P) + p, mask=real, other=0.0)
        v = tl.load(row + U + o, mask=real, other=0.0)
        x = tl.dot(qu, tl.trans(ku), input_precision="ieee")
        x = tl.dot(qp, tl.trans(kp), x, input_precision="ieee")
        x = tl.where(key[None, :] <= mine[:, None], x * scale, float("-inf"))
        best = tl.maximum(top, tl.max(x, 1))
        w = tl.exp2(x - best[:, None])
        keep = tl.exp2(top - best)
        acc = tl.dot(w.to(v.dtype), v, acc * keep[:, None], input_precision="ieee")
        total = total * keep + tl.sum(w, 1)
        top = best
    y = acc / total[:, None]
    tl.store(out + (flat + i)[:, None] * (HEADS * O) + h * O + o, y.to(out.dtype.element_ty), mask=there)


_run = Direct(_attend_made)


def attend_made(
    q_TX: Tensor, made_JX: Tensor, latents_JC: Tensor, cos_sin: Tensor, work: Tensor, out_TX: Tensor, nope: int,
    scale: float, *, interleaved: bool,
) -> None:  # fmt: skip
    """Attention of the tiles of *work* into their positions of *out* ([T, N * O]).

    *work* is [tiles, 4] int32: first flat position, queries, position of the first, first key of its row. *q* [T, N *
    (U + P)] is not rotated yet, its rows may lie apart; *made* [J, N * (U + O)] are the keys without rope and the
    values of each head, *latents* [J, C] what they were made of, rope keys behind; both contiguous. U (*nope*), P and O
    are powers of two, 16 or more.
    """
    rope = cos_sin.shape[1]
    heads = q_TX.shape[1] // (nope + rope)
    keys = 64 if q_TX.dtype.itemsize == 2 else 32
    _run(
        (heads, len(work), 1), (q_TX, made_JX, latents_JC, cos_sin, work, out_TX), (scale * LOG2E,),
        (q_TX.stride(0), heads, nope, rope, latents_JC.shape[1] - rope, out_TX.shape[1] // heads, interleaved, QUERIES,
         keys, 2),
        warps=4,
    )  # fmt: skip
