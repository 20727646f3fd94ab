"""Pairs of a position and an expert, sorted by expert in tiles of whole rows, without asking the host.

Every program counts all pairs, which are few numbers, and so knows where its expert begins: no kernel before it, no
atomics, and the order within an expert is that of the pairs.

Shapes: M pairs, E experts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from attrs import frozen
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from agentinfer.ops.kernels.launch import Direct
from agentinfer.ops.kernels.tiles import power_of_two

CHUNK = 1024
"""Pairs that a program looks at at once."""


@frozen(eq=False)
class ExpertRows:
    """Where the rows of each expert lie."""

    pairs: Tensor
    """[tiles * rows] int32: number of the pair, or M where a tile is not full. From the last used tile on: anything."""
    experts: Tensor
    """[tiles] int32: the expert of a tile. From the last used one on: anything."""
    used: Tensor
    """[1] int32: how many tiles are used."""
    rows: int
    """Rows a tile."""


@triton.jit(do_not_specialize=["M"])
def _sort(
    chosen, pairs, tiles, used, M,
    E: tl.constexpr, EP: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program e: the pairs of expert e."""
    if PDL:
        gdc_launch_dependents()
    e = tl.program_id(0)
    each = tl.arange(0, EP)
    i = tl.arange(0, CHUNK)
    if PDL:
        gdc_wait()
    counts = tl.zeros((EP,), tl.int32)
    for at in tl.range(0, M, CHUNK):
        who = tl.load(chosen + at + i, mask=at + i < M, other=-1, cache_modifier=".cg").to(tl.int32)
        counts += tl.histogram(who, EP, mask=who >= 0)
    whole = (counts + ROWS - 1) // ROWS
    first = tl.sum(tl.where(each < e, whole, 0), 0)
    mine = tl.sum(tl.where(each == e, whole, 0), 0)
    count = tl.sum(tl.where(each == e, counts, 0), 0)
    if e == E - 1:
        tl.store(used, first + mine)
    for at in tl.range(0, mine):
        tl.store(tiles + first + at, e)
    place = first * ROWS
    for at in tl.range(0, M, CHUNK):
        there = at + i < M
        who = tl.load(chosen + at + i, mask=there, other=0, cache_modifier=".cg").to(tl.int32)
        hit = there & (who == e)
        rank = tl.cumsum(hit.to(tl.int32), 0)
        tl.store(pairs + place + rank - 1, at + i, mask=hit)
        place += tl.max(rank, 0)
    rest = count + tl.arange(0, ROWS)
    tl.store(pairs + first * ROWS + rest, tl.zeros((ROWS,), tl.int32) + M, mask=rest < mine * ROWS)


_run = Direct(_sort)


def expert_rows(experts_TK: Tensor, num_experts: int, rows: int, *, pdl: bool = False) -> ExpertRows:
    """The pairs of *experts* ([T, K] int64, contiguous, in range or -1), pair t * K + k, in tiles of *rows* (a power
    of two) of one expert each; pairs of -1 are in none. Tiles are as many as any choice can need.
    """
    count, device = experts_TK.numel(), experts_TK.device
    tiles = min(count, count // rows + num_experts)
    pairs = torch.empty(tiles * rows, dtype=torch.int32, device=device)
    whose = torch.empty(tiles, dtype=torch.int32, device=device)
    used = torch.empty(1, dtype=torch.int32, device=device)
    _run(
        (num_experts, 1, 1), (experts_TK, pairs, whose, used), (count,),
        (num_experts, power_of_two(num_experts), rows, CHUNK, pdl),
        warps=4, pdl=pdl,
    )  # fmt: skip
    return ExpertRows(pairs, whose, used, rows)
