"""Attention of rows with one query each, all keys of all rows shared evenly among as many programs as the GPU holds.

`attend_decode` gives a program a row and KV head, so the GPU runs in waves: each begins with the latency of its first
keys, and in the last one most of the GPU has nothing to do. Here there is one wave. The keys of (row, KV head) after
(row, KV head) are one line of chunks, program p has the p-th equal part of it, and what a part begins or ends in the
middle of is put together by whoever finishes it last. So where the sums of a row are cut follows from the lengths of
all rows, and its last bits may too; the same lengths give the same bits.

Shapes as in attend_decode; P programs, W chunks of KEYS keys in all.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from agentinfer.ops.kernels.attend_pieces import block_of, load_keys, newest, rest, seen, turned
from agentinfer.ops.kernels.launch import Direct
from agentinfer.ops.kernels.tiles import AttendTile, power_of_two

AT_ONCE = 8
"""Parts that are put together at once."""
HOLDING = (32, 256, 2048)
"""Numbers of rows that there are programs for: each program reads the lengths of so many."""


@triton.jit
def _line(context, count, ROWS: tl.constexpr, WINDOW: tl.constexpr, KEYS: tl.constexpr, HEADS: tl.constexpr):
    """Chunks of a head of each row, and where in the line each row ends. Every row has one chunk at least."""
    row = tl.arange(0, ROWS)
    now = tl.maximum(tl.load(context + row, mask=row < count, other=1) - 1, 0)
    if WINDOW > 0:
        now = tl.minimum(now, WINDOW - 1)
    chunks = tl.where(row < count, tl.maximum(tl.cdiv(now, KEYS), 1), 0)
    return chunks, tl.cumsum(chunks, 0) * HEADS


@triton.jit
def _place(p, j):
    """Where program *p* leaves the part that it begins in the middle (j > 0), or begins and does not end (j = 0)."""
    return p * 2 + tl.where(j == 0, 1, 0)


@triton.jit
def _together(
    parts, sums, out, first, used, GROUP: tl.constexpr, GC: tl.constexpr, DIM: tl.constexpr, AT_ONCE: tl.constexpr
):
    """The output of the heads of one row and KV head from the parts of *used* programs, *first* and on."""
    head = tl.arange(0, GC)
    dims = tl.arange(0, DIM)
    real = head < GROUP
    best = tl.full((GC,), float("-inf"), tl.float32)
    for c in range(0, used, AT_ONCE):
        j = c + tl.arange(0, AT_ONCE)
        at = sums + _place(first + j, j)[:, None] * (2 * GROUP) + head[None, :]
        there = (j < used)[:, None] & real[None, :]
        best = tl.maximum(best, tl.max(tl.load(at, mask=there, other=float("-inf"), cache_modifier=".cg"), 0))
    best = tl.where(real, best, 0.0)
    weight = tl.zeros((GC,), tl.float32)
    acc = tl.zeros((GC, DIM), tl.float32)
    for c in range(0, used, AT_ONCE):
        j = c + tl.arange(0, AT_ONCE)
        place = _place(first + j, j)[:, None]
        there = (j < used)[:, None] & real[None, :]
        at = sums + place * (2 * GROUP) + head[None, :]
        keep = tl.exp2(tl.load(at, mask=there, other=float("-inf"), cache_modifier=".cg") - best[None, :])
        weight += tl.sum(keep * tl.load(at + GROUP, mask=there, other=0.0, cache_modifier=".cg"), 0)
        at = parts + ((place * GROUP + head[None, :]) * DIM)[:, :, None] + dims[None, None, :]
        acc += tl.sum(tl.load(at, mask=there[:, :, None], other=0.0, cache_modifier=".cg") * keep[:, :, None], 0)
    y = acc / tl.where(real, weight, 1.0)[:, None]
    tl.store(out + head[:, None] * DIM + dims[None, :], y.to(out.dtype.element_ty), mask=real[:, None])


@triton.jit
def _hand_in(
    acc, top, total, parts, sums, counter, out, place, first, used,
    GROUP: tl.constexpr, GP: tl.constexpr, GC: tl.constexpr, DIM: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Leave a part; the last one of its row and KV head puts all together and sets the counter back to 0."""
    head = tl.arange(0, GP)
    real = head < GROUP
    tl.store(parts + (place * GROUP + head)[:, None] * DIM + tl.arange(0, DIM)[None, :], acc, mask=real[:, None])
    tl.store(sums + place * (2 * GROUP) + head, top, mask=real)
    tl.store(sums + place * (2 * GROUP) + GROUP + head, total, mask=real)
    tl.debug_barrier()  # all threads have stored before one of them counts
    if tl.atomic_add(counter, 1, sem="acq_rel") == used - 1:
        _together(parts, sums, out, first, used, GROUP, GC, DIM, AT_ONCE)
        tl.store(counter, 0)


@triton.jit(do_not_specialize=["columns", "least", "count"])
def _attend_even(
    qkv, q_norm, k_norm, cos_sin, k_cache, v_cache, table, rows, context, slots, out, parts, sums, counters,
    eps, scale, columns, least, count,
    HEADS: tl.constexpr, GROUP: tl.constexpr, GP: tl.constexpr, GC: tl.constexpr, DIM: tl.constexpr,
    BLOCK: tl.constexpr, APART: tl.constexpr, TOKEN: tl.constexpr, HEAD: tl.constexpr, WINDOW: tl.constexpr,
    NORM: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr, STAGES: tl.constexpr,
    AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program p: chunks p * share and on of the line, *least* of them or more. ROWS: one of HOLDING. The other
    constants are those of attend_decode.
    """
    if PDL:
        gdc_launch_dependents()
    STRIDE: tl.constexpr = HEADS * DIM
    half = tl.arange(0, DIM // 2)[None, :]
    head = tl.arange(0, GP)
    chunks_R, ends_R = _line(context, count, ROWS, WINDOW, KEYS, HEADS)
    everything = tl.max(ends_R)
    share = tl.maximum(tl.cdiv(everything, tl.num_programs(0)), least)
    at = tl.program_id(0) * share
    stop = tl.minimum(at + share, everything)
    while at < stop:
        r = tl.sum((ends_R <= at).to(tl.int32))
        mine = tl.arange(0, ROWS) == r
        chunks = tl.sum(tl.where(mine, chunks_R, 0))
        base = tl.sum(tl.where(mine, ends_R, 0)) - chunks * HEADS
        h = (at - base) // chunks
        chunk = at - base - h * chunks
        done = tl.minimum(chunk + stop - at, chunks)
        now = tl.maximum(tl.load(context + r) - 1, 0)
        low = tl.maximum(now - WINDOW + 1, 0) if WINDOW > 0 else 0
        begin = low + chunk * KEYS
        end = tl.minimum(low + done * KEYS, now)
        blocks = table + tl.load(rows + r) * columns
        key = begin + tl.arange(0, KEYS)
        block = block_of(blocks, key, end, BLOCK)
        k_head, v_head = k_cache + h * HEAD, v_cache + h * HEAD
        k1, k2, v = load_keys(k_head, v_head, block, key, end, BLOCK, APART, TOKEN, DIM)
        if AHEAD:
            block = block_of(blocks, key + KEYS, end, BLOCK)
        slot = tl.load(slots + r)
        slot = slot // BLOCK * APART + slot % BLOCK * TOKEN
        cos = tl.load(cos_sin + now * DIM + half)
        sin = tl.load(cos_sin + now * DIM + DIM // 2 + half)
        if PDL:
            gdc_wait()
        row = qkv + r.to(tl.int64) * ((GROUP + 2) * STRIDE)
        q = row + (h * GROUP + head)[:, None] * DIM + half
        q1, q2 = turned(q, (head < GROUP)[:, None], q_norm, cos, sin, eps, k_cache, DIM, NORM)
        top = tl.full((GP,), float("-inf"), tl.float32)
        total = tl.zeros((GP,), tl.float32)
        acc = tl.zeros((GP, DIM), tl.float32)
        if chunk == 0:
            new = row + (GROUP * HEADS + h) * DIM
            top, value = newest(
                new, k_head + slot, v_head + slot, q1, q2, k_norm, cos, sin, eps, scale, STRIDE, DIM, NORM
            )
            total = tl.full((GP,), 1.0, tl.float32)
            acc += value[None, :]
        if begin < end:
            top, total, acc = seen(q1, q2, k1, k2, v, key < end, top, total, acc, scale)
            top, total, acc = rest(
                q1, q2, k_head, v_head, blocks, block, begin + KEYS, end, top, total, acc, scale,
                BLOCK, APART, TOKEN, DIM, KEYS, STAGES, AHEAD,
            )  # fmt: skip
        pair = r * HEADS + h
        y = out + pair.to(tl.int64) * (GROUP * DIM)
        if done - chunk == chunks:
            whole = (acc / total[:, None]).to(out.dtype.element_ty)
            tl.store(y + head[:, None] * DIM + tl.arange(0, DIM)[None, :], whole, mask=(head < GROUP)[:, None])
        else:
            start = base + h * chunks
            first = start // share
            used = (start + chunks - 1) // share - first + 1
            _hand_in(
                acc, top, total, parts, sums, counters + pair, y, _place(tl.program_id(0), chunk), first, used,
                GROUP, GP, GC, DIM, AT_ONCE,
            )  # fmt: skip
        at += done - chunk


_run = Direct(_attend_even)


def attend_even(
    qkv_RX: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, rows: Tensor, context: Tensor, slots: Tensor,
    out: Tensor, cos_sin: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, eps: float, scale: float,
    window: int | None, counters: Tensor, processors: int, tile: AttendTile, *, pdl: bool = False,
) -> Tensor:  # fmt: skip
    """As `attend_decode`, written to *out*, with *tile*.even programs on each of *processors*. *scale* is base 2's."""
    count, (heads, dim) = len(qkv_RX), k_cache.shape[-2:]
    group = out.shape[1] // (heads * dim)
    programs, padded = tile.even * processors, power_of_two(group)
    parts = torch.empty((programs, 2, group, dim), dtype=torch.float32, device=out.device)
    sums = torch.empty((programs, 2, 2, group), dtype=torch.float32, device=out.device)
    _run(
        (programs, 1, 1),
        (qkv_RX, out if q_norm is None else q_norm, out if k_norm is None else k_norm, cos_sin, k_cache, v_cache,
         table, rows, context, slots, out, parts, sums, counters),
        (eps, scale, table.stride(0), max(1, tile.least // tile.keys), count),
        (heads, group, max(16, padded), padded, dim, k_cache.shape[1], *k_cache.stride()[:3], window or 0,
         q_norm is not None, tile.keys, next(n for n in HOLDING if count <= n), AT_ONCE, tile.stages, tile.ahead, pdl),
        warps=tile.warps, registers=tile.registers, pdl=pdl,
    )  # fmt: skip
    return out
