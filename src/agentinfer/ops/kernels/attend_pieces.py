"""Pieces of the kernels of decode attention: queries and keys normed and rotated, keys loaded, the online softmax."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def turned(at, there, weight, cos, sin, eps, cache, DIM: tl.constexpr, NORM: tl.constexpr):  # noqa: ANN201 - tiles have no types
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
def newest(  # noqa: ANN201
    new, k_slot, v_slot, q1, q2, k_norm, cos, sin, eps, scale,
    STRIDE: tl.constexpr, DIM: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Write the key at *new* and its value, which lies STRIDE behind it, to their slots. Its scores and the value."""
    half = tl.arange(0, DIM // 2)[None, :]
    dims = tl.arange(0, DIM)
    k1, k2 = turned(new + half, half >= 0, k_norm, cos, sin, eps, k_slot, DIM, NORM)
    value = tl.load(new + STRIDE + dims, cache_modifier=".cg").to(v_slot.dtype.element_ty)
    tl.store(k_slot + half, k1)
    tl.store(k_slot + DIM // 2 + half, k2)
    tl.store(v_slot + dims, value)
    score = tl.sum(q1.to(tl.float32) * k1.to(tl.float32), 1) + tl.sum(q2.to(tl.float32) * k2.to(tl.float32), 1)
    return score * scale, value.to(tl.float32)


@triton.jit
def block_of(table, key, end, BLOCK: tl.constexpr):  # noqa: ANN201
    """The blocks of keys *key*; from *end* on block 0, and the table is not read."""
    return tl.load(table + key // BLOCK, mask=key < end, other=0)


@triton.jit
def load_keys(  # noqa: ANN201
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
def seen(q1, q2, k1, k2, v, there, top, total, acc, scale):  # noqa: ANN201
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
def rest(  # noqa: ANN201
    q1, q2, k_head, v_head, table, block, begin, end, top, total, acc, scale,
    BLOCK: tl.constexpr, APART: tl.constexpr, TOKEN: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr,
    STAGES: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """The online softmax over the keys *begin* .. end - 1, the first of which are in the blocks *block* (AHEAD)."""
    for at in tl.range(begin, end, KEYS, num_stages=STAGES):
        key = at + tl.arange(0, KEYS)
        if not AHEAD:
            block = block_of(table, key, end, BLOCK)
        k1, k2, v = load_keys(k_head, v_head, block, key, end, BLOCK, APART, TOKEN, DIM)
        if AHEAD:
            block = block_of(table, key + KEYS, end, BLOCK)
        top, total, acc = seen(q1, q2, k1, k2, v, key < end, top, total, acc, scale)
    return top, total, acc
