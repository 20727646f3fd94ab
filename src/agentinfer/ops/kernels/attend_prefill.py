"""Causal attention over the paged KV cache for tiles of queries: chunks of prompts, and single queries beside them.

The G query heads of a KV head are rows of one tile, so keys are read once for all of them and a lone query still fills
a matrix product. Which tiles there are says a work list, made on the host: no program is empty, and the longest come
first, so that the last wave is short.

Shapes: T positions, N query heads, H KV heads, D head dim, B tokens a block, M table columns, W tiles.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from attrs import frozen
from torch import Tensor

from agentinfer.ops.kernels.launch import Direct

LOG2E = 1.4426950408889634


@frozen
class Tile:
    """How one launch is cut up."""

    rows: int
    """Queries times query heads of a KV head: a power of two."""
    keys: int
    """Keys a step of the loop: a power of two."""
    warps: int
    stages: int


SINGLE_ROWS = 16
"""Rows of a tile of few queries: the least that a tensor core takes."""


def single_tile(dtype: torch.dtype) -> Tile:
    """For rows of few queries: bound by bytes. Two warps, as measured for decode."""
    if dtype == torch.float32:
        return Tile(rows=SINGLE_ROWS, keys=32, warps=4, stages=1)
    return Tile(rows=SINGLE_ROWS, keys=64, warps=2, stages=2)


MULTIPROCESSORS = 132
"""Of an H100 or H200: fewer programs than that leave some idle."""


def chunk_tile(dtype: torch.dtype, dim: int, rows: int) -> Tile:
    """For chunks, of *rows* queries times query heads in all: bound by products. Tensor cores want 64 rows a warp
    group; two groups share the keys that they read, unless there are so few rows that more programs are worth more.

    Three stages, since the keys' places come from a load themselves: that of the table's entries takes one.
    float32 has no tensor cores (to IEEE precision) and twice the bytes.
    """
    if dtype == torch.float32:
        return Tile(rows=32, keys=32, warps=4, stages=1)
    if rows < MULTIPROCESSORS * 128:
        return Tile(rows=64, keys=64, warps=4, stages=3)
    return Tile(rows=128, keys=128 if dim > 64 else 64, warps=8, stages=3)


@triton.jit
def _step(
    acc, top, total, q, k_head, v_head, table, key, end, position, scale, window,
    STRIDE: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax: keys *key* of the row. MASKED: some query may not see some of them."""
    dims = tl.arange(0, DIM)
    if MASKED:  # nothing past the row's context is read: neither the table nor the cache
        there = key < end
        block = tl.load(table + key // BLOCK, mask=there, other=0)
        at = (block.to(tl.int64) * BLOCK + key % BLOCK) * STRIDE
        k = tl.load(k_head + at[:, None] + dims[None, :], mask=there[:, None], other=0.0)
        v = tl.load(v_head + at[:, None] + dims[None, :], mask=there[:, None], other=0.0)
    else:
        block = tl.load(table + key // BLOCK)
        at = (block.to(tl.int64) * BLOCK + key % BLOCK) * STRIDE
        k = tl.load(k_head + at[:, None] + dims[None, :])
        v = tl.load(v_head + at[:, None] + dims[None, :])
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    if MASKED:
        seen = (key[None, :] <= position[:, None]) & (key < end)[None, :]
        if WINDOW:
            seen = seen & (key[None, :] > position[:, None] - window)
        s = tl.where(seen, s, float("-inf"))
    new = tl.maximum(top, tl.max(s, 1) * scale)
    shift = new
    if MASKED:  # a query that has seen no key yet: exp2(-inf - 0) is 0, exp2(-inf + inf) would be NaN
        shift = tl.where(new == float("-inf"), 0.0, new)
    p = tl.exp2(s * scale - shift[:, None])
    keep = tl.exp2(top - shift)
    acc = tl.dot(p.to(v.dtype), v, acc * keep[:, None], input_precision="ieee")
    return acc, new, total * keep + tl.sum(p, 1)


@triton.jit(do_not_specialize=["columns", "window"])
def _attend_tiles(
    q, k_cache, v_cache, table, work, out, scale, columns, window,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, WINDOW: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program w * H + h: tile w, KV head h. Its keys are low .. end - 1.

    =================== ===================================================
    low .. left - 1     masked: before the window of the tile's last query
    left .. right - 1   seen by all queries
    right .. end - 1    masked: the diagonal
    =================== ===================================================
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    STRIDE: tl.constexpr = KV_HEADS * DIM
    entry = work + tl.program_id(0) // KV_HEADS * 4
    head = tl.program_id(0) % KV_HEADS
    flat = tl.load(entry)
    count = tl.load(entry + 1)
    start = tl.load(entry + 2)
    table += tl.load(entry + 3).to(tl.int64) * columns
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM)
    query = rows // GROUP
    place = ((flat + query).to(tl.int64) * HEADS + head * GROUP + rows % GROUP)[:, None] * DIM + dims[None, :]
    mask = (query < count)[:, None]
    tile = tl.load(q + place, mask=mask, other=0.0)
    position = start + query
    end = start + count
    low = 0
    left = 0
    if WINDOW:
        low = tl.maximum(start - window + 1, 0) // KEYS * KEYS
        left = tl.cdiv(tl.maximum(end - window, 0), KEYS) * KEYS
    right = tl.maximum((start + 1) // KEYS * KEYS, left)
    k_head = k_cache + head * DIM
    v_head = v_cache + head * DIM
    keys = tl.arange(0, KEYS)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, DIM), tl.float32)
    if WINDOW:
        for first in tl.range(low, tl.minimum(left, end), KEYS, num_stages=STAGES):
            acc, top, total = _step(acc, top, total, tile, k_head, v_head, table, first + keys, end, position, scale,
                                    window, STRIDE, DIM, BLOCK, MASKED=True, WINDOW=True)  # fmt: skip
    for first in tl.range(left, right, KEYS, num_stages=STAGES):
        acc, top, total = _step(acc, top, total, tile, k_head, v_head, table, first + keys, end, position, scale,
                                window, STRIDE, DIM, BLOCK, MASKED=False, WINDOW=WINDOW)  # fmt: skip
    for first in tl.range(right, end, KEYS, num_stages=STAGES):
        acc, top, total = _step(acc, top, total, tile, k_head, v_head, table, first + keys, end, position, scale,
                                window, STRIDE, DIM, BLOCK, MASKED=True, WINDOW=WINDOW)  # fmt: skip
    total = tl.where(total == 0.0, 1.0, total)  # a row of padding has no keys: zeros
    tl.store(out + place, (acc / total[:, None]).to(out.dtype.element_ty), mask=mask)


_run = Direct(_attend_tiles)


def attend_tiles(
    q_TND: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    work_W4: Tensor,
    out_TND: Tensor,
    scale: float,
    window: int | None,
    tile: Tile,
) -> None:
    """Attention of the queries that the work list names, into *out_TND*; other queries of it are not written.

    A tile of the list, int32: (first flat position, queries, position of the first in its sequence, row of the
    *table*). It has at most `tile.rows // (N // H)` queries, which see the keys 0 .. their position; none where the
    position is negative. *window*: a query sees itself and at most window - 1 keys before it.
    The caches are [blocks, B, H, D], *table* [rows, M] int32, all contiguous and of one dtype with the queries.
    """
    num_heads, dim = q_TND.shape[1:]
    kv_heads = k_cache.shape[2]
    _run(
        (len(work_W4) * kv_heads, 1, 1),
        (q_TND, k_cache, v_cache, table, work_W4, out_TND),
        (scale * LOG2E, table.shape[1], window or 0),
        (num_heads, kv_heads, dim, k_cache.shape[1], tile.rows, tile.keys, window is not None, tile.stages),
        warps=tile.warps, stages=tile.stages,
    )  # fmt: skip
