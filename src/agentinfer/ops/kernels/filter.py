"""Top-k, top-p and min-p of rows of logits, in place, on the device, without sorting: so that a graph can capture them.

What ops/sample.py defines: z = (logit - maximum) / temperature; the k largest z; of these the fewest largest that hold
the share top_p of their mass; of these the z of at least log(min_p). Of equal z at a cut the lowest ids stay.

A program a row. w = -z is never negative, so its bits, as an integer, order as it does: the cut of top-k is the least w
that k tokens do not exceed, that of top-p the least that enough mass does not, each found by halving the bits, a pass
over the row (which the cache holds) a bit. Rows without filters, and unsound ones, leave at once.

Shapes: S samples, V vocabulary.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from agentinfer.ops.kernels.launch import Direct

TILE = 8192
"""Token ids a step."""
WORDS = 8
"""32-bit words of a sample's parameters: state.columns.PARAMS."""
SLACK = 1e-6
"""sample.TIE."""
INFINITE: tl.constexpr = tl.constexpr(0x7F800000)
"""Its bits."""


@triton.jit
def _far(logits, first, top, V: tl.constexpr, BV: tl.constexpr):
    """How far the ids *first* and on are below *top*, never negative (past the end: infinitely)."""
    ids = first + tl.arange(0, BV)
    return tl.abs(top - tl.load(logits + ids, mask=ids < V, other=float("-inf")))  # abs: of -0, the largest bits


@triton.jit
def _top(logits, V: tl.constexpr, BV: tl.constexpr):
    """The largest logit; +inf if there is NaN."""
    most = tl.full((BV,), float("-inf"), tl.float32)
    for first in tl.range(0, V, BV):
        ids = first + tl.arange(0, BV)
        x = tl.load(logits + ids, mask=ids < V, other=float("-inf"))
        most = tl.maximum(most, tl.where(x < float("inf"), x, float("inf")))
    return tl.max(most, 0)


@triton.jit
def _within(logits, cut, top, temperature, V: tl.constexpr, BV: tl.constexpr, MASS: tl.constexpr, W: tl.constexpr):
    """Of the tokens that are at most (bits) *cut* below *top*, or whose w is (W): how many, or (MASS) the sum of
    exp(-w), in float64. Only W divides: the passes of a search need not round as the reference does.
    """
    rate = tl.div_rn(-1.4426950408889634, temperature)
    sums = tl.zeros((BV,), tl.float32)
    for first in tl.range(0, V, BV):
        far = _far(logits, first, top, V, BV)
        ids = first + tl.arange(0, BV)
        bits = (tl.div_rn(far, temperature) if W else far).to(tl.int32, bitcast=True)
        sums += tl.where((bits <= cut) & (ids < V), tl.exp2(far * rate) if MASS else 1.0, 0.0)
    return tl.sum(sums.to(tl.float64), 0)


@triton.jit
def _cut(logits, goal, top, temperature, V: tl.constexpr, BV: tl.constexpr, MASS: tl.constexpr):
    """The least w (its bits) that tokens of *goal* in all (number, or mass) do not exceed, infinity if there is none;
    and what lies strictly below it.
    """
    low = tl.full((), -1, tl.int32)
    high = tl.full((), INFINITE, tl.int32)
    while high - low > 1:
        middle = low + (high - low) // 2
        if _within(logits, middle, top, temperature, V, BV, MASS, W=False) >= goal:
            high = middle
        else:
            low = middle
    cut = tl.div_rn(high.to(tl.float32, bitcast=True), temperature).to(tl.int32, bitcast=True)
    return cut, _within(logits, cut - 1, top, temperature, V, BV, MASS, W=True)


@triton.jit
def _mass(cut):
    """exp(-w) of the w whose bits are *cut*, in float64."""
    return tl.exp(-cut.to(tl.float32, bitcast=True)).to(tl.float64)


@triton.jit
def _keep(logits, cut, ties, last, top, temperature, V: tl.constexpr, BV: tl.constexpr):
    """-inf for all but the tokens below *cut*, the first *ties* of those at it, and of these what is at most *last*."""
    seen = tl.full((), 0.0, tl.float32)
    for first in tl.range(0, V, BV):
        w = tl.div_rn(_far(logits, first, top, V, BV), temperature)
        bits = w.to(tl.int32, bitcast=True)
        ids = first + tl.arange(0, BV)
        level = ((bits == cut) & (ids < V)).to(tl.float32)
        rank = tl.cumsum(level, 0) + seen
        seen += tl.sum(level, 0)
        kept = ((bits < cut) | ((level > 0) & (rank <= ties))) & (w <= last) & (w < float("inf"))
        tl.store(logits + ids, float("-inf"), mask=(ids < V) & (kept == 0))


@triton.jit
def _filter(
    logits, asked,
    STRIDE: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, WORDS: tl.constexpr, GREEDY: tl.constexpr,
    SLACK: tl.constexpr, DEVICE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program s: sample s. DEVICE: the accurate logarithm of a GPU; the interpreter's is."""
    if PDL:
        gdc_launch_dependents()
    sample = tl.program_id(0)
    row = asked + sample * WORDS
    if PDL:
        gdc_wait()
    temperature = tl.load(row).to(tl.float32, bitcast=True)
    top_p = tl.load(row + 1).to(tl.float32, bitcast=True)
    min_p = tl.load(row + 2).to(tl.float32, bitcast=True)
    k = tl.load(row + 3)
    some = (k > 0) & (k < V)
    if (temperature >= GREEDY) & (some | (top_p < 1.0) | (min_p > 0.0)):
        logits += sample.to(tl.int64) * STRIDE
        top = _top(logits, V, BV)
        if (top > float("-inf")) & (top < float("inf")):
            cut = tl.full((), INFINITE, tl.int32)
            ties = tl.full((), V, tl.float64)
            if some:
                cut, less = _cut(logits, k.to(tl.float64), top, temperature, V, BV, MASS=False)
                ties = k.to(tl.float64) - less
            if top_p < 1.0:
                before = _within(logits, cut - 1, top, temperature, V, BV, MASS=True, W=True)
                goal = top_p.to(tl.float64) * (before + ties * _mass(cut)) * (1.0 - SLACK)
                if goal <= before:  # else top-k's cut is that of top-p too
                    cut, before = _cut(logits, goal, top, temperature, V, BV, MASS=True)
                    ties = tl.full((), V, tl.float64)
                each = _mass(cut)
                ties = tl.minimum(ties, tl.ceil((goal - before) / tl.where(each > 0, each, 1.0)))
            last = float("inf")
            if min_p > 0.0:
                last = SLACK - (libdevice.log(min_p) if DEVICE else tl.log(min_p))
            _keep(logits, cut, tl.maximum(ties, 1.0).to(tl.float32), last, top, temperature, V, BV)


_run = Direct(_filter)


def filter_rows(
    logits_SV: Tensor, params: Tensor, *, greedy_below: float = 1e-5, pdl: bool = False, tile: int = TILE
) -> None:
    """Set to -inf, in place, what the filters of each row take away, as ops/sample.py `survivors` does.

    *logits* are float32 with rows of any stride; *params* is [S, 8] int32, the bits of state.columns.PARAMS. Greedy
    rows and those without a finite maximum stay as they are. *pdl*: take part in programmatic dependent launch.
    *tile*: ids a step, a power of two.
    """
    count, vocabulary = logits_SV.shape
    if count:
        _run(
            (count, 1, 1), (logits_SV, params), (),
            (logits_SV.stride(0), vocabulary, tile, WORDS, greedy_below, SLACK, logits_SV.is_cuda, pdl),
            warps=16, pdl=pdl,
        )  # fmt: skip
