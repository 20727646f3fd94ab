"""Attention of rows with one query each, from the qkv product to the heads' output in one kernel: q/k norm, neox rope,
KV write, paged attention, the keys of a row split among programs.

The new key and value join as they are computed and are never read back; only keys of earlier steps come from the
cache, so the first of them are loaded before waiting for the qkv product. Of several splits, the one that finishes
last combines all.

Shapes: R rows, N query heads, H KV heads, G = N / H query heads a KV head, D head dim, X = (N + 2 H) D, B tokens a
block, M table columns, P splits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from agentinfer.ops.kernels.launch import Direct
from agentinfer.ops.kernels.tiles import PAIRS, AttendTile, attend_tile, power_of_two

LOG2E = 1.4426950408889634
COUNTERS = PAIRS
"""Numbers that `attend_decode` needs to count splits."""
SLICE = 4096
"""Numbers a warp combines at once: 128 registers a thread."""


@triton.jit
def _turned(at, there, weight, cos, sin, eps, cache, DIM: tl.constexpr, NORM: tl.constexpr):
    """The heads whose first halves are *at* ([n, D / 2]), normed and rotated, as the cache would have them."""
    x1 = tl.load(at, mask=there, other=0.0, cache_modifier=".cg").to(tl.float32)
    x2 = tl.load(at + DIM // 2, mask=there, other=0.0, cache_modifier=".cg").to(tl.float32)
    if NORM:
        dims = tl.arange(0, DIM // 2)
        r = tl.rsqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / DIM + eps)[:, None]
        x1 = x1 * r * tl.load(weight + dims).to(tl.float32)[None, :]
        x2 = x2 * r * tl.load(weight + DIM // 2 + dims).to(tl.float32)[None, :]
    y1 = x1 * cos - x2 * sin
    y2 = x2 * cos + x1 * sin
    return y1.to(cache.dtype.element_ty), y2.to(cache.dtype.element_ty)


@triton.jit
def _newest(
    new, k_slot, v_slot, q1, q2, k_norm, cos, sin, eps, scale,
    STRIDE: tl.constexpr, DIM: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Write the key at *new* and its value, which lies STRIDE behind it, to their slots. Its scores and the value."""
    half = tl.arange(0, DIM // 2)[None, :]
    dims = tl.arange(0, DIM)
    k1, k2 = _turned(new + half, half >= 0, k_norm, cos, sin, eps, k_slot, DIM, NORM)
    value = tl.load(new + STRIDE + dims, cache_modifier=".cg").to(v_slot.dtype.element_ty)
    tl.store(k_slot + half, k1)
    tl.store(k_slot + DIM // 2 + half, k2)
    tl.store(v_slot + dims, value)
    score = tl.sum(q1.to(tl.float32) * k1.to(tl.float32), 1) + tl.sum(q2.to(tl.float32) * k2.to(tl.float32), 1)
    return score * scale, value.to(tl.float32)


@triton.jit
def _shares(count, r, least, whole, KEYS: tl.constexpr, SPLITS: tl.constexpr):
    """Keys of a split, of the *count* of row r, and how many splits there are."""
    share = tl.maximum(tl.cdiv(tl.cdiv(count, SPLITS), KEYS) * KEYS, tl.maximum(least, KEYS))
    share = tl.where(r < whole, tl.maximum(share, count), share)
    return share, tl.maximum(tl.cdiv(count, share), 1)


@triton.jit
def _block(table, key, end, BLOCK: tl.constexpr):
    """The blocks of keys *key*; from *end* on block 0, and the table is not read."""
    return tl.load(table + key // BLOCK, mask=key < end, other=0)


@triton.jit
def _load(
    k_head, v_head, block, key, end,
    BLOCK: tl.constexpr, APART: tl.constexpr, TOKEN: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Both halves of keys *key* in the blocks *block*, and their values; zeros from *end* on: there nothing is read."""
    there = key < end
    half = tl.arange(0, DIM // 2)
    at = (block.to(tl.int64) * APART + key % BLOCK * TOKEN)[:, None]
    k1 = tl.load(k_head + at + half[None, :], mask=there[:, None], other=0.0)
    k2 = tl.load(k_head + at + DIM // 2 + half[None, :], mask=there[:, None], other=0.0)
    v = tl.load(v_head + at + tl.arange(0, DIM)[None, :], mask=there[:, None], other=0.0)
    return k1, k2, v


@triton.jit
def _seen(q1, q2, k1, k2, v, there, top, total, acc, scale):
    """One step of the online softmax (base 2)."""
    s = tl.dot(q1, tl.trans(k1), input_precision="ieee")
    s = tl.dot(q2, tl.trans(k2), s, input_precision="ieee")
    s = tl.where(there[None, :], s * scale, float("-inf"))
    new = tl.maximum(top, tl.max(s, 1))
    p = tl.exp2(s - new[:, None])
    keep = tl.exp2(top - new)
    acc = tl.dot(p.to(v.dtype), v, acc * keep[:, None], input_precision="ieee")
    return new, total * keep + tl.sum(p, 1), acc


@triton.jit
def _rest(
    q1, q2, k_head, v_head, table, block, begin, end, top, total, acc, scale,
    BLOCK: tl.constexpr, APART: tl.constexpr, TOKEN: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr,
    STAGES: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """The online softmax over the keys *begin* .. end - 1, the first of which are in the blocks *block* (AHEAD)."""
    for at in tl.range(begin, end, KEYS, num_stages=STAGES):
        key = at + tl.arange(0, KEYS)
        if not AHEAD:
            block = _block(table, key, end, BLOCK)
        k1, k2, v = _load(k_head, v_head, block, key, end, BLOCK, APART, TOKEN, DIM)
        if AHEAD:
            block = _block(table, key + KEYS, end, BLOCK)
        top, total, acc = _seen(q1, q2, k1, k2, v, key < end, top, total, acc, scale)
    return top, total, acc


@triton.jit
def _combine(  # the last split to arrive
    parts, sums, out, first, used,
    GROUP: tl.constexpr, GC: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """The output of the heads of one row and KV head from their *used* splits, *first* and on."""
    head = tl.arange(0, GC)
    dims = tl.arange(0, DIM)
    real = head < GROUP
    split = tl.arange(0, SPLITS)
    at = sums + (first + split)[:, None] * (2 * GROUP) + head[None, :]
    there = (split < used)[:, None] & real[None, :]
    top = tl.load(at, mask=there, other=float("-inf"), cache_modifier=".cg")
    top = tl.where(real[None, :], top, 0.0)
    total = tl.load(at + GROUP, mask=there, other=1.0, cache_modifier=".cg")
    best = tl.max(top, 0)
    weight = tl.sum(tl.exp2(top - best[None, :]) * total, 0)
    acc = tl.zeros((GC, DIM), tl.float32)
    for c in tl.static_range(0, SPLITS, AT_ONCE):
        split = c + tl.arange(0, AT_ONCE)
        there = (split < used)[:, None] & real[None, :]
        some = (first + split)[:, None]
        top = tl.load(sums + some * (2 * GROUP) + head[None, :], mask=there, other=float("-inf"), cache_modifier=".cg")
        place = parts + ((some * GROUP + head[None, :]) * DIM)[:, :, None] + dims[None, None, :]
        part = tl.load(place, mask=there[:, :, None], other=0.0, cache_modifier=".cg")
        acc += tl.sum(part * tl.exp2(top - best[None, :])[:, :, None], 0)
    y = acc / weight[:, None]
    tl.store(out + head[:, None] * DIM + dims[None, :], y.to(out.dtype.element_ty), mask=real[:, None])


@triton.jit
def _hand_in(
    acc, top, total, parts, sums, counters, out, pair, s, used, head, dims,
    GROUP: tl.constexpr, GC: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Store a split's part; the last one of its row and KV head combines all and sets the counter back to 0."""
    at = pair * SPLITS + s
    real = head < GROUP
    tl.store(parts + (at * GROUP + head)[:, None] * DIM + dims[None, :], acc, mask=real[:, None])
    tl.store(sums + at * (2 * GROUP) + head, top, mask=real)
    tl.store(sums + at * (2 * GROUP) + GROUP + head, total, mask=real)
    tl.debug_barrier()  # all threads have stored before one of them counts
    if tl.atomic_add(counters + pair, 1, sem="acq_rel") == used - 1:
        _combine(parts, sums, out, pair * SPLITS, used, GROUP, GC, DIM, SPLITS, AT_ONCE)
        tl.store(counters + pair, 0)


@triton.jit
def _give(
    acc, top, total, parts, sums, counters, out, pair, s, used,
    GROUP: tl.constexpr, GP: tl.constexpr, GC: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Store the output of the heads of *pair* (row and KV head), or of one of *used* splits hand in its part."""
    head = tl.arange(0, GP)
    dims = tl.arange(0, DIM)
    out += pair * (GROUP * DIM)
    if used == 1:
        y = (acc / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + head[:, None] * DIM + dims[None, :], y, mask=(head < GROUP)[:, None])
    elif SPLITS > 1:
        _hand_in(
            acc, top, total, parts, sums, counters, out, pair, s, used, head, dims, GROUP, GC, DIM, SPLITS, AT_ONCE
        )


@triton.jit(do_not_specialize=["columns", "least", "whole"])
def _attend_decode(
    qkv, q_norm, k_norm, cos_sin, k_cache, v_cache, table, rows, context, slots, out, parts, sums, counters,
    eps, scale, columns, least, whole,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GP: tl.constexpr, GC: tl.constexpr, DIM: tl.constexpr,
    BLOCK: tl.constexpr, APART: tl.constexpr, TOKEN: tl.constexpr, HEAD: tl.constexpr, WINDOW: tl.constexpr,
    NORM: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr, AT_ONCE: tl.constexpr, STAGES: tl.constexpr,
    EARLY: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (h, s, r): split s of the keys of KV head h and row r, if there are keys for so many splits of *least*;
    rows before *whole* are not split. GP, GC: G padded for products and for sums. APART, TOKEN, HEAD: how far blocks,
    tokens and heads of the caches lie apart. EARLY, AHEAD: as AttendTile says.
    """
    if PDL:
        gdc_launch_dependents()
    h, s, r = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    HALF: tl.constexpr = DIM // 2
    STRIDE: tl.constexpr = KV_HEADS * DIM
    half = tl.arange(0, HALF)[None, :]
    head = tl.arange(0, GP)
    now = tl.maximum(tl.load(context + r) - 1, 0)
    low = tl.maximum(now - WINDOW + 1, 0) if WINDOW > 0 else 0
    share = tl.cdiv(now - low, KEYS) * KEYS
    used = 1
    if SPLITS > 1:
        share, used = _shares(now - low, r, least, whole, KEYS, SPLITS)
        if s >= used:
            return
    begin = low + s * share
    end = tl.minimum(begin + share, now)
    table += tl.load(rows + r) * columns
    k_cache += h * HEAD
    v_cache += h * HEAD
    key = begin + tl.arange(0, KEYS)
    block = _block(table, key, end, BLOCK)
    if EARLY:
        k1, k2, v = _load(k_cache, v_cache, block, key, end, BLOCK, APART, TOKEN, DIM)
        if AHEAD:
            block = _block(table, key + KEYS, end, BLOCK)
    slot = tl.load(slots + r)
    slot = slot // BLOCK * APART + slot % BLOCK * TOKEN
    cos = tl.load(cos_sin + now * DIM + half)
    sin = tl.load(cos_sin + now * DIM + HALF + half)
    if PDL:
        gdc_wait()
    qkv += r * ((GROUP + 2) * STRIDE)
    q = qkv + (h * GROUP + head)[:, None] * DIM + half
    q1, q2 = _turned(q, (head < GROUP)[:, None], q_norm, cos, sin, eps, k_cache, DIM, NORM)
    top = tl.full((GP,), float("-inf"), tl.float32)
    total = tl.zeros((GP,), tl.float32)
    acc = tl.zeros((GP, DIM), tl.float32)
    if s == 0:
        new = qkv + (GROUP * KV_HEADS + h) * DIM
        top, value = _newest(
            new, k_cache + slot, v_cache + slot, q1, q2, k_norm, cos, sin, eps, scale, STRIDE, DIM, NORM
        )
        total = tl.full((GP,), 1.0, tl.float32)
        acc += value[None, :]
    if begin < end:
        if EARLY:
            top, total, acc = _seen(q1, q2, k1, k2, v, key < end, top, total, acc, scale)
            begin += KEYS
        top, total, acc = _rest(
            q1, q2, k_cache, v_cache, table, block, begin, end, top, total, acc, scale,
            BLOCK, APART, TOKEN, DIM, KEYS, STAGES, AHEAD,
        )  # fmt: skip
    pair = r * KV_HEADS + h
    _give(acc, top, total, parts, sums, counters, out, pair, s, used, GROUP, GP, GC, DIM, SPLITS, AT_ONCE)


_run = Direct(_attend_decode)


def attend_decode(
    qkv_RX: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    rows: Tensor,
    context: Tensor,
    slots: Tensor,
    num_heads: int,
    cos_sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    scale: float,
    window: int | None,
    counters: Tensor,
    *,
    pdl: bool = False,
    tile: AttendTile | None = None,
) -> Tensor:
    """Attention of R rows at position context - 1 each: [R, N * D] of qkv's dtype, new memory. Writes the new keys and
    values to *slots* of the caches in place.

    *qkv* rows are N query heads, H key heads, H value heads; the caches are [blocks, B, H, D] of its dtype, the numbers
    of a head together, both of the same strides. Step row i has the blocks *table*[rows[i]] ([.., M] int32); *rows* and
    *slots* are int64 [R], *context* int32 [R]: keys, the new one included (less than one counts as one). *cos_sin* is
    [positions, D] float32. *q_norm*, *k_norm* ([D]): both or neither. A row sees at most *window* keys, the new one
    included. All else is contiguous but the table's columns. Nothing else is read of the cache or the table, and no row
    depends on another.

    *counters* ([COUNTERS] int32) are 0 before and after; no other stream may use them meanwhile. *pdl*: all but *qkv*
    must be complete before the kernel before this one began.
    """
    count, (heads, dim) = len(qkv_RX), k_cache.shape[-2:]
    out = torch.empty((count, num_heads * dim), dtype=qkv_RX.dtype, device=qkv_RX.device)
    if not count:
        return out
    group = num_heads // heads
    t = attend_tile(count, heads) if tile is None else tile
    parts = sums = out
    if t.splits > 1:
        parts = torch.empty((count, heads, t.splits, group, dim), dtype=torch.float32, device=out.device)
        sums = torch.empty((count, heads, t.splits, 2, group), dtype=torch.float32, device=out.device)
    padded = power_of_two(group)
    _run(
        (heads, t.splits, count),
        (qkv_RX, out if q_norm is None else q_norm, out if k_norm is None else k_norm, cos_sin, k_cache, v_cache,
         table, rows, context, slots, out, parts, sums, counters),
        (eps, scale * LOG2E, table.stride(0), t.least, t.whole),
        (heads, group, max(16, padded), padded, dim, k_cache.shape[1], *k_cache.stride()[:3], window or 0,
         q_norm is not None, t.keys, t.splits, max(1, min(t.splits, SLICE * t.warps // (padded * dim))), t.stages,
         t.early, t.ahead, pdl),
        warps=t.warps, registers=t.registers, pdl=pdl,
    )  # fmt: skip
    return out
