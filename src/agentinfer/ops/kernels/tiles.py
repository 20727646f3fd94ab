"""How each kernel is cut up: the shapes that were measured, and a rule for all others.

Measured on an H200 in whole decode steps. N rows and K columns of a weight; G query heads a KV head. A gated weight
(gate rows, then up rows) counts as N of its output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from attrs import evolve, frozen


@frozen
class GemvTile:
    """A program computes *rows* numbers, *chunk* columns at a time. Powers of two."""

    rows: int
    chunk: int
    warps: int


@frozen
class GemmTile:
    """A program computes a block of m x n numbers, k columns at a time, from one of *split* parts of the columns."""

    m: int
    n: int
    k: int
    stages: int
    warps: int
    split: int


@frozen
class AttendTile:
    """At most *splits* programs share the keys of a row and KV head, each *least* of them or more, *keys* at a time."""

    splits: int
    keys: int
    warps: int
    stages: int
    least: int = 0
    early: bool = True
    """The first keys are loaded before the kernel before has ended, into registers: fewer waits, fewer programs."""
    ahead: bool = False
    """Blocks of keys are looked up a step of the loop before they are loaded, so that with 3 or more *stages* the loads
    of a program overlap each other, and a lone program is as fast as memory is near. Without, nothing overlaps within a
    program: the others on its multiprocessor must hide its waits."""
    whole: int = 0
    """Rows before this one are not split: those of full waves of programs, if the last wave is to be filled."""
    registers: int = 0
    """Most registers a thread, so that more programs fit a multiprocessor; 0: as many as the compiler likes. (Those
    that split take 212, so 4 programs fit; 168 make it 6, and nothing spills.)"""


GEMV: Mapping[tuple[int, int, bool], GemvTile] = MappingProxyType(
    {
        (6144, 4096, False): GemvTile(4, 2048, 4),  # Qwen3-8B: qkv, o, gate and up, down, head
        (4096, 4096, False): GemvTile(4, 2048, 2),
        (12288, 4096, True): GemvTile(4, 2048, 4),
        (4096, 12288, False): GemvTile(4, 2048, 2),
        (151936, 4096, False): GemvTile(4, 4096, 4),
        (4096, 1024, False): GemvTile(8, 1024, 2),  # Qwen3-0.6B: the same
        (1024, 2048, False): GemvTile(2, 2048, 4),
        (3072, 1024, True): GemvTile(8, 1024, 4),
        (1024, 3072, False): GemvTile(2, 1024, 4),
        (151936, 1024, False): GemvTile(8, 1024, 4),
    }
)
"""(N, K, gated) -> tile."""

GEMM: Mapping[tuple[int, int, int, bool], GemmTile] = MappingProxyType(
    {
        (32, 6144, 4096, False): GemmTile(32, 64, 256, 4, 4, 1),  # Qwen3-8B: qkv, o, gate and up, down, head
        (32, 4096, 4096, False): GemmTile(32, 32, 256, 4, 4, 2),
        (32, 12288, 4096, True): GemmTile(32, 32, 128, 4, 4, 1),
        (32, 4096, 12288, False): GemmTile(32, 32, 256, 4, 4, 2),
        (32, 151936, 4096, False): GemmTile(32, 64, 128, 3, 4, 1),
        (64, 6144, 4096, False): GemmTile(64, 64, 128, 4, 4, 1),
        (64, 4096, 4096, False): GemmTile(64, 32, 128, 4, 4, 2),
        (64, 12288, 4096, True): GemmTile(64, 32, 64, 4, 4, 1),
        (64, 4096, 12288, False): GemmTile(64, 64, 128, 4, 4, 2),
        (64, 151936, 4096, False): GemmTile(64, 128, 128, 4, 8, 1),
        (64, 1024, 2048, False): GemmTile(64, 32, 128, 4, 4, 4),  # Qwen3-0.6B
        (64, 1024, 3072, False): GemmTile(64, 32, 128, 4, 4, 4),
        (128, 4096, 1024, False): GemmTile(64, 64, 128, 4, 4, 1),
        (128, 1024, 2048, False): GemmTile(64, 64, 128, 4, 4, 4),
        (128, 3072, 1024, True): GemmTile(128, 32, 128, 4, 4, 1),
        (128, 1024, 3072, False): GemmTile(64, 64, 128, 4, 4, 4),
    }
)
"""(most rows, N, K, gated) -> tile for numbers of two bytes. *split* counts only where partial sums are wanted."""

GEMM_ROWS = (16, 32, 64, 128)
"""Numbers of rows up to which tiles can be told apart."""
NARROW = 1 << 23
"""Weights of at most so many numbers are read faster than kernels follow each other."""

ATTEND: Sequence[tuple[int, AttendTile]] = (
    (8, AttendTile(32, 32, 4, 2, 32)),
    (32, AttendTile(16, 64, 2, 2, 128)),
    (64, AttendTile(8, 64, 2, 2, 128)),
    (128, AttendTile(4, 64, 2, 2, 256)),
    (192, AttendTile(8, 64, 2, 2, 256)),
    (448, AttendTile(4, 64, 2, 2, 256)),
    (1024, AttendTile(1, 64, 4, 2)),
)
"""(most rows times KV heads, tile): the best over contexts of 256, 1,024, 4,096 and of 200 to 2,000 mixed. Beyond,
nothing is split: there are programs enough."""
PAIRS = 2048
"""Most rows times KV heads whose keys are split."""


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n (n >= 1)."""
    return 1 << (n - 1).bit_length()


def gemv_tile(n: int, k: int, gated: bool) -> GemvTile:
    """The tile of a product with one row: as measured, or about 64 weights a thread and little beyond the last column.
    Wide chunks for few rows, so that there are programs for all processors.
    """
    known = GEMV.get((n, k, gated))
    if known is not None:
        return known
    chunk = 2048
    while chunk > 64 and -(-k // chunk) * chunk * 4 > 5 * k:
        chunk //= 2
    rows = min(8, 8192 // chunk)
    while rows > 2 and n < 512 * rows:
        rows //= 2
    return GemvTile(rows, chunk, max(1, min(4, rows * chunk // 2048)))


def gemm_tile(rows: int, n: int, k: int, gated: bool, *, partial: bool) -> GemmTile:
    """The tile of a product with 2 to 128 rows. *partial*: the columns may be split, because whoever reads the result
    adds up the parts. Wide models keep 64 columns a program, narrow ones 32, so that there are programs for all.
    """
    for most in GEMM_ROWS:
        if rows <= most and (rows <= 64) == (most <= 64) and (most, n, k, gated) in GEMM:
            known = GEMM[most, n, k, gated]
            return known if partial else evolve(known, split=1)
    few = rows <= 32
    width = 64 if n >= 4096 and not (few and gated) else 32
    split = 1
    while partial and split < 8 and -(-n // width) * split < 128 and k >= 512 * split:
        split *= 2
    return GemmTile(32 if few else 64, width, 128, 4, 4, split)


def attend_tile(rows: int, kv_heads: int) -> AttendTile:
    """The tile of decode attention. Nothing is known of the lengths of the rows: long ones are split until the GPU is
    full, so that it does not wait for the longest.
    """
    pairs = rows * kv_heads
    return next((tile for most, tile in ATTEND if pairs <= most), AttendTile(1, 64, 2, 2, registers=168))
