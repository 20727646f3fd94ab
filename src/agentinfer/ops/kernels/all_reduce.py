"""The sum over ranks of a message: each rank writes its part into every other's memory, and adds what came.

One trip over the links: data, then a flag that the data is there. Each program has a piece of the message, flags and
places of its own, and counts its calls. Places alternate between two, so no barrier is needed at the end: a rank writes
where it wrote two calls ago, and it has seen the flag of the call between, which another rank raises only once its
kernel of the call before, the one that read, is over.

Messages of one range of sizes share pieces of one size, and have flags, places and counts of their own: else a piece
could be written where another program, of a message cut otherwise, still reads. Memory of a rank, that all others can
write, range by range: flags [PIECES, ranks] int32, then [2, ranks, PIECES * bytes of a piece].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from agentinfer.ops.kernels.launch import Direct
from agentinfer.ops.kernels.tiles import power_of_two

RANGES = (2 << 10, 16 << 10)
"""Bytes a program, of messages of each range: a larger piece has fewer flags, a smaller one more programs."""
PIECES = 256
"""Most programs."""
MOST = PIECES * RANGES[-1]
"""Bytes of the largest message."""


@triton.jit
def _send(
    own, at, there, pointers, b, count,
    RANK: tl.constexpr, SIZE: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr, FROM: tl.constexpr,
):  # fmt: skip
    """Write *own* to places *at* of every other rank, over memory from byte FROM on, then the flag of program *b*."""
    REGION: tl.constexpr = PIECES * (PIECE // (own.dtype.primitive_bitwidth // 8))
    half = (count & 1) * SIZE
    for k in tl.static_range(1, SIZE):
        theirs = tl.load(pointers + (RANK + k) % SIZE) + FROM + 4 * PIECES * SIZE
        data = tl.multiple_of(theirs.to(tl.pointer_type(own.dtype)), 16)
        tl.store(data + (half + RANK) * REGION + at, own, mask=there)
    tl.debug_barrier()  # all that this program wrote comes before the flag
    for k in tl.static_range(1, SIZE):
        flags = (tl.load(pointers + (RANK + k) % SIZE) + FROM).to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(flags + b * SIZE + RANK, count, sem="release", scope="sys")


@triton.jit
def _add(
    own, at, there, pointers, b, count,
    RANK: tl.constexpr, SIZE: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr, FROM: tl.constexpr,
    PATIENCE: tl.constexpr,
):  # fmt: skip
    """*own* and what the others wrote to places *at* of this rank, in float32. PATIENCE: how often to look for a flag;
    0: until it is there.
    """
    REGION: tl.constexpr = PIECES * (PIECE // (own.dtype.primitive_bitwidth // 8))
    half = (count & 1) * SIZE
    mine = tl.load(pointers + RANK) + FROM
    flags = mine.to(tl.pointer_type(tl.int32)) + b * SIZE
    for k in tl.static_range(1, SIZE):
        flag = flags + (RANK + k) % SIZE
        tries = 0
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        while (seen - count < 0) & ((PATIENCE == 0) | (tries < PATIENCE)):  # the other may be one call ahead
            seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
            tries += 1
    tl.debug_barrier()
    data = tl.multiple_of((mine + 4 * PIECES * SIZE).to(tl.pointer_type(own.dtype)), 16)
    total = tl.zeros(own.shape, tl.float32)
    for rank in tl.static_range(SIZE):  # in this order on every rank, so that all have the same bits
        if rank == RANK:
            part = own
        else:
            part = tl.load(data + (half + rank) * REGION + at, mask=there, other=0.0, cache_modifier=".cg")
        total += part.to(tl.float32)
    return total


@triton.jit(do_not_specialize=["UNITS"])
def _all_reduce(
    x, out, pointers, counters, UNITS,
    RANK: tl.constexpr, SIZE: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr, FROM: tl.constexpr,
    PATIENCE: tl.constexpr, SEND: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program b: piece b of UNITS * 16 bytes. SEND and ADD are its halves, both on but in tests of one at a time."""
    if PDL:
        gdc_launch_dependents()
    BLOCK: tl.constexpr = PIECE // (x.dtype.element_ty.primitive_bitwidth // 8)
    b = tl.program_id(0)
    at = b * BLOCK + tl.arange(0, BLOCK)
    there = at < UNITS * (BLOCK * 16 // PIECE)
    if PDL:
        gdc_wait()
    own = tl.load(x + at, mask=there, other=0.0)
    count = tl.load(counters + b) + 1
    if SEND:
        _send(own, at, there, pointers, b, count, RANK, SIZE, PIECE, PIECES, FROM)
    if ADD:
        total = _add(own, at, there, pointers, b, count, RANK, SIZE, PIECE, PIECES, FROM, PATIENCE)
        tl.store(out + at, total.to(out.dtype.element_ty), mask=there)
        tl.store(counters + b, count)


@triton.jit(do_not_specialize=["stride"])
def _all_reduce_norm(
    parts, residual, weight, out, pointers, counters, eps, stride,
    D: tl.constexpr, BD: tl.constexpr, PARTS: tl.constexpr,
    RANK: tl.constexpr, SIZE: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr, FROM: tl.constexpr,
    PATIENCE: tl.constexpr, SEND: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program b: row b, which is a piece. What is sent has the type of *out*."""
    if PDL:
        gdc_launch_dependents()
    b = tl.program_id(0)
    dims = tl.arange(0, BD)
    inside = dims < D
    w = tl.load(weight + dims, mask=inside, other=0.0).to(tl.float32)
    row = b.to(tl.int64) * D
    at = b * (PIECE // (out.dtype.element_ty.primitive_bitwidth // 8)) + dims
    if PDL:
        gdc_wait()
    own = tl.zeros((BD,), tl.float32)
    for i in tl.static_range(PARTS):
        place = parts + i * stride.to(tl.int64) + row + dims
        own += tl.load(place, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    own = own.to(out.dtype.element_ty)
    count = tl.load(counters + b) + 1
    if SEND:
        _send(own, at, inside, pointers, b, count, RANK, SIZE, PIECE, PIECES, FROM)
    if ADD:
        before = tl.load(residual + row + dims, mask=inside, other=0.0)
        total = _add(own, at, inside, pointers, b, count, RANK, SIZE, PIECE, PIECES, FROM, PATIENCE)
        y = before + total.to(out.dtype.element_ty).to(tl.float32)
        tl.store(residual + row + dims, y, mask=inside)
        r = tl.rsqrt(tl.sum(y * y) / D + eps)
        tl.store(out + row + dims, (y * r * w).to(out.dtype.element_ty), mask=inside)
        tl.store(counters + b, count)


_run, _run_norm = Direct(_all_reduce), Direct(_all_reduce_norm)


def buffer_bytes(ranks: int, ranges: int = len(RANGES)) -> int:
    """Bytes of the memory that each of *ranks* lends to the others, for the first *ranges* of messages."""
    return sum(4 * PIECES * ranks + 2 * ranks * PIECES * piece for piece in RANGES[:ranges])


def range_of(size: int) -> int:
    """Which of RANGES a message of *size* bytes is in."""
    return next(i for i, piece in enumerate(RANGES) if size <= PIECES * piece)


def all_reduce(
    x: Tensor, pointers: Tensor, counters: Tensor, rank: int, *, patience: int = 0, send: bool = True, add: bool = True,
    pdl: bool = False,
) -> Tensor:  # fmt: skip
    """The sum of *x* over the ranks, of x's dtype, added in float32: a new tensor. Every rank calls it in the same
    order, in one stream each.

    *x* is contiguous, of float32, bfloat16 or float16, of whole 16 bytes, at most MOST. *pointers* [ranks] int64 are
    the addresses of the ranks' memory (`buffer_bytes`), which begins as zeros, as does *counters* ([RANGES, PIECES]
    int32). *patience*: how often to look for what another rank sends; 0: until it is there. *send*, *add*: its two
    halves. *pdl*: take part in programmatic dependent launch.
    """
    out = torch.empty_like(x)
    size = x.numel() * x.itemsize
    if size:
        which = range_of(size)
        piece, ranks = RANGES[which], len(pointers)
        _run(
            (-(-size // piece), 1, 1), (x, out, pointers, counters[which]), (size // 16,),
            (rank, ranks, piece, PIECES, buffer_bytes(ranks, which), patience, send, add, pdl),
            warps=4 if which == 0 else 8, pdl=pdl,
        )  # fmt: skip
    return out


def rows_fit(rows: int, width: int, dtype: torch.dtype) -> bool:
    """Whether `all_reduce_norm` serves so many rows of *width* numbers: one a program, of whole 16 bytes."""
    size = width * dtype.itemsize
    return rows <= PIECES and size <= RANGES[-1] and size % 16 == 0


def all_reduce_norm(
    parts_PTD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, dtype: torch.dtype,
    pointers: Tensor, counters: Tensor, rank: int, *, patience: int = 0, send: bool = True, add: bool = True,
    pdl: bool = False,
) -> Tensor:  # fmt: skip
    """`all_reduce` of the sum of *parts*, rounded to *dtype*, and `add_norm` in one: the sum over ranks, rounded too,
    goes onto *residual* (float32) in place; its norm, [T, D] of *dtype*, is new. Shapes as `rows_fit` has them, all
    contiguous; the rest as of `all_reduce`, with which it may alternate.
    """
    _, count, width = parts_PTD.shape
    out = torch.empty((count, width), dtype=dtype, device=residual_TD.device)
    if count:
        which, ranks, block = len(RANGES) - 1, len(pointers), power_of_two(width)
        _run_norm(
            (count, 1, 1), (parts_PTD, residual_TD, weight_D, out, pointers, counters[which]),
            (eps, parts_PTD.stride(0)),
            (
                width, block, len(parts_PTD), rank, ranks, RANGES[which], PIECES, buffer_bytes(ranks, which), patience,
                send, add, pdl,
            ),
            warps=max(1, min(8, block // 512)), pdl=pdl,
        )  # fmt: skip
    return out
