"""One token a sample, greedy or by Gumbel noise: the argmax of (logit - row maximum) / temperature + noise.

Two kernels. The first finds the best token of each tile of the vocabulary, where the maximum of the tile serves in
place of that of the row: a shift common to all does not change which is largest, and subtracting a maximum first keeps
every z at 0 or below, so that no temperature, however low, overflows. The second compares the winners by the z of the
whole row. Where a row has filters that token is only the first candidate: `filter` goes on from it.

Shapes: S samples, V vocabulary, C tiles.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from agentinfer.ops.comm import Group
from agentinfer.ops.kernels.filter import CHUNK, choose_filtered
from agentinfer.ops.kernels.launch import Direct
from agentinfer.ops.kernels.noise import _gumbel
from agentinfer.ops.kernels.tiles import power_of_two

TILE = 4096
"""Token ids a program."""
WORDS = 8
"""32-bit words of a sample's parameters: state.columns.PARAMS."""


@triton.jit
def _z(logit, top, temperature):
    """(logit - top) / temperature, to two units in the last place: by the reciprocal, that a row has one of. Where top
    is infinite, it is left out.
    """
    shift = tl.where((top == float("-inf")) | (top == float("inf")), 0.0, top)
    return (logit - shift) * tl.div_rn(1.0, temperature)


@triton.jit
def _sample_tiles(
    logits, asked, index, numbers, maxima,
    STRIDE: tl.constexpr, FIRST: tl.constexpr, END: tl.constexpr, C: tl.constexpr, BV: tl.constexpr,
    CHUNK: tl.constexpr, WORDS: tl.constexpr, GREEDY: tl.constexpr, DEVICE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (c, s): of tile c of sample s the score of its winner over the tile's maximum, that maximum (+inf where
    the tile holds NaN or +inf), and the winner, an int32. The logits are those of ids FIRST up to END. Of rows with
    filters also the maximum of every CHUNK ids (0: of none).
    """
    if PDL:
        gdc_launch_dependents()
    tile = tl.program_id(0)
    sample = tl.program_id(1)
    block = (FIRST // BV + tile) * (BV // 4) + tl.arange(0, BV // 4)
    lane = tl.arange(0, 4)
    ids = block[:, None] * 4 + lane[None, :]
    row = asked + sample * WORDS
    if PDL:
        gdc_wait()
    at = logits + sample.to(tl.int64) * STRIDE + (ids - FIRST)
    score = tl.load(at, mask=(ids >= FIRST) & (ids < END), other=float("-inf"))
    score = tl.where(score < float("inf"), score, float("inf"))  # of NaN, +inf: it wins, and shows
    top = tl.max(tl.max(score, 1), 0)
    most = top
    temperature = tl.load(row).to(tl.float32, bitcast=True)
    if temperature >= GREEDY:
        if CHUNK > 0:  # a constant: the rest is compiled or not
            top_p = tl.load(row + 1).to(tl.float32, bitcast=True)
            min_p = tl.load(row + 2).to(tl.float32, bitcast=True)
            if (tl.load(row + 3) > 0) | (top_p < 1.0) | (min_p > 0.0):
                chunk = (sample * C + tile) * (BV // CHUNK) + tl.arange(0, BV // CHUNK)
                tl.store(maxima + chunk, tl.max(tl.reshape(score, (BV // CHUNK, CHUNK)), 1))
        noise = _gumbel(tl.load(row + 4), tl.load(row + 5), tl.load(index + sample), block, lane, DEVICE)
        score = _z(score, top, temperature) + noise
        most = tl.max(tl.max(score, 1), 0)
    winner = tl.min(tl.min(tl.where(score == most, ids, 0x7FFFFFFF), 1), 0)
    out = numbers + (sample * C + tile).to(tl.int64) * 3
    tl.store(out, most)
    tl.store(out + 1, top)
    tl.store(out + 2, tl.minimum(winner, END - 1).to(tl.float32, bitcast=True))


@triton.jit
def _sample_rows(
    numbers, asked, tokens, ok,
    V: tl.constexpr, C: tl.constexpr, BC: tl.constexpr, WORDS: tl.constexpr, GREEDY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program s: the best of the winners of sample s."""
    if PDL:
        gdc_launch_dependents()
    sample = tl.program_id(0)
    tile = tl.arange(0, BC)
    there = tile < C
    at = numbers + (sample.to(tl.int64) * C + tile) * 3
    if PDL:
        gdc_wait()
    score = tl.load(at, mask=there, other=float("-inf"), cache_modifier=".cg")
    tops = tl.load(at + 1, mask=there, other=float("-inf"), cache_modifier=".cg")
    ids = tl.load(at + 2, mask=there, other=0.0, cache_modifier=".cg").to(tl.int32, bitcast=True)
    ids = tl.where(there, ids, 0x7FFFFFFF)
    top = tl.max(tops, 0)
    temperature = tl.load(asked + sample * WORDS).to(tl.float32, bitcast=True)
    if temperature >= GREEDY:
        score += _z(tops, top, temperature)
    token = tl.min(tl.where(score == tl.max(score, 0), ids, 0x7FFFFFFF), 0)
    token = tl.minimum(token, V - 1)
    tl.store(tokens + sample, token.to(tl.int64))
    tl.store(ok + sample, (top > float("-inf")) & (top < float("inf")))


_run_tiles, _run_rows = Direct(_sample_tiles), Direct(_sample_rows)


def sample_tokens(
    logits_SV: Tensor,
    params: Tensor,
    index: Tensor,
    tokens_out: Tensor,
    ok_out: Tensor,
    *,
    greedy_below: float = 1e-5,
    pdl: bool = False,
) -> None:
    """Write one token a sample to *tokens_out* ([S] int64), and to *ok_out* ([S] int64 or bool) whether its logits were
    sound: 1 or 0.

    *logits* are float32 with rows of any stride, and not written; *params* is [S, 8] int32, the bits of
    state.columns.PARAMS (of which temperature, filters and seed are read); *index* [S] int32, the output index.
    Temperatures below *greedy_below* choose the largest logit; ties go to the lowest id. Where a row holds NaN or +inf,
    or nothing but -inf, ok is False and the token is some id of the vocabulary.
    """
    count, vocabulary = logits_SV.shape
    if not count:
        return
    tiles = -(-vocabulary // TILE)
    maxima = torch.empty((count, tiles * (TILE // CHUNK)), dtype=torch.float32, device=logits_SV.device)
    numbers = _tiles(logits_SV, params, index, 0, vocabulary, tiles, greedy_below, maxima, pdl=pdl)
    _rows(numbers, params, vocabulary, tokens_out, ok_out, greedy_below, pdl=pdl)
    choose_filtered(logits_SV, params, index, numbers, maxima, tokens_out, greedy_below=greedy_below, pdl=pdl)


def sample_parts(
    logits_SV: Tensor,
    params: Tensor,
    index: Tensor,
    group: Group,
    vocab_size: int,
    tokens_out: Tensor,
    ok_out: Tensor,
    *,
    greedy_below: float = 1e-5,
    pdl: bool = False,
) -> None:
    """`sample_tokens` where rank r of *group* has the logits of ids r * V and on: every rank writes the same. Heeds no
    filters. The ranks tell each other three numbers a tile; a tile that lies on two ranks counts as two, so a score may
    differ from that of one rank in its last bits.
    """
    count, width = logits_SV.shape
    if not count:
        return
    first = group.rank * width
    end = max(first, min(first + width, vocab_size))
    numbers = _tiles(logits_SV, params, index, first, end, -(-width // TILE) + 1, greedy_below, None, pdl=pdl)
    numbers = group.all_gather_last_dim(numbers.view(count, -1)).view(count, -1, 3)
    _rows(numbers, params, vocab_size, tokens_out, ok_out, greedy_below, pdl=False)


def _tiles(
    logits_SV: Tensor, params: Tensor, index: Tensor, first: int, end: int, tiles: int, greedy_below: float,
    maxima: Tensor | None, *, pdl: bool,
) -> Tensor:  # fmt: skip
    """[S, tiles, 3] float32: what `_sample_tiles` says of each. *maxima*: where to write those of chunks."""
    count, device = len(logits_SV), logits_SV.device
    numbers = torch.empty((count, tiles, 3), dtype=torch.float32, device=device)
    _run_tiles(
        (tiles, count, 1), (logits_SV, params, index, numbers, numbers if maxima is None else maxima), (),
        (logits_SV.stride(0), first, end, tiles, TILE, 0 if maxima is None else CHUNK, WORDS, greedy_below,
         device.type == "cuda", pdl),
        warps=4, pdl=pdl,
    )  # fmt: skip
    return numbers


def _rows(
    numbers: Tensor, params: Tensor, vocabulary: int, tokens_out: Tensor, ok_out: Tensor, greedy_below: float, *,
    pdl: bool,
) -> None:  # fmt: skip
    count, tiles, _ = numbers.shape
    _run_rows(
        (count, 1, 1), (numbers, params, tokens_out, ok_out), (),
        (vocabulary, tiles, power_of_two(tiles), WORDS, greedy_below, pdl), warps=1, pdl=pdl,
    )  # fmt: skip
