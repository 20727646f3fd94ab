"""What is cached of a token by latent attention: its latent, normed, and its rope key, turned. Written to its slot.

Shapes: T positions, N heads, U unrotated numbers of a query head, L latent width, P rope width, C = L + P, B tokens a
block.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from agentinfer.ops.kernels.launch import Direct
from agentinfer.ops.kernels.tiles import power_of_two


@triton.jit
def turned(at, there, angles, P: tl.constexpr, INTERLEAVED: tl.constexpr):  # noqa: ANN201 - tiles have no types
    """The P numbers from each of *at* on ([n, 1] pointers), turned by the cos and sin from *angles* on ([n or 1, 1]);
    zeros where not *there*. Float32.
    """
    dims = tl.arange(0, P)[None, :]
    if INTERLEAVED:
        partner, pair, first = dims ^ 1, dims // 2, dims % 2 == 0
    else:
        partner, pair, first = dims ^ (P // 2), dims % (P // 2), dims < P // 2
    x = tl.load(at + dims, mask=there, other=0.0, cache_modifier=".cg").to(tl.float32)
    y = tl.load(at + partner, mask=there, other=0.0, cache_modifier=".cg").to(tl.float32)
    return x * tl.load(angles + pair) + tl.where(first, -y, y) * tl.load(angles + P // 2 + pair)


@triton.jit
def cached(latent, norm, angles, eps, kind, L: tl.constexpr, P: tl.constexpr, INTERLEAVED: tl.constexpr):  # noqa: ANN201 - tiles have no types
    """What is cached of the token whose L + P numbers begin at *latent*: ([1, L], [1, P]) of the type *kind* points
    to.
    """
    dims = tl.arange(0, L)[None, :]
    x = tl.load(latent + dims, cache_modifier=".cg").to(tl.float32)
    r = tl.rsqrt(tl.sum(x * x) / L + eps)
    x = x * r * tl.load(norm + dims).to(tl.float32)
    first = tl.zeros((1, 1), tl.int64)
    key = turned(latent + L + first, first == 0, angles + first, P, INTERLEAVED)
    return x.to(kind.dtype.element_ty), key.to(kind.dtype.element_ty)


@triton.jit
def _latent_write(
    latent, norm, cos_sin, positions, slots, cache, q, out, eps,
    L: tl.constexpr, P: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr, APART: tl.constexpr,
    TOKEN: tl.constexpr, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, HP: tl.constexpr, QUERY: tl.constexpr,
    Q_STRIDE: tl.constexpr,
):  # fmt: skip
    """Program t: position t, and the last P numbers of its HEADS heads of QUERY numbers, if there are heads."""
    t = tl.program_id(0).to(tl.int64)
    angles = cos_sin + tl.load(positions + t) * P
    normed, key = cached(latent + t * STRIDE, norm, angles, eps, cache, L, P, INTERLEAVED)
    slot = tl.load(slots + t)
    cache += slot // BLOCK * APART + slot % BLOCK * TOKEN
    rope = tl.arange(0, P)[None, :]
    tl.store(cache + tl.arange(0, L)[None, :], normed)
    tl.store(cache + L + rope, key)
    if HEADS > 0:
        head = tl.arange(0, HP)[:, None]
        there = head < HEADS
        at = q + t * Q_STRIDE + head * QUERY + (QUERY - P)
        first = tl.zeros((HP, 1), tl.int64)
        turn = turned(at, there, angles + first, P, INTERLEAVED)
        tl.store(out + (t * HEADS + head) * (L + P) + L + rope, turn.to(out.dtype.element_ty), mask=there)


_run = Direct(_latent_write)


def latent_write(
    latent_TC: Tensor, norm_L: Tensor, cos_sin: Tensor, positions: Tensor, slots: Tensor, cache: Tensor, eps: float,
    *, interleaved: bool, q_TX: Tensor | None = None, out_TNC: Tensor | None = None,
) -> None:  # fmt: skip
    """Norm the latents, turn the rope keys behind them, and write both to *slots* of *cache* ([blocks, B, 1, C]).

    Rows of *latent* may lie apart; L and P are powers of two. *positions* and *slots* are int64 [T]. With *q*
    ([T, N * (U + P)], rows may lie apart) and *out* ([T, N, C], contiguous) the last P numbers of each head are turned
    too, and written to the last P of *out*.
    """
    count, rope = len(latent_TC), cos_sin.shape[1]
    if not count:
        return
    q, out, heads = latent_TC, latent_TC, 0
    if q_TX is not None and out_TNC is not None:
        q, out, heads = q_TX, out_TNC, out_TNC.shape[1]
    query = q.shape[1] // max(1, heads)
    _run(
        (count, 1, 1),
        (latent_TC, norm_L, cos_sin, positions, slots, cache, q, out), (eps,),
        (latent_TC.shape[1] - rope, rope, latent_TC.stride(0), cache.shape[1], *cache.stride()[:2], interleaved,
         heads, power_of_two(max(1, heads)), query, q.stride(0)),
        warps=4,
    )  # fmt: skip
