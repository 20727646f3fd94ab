"""Top-k, top-p and min-p on the device, exactly as ops/sample.py has them, without sorting and mostly without a cut.

w = (row maximum - logit) / temperature. A token is above another if its w is less, or equal and its id lower. What the
filters keep of a row is what lies above somewhere: fewer than k tokens are above it, less than top_p of the mass is,
and its w is at most -log(min_p). So the best of all tokens by noise, if it is kept, is the best of those that are kept.
If it is not, nothing below it is kept either, and the next candidate is the best of those above it.

`_begin`, a program a row: the token of the plain kernels is the first candidate, where its w is within a bound; what
exceeds the bound is never kept. That of min-p is its cut. That of top-k is the k-th largest of the maxima of CHUNK ids:
at least k tokens reach it, and few more. Where top-p follows top-k, the mass of the k largest is summed here: their cut
is found by halving its bits, over the chunks that reach the bound.
`_round`, SPLITS programs a row: what is above the candidate, and the best of it. The first draws nothing for a row that
has a candidate, since most are kept; the second looks again at what the first refused, and draws. Of a row without
top-p only those steps are read whose maxima are above; of one with top-p all are read once, for the mass of all, and
then only those. A row that is decided leaves at once.
`_settle`, a program a row: as many rounds more as it takes, and the token.

A candidate is kept with the chance that its filters leave, and each of the next ones is drawn from less: a row with
top-p p takes 1 + log(1/p) rounds on average, whatever its logits. Sums are of float32 within a lane, of float64 beyond,
in an order that depends on nothing but the row. Rows with k in the thousands and top-p pay for the halving: some 30
passes of one program.

Shapes: S samples, V vocabulary, C chunks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from agentinfer.ops.kernels.launch import Direct
from agentinfer.ops.kernels.noise import _gumbel
from agentinfer.ops.kernels.tiles import power_of_two

TILE = 1024
"""Token ids a step of a program."""
SPLITS = 8
"""Programs a row."""
GROUP = 32
"""Steps of a program whose maxima are looked at together."""
ROUNDS = 4
"""Rounds of many programs a row."""
CHUNK = 128
"""Token ids of which one maximum is kept."""
GATHER = 64
"""Chunks that are read together."""
WORDS = 8
"""32-bit words of a sample's parameters: state.columns.PARAMS."""
SLACK = 1e-6
"""sample.TIE."""
INFINITE: tl.constexpr = tl.constexpr(0x7F800000)
"""Its bits."""
PARTS: tl.constexpr = tl.constexpr(6)
"""Numbers that a program of a round leaves, float64: how many tokens are above the candidate, their mass, the mass of
all, the best score above it, whose it is, and the candidate."""
BOUNDS: tl.constexpr = tl.constexpr(3)
"""Numbers of a row, float64: its maximum, the largest w that can be kept, the mass of the k largest (0: not asked)."""


@triton.jit
def _asked(row, V: tl.constexpr, GREEDY: tl.constexpr, SLACK: tl.constexpr, DEVICE: tl.constexpr):
    """temperature, k (V + 1: off), top_p, the largest w that min-p keeps, and whether there is any filter. DEVICE: the
    accurate logarithm of a GPU; the interpreter's is.
    """
    temperature = tl.load(row).to(tl.float32, bitcast=True)
    top_p = tl.load(row + 1).to(tl.float32, bitcast=True)
    min_p = tl.load(row + 2).to(tl.float32, bitcast=True)
    k = tl.load(row + 3)
    k = tl.where((k > 0) & (k < V), k, V + 1)
    some = tl.where(min_p > 0.0, min_p, 1.0)
    last = tl.where(min_p > 0.0, SLACK - (libdevice.log(some) if DEVICE else tl.log(some)), float("inf"))
    return temperature, k, top_p, last, (temperature >= GREEDY) & ((k < V) | (top_p < 1.0) | (min_p > 0.0))


@triton.jit
def _made(at):
    """What the kernel before this one has written; the cache of a multiprocessor may hold what was there before."""
    return tl.load(at, cache_modifier=".cg")


@triton.jit
def _w(x, top, temperature, DEVICE: tl.constexpr):
    """How far logits are below *top*; never -0, whose bits are large. On a GPU (DEVICE) this is the rounded quotient,
    too (Markstein 1990: two corrections by the rounded reciprocal), but for what is no mass: above 2^100 or subnormal.
    The ordinary division checks its operands, and branches, for each.
    """
    away = tl.abs(top - x)
    if DEVICE:
        inverse = tl.div_rn(1.0, temperature)
        rough = away * inverse
        near = tl.fma(tl.fma(-rough, temperature, away), inverse, rough)
        w = tl.where(away < 1.2676506002282294e30, tl.fma(tl.fma(-near, temperature, away), inverse, near), rough)
    else:
        w = tl.div_rn(away, temperature)
    return w


@triton.jit
def _bits(w):
    """Those of a number that is not negative are in its order."""
    return w.to(tl.int32, bitcast=True)


@triton.jit
def _under(logits, chunks, n, cut, top, temperature, V: tl.constexpr, CHUNK: tl.constexpr, GATHER: tl.constexpr,
           MASS: tl.constexpr, DEVICE: tl.constexpr):  # fmt: skip
    """Of the tokens of the first *n* of *chunks* whose w is at most (bits) *cut*: how many, or (MASS) their mass."""
    sums = tl.zeros((GATHER, CHUNK), tl.float32 if MASS else tl.int32)
    for i in tl.range(0, n, GATHER):
        at = i + tl.arange(0, GATHER)
        chunk = tl.load(chunks + at, mask=at < n, other=0)
        ids = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
        there = (at < n)[:, None] & (ids < V)
        w = _w(tl.load(logits + ids, mask=there, other=float("-inf")), top, temperature, DEVICE)
        sums += tl.where(there & (_bits(w) <= cut), tl.exp(-w) if MASS else 1, 0)
    return tl.sum(tl.sum(sums.to(tl.float64) if MASS else sums, 1), 0)


@triton.jit
def _mass_of_largest(logits, maxima, chunks, k, bound, top, temperature, V: tl.constexpr, C: tl.constexpr,
                     BC: tl.constexpr, CHUNK: tl.constexpr, GATHER: tl.constexpr,
                     DEVICE: tl.constexpr):  # fmt: skip
    """The mass of the *k* largest, float64, none of which is beyond w = *bound*. Writes *chunks*."""
    chunk = tl.arange(0, BC)
    most = tl.load(maxima + chunk, mask=chunk < C, other=float("-inf"), cache_modifier=".cg")
    reach = (_w(most, top, temperature, DEVICE) <= bound) & (chunk < C)
    place = tl.cumsum(reach.to(tl.int32), 0) - 1
    tl.store(chunks + place, chunk, mask=reach)
    n = tl.sum(reach.to(tl.int32), 0)
    tl.debug_barrier()
    low = tl.full((), -1, tl.int32)
    high = _bits(bound)
    while high - low > 1:
        middle = low + (high - low) // 2
        if _under(logits, chunks, n, middle, top, temperature, V, CHUNK, GATHER, MASS=False, DEVICE=DEVICE) >= k:
            high = middle
        else:
            low = middle
    less = _under(logits, chunks, n, high - 1, top, temperature, V, CHUNK, GATHER, MASS=False, DEVICE=DEVICE)
    mass = _under(logits, chunks, n, high - 1, top, temperature, V, CHUNK, GATHER, MASS=True, DEVICE=DEVICE)
    return mass + (k - less).to(tl.float64) * tl.exp(-high.to(tl.float32, bitcast=True)).to(tl.float64)


@triton.jit
def _bound(maxima, k, top, temperature, C: tl.constexpr, BC: tl.constexpr, DEVICE: tl.constexpr):
    """The w that *k* chunks have tokens within; infinity if there are not as many."""
    chunk = tl.arange(0, BC)
    most = tl.load(maxima + chunk, mask=chunk < C, other=float("-inf"), cache_modifier=".cg")
    bits = _bits(_w(most, top, temperature, DEVICE))
    low = tl.full((), -1, tl.int32)
    high = tl.full((), INFINITE, tl.int32)
    while high - low > 1:
        middle = low + (high - low) // 2
        if tl.sum((bits <= middle).to(tl.int32), 0) >= k:
            high = middle
        else:
            low = middle
    return high.to(tl.float32, bitcast=True)


@triton.jit
def _leave(out, count, mass, total, score, best, candidate):
    """Write the numbers of a program (PARTS)."""
    tl.store(out, count)
    tl.store(out + 1, mass)
    tl.store(out + 2, total)
    tl.store(out + 3, score)
    tl.store(out + 4, best)
    tl.store(out + 5, candidate)


@triton.jit
def _begin(
    logits, asked, numbers, maxima, chunks, tokens, bounds, parts,
    STRIDE: tl.constexpr, V: tl.constexpr, TILES: tl.constexpr, BT: tl.constexpr, C: tl.constexpr, BC: tl.constexpr,
    CHUNK: tl.constexpr, GATHER: tl.constexpr, SPLITS: tl.constexpr, WORDS: tl.constexpr, GREEDY: tl.constexpr,
    SLACK: tl.constexpr, DEVICE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program s: bounds of sample s, and its first candidate as if a round had found it."""
    if PDL:
        gdc_launch_dependents()
    sample = tl.program_id(0)
    if PDL:
        gdc_wait()
    temperature, k, top_p, last, filtered = _asked(asked + sample * WORDS, V, GREEDY, SLACK, DEVICE)
    if filtered:
        row = logits + sample.to(tl.int64) * STRIDE
        tile = tl.arange(0, BT)
        at = numbers + (sample * TILES + tile) * 3 + 1
        tops = tl.load(at, mask=tile < TILES, other=float("-inf"), cache_modifier=".cg")
        top = tl.max(tops, 0)
        sound = (top > float("-inf")) & (top < float("inf"))
        total = tl.full((), 0.0, tl.float64)
        if sound & (k < V):
            bound = _bound(maxima + sample * C, k, top, temperature, C, BC, DEVICE)
            if top_p < 1.0:
                total = _mass_of_largest(
                    row, maxima + sample * C, chunks + sample * C, k, bound, top, temperature, V, C, BC, CHUNK, GATHER,
                    DEVICE,
                )  # fmt: skip
            last = tl.minimum(last, bound)
        token = _made(tokens + sample).to(tl.int32)
        able = sound & (_w(tl.load(row + token), tl.where(sound, top, 0.0), temperature, DEVICE) <= last)
        tl.store(bounds + sample * BOUNDS, top.to(tl.float64))
        tl.store(bounds + sample * BOUNDS + 1, last.to(tl.float64))
        tl.store(bounds + sample * BOUNDS + 2, total)
        each = parts + (sample * SPLITS + tl.arange(0, SPLITS)) * PARTS
        above = tl.zeros((SPLITS,), tl.float64) + tl.where(sound, float("inf"), -1.0)  # of what is unsound, any token
        _leave(each, above, above, 0.0, 0.0, tl.where(able, token, -1), tl.where(sound, -1, token))


@triton.jit
def _decided(parts, total, k, top_p, V: tl.constexpr, SPLITS: tl.constexpr, SLACK: tl.constexpr):
    """Whether the round that left *parts* decided its row, and the token, or else the next candidate (-1: what is below
    all). *total*: the mass of the k largest; 0: that of all, summed by the round.
    """
    each = parts + tl.arange(0, SPLITS) * PARTS
    count, mass = tl.sum(_made(each), 0), tl.sum(_made(each + 1), 0)
    total = tl.where(total > 0, total, tl.sum(_made(each + 2), 0))
    score, candidate = _made(each + 3), tl.max(_made(each + 5), 0)
    best = tl.max(score, 0)
    following = tl.min(tl.where(score == best, _made(each + 4), float(V)), 0)
    goal = tl.maximum(top_p.to(tl.float64) * total * (1.0 - SLACK), 1e-300)  # the largest token is always kept
    kept = (candidate >= 0) & (count < k) & ((mass < goal) | (top_p >= 1.0))
    free = (k > V) & (top_p >= 1.0) & (following >= 0)  # the bound is all there is
    done = kept | free | (best == float("-inf"))
    return done, tl.where(kept, candidate, following).to(tl.int32)


@triton.jit
def _steps(maxima, first, reach, top, temperature, C: tl.constexpr, BV: tl.constexpr, CHUNK: tl.constexpr,
           GROUP: tl.constexpr, DEVICE: tl.constexpr):  # fmt: skip
    """Which of the GROUP steps of BV ids from *first* on have a token whose w is at most *reach*: bits, an int32."""
    chunk = first // CHUNK + tl.arange(0, GROUP * BV // CHUNK)
    most = tl.load(maxima + chunk, mask=chunk < C, other=float("-inf"), cache_modifier=".cg")
    w = _w(tl.max(tl.reshape(most, (GROUP, BV // CHUNK)), 1), top, temperature, DEVICE)
    return tl.sum(tl.where(w <= reach, 1 << tl.arange(0, GROUP), 0), 0)


@triton.jit
def _look(
    row, maxima, asked, index, first, candidate, top, last, temperature, masses, weigh, draw,
    V: tl.constexpr, C: tl.constexpr, SPAN: tl.constexpr, BV: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr,
    DEVICE: tl.constexpr,
):  # fmt: skip
    """Of the ids *first* and on, SPAN of them: what is above *candidate*, or within *last* if that is -1: number,
    (where *masses*) mass; the mass of all (where *weigh*); the best score above it and whose it is (where *draw*; else
    0, and the candidate itself). Steps that have nothing above are not read, unless all is weighed.
    """
    at = tl.load(row + tl.maximum(candidate, 0))
    edge = tl.where(candidate >= 0, _w(at, top, temperature, DEVICE), last)
    place = tl.where(candidate >= 0, candidate, V)
    low, high = tl.load(asked + 4), tl.load(asked + 5)
    lane = tl.arange(0, 4)
    count = tl.zeros((BV // 4,), tl.int32)
    mass = tl.zeros((BV // 4,), tl.float32)
    whole = tl.zeros((BV // 4,), tl.float32)
    best = tl.where(draw, float("-inf"), 0.0)
    winner = tl.where(draw, 0, candidate)
    reach = tl.where(weigh, float("inf"), edge)
    end = tl.minimum(first + SPAN, V)
    for group in tl.range(first, end, GROUP * BV):
        steps = _steps(maxima, group, reach, top, temperature, C, BV, CHUNK, GROUP, DEVICE)
        for begin in tl.range(group, tl.minimum(group + GROUP * BV, end), BV):
            if (steps >> ((begin - group) // BV)) & 1:
                block = begin // 4 + tl.arange(0, BV // 4)
                ids = block[:, None] * 4 + lane[None, :]
                w = _w(tl.load(row + ids, mask=ids < V, other=float("-inf")), top, temperature, DEVICE)
                above = (w < edge) | ((w == edge) & (ids < place))
                count += tl.sum(above.to(tl.int32), 1)
                if masses:
                    share = tl.exp(-w)
                    mass += tl.sum(tl.where(above, share, 0.0), 1)
                    whole += tl.sum(share, 1)
                if draw:
                    able = above & (w < float("inf"))
                    if tl.max(tl.max(able.to(tl.int32), 1), 0) > 0:
                        noise = _gumbel(low, high, index, block, lane, DEVICE)
                        score = tl.where(able, noise - w, float("-inf"))
                        most = tl.max(tl.max(score, 1), 0)
                        if most > best:
                            best = most
                            winner = tl.min(tl.min(tl.where(score == most, ids, V), 1), 0)
    number, mass_of_all = tl.sum(count, 0).to(tl.float64), tl.sum(whole.to(tl.float64), 0)
    return number, tl.sum(mass.to(tl.float64), 0), mass_of_all, best.to(tl.float64), winner.to(tl.float64)


@triton.jit
def _look_again(
    row, maxima, asked, index, bounds, before, out, first, candidate, temperature, top_p, draw,
    V: tl.constexpr, C: tl.constexpr, SPAN: tl.constexpr, BV: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr,
    DEVICE: tl.constexpr,
):  # fmt: skip
    """`_look`, from what the program of the round *before* has left to *out*. The mass of all is summed once, if at
    all.
    """
    top, last = _made(bounds).to(tl.float32), _made(bounds + 1).to(tl.float32)
    weigh = (top_p < 1.0) & (_made(bounds + 2) == 0) & (_made(before + 2) == 0)
    count, mass, whole, score, best = _look(
        row, maxima, asked, index, first, candidate, top, last, temperature, top_p < 1.0, weigh, draw, V, C, SPAN, BV,
        CHUNK, GROUP, DEVICE,
    )  # fmt: skip
    _leave(out, count, mass, tl.where(weigh, whole, _made(before + 2)), score, best, candidate)


@triton.jit
def _round(
    logits, asked, index, maxima, bounds, before, parts,
    FIRST: tl.constexpr, STRIDE: tl.constexpr, V: tl.constexpr, C: tl.constexpr, SPAN: tl.constexpr, BV: tl.constexpr,
    CHUNK: tl.constexpr, GROUP: tl.constexpr, SPLITS: tl.constexpr, WORDS: tl.constexpr, GREEDY: tl.constexpr,
    SLACK: tl.constexpr, DEVICE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, s): part i of a round over sample s. *before*: the parts of the round before. The FIRST draws only
    where there is no candidate yet.
    """
    if PDL:
        gdc_launch_dependents()
    sample = tl.program_id(1)
    if PDL:
        gdc_wait()
    mine = asked + sample * WORDS
    temperature, k, top_p, _, filtered = _asked(mine, V, GREEDY, SLACK, DEVICE)
    if filtered:
        total = _made(bounds + sample * BOUNDS + 2)
        done, token = _decided(before + sample * SPLITS * PARTS, total, k, top_p, V, SPLITS, SLACK)
        place = (sample * SPLITS + tl.program_id(0)) * PARTS
        if done:
            _leave(parts + place, -1.0, -1.0, 0.0, 0.0, token, token)
        else:
            _look_again(
                logits + sample.to(tl.int64) * STRIDE, maxima + sample * C, mine, tl.load(index + sample),
                bounds + sample * BOUNDS, before + place, parts + place, tl.program_id(0) * SPAN, token, temperature,
                top_p, (token < 0) | (not FIRST), V, C, SPAN, BV, CHUNK, GROUP, DEVICE,
            )  # fmt: skip


@triton.jit
def _settle(
    logits, asked, index, maxima, bounds, parts, tokens,
    STRIDE: tl.constexpr, V: tl.constexpr, C: tl.constexpr, SPAN: tl.constexpr, BV: tl.constexpr, CHUNK: tl.constexpr,
    GROUP: tl.constexpr, SPLITS: tl.constexpr, WORDS: tl.constexpr, GREEDY: tl.constexpr, SLACK: tl.constexpr,
    DEVICE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program s: the token of sample s, after as many rounds as it takes. Writes *parts*."""
    if PDL:
        gdc_launch_dependents()
    sample = tl.program_id(0)
    if PDL:
        gdc_wait()
    mine = asked + sample * WORDS
    temperature, k, top_p, _, filtered = _asked(mine, V, GREEDY, SLACK, DEVICE)
    if filtered:
        total = _made(bounds + sample * BOUNDS + 2)
        each = parts + sample * SPLITS * PARTS
        done, token = _decided(each, total, k, top_p, V, SPLITS, SLACK)
        while done == 0:
            for i in tl.range(0, SPLITS):
                out = each + i * PARTS
                _look_again(
                    logits + sample.to(tl.int64) * STRIDE, maxima + sample * C, mine, tl.load(index + sample),
                    bounds + sample * BOUNDS, out, out, i * SPAN, token, temperature, top_p, done == 0, V, C, SPAN, BV,
                    CHUNK, GROUP, DEVICE,
                )  # fmt: skip
            tl.debug_barrier()  # what is left is read by others than wrote it, and then written again
            done, token = _decided(each, total, k, top_p, V, SPLITS, SLACK)
            tl.debug_barrier()
        tl.store(tokens + sample, token.to(tl.int64))


_run_begin, _run_round, _run_settle = Direct(_begin), Direct(_round), Direct(_settle)


def choose_filtered(
    logits_SV: Tensor,
    params: Tensor,
    index: Tensor,
    numbers: Tensor,
    maxima_SC: Tensor,
    tokens: Tensor,
    *,
    greedy_below: float = 1e-5,
    pdl: bool = False,
) -> None:
    """Write the token of each sample with filters to *tokens* ([S] int64), which hold that of all without: the argmax
    of z + noise over what `survivors` of ops/sample.py leaves. A row without a finite maximum has any token.

    *logits* are float32 with rows of any stride, and not written; *params* [S, 8] int32, the bits of
    state.columns.PARAMS; *index* [S] int32. *numbers*: [S, tiles, 3] of `sample._sample_tiles`, and *maxima* those that
    it found of CHUNK ids each, of rows with top-k. *pdl*: take part in programmatic dependent launch.
    """
    count, vocabulary = logits_SV.shape
    stride, device = logits_SV.stride(0), logits_SV.device
    tiles, chunks = numbers.shape[1], maxima_SC.shape[1]
    span = -(-vocabulary // (SPLITS * TILE)) * TILE
    bounds = torch.empty((count, BOUNDS.value), dtype=torch.float64, device=device)
    parts = torch.empty((ROUNDS + 1, count, SPLITS, PARTS.value), dtype=torch.float64, device=device)
    end = (WORDS, greedy_below, SLACK, logits_SV.is_cuda, pdl)
    _run_begin(
        (count, 1, 1),
        (logits_SV, params, numbers, maxima_SC, torch.empty_like(maxima_SC, dtype=torch.int32), tokens, bounds,
         parts[0]), (),
        (stride, vocabulary, tiles, power_of_two(tiles), chunks, power_of_two(chunks), CHUNK, GATHER, SPLITS, *end),
        warps=16, pdl=pdl,
    )  # fmt: skip
    rounds = (stride, vocabulary, chunks, span, TILE, CHUNK, GROUP, SPLITS, *end)
    for i in range(ROUNDS):
        given = (logits_SV, params, index, maxima_SC, bounds, parts[i], parts[i + 1])
        _run_round((SPLITS, count, 1), given, (), (i == 0, *rounds), warps=4, pdl=pdl)
    given = (logits_SV, params, index, maxima_SC, bounds, parts[ROUNDS], tokens)
    _run_settle((count, 1, 1), given, (), rounds, warps=8, pdl=pdl)
