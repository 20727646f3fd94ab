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

from agentinfer.ops.kernels.launch import Direct

RANGES = (2 << 10, 16 << 10)
"""Bytes a program, of messages of each range: a larger piece has fewer flags, a smaller one more programs."""
PIECES = 256
"""Most programs."""
MOST = PIECES * RANGES[-1]
"""Bytes of the largest message."""


@triton.jit(do_not_specialize=["UNITS"])
def _all_reduce(
    x, out, pointers, counters, UNITS,
    RANK: tl.constexpr, SIZE: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr, FROM: tl.constexpr,
    PATIENCE: tl.constexpr, SEND: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Program b: piece b of UNITS * 16 bytes, over memory from byte FROM on. SEND and ADD are its two halves, both on
    but in tests of one at a time. PATIENCE: how often to look for a flag; 0: until it is there.
    """
    BYTES: tl.constexpr = x.dtype.element_ty.primitive_bitwidth // 8
    BLOCK: tl.constexpr = PIECE // BYTES
    REGION: tl.constexpr = PIECES * BLOCK
    b = tl.program_id(0)
    at = b * BLOCK + tl.arange(0, BLOCK)
    there = at < UNITS * (16 // BYTES)
    own = tl.load(x + at, mask=there, other=0.0)
    count = tl.load(counters + b) + 1
    half = (count & 1) * SIZE
    if SEND:
        for k in tl.static_range(1, SIZE):
            theirs = tl.load(pointers + (RANK + k) % SIZE) + FROM + 4 * PIECES * SIZE
            data = tl.multiple_of(theirs.to(x.dtype), 16)
            tl.store(data + (half + RANK) * REGION + at, own, mask=there)
        tl.debug_barrier()  # all that this program wrote comes before the flag
        for k in tl.static_range(1, SIZE):
            flags = (tl.load(pointers + (RANK + k) % SIZE) + FROM).to(tl.pointer_type(tl.int32))
            tl.atomic_xchg(flags + b * SIZE + RANK, count, sem="release", scope="sys")
    if ADD:
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
        data = tl.multiple_of((mine + 4 * PIECES * SIZE).to(x.dtype), 16)
        total = tl.zeros((BLOCK,), tl.float32)
        for rank in tl.static_range(SIZE):  # in this order on every rank, so that all have the same bits
            if rank == RANK:
                part = own
            else:
                part = tl.load(data + (half + rank) * REGION + at, mask=there, other=0.0, cache_modifier=".cg")
            total += part.to(tl.float32)
        tl.store(out + at, total.to(out.dtype.element_ty), mask=there)
        tl.store(counters + b, count)


_run = Direct(_all_reduce)


def buffer_bytes(ranks: int, ranges: int = len(RANGES)) -> int:
    """Bytes of the memory that each of *ranks* lends to the others, for the first *ranges* of messages."""
    return sum(4 * PIECES * ranks + 2 * ranks * PIECES * piece for piece in RANGES[:ranges])


def range_of(size: int) -> int:
    """Which of RANGES a message of *size* bytes is in."""
    return next(i for i, piece in enumerate(RANGES) if size <= PIECES * piece)


def all_reduce(
    x: Tensor, pointers: Tensor, counters: Tensor, rank: int, *, patience: int = 0, send: bool = True, add: bool = True
) -> Tensor:
    """The sum of *x* over the ranks, of x's dtype, added in float32: a new tensor. Every rank calls it in the same
    order, in one stream each.

    *x* is contiguous, of float32, bfloat16 or float16, of whole 16 bytes, at most MOST. *pointers* [ranks] int64 are
    the addresses of the ranks' memory (`buffer_bytes`), which begins as zeros, as does *counters* ([RANGES, PIECES]
    int32).
    """
    out = torch.empty_like(x)
    size = x.numel() * x.itemsize
    if size:
        which = range_of(size)
        piece, ranks = RANGES[which], len(pointers)
        _run(
            (-(-size // piece), 1, 1), (x, out, pointers, counters[which]), (size // 16,),
            (rank, ranks, piece, PIECES, buffer_bytes(ranks, which), patience, send, add),
            warps=4 if which == 0 else 8,
        )  # fmt: skip
    return out
