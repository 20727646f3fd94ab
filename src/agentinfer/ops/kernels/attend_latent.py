"""Latent attention of rows with one query each, absorbed: three kernels from the query to the heads' output.

====== ============================================================================================================
absorb the unrotated part of each head's query, times the key part of kv_b: a query for latents
attend norm of the new latent, rope, cache write, attention of all heads to one row of latents; keys split
values of each head the splits put together, times the value part of kv_b
====== ============================================================================================================

The splits are put together by whoever needs them, a head's by the programs of that head, so nobody counts and nothing
is added in another order. The new token joins as it is computed and is never read back.

Shapes: R rows, N heads, U unrotated and P rotated numbers of a query head, L latent width, C = L + P, O value width,
B tokens a block, M table columns, S splits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from attrs import frozen
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from agentinfer.ops.kernels.latent_write import cached, turned
from agentinfer.ops.kernels.launch import Direct
from agentinfer.ops.kernels.tiles import power_of_two

LOG2E = 1.4426950408889634
SINGLY = 8
"""Most rows whose splits are put together row by row; of more, 16 rows at once."""


@frozen
class LatentTile:
    """At most *splits* programs share the keys of a row, each *least* of them or more, *keys* at a time, for *heads*
    heads.
    """

    splits: int
    keys: int
    heads: int
    warps: int
    stages: int
    least: int = 0


def latent_tile(rows: int, heads: int, itemsize: int) -> LatentTile:
    """A rule, not measured yet. 16 heads are what the small tensor cores take; with 64, those of warp groups are used,
    and a program fills a multiprocessor; of numbers of 4 bytes 32 heads do.
    """
    together = 16 if heads <= 16 else min(64 if itemsize == 2 else 32, power_of_two(heads))
    programs = rows * -(-heads // together)
    if programs > SINGLY:
        splits = 8 if programs <= 32 else 4 if programs <= 64 else 2 if programs <= 132 else 1
    else:
        splits = 64 if programs <= 2 else 32
    if rows > SINGLY:  # `values` unrolls its loop over them
        splits = min(splits, 8)
    return LatentTile(splits, 32 if itemsize == 2 else 16, together, 4 if together < 64 else 8, 2, 64)


@triton.jit(do_not_specialize=["T"])
def _absorb(
    q, kv_b, out, T,
    STRIDE: tl.constexpr, HEADS: tl.constexpr, QUERY: tl.constexpr, U: tl.constexpr, WIDE: tl.constexpr,
    L: tl.constexpr, APART: tl.constexpr, BM: tl.constexpr, BL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (n, l, t): numbers l * BL and on of head n, rows t * BM and on. WIDE: rows of kv_b a head; APART: how far
    heads of *out* lie apart.
    """
    if PDL:
        gdc_launch_dependents()
    n = tl.program_id(0)
    at = tl.program_id(1) * BL + tl.arange(0, BL)
    t = (tl.program_id(2) * BM + tl.arange(0, BM)).to(tl.int64)
    u = tl.arange(0, U)
    w = tl.load(kv_b + (n * WIDE + u).to(tl.int64)[:, None] * L + at[None, :])
    if PDL:
        gdc_wait()
    there = (t < T)[:, None]
    x = tl.load(q + t[:, None] * STRIDE + n * QUERY + u[None, :], mask=there, other=0.0, cache_modifier=".cg")
    y = tl.dot(x, w, input_precision="ieee")
    tl.store(out + (t * HEADS + n)[:, None] * APART + at[None, :], y.to(out.dtype.element_ty), mask=there)


@triton.jit
def _share(now, least, SPLITS: tl.constexpr, KEYS: tl.constexpr):
    """Keys of each split of *now* keys."""
    share = tl.cdiv(tl.cdiv(now, SPLITS), KEYS) * KEYS
    if SPLITS > 1:
        share = tl.maximum(share, tl.maximum(least, KEYS))
    return share


@triton.jit
def _used(now, share):
    """How many splits have keys, or the new token."""
    return tl.maximum(tl.cdiv(now, tl.maximum(share, 1)), 1)


@triton.jit
def _places(table, key, end, BLOCK: tl.constexpr, APART: tl.constexpr, TOKEN: tl.constexpr):
    """Where keys *key* lie in the cache; from *end* on anything, and the table is not read."""
    block = tl.load(table + key // BLOCK, mask=key < end, other=0).to(tl.int64)
    return block * APART + key % BLOCK * TOKEN


@triton.jit(do_not_specialize=["columns", "least"])
def _attend(
    q, inner, latent, norm, cos_sin, cache, table, rows, context, slots, parts, sums, eps, scale, columns, least,
    HEADS: tl.constexpr, HP: tl.constexpr, STRIDE: tl.constexpr, QUERY: tl.constexpr, U: tl.constexpr,
    L: tl.constexpr, P: tl.constexpr, APART_NEW: tl.constexpr, BLOCK: tl.constexpr, APART: tl.constexpr,
    TOKEN: tl.constexpr, INTERLEAVED: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (h, s, r): heads h * HP and on over split s of the keys of row r, if there are keys for so many splits.
    STRIDE, APART_NEW: how far rows of q and of latent lie apart; APART, TOKEN: blocks and tokens of the cache.
    """
    if PDL:
        gdc_launch_dependents()
    h, s, r = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    now = tl.maximum(tl.load(context + r) - 1, 0)
    share = _share(now, least, SPLITS, KEYS)
    if s >= _used(now, share):
        return
    begin = s * share
    end = tl.minimum(begin + share, now)
    head = h * HP + tl.arange(0, HP)
    real = (head < HEADS)[:, None]
    dims = tl.arange(0, L)[None, :]
    rope = tl.arange(0, P)[None, :]
    table += tl.load(rows + r) * columns
    key = begin + tl.arange(0, KEYS)
    place = _places(table, key, end, BLOCK, APART, TOKEN)
    slot = tl.load(slots + r)
    angles = cos_sin + now.to(tl.int64) * P
    kind = cache.dtype.element_ty
    if PDL:
        gdc_wait()
    ql = tl.load(inner + (r * HEADS + head)[:, None] * L + dims, mask=real, other=0.0, cache_modifier=".cg")
    first = tl.zeros((HP, 1), tl.int64)
    at = q + r * STRIDE + (head * QUERY + U)[:, None]
    qr = turned(at, real, angles + first, P, INTERLEAVED).to(kind)
    top = tl.full((HP,), float("-inf"), tl.float32)
    total = tl.zeros((HP,), tl.float32)
    acc = tl.zeros((HP, L), tl.float32)
    if s == 0:
        new, turn = cached(latent + r * APART_NEW, norm, angles, eps, cache, L, P, INTERLEAVED)
        if h == 0:
            to = cache + slot // BLOCK * APART + slot % BLOCK * TOKEN
            tl.store(to + dims, new)
            tl.store(to + L + rope, turn)
        score = tl.sum(ql.to(tl.float32) * new.to(tl.float32), 1)
        top = (score + tl.sum(qr.to(tl.float32) * turn.to(tl.float32), 1)) * scale
        total = tl.full((HP,), 1.0, tl.float32)
        acc += new.to(tl.float32)
    for i in tl.range(begin, end, KEYS, num_stages=STAGES):
        key = i + tl.arange(0, KEYS)
        there = key < end
        kl = tl.load(cache + place[:, None] + dims, mask=there[:, None], other=0.0)
        kr = tl.load(cache + place[:, None] + L + rope, mask=there[:, None], other=0.0)
        place = _places(table, key + KEYS, end, BLOCK, APART, TOKEN)  # a step ahead, so that loads can overlap
        x = tl.dot(ql, tl.trans(kl), input_precision="ieee")
        x = tl.dot(qr, tl.trans(kr), x, input_precision="ieee")
        x = tl.where(there[None, :], x * scale, float("-inf"))
        best = tl.maximum(top, tl.max(x, 1))
        p = tl.exp2(x - best[:, None])
        keep = tl.exp2(top - best)
        acc = tl.dot(p.to(kind), kl, acc * keep[:, None], input_precision="ieee")
        total = total * keep + tl.sum(p, 1)
        top = best
    at = (r * HEADS + head) * SPLITS + s
    if SPLITS == 1:
        acc = acc / total[:, None]
    else:
        tl.store(sums + at * 2, top, mask=head < HEADS)
        tl.store(sums + at * 2 + 1, total, mask=head < HEADS)
    tl.store(parts + at[:, None] * L + dims, acc.to(parts.dtype.element_ty), mask=real)


@triton.jit
def _weights_of(sums, at, split, used):
    """(largest score, sum, of the splits *split*) that begin at *at*; -inf and 0 where they are not used."""
    there = split < used
    top = tl.load(sums + (at + split) * 2, mask=there, other=float("-inf"), cache_modifier=".cg")
    return top, tl.load(sums + (at + split) * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")


@triton.jit(do_not_specialize=["least"])
def _values_singly(
    parts, sums, context, kv_b, out, least,
    HEADS: tl.constexpr, U: tl.constexpr, O: tl.constexpr, L: tl.constexpr, BO: tl.constexpr, KEYS: tl.constexpr,
    SPLITS: tl.constexpr, AT_ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (n, o, r): numbers o * BO and on of head n and row r."""
    if PDL:
        gdc_launch_dependents()
    n, r = tl.program_id(0), tl.program_id(2).to(tl.int64)
    o = tl.program_id(1) * BO + tl.arange(0, BO)
    dims = tl.arange(0, L)
    w = tl.load(kv_b + (n * (U + O) + U + o).to(tl.int64)[:, None] * L + dims[None, :])
    now = tl.maximum(tl.load(context + r) - 1, 0)
    used = _used(now, _share(now, least, SPLITS, KEYS))
    if PDL:
        gdc_wait()
    at = (r * HEADS + n) * SPLITS
    if SPLITS == 1:
        x = tl.load(parts + at * L + dims, cache_modifier=".cg").to(tl.float32)
    else:
        top, total = _weights_of(sums, at, tl.arange(0, SPLITS), used)
        best = tl.max(top, 0)
        weight = tl.sum(tl.exp2(top - best) * total, 0)
        x = tl.zeros((L,), tl.float32)
        for c in tl.static_range(0, SPLITS, AT_ONCE):
            split = c + tl.arange(0, AT_ONCE)
            top, total = _weights_of(sums, at, split, used)
            place = parts + (at + split)[:, None] * L + dims[None, :]
            part = tl.load(place, mask=(split < used)[:, None], other=0.0, cache_modifier=".cg")
            x += tl.sum(part * tl.exp2(top - best)[:, None], 0)
        x = (x / weight).to(w.dtype).to(tl.float32)
    y = tl.sum(w.to(tl.float32) * x[None, :], 1)
    tl.store(out + (r * HEADS + n) * O + o, y.to(out.dtype.element_ty))


@triton.jit(do_not_specialize=["T", "least"])
def _values(
    parts, sums, context, kv_b, out, T, least,
    HEADS: tl.constexpr, U: tl.constexpr, O: tl.constexpr, L: tl.constexpr, BM: tl.constexpr, BO: tl.constexpr,
    KEYS: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (n, o, t): numbers o * BO and on of head n, rows t * BM and on."""
    if PDL:
        gdc_launch_dependents()
    n = tl.program_id(0)
    o = tl.program_id(1) * BO + tl.arange(0, BO)
    t = (tl.program_id(2) * BM + tl.arange(0, BM)).to(tl.int64)
    there = t < T
    dims = tl.arange(0, L)[None, :]
    w = tl.load(kv_b + (n * (U + O) + U + o).to(tl.int64)[:, None] * L + dims)
    now = tl.maximum(tl.load(context + t, mask=there, other=1) - 1, 0)
    used = _used(now, _share(now, least, SPLITS, KEYS))
    if PDL:
        gdc_wait()
    at = (t * HEADS + n) * SPLITS
    if SPLITS == 1:
        x = tl.load(parts + at[:, None] * L + dims, mask=there[:, None], other=0.0, cache_modifier=".cg")
    else:
        used = tl.where(there, used, 0)
        split = tl.arange(0, SPLITS)[None, :]
        top, total = _weights_of(sums, at[:, None], split, used[:, None])
        best = tl.where(there, tl.max(top, 1), 0.0)
        weight = tl.where(there, tl.sum(tl.exp2(top - best[:, None]) * total, 1), 1.0)
        wide = tl.zeros((BM, L), tl.float32)
        for s in tl.static_range(SPLITS):
            top, total = _weights_of(sums, at, s, used)
            place = parts + (at + s)[:, None] * L + dims
            part = tl.load(place, mask=(s < used)[:, None], other=0.0, cache_modifier=".cg")
            wide += part * (tl.exp2(top - best) / weight)[:, None]
        x = wide.to(w.dtype)
    y = tl.dot(x, tl.trans(w), input_precision="ieee")
    tl.store(out + (t * HEADS + n)[:, None] * O + o[None, :], y.to(out.dtype.element_ty), mask=there[:, None])


_run_absorb = Direct(_absorb)
_run_attend = Direct(_attend)
_run_singly = Direct(_values_singly)
_run_values = Direct(_values)


def absorb(q_TX: Tensor, kv_b: Tensor, nope: int, *, more: int = 0, pdl: bool = False) -> Tensor:
    """The queries for latents, [T, N, L + *more*] of q's dtype: the first *nope* (U) numbers of each head times the
    first U rows of kv_b ([N, U + O, L], contiguous) of that head; what is behind L is left to the caller. Rows of q may
    lie apart. *pdl*: kv_b is complete before the kernel before this one began.
    """
    heads, wide, width = kv_b.shape
    count, query = len(q_TX), q_TX.shape[1] // heads
    out = torch.empty((count, heads, width + more), dtype=q_TX.dtype, device=q_TX.device)
    rows = 16 if count <= 16 else 64
    some = min(64, width)
    _run_absorb(
        (heads, width // some, -(-count // rows)), (q_TX, kv_b, out), (count,),
        (q_TX.stride(0), heads, query, nope, wide, width, width + more, rows, some, pdl),
        warps=4, pdl=pdl,
    )  # fmt: skip
    return out


def values(latents_RNL: Tensor, kv_b: Tensor, nope: int, context: Tensor, *, pdl: bool = False) -> Tensor:
    """[R, N * O] of the latents' dtype: what each head attended to, times the value part of kv_b. *context*: int32 [R],
    as in `attend_latent`. *pdl*: kv_b and *context* are complete before the kernel before this one began.
    """
    whole = LatentTile(1, 16, 16, 4, 1)
    return _put_together(latents_RNL, latents_RNL, context, kv_b, nope, latents_RNL.dtype, whole, pdl=pdl)


def _put_together(
    parts: Tensor, sums: Tensor, context: Tensor, kv_b: Tensor, nope: int, dtype: torch.dtype, t: LatentTile, *,
    pdl: bool,
) -> Tensor:  # fmt: skip
    """[R, N * O]: the splits of each head times the value part of kv_b."""
    heads, wide, width = kv_b.shape
    count, value = len(parts), wide - nope
    out = torch.empty((count, heads * value), dtype=dtype, device=parts.device)
    if count <= SINGLY:
        some = min(16, value)
        _run_singly(
            (heads, value // some, count), (parts, sums, context, kv_b, out), (t.least,),
            (heads, nope, value, width, some, t.keys, t.splits, min(16, t.splits), pdl),
            warps=4, pdl=pdl,
        )  # fmt: skip
    else:
        some = min(32, value)
        _run_values(
            (heads, value // some, -(-count // 16)), (parts, sums, context, kv_b, out), (count, t.least),
            (heads, nope, value, width, 16, some, t.keys, t.splits, pdl),
            warps=8, pdl=pdl,
        )  # fmt: skip
    return out


def attend_latent(
    q_RX: Tensor,
    latent_RC: Tensor,
    cache: Tensor,
    table: Tensor,
    rows: Tensor,
    context: Tensor,
    slots: Tensor,
    nope: int,
    cos_sin: Tensor,
    norm_L: Tensor,
    kv_b: Tensor,
    eps: float,
    scale: float,
    *,
    interleaved: bool,
    pdl: bool = False,
    tile: LatentTile | None = None,
) -> Tensor:
    """Latent attention of R rows at position context - 1 each: [R, N * O] of q's dtype, new memory. Writes what is
    cached of the new tokens to *slots* of *cache* ([blocks, B, 1, C]) in place.

    *q* [R, N * (U + P)] (U is *nope*) and *latent* [R, C] as they come from their products: nothing is rotated, the
    latent not normed; their rows may lie apart. *kv_b* is [N, U + O, L], *cos_sin* [positions, P] float32, *norm* [L];
    all of one dtype but *cos_sin*. U, P, L and O are powers of two, 16 or more. Step row i has the blocks
    *table*[rows[i]] ([.., M] int32); *rows* and *slots* are int64 [R], *context* int32 [R]: keys, the new one included
    (less than one counts as one). Nothing else is read of the cache or the table, and no row depends on another.

    *pdl*: all but *q* and *latent* must be complete before the kernel before this one began.
    """
    heads, _, width = kv_b.shape
    count, rope = len(q_RX), cos_sin.shape[1]
    if not count:
        return torch.empty((0, heads * (kv_b.shape[1] - nope)), dtype=q_RX.dtype, device=q_RX.device)
    t = latent_tile(count, heads, q_RX.dtype.itemsize) if tile is None else tile
    inner = absorb(q_RX, kv_b, nope, pdl=pdl)
    kind = q_RX.dtype if t.splits == 1 else torch.float32
    parts = torch.empty((count, heads, t.splits, width), dtype=kind, device=q_RX.device)
    sums = torch.empty((count, heads, t.splits, 2), dtype=torch.float32, device=q_RX.device)
    _run_attend(
        (-(-heads // t.heads), t.splits, count),
        (q_RX, inner, latent_RC, norm_L, cos_sin, cache, table, rows, context, slots, parts, sums),
        (eps, scale * LOG2E, table.stride(0), t.least),
        (heads, t.heads, q_RX.stride(0), nope + rope, nope, width, rope, latent_RC.stride(0), cache.shape[1],
         *cache.stride()[:2], interleaved, t.keys, t.splits, t.stages, pdl),
        warps=t.warps, pdl=pdl,
    )  # fmt: skip
    return _put_together(parts, sums, context, kv_b, nope, q_RX.dtype, t, pdl=pdl)
